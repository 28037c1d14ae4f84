"""
What `qtsplus serve` adds to vLLM's server.

[`Connection`], a middleware (`--middleware`), refuses requests that are not allowed and adds evidence to answers.
[`Media`] reads the images and videos that requests name (`VLLM_MEDIA_CONNECTOR=qtsplus`).
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
ASKING = 32  # requests that are prepared at once
RELEASE_SECONDS = 10  # from the end of a request to its release; until then its evidence can be asked for
READ_BYTES = 2 * 2**30  # of main memory, for frames of videos that may be asked about again
FRESH_SECONDS = 60  # after which a video behind an address is read again
HOSTS = "QTSPLUS_HOSTS"  # in the environment: the names that the server answers to
KEY = "VLLM_API_KEY"  # in the environment: its key

Video = tuple[np.ndarray, dict]  # its frames `[T, H, W, 3]`, and its description for vLLM

# For each prompt that the engine got during a request, the hash of its video item, or "" if it has no video.
_ASKED: ContextVar[list[str]] = ContextVar("asked")
# Why the adapter of a request was refused.
_REFUSED: ContextVar[list[str]] = ContextVar("refused")


def read_frames(processor, place: str, name: str, **reading) -> Video:
    """
    The frames that `qtsplus ask` looks at, `[T, H, W, 3]` in their size for the model, and their description for vLLM.

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
    if len(frames) == 1:  # Transformers repeats a single frame too
        frames = np.repeat(frames, 2, 0)
    about = dict(vars(chunks.about))
    metadata = about.pop("metadata")
    about["warnings"] = [warning.replace(place, name) for warning in about["warnings"]]
    description = dict(vars(metadata), video_backend="opencv", do_sample_frames=False, about=about)
    mark = hashlib.sha256(frames.tobytes())
    mark.update(repr((frames.shape, description)).encode())
    description["mark"] = mark.hexdigest()
    return frames, description


def _key_of_video(door: Door, processor, url: str, **reading):
    """
    The cache's key for a video. It depends on the file's state, its name, and how it is read. For an address the state
    is unknown, so its key changes with time.
    """
    if is_inline(url):
        return hashkey(hashlib.sha256(url.encode()).digest(), **reading)
    if is_address(url):
        return hashkey(url, monotonic() // FRESH_SECONDS, **reading)
    with door.place(url) as place:
        return hashkey(url, os.stat(place).st_dev, *file_state(place).values(), **reading)


# With a condition, the first of several questions about a video reads it while the others wait.
@cached(LRUCache(READ_BYTES, lambda video: video[0].nbytes), _key_of_video, condition=Condition())
def _read_video(door: Door, processor, url: str, **reading) -> Video:
    """The video that a request names."""
    with door.place(url) as place:
        return read_frames(processor, place, shown_name(url), **reading)


@MEDIA_CONNECTOR_REGISTRY.register("qtsplus")
class Media(MediaConnector):
    """Fetches the images and videos of requests through a [`Door`], and reads videos as Transformers does."""

    processor: Any = None  # of the model that is served
    most_frames = 0  # `num_frames` of the server; the limit for a request, if it is above the processor's

    def load_from_url(self, url, media_io, *, fetch_timeout=None):
        if is_inline(url):
            return super().load_from_url(url, media_io)
        with self._door.place(url) as place:
            return media_io.load_file(Path(place))

    async def load_from_url_async(self, url, media_io, *, fetch_timeout=None):
        return await asyncio.to_thread(self.load_from_url, url, media_io)

    def fetch_video(self, video_url, **kwargs):
        return _read_video(self._door, self.processor, video_url, **self._reading())

    def _reading(self) -> dict:
        """A request's `media_io_kwargs` as arguments of the processor's `video_chunks`; `ValueError` for wrong ones."""
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
    A [`Guard`] around vLLM's server. Each choice in an answer gets a field `qtsplus` with its evidence and counts.
    The first request also connects the processor to the engine.
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
        """Connects the processor to the engine, and puts three functions before those of the engine."""
        loop = asyncio.get_running_loop()
        renderer = engine.renderer
        processor = renderer.get_mm_processor()
        generate = engine.generate
        add_request = engine.add_request
        add_lora = engine.add_lora

        def call(method, args):
            return asyncio.run_coroutine_threadsafe(engine.collective_rpc(method, args=args), loop)

        def call_and_wait(method, args):
            return call(method, args).result()  # in the thread where requests are prepared

        def release(key):
            if not loop.is_closed():
                loop.call_soon_threadsafe(loop.call_later, RELEASE_SECONDS, call, "qtsplus_release", (key,))

        def generate_and_note(prompt, *args, **kwargs):
            videos = prompt.get("mm_hashes", {}).get("video", [""])
            _ASKED.get([]).extend(videos)
            return generate(prompt, *args, **kwargs)

        async def add_or_abort(*args, **kwargs):
            """Ends a request whose client leaves while it is sent; vLLM would run it after its tokens were released."""
            sending = asyncio.ensure_future(add_request(*args, **kwargs))
            try:
                return await asyncio.shield(sending)
            except asyncio.CancelledError:
                sent = await sending
                await engine.abort(sent.request_id, internal=True)
                raise

        async def check_and_add_lora(request):
            try:
                await asyncio.to_thread(check_served_adapter, request.lora_path)
            except ValueError as error:  # vLLM writes it only into its log, or answers with status 500
                _REFUSED.get([]).append(str(error))
                raise
            return await add_lora(request)

        self.engine = engine
        engine.generate = generate_and_note
        engine.add_request = add_or_abort
        engine.add_lora = check_and_add_lora
        processor.call_engine = call_and_wait
        processor.release = release
        # Preparing a request waits for the engine. vLLM's own pool has one thread, so requests would wait in turn.
        pool = ThreadPoolExecutor(ASKING)
        renderer._process_multimodal_async = make_async(renderer._process_multimodal, executor=pool)
        config = engine.vllm_config.model_config
        options = config.multimodal_config.media_io_kwargs or {}
        Media.processor = load_processor(config.model, config.revision)
        Media.most_frames = options.get("video", {}).get("num_frames", 0)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == HEALTH:
            return await self.server(scope, receive, send)
        # These addresses take items that are already processed. Wrong or outdated ones may end the engine.
        if "/inference/" in scope["path"]:
            return await refuse(404, "There is nothing here for clients.")(scope, receive, send)
        if self.engine is None:
            self._connect(scope["app"].state.engine_client)
        asked: list[str] = []
        _ASKED.set(asked)
        refused: list[str] = []
        _REFUSED.set(refused)
        await self.server(scope, receive, self._send_with_basis(asked, refused, send))

    def _send_with_basis(self, asked: list[str], refused: list[str], send: Send) -> Send:
        """A `send` that adds evidence to an answer or the parts of a stream, or says why an adapter was refused."""
        start: Message = {}

        async def send_with_basis(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)  # sent with the body, since the body's length may change
                return
            body = message.get("body", b"")
            body = await self._add_basis(body, asked)
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

        return send_with_basis

    async def _add_basis(self, body: bytes, asked: list[str]) -> bytes:
        """A whole answer, or one event of a stream, with the evidence and counts of its finished choices."""
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
        return body.replace(content.rstrip(), json.dumps(answer).encode())
