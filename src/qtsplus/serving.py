"""Chat completions of `transformers serve` for one QTSplus model, to try it: no path and no address is read unasked."""

import asyncio
import contextlib
import copy
import json
import secrets
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import h11
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from torch import nn
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import GenerationState, Modality
from uvicorn.protocols.http.h11_impl import H11Protocol

from .answers import check_text, positions_needed
from .data.media import UNREADABLE
from .decoding_qtsplus import is_address, shown_name
from .door import Door
from .evidence import evidence_intervals
from .layout_qtsplus import lay_out
from .prompt_qtsplus import take_inputs
from .settings import STRICT, build, show

MAX_BODY = 100 * 2**20  # bytes of a request, with the videos in it
MAX_COMMAS = 30_000  # of a request, which bound what is in its lists
MAX_VIDEOS = 64  # of a request
MAX_WAITING = 2**30  # bytes of all requests that wait for their answer
MAX_CONNECTIONS = 400  # a request on a further one is refused, and at twice as many a connection
MAX_FETCHING = 4  # requests whose videos are fetched at once
ARRIVAL_SECONDS = 120.0  # in which a request has to arrive whole
CHARACTERS_PER_POSITION = 16  # of a text, at most; no language needs as many


@dataclass(frozen=True)
class _Budget:
    __pydantic_config__ = STRICT
    retention: Annotated[float, Field(gt=0, le=1)] | None = None
    max_visual_tokens: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True)
class _Chat:
    """A request; a field of other servers is refused, since it would have no effect."""

    __pydantic_config__ = STRICT
    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    mm_processor_kwargs: _Budget = field(default_factory=_Budget)  # as vLLM takes it
    max_tokens: Annotated[int, Field(ge=1, le=8192)] = 1024
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None  # a stream tells its usage in any case


