"""
Around vLLM's server: what it lets in, and what its answers rest on.

`qtsplus serve` puts [`Connection`] around it (`--middleware`) and has it read what requests name through [`Media`]
(`VLLM_MEDIA_CONNECTOR=qtsplus`).
"""

import asyncio
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from threading import Condition
from time import monotonic
from typing import Any

import numpy as np
from cachetools import LRUCache, cached  # which vLLM needs too
from cachetools.keys import hashkey
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.utils.async_utils import make_async

from ..common.journals import file_state
from ..data.media import UNREADABLE
from ..hub.loading import check_served_adapter, load_processor
from ..model.addresses_qtsplus import is_address, is_inline, shown_name
from ..model.sampling_qtsplus import read_keys
from ..serve.door import Door
from ..serve.guard import HEALTH, Guard, refuse

MAX_BODY = 100 * 2**20  # bytes of a request, with the videos in it
ASKING = 32  # questions that are made ready at once
RELEASE_SECONDS = 10
READ_BYTES = 2 * 2**30  # of main memory, for frames of videos that may be asked about again
FRESH_SECONDS = 60  # after which a video behind an address is read again
HOSTS = "QTSPLUS_HOSTS"  # in the environment: the names that the server answers to
KEY = "VLLM_API_KEY"  # in the environment: its key

Video = tuple[np.ndarray, dict]  # its frames `[T, H, W, 3]`, and what vLLM is told of it

# The hashes of what the engine was asked while a request was answered.
_ASKED: ContextVar[list[str]] = ContextVar("asked")
# Why the adapter of a request was refused.
_REFUSED: ContextVar[list[str]] = ContextVar("refused")


def read_frames(processor, place: str, name: str, **reading) -> Video:
    """
    The frames that `qtsplus ask` looks at, `[T, H, W, 3]` in their size for the model, and what vLLM is told of them.

    Args:
        place: the video, as [`Door.place`] gives it.
        name: what errors and warnings call it.
        reading: as for the processor's `video_chunks`.
    """
    try:
        chunks = processor.video_chunks(place, **reading)
        frames = np.stack([chunks.resize(frame) for frame in chunks.decode()])
    except UNREADABLE as error:
        raise ValueError(str(error).replace(place, name)) from error
    if len(frames) == 1:  # as Transformers shows one to the vision tower
        frames = np.repeat(frames, 2, 0)
    known = dict(vars(chunks.about))
    metadata = known.pop("metadata")
    known["warnings"] = [warning.replace(place, name) for warning in known["warnings"]]
    about = dict(vars(metadata), video_backend="opencv", do_sample_frames=False, about=known)
    about["mark"] = mark_of(frames, about)
    return frames, about


def mark_of(frames: np.ndarray, about: dict) -> str:
    """A hash of all that vLLM is told of a video."""
    digest = hashlib.sha256(frames.tobytes())
    digest.update(repr((frames.shape, about)).encode())
    return digest.hexdigest()