@dataclass(frozen=True)
class _Said:
    """What the messages of a request hold beside their turns."""

    texts: list[str] = field(default_factory=list)
    videos: list[str] = field(default_factory=list)  # as the request names them

    def turn(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the chat template takes it."""
        role, parts = message.get("role"), message.get("content")
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        if role not in ("system", "user", "assistant") or not isinstance(parts, list):
            raise ValueError(f"messages holds {show(message)}; expected a role and a content.")
        return {"role": role, "content": [self._part(part) for part in parts]}

    def _part(self, part: Any) -> dict[str, str]:
        match part:
            case {"type": "text", "text": str(text)}:
                self.texts.append(check_text("text", text))
                return {"type": "text", "text": text}
            case {"type": "video_url", "video_url": {"url": str(url)}}:
                self.videos.append(url)
                return {"type": "video"}
        raise ValueError(f"content holds {show(part)}; expected a text or a video_url.")


class _Served:
    """A model that answers one request after another, and stops where the client has left."""

    def __init__(self, name: str, model: Any, processor: Any, door: Door, budget: Mapping[str, Any]):
        self.name, self.model, self.processor, self.door, self.budget = name, model, processor, door, budget
        self.positions = model.config.get_text_config().max_position_embeddings
        self.reader = copy.copy(processor)
        self.reader.read_frames = lambda video, *how: processor.read_frames(
            replace(video, decode=lambda: map(self._heard, video.decode())), *how
        )
        self.prepared = copy.copy(processor)  # for requests whose inputs were made before, beside the event loop
        self.prepared.apply_chat_template = lambda *_, inputs, **__: inputs
        self.state = GenerationState()
        self.turn, self.fetching = asyncio.Lock(), asyncio.Semaphore(MAX_FETCHING)
        self.left = threading.Event()  # of the request that the model works on
        self.waiting = 0  # bytes of the requests that wait
        for module in model.modules():
            for layer in module if isinstance(module, nn.ModuleList) else ():
                layer.register_forward_pre_hook(lambda *_: _require_client(self.left))

    async def answer(self, asked: _Chat, left: threading.Event) -> Any:
        """As `transformers serve` answers; `left` is set when the client has gone."""
        said = _Said()
        turns = [said.turn(message) for message in asked.messages]
        characters, most = sum(map(len, said.texts)), CHARACTERS_PER_POSITION * self.positions
        if characters > most:
            raise ValueError(f"The prompt has {characters} characters; expected at most {most}.")
        if len(said.videos) > MAX_VIDEOS:
            raise ValueError(f"The request holds {len(said.videos)} videos; expected at most {MAX_VIDEOS}.")
        fetching = self.fetching if any(map(is_address, said.videos)) else contextlib.nullcontext()
        with tempfile.TemporaryDirectory(prefix="qtsplus-", ignore_cleanup_errors=True) as folder:
            async with fetching:
                places = [
                    await asyncio.to_thread(self.door.place, url, folder, partial(_require_client, left))
                    if is_address(url)
                    else self.door.place(url, "")
                    for url in said.videos
                ]
                await self.turn.acquire()
            # In the thread that generates: on a CPU a second one that computes would slow down both.
            thread: Any = self.state.get_manager(self.name)
            try:
                work = thread.async_submit(self._prepare, turns, said, places, asked, left)
                inputs = await asyncio.shield(work)  # whoever leaves ends his wait, and the thread ends the work
                return await asyncio.shield(self._generate(asked, inputs, left))
            finally:  # when the thread has done what it was given; this also ends its hold on what that returned
                thread.async_submit(int).add_done_callback(lambda _: self.turn.release())

    def _prepare(self, turns: list[Any], said: _Said, places: list[str], asked: _Chat, left: threading.Event) -> Any:
        """The model's inputs; all of the text is text. A `ValueError` where the model has no positions for them."""
        self.left = left
        _require_client(left)
        self._require_positions(sum(len(self.processor.text_ids(text)) for text in said.texts) + asked.max_tokens)
        try:
            inputs = self.reader.conversation_inputs([turns], videos=places or None)
        except UNREADABLE as error:  # which calls a video as the request does, and not by its place here
            message = str(error)
            for place, url in zip(places, said.videos, strict=True):
                message = message.replace(place, shown_name(url))
            raise ValueError(message) from error
        own = {name: value for name, value in asdict(asked.mm_processor_kwargs).items() if value is not None}
        inputs.update(own or self.budget)
        visual, selection = take_inputs(dict(inputs))
        layout = lay_out(self.model.model, visual, inputs["input_ids"], inputs["attention_mask"])
        self._require_positions(positions_needed(self.model, layout, selection, asked.max_tokens))
        return inputs

    def _heard(self, frame: Any) -> Any:
        """A frame, if the client is still there."""
        _require_client(self.left)
        return frame

    def _require_positions(self, needed: int) -> None:
        if needed > self.positions:
            raise ValueError(
                f"The prompt and max_tokens take {needed} positions, and the model has {self.positions}: "
                "expected a shorter text, a shorter video or fewer max_tokens."
            )

    async def _generate(self, asked: _Chat, inputs: Any, left: threading.Event) -> Any:
        ours = ("mm_processor_kwargs", "stream_options")
        body = {name: value for name, value in asdict(asked).items() if name not in ours}
        body |= {"messages": [], "chat_template_kwargs": {"inputs": inputs}}
        basis: dict[str, Any] = {}
        # The manager of Transformers finds no class of remote code; here the model is loaded already.
        manager: Any = SimpleNamespace(force_model=self.name, process_model_name=str)
        manager.load_model_and_processor = lambda *_, **__: (self._noting(basis), self.prepared)
        manager.get_model_modality = lambda *_, **__: Modality.VLM
        handler = ChatCompletionHandler(model_manager=manager, generation_state=self.state)
        answer: Any = await handler.handle_request(body, f"chatcmpl-{uuid.uuid4().hex}")
        if asked.stream:
            answer.body_iterator = _telling(answer.body_iterator, left)
            return answer
        return {**json.loads(answer.body), "qtsplus": basis}

    def _noting(self, basis: dict[str, Any]) -> Any:
        """The model for one request, which notes what its answer rests on."""

        def generate(**inputs: Any) -> Any:
            output = self.model.generate(**inputs, return_dict_in_generate=True)
            if (grid := inputs.get("video_grid_thw")) is not None:
                merge_size = self.processor.video_processor.merge_size
                (kept,), relevance = output.qtsplus.kept_indices, output.qtsplus.relevance
                relevance = None if relevance is None else relevance[0]
                seconds, share = inputs["second_per_grid_ts"], self.model.config.qtsplus_config.evidence_share
                intervals = evidence_intervals(kept, relevance, grid, seconds, merge_size, share)
                total = int(grid.prod(1).sum()) // merge_size**2
                basis.update(kept_tokens=len(kept), visual_tokens=total, evidence=[asdict(one) for one in intervals])
            return output.sequences

        noting = copy.copy(self.model)
        noting.generate = generate
        return noting


def _require_client(left: threading.Event) -> None:
    if left.is_set():
        raise ClientDisconnect


async def _telling(parts: AsyncIterator[Any], left: threading.Event) -> AsyncIterator[Any]:
    """The parts of a stream; says when nobody reads them any more."""
    try:
        async for part in parts:
            yield part
    finally:
        left.set()


def build_app(
    name: str,
    model: Any,
    processor: Any,
    door: Door,
    budget: Mapping[str, Any],
    api_key: str | None = None,
    hosts: Sequence[str] = ("*",),
) -> FastAPI:
    """
    The server's app, with a `budget` for requests that state none. Beside an answer that is not streamed stands what it
    rests on, as `qtsplus`: the counts of kept and of all visual tokens, and the evidence.

    Args:
        api_key: what requests have to bring as `Authorization: Bearer`, if any.
        hosts: what they may call the server (`Host`): a page that has its name lead here is no client.
    """
    served = _Served(name, model, processor, door, budget)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await served.turn.acquire()  # the thread has ended its work

    app = FastAPI(openapi_url=None, lifespan=lifespan)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)

    @app.exception_handler(AnyHTTPException)
    @app.exception_handler(ClientDisconnect)  # nobody hears it
    @app.exception_handler(RecursionError)  # brackets in brackets
    @app.exception_handler(ValueError)
    async def refuse(_: Request, error: Exception) -> JSONResponse:
        status, headers = getattr(error, "status_code", 400), getattr(error, "headers", None)
        message = " ".join(str(getattr(error, "detail", error)).split())
        return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status, headers)

    async def require_key(request: Request) -> None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = secrets.compare_digest(key.encode(), (api_key or "").encode()) and kind.lower() == "bearer"
        if api_key is not None and not is_right:
            raise HTTPException(401, "Expected the server's key as Authorization: Bearer KEY.")

    @app.post("/v1/chat/completions", dependencies=[Depends(require_key)])
    async def chat(request: Request) -> Any:
        # A page elsewhere may send other types unasked, which would make the model work for it.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "Expected Content-Type: application/json.")
        async with _arrived(request, served) as asked:
            left = threading.Event()
            work, leaving = asyncio.ensure_future(served.answer(asked, left)), asyncio.ensure_future(_left(request))
            try:
                await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                if not work.done():
                    left.set()
                    work.cancel()
            if left.is_set():
                raise ClientDisconnect
            return work.result()

    @app.get("/v1/models", dependencies=[Depends(require_key)])
    async def models() -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "qtsplus"}]}

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok"}

    return app


async def _left(request: Request) -> None:
    """Ends when the client of a request that has been read leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def _arrived(request: Request, served: _Served) -> AsyncIterator[_Chat]:
    """A request, which waits while the block runs; a 413 for one that is too large, a 503 for one too many."""
    body, size = bytearray(), 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_BODY:  # it is read to its end, so that the client hears why, and not kept
                continue
            body += chunk
            served.waiting += len(chunk)
            if served.waiting > MAX_WAITING:
                raise HTTPException(503, "Too many requests wait for their answer; try again.")
        if size > MAX_BODY:
            raise HTTPException(413, f"The request is larger than {MAX_BODY / 2**20:.0f} MiB.")
        yield _parse(body)
    finally:
        served.waiting -= len(body)


def _parse(body: bytearray) -> _Chat:
    if body.count(b",") > MAX_COMMAS:
        raise ValueError(f"The request holds more than {MAX_COMMAS} commas; expected fewer messages and fields.")
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise ValueError("The request is no JSON object.")
    if "max_completion_tokens" in fields:  # the newer name
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    return build("", _Chat, {name: value for name, value in fields.items() if value is not None})  # as OpenAI's


class _Punctual(H11Protocol):
    """A connection that ends where a request does not arrive whole in time, or where there are too many."""

    deadline: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.deadline = self.loop.call_later(ARRIVAL_SECONDS, self._give_up)
        if len(self.connections) > 2 * MAX_CONNECTIONS:
            transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self.deadline.cancel()

    def on_response_complete(self) -> None:
        self.deadline.cancel()
        self.deadline = self.loop.call_later(ARRIVAL_SECONDS, self._give_up)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self.deadline.cancel()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.send_400_response(f"The request did not arrive within {ARRIVAL_SECONDS:g} seconds.")
        else:
            self.transport.abort()


def run(app: FastAPI, host: str, port: int) -> None:
    """Serves until it is stopped. What arrives is bounded: headers by uvicorn, the rest as above."""
    limits: dict[str, Any] = {
        "http": _Punctual,
        "ws": "none",
        "limit_concurrency": MAX_CONNECTIONS,
        "timeout_graceful_shutdown": 5,
    }
    uvicorn.run(app, host=host, port=port, log_level="warning", **limits)