def _state(door: Door, processor, url: str, **reading):
    """A key that differs where a video differs, its name, or how it is read; an address is read again in a minute."""
    if is_inline(url):
        return hashkey(hashlib.sha256(url.encode()).digest(), **reading)
    if is_address(url):
        return hashkey(url, monotonic() // FRESH_SECONDS, **reading)
    with door.place(url) as place:
        return hashkey(url, os.stat(place).st_dev, *file_state(place).values(), **reading)


# Of questions about one video that come together, one reads it and the others wait.
@cached(LRUCache(READ_BYTES, lambda video: video[0].nbytes), _state, condition=Condition())
def _read(door: Door, processor, url: str, **reading) -> Video:
    """The video that a request names."""
    with door.place(url) as place:
        return read_frames(processor, place, shown_name(url), **reading)


@MEDIA_CONNECTOR_REGISTRY.register("qtsplus")
class Media(MediaConnector):
    """What requests name: fetched through a [`Door`], and videos read as Transformers reads them."""

    processor: Any = None  # of the model that is served
    most_frames = 0  # of a video, where the server is started with more than the processor takes

    def load_from_url(self, url, media_io, *, fetch_timeout=None):
        if is_inline(url):
            return super().load_from_url(url, media_io)
        with self._door.place(url) as place:
            return media_io.load_file(Path(place))

    async def load_from_url_async(self, url, media_io, *, fetch_timeout=None):
        return await asyncio.to_thread(self.load_from_url, url, media_io)

    def fetch_video(self, video_url, **kwargs):
        return _read(self._door, self.processor, video_url, **self._reading())

    def _reading(self) -> dict:
        """How a request's `media_io_kwargs` have its videos read; `ValueError` for what cannot be."""
        stated = self.media_io_kwargs.get("video") or {}
        unknown = sorted(stated.keys() - {"fps", "num_frames"})
        if unknown:
            raise ValueError(f"media_io_kwargs names {', '.join(unknown)} for a video; expected fps or num_frames.")
        reading = read_keys(stated)
        if "num_frames" in reading:
            count = reading.pop("num_frames")
            most = max(self.most_frames, self.processor.video_processor.max_frames)
            if count > most:
                raise ValueError(f"num_frames={count}: expected at most {most}, or more at the server's start.")
            reading["max_frames"] = count
        return reading

    async def fetch_video_async(self, video_url, **kwargs):
        return await asyncio.to_thread(self.fetch_video, video_url, **kwargs)

    @property
    def _door(self) -> Door:
        return Door(self.allowed_local_media_path, self.allowed_media_domains)


class Connection(Guard):
    """
    A [`Guard`] around vLLM's server, behind which each choice of an answer gets what it rests on, as `qtsplus`.
    It also connects the processor to the engine.
    """

    def __init__(self, app: ASGIApp):
        self.server = app
        self.engine: Any = None
        super().__init__(
            self._answer,
            hosts=json.loads(os.environ.get(HOSTS, '["*"]')),
            key=os.environ.get(KEY),
            largest=MAX_BODY,
        )

    def _connect(self, engine) -> None:
        """Connects the processor to the engine, when the first request comes."""
        loop = asyncio.get_running_loop()
        renderer = engine.renderer
        processor = renderer.get_mm_processor()
        generate = engine.generate

        def call(method, args):
            return asyncio.run_coroutine_threadsafe(engine.collective_rpc(method, args=args), loop)

        def call_and_wait(method, args):
            return call(method, args).result()  # in the thread where requests are prepared

        def release(key):
            if not loop.is_closed():  # later, since the answer is still told what it rests on
                loop.call_soon_threadsafe(loop.call_later, RELEASE_SECONDS, call, "qtsplus_release", (key,))

        add_request = engine.add_request

        async def add_whole(*args, **kwargs):
            """Ends a request whose client leaves while it is sent; vLLM would run it after its tokens were released."""
            sending = asyncio.ensure_future(add_request(*args, **kwargs))
            try:
                return await asyncio.shield(sending)
            except asyncio.CancelledError:
                sent = await sending
                await engine.abort(sent.request_id, internal=True)
                raise

        def noting(prompt, *args, **kwargs):
            videos = prompt.get("mm_hashes", {}).get("video", [""])
            _ASKED.get([]).extend(videos)
            return generate(prompt, *args, **kwargs)

        add_lora = engine.add_lora

        async def add_checked(request):
            try:
                await asyncio.to_thread(check_served_adapter, request.lora_path)
            except ValueError as error:  # of which vLLM tells its log alone, or answers with status 500
                _REFUSED.get([]).append(str(error))
                raise
            return await add_lora(request)

        self.engine = engine
        engine.generate = noting
        engine.add_request = add_whole
        engine.add_lora = add_checked
        processor.call_engine = call_and_wait
        processor.release = release
        # In vLLM's own single thread each request would wait for a step of the engine, one after the other.
        pool = ThreadPoolExecutor(ASKING)
        renderer._process_multimodal_async = make_async(renderer._process_multimodal, executor=pool)
        config = engine.vllm_config.model_config
        options = config.multimodal_config.media_io_kwargs or {}
        Media.processor = load_processor(config.model, config.revision)
        Media.most_frames = options.get("video", {}).get("num_frames", 0)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == HEALTH:
            return await self.server(scope, receive, send)
        if "/inference/" in scope["path"]:  # there items come of any age and content, which may end the engine
            return await refuse(404, "There is nothing here for clients.")(scope, receive, send)
        if self.engine is None:
            self._connect(scope["app"].state.engine_client)
        asked: list[str] = []
        _ASKED.set(asked)
        refused: list[str] = []
        _REFUSED.set(refused)
        await self.server(scope, receive, self._telling(asked, refused, send))

    def _telling(self, asked: list[str], refused: list[str], send: Send) -> Send:
        """Sends an answer, or the parts of a stream, with what its choices rest on, or why its adapter was refused."""
        start: Message = {}

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)  # waits for the body, whose length may be another
                return
            body = message.get("body", b"")
            body = await self._told(body, asked)
            if start:
                if refused and start["status"] >= 400:
                    start["status"] = 400
                    body = refuse(400, refused[0]).body
                headers = MutableHeaders(raw=start["headers"])
                if "content-length" in headers:
                    headers["content-length"] = str(len(body))
                await send(dict(start))
                start.clear()
            await send(dict(message, body=body))

        return tell

    async def _told(self, body: bytes, asked: list[str]) -> bytes:
        """A whole answer, or one event of a stream, with what its finished choices rest on."""
        content = body.removeprefix(b"data: ")
        if not any(asked) or not content.startswith(b"{"):
            return body
        answer = json.loads(content)
        finished = [choice for choice in answer.get("choices", ()) if choice.get("finish_reason") is not None]
        for choice in finished:
            number = min(choice["index"], len(asked) - 1)  # several choices may answer one question
            answers = await self.engine.collective_rpc("qtsplus_basis", args=(asked[number],))
            basis = answers[0]
            if basis is None and asked[number]:
                raise RuntimeError("The engine lost a request's tokens before its answer was complete.")
            choice["qtsplus"] = basis
        if not finished:
            return body
        told = json.dumps(answer).encode()
        return body.replace(content.rstrip(), told)
