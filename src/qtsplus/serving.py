"""Chat completions of `transformers serve` for one QTSplus model, to try it: no path and no address is read unasked."""

import copy
import json
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import Field
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import GenerationState, Modality

from .decoding_qtsplus import is_inline, shown_name
from .evidence import evidence_intervals
from .settings import STRICT, build, show

MAX_BODY = 100 * 2**20  # bytes of a request, with the videos in it


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
    seed: int | None = None
    stream: bool = False


@dataclass(frozen=True)
class Door:
    """Which videos a request may name: those in it (`data:`), in a folder (`file:///...`), at addresses of hosts."""

    media_root: Path | None = None
    domains: Sequence[str] = ()

    def place(self, url: str) -> str:
        """The video as the processor takes it; a `ValueError` for one that may not be read, or is not there."""
        parts = urlsplit(url[:4096])
        if is_inline(url) or (parts.scheme in ("http", "https") and parts.hostname in self.domains):
            return url
        if parts.scheme == "file" and self.media_root is not None:
            path = Path(unquote(parts.path)).resolve()
            if path.is_relative_to(self.media_root.resolve()) and path.is_file():
                return str(path)
        raise ValueError(
            f"The video {shown_name(url)[:200]!r} may not be read: expected data:video/mp4;base64,..., or what the "
            "server allows with --allow-media-root (as file:///...) or --allow-media-domain."
        )

    def inputs(self, processor: Any, messages: list[dict[str, Any]]) -> Any:
        """The model's inputs for a conversation, all of whose text is text."""
        conversation: list[dict[str, Any]] = []
        videos: list[str] = []
        for message in messages:
            role, parts = message.get("role"), message.get("content")
            if isinstance(parts, str):
                parts = [{"type": "text", "text": parts}]
            if role not in ("system", "user", "assistant") or not isinstance(parts, list):
                raise ValueError(f"messages holds {show(message)}; expected a role and a content.")
            conversation.append({"role": role, "content": [_part(part, videos) for part in parts]})
        return processor.conversation_inputs([conversation], videos=[self.place(url) for url in videos] or None)


def _part(part: Any, videos: list[str]) -> dict[str, str]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "video_url", "video_url": {"url": str(url)}}:
            videos.append(url)
            return {"type": "video"}
    raise ValueError(f"content holds {show(part)}; expected a text or a video_url.")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An allowed host could lead to one that is not."""

    def redirect_request(self, *_: Any) -> None:
        return None


def build_app(name: str, model: Any, processor: Any, door: Door, budget: Mapping[str, Any]) -> FastAPI:
    """
    The server's app, with a `budget` for requests that state none. Beside an answer that is not streamed stands what it
    rests on, as `qtsplus`: the counts of kept and of all visual tokens, and the evidence.
    """
    urllib.request.install_opener(urllib.request.build_opener(_NoRedirects))
    prepared = copy.copy(processor)  # for requests whose inputs were made before, beside the event loop
    prepared.apply_chat_template = lambda *_, inputs, **__: inputs
    state = GenerationState()
    app = FastAPI(openapi_url=None)

    @app.exception_handler(RecursionError)  # brackets in brackets
    @app.exception_handler(ValueError)
    async def refuse(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": " ".join(str(error).split()), "type": "invalid_request_error"}}, 400)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        asked = await _read(request)
        # In the thread that generates: on a CPU a second one that computes would slow down both.
        generating: Any = state.get_manager(name)
        inputs = await generating.async_submit(door.inputs, processor, asked.messages)
        body = asdict(asked)
        own = {name: value for name, value in body.pop("mm_processor_kwargs").items() if value is not None}
        inputs.update(own or budget)
        body |= {"messages": [], "chat_template_kwargs": {"inputs": inputs}}
        basis: dict[str, Any] = {}
        # The manager of Transformers finds no class of remote code; here the model is loaded already.
        manager: Any = SimpleNamespace(force_model=name, process_model_name=str)
        manager.load_model_and_processor = lambda *_, **__: (_noting(model, processor, basis), prepared)
        manager.get_model_modality = lambda *_, **__: Modality.VLM
        handler = ChatCompletionHandler(model_manager=manager, generation_state=state)
        answer: Any = await handler.handle_request(body, f"chatcmpl-{uuid.uuid4().hex}")
        return answer if asked.stream else {**json.loads(answer.body), "qtsplus": basis}

    @app.get("/v1/models")
    def models() -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "qtsplus"}]}

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok"}

    return app


def _noting(model: Any, processor: Any, basis: dict[str, Any]) -> Any:
    """The model for one request, which notes what its answer rests on."""

    def generate(**inputs: Any) -> Any:
        output = model.generate(**inputs, return_dict_in_generate=True)
        if (grid := inputs.get("video_grid_thw")) is not None:
            merge_size = processor.video_processor.merge_size
            (kept,), relevance = output.qtsplus.kept_indices, output.qtsplus.relevance
            relevance = None if relevance is None else relevance[0]
            seconds, share = inputs["second_per_grid_ts"], model.config.qtsplus_config.evidence_share
            intervals = evidence_intervals(kept, relevance, grid, seconds, merge_size, share)
            total = int(grid.prod(1).sum()) // merge_size**2
            basis.update(kept_tokens=len(kept), visual_tokens=total, evidence=[asdict(one) for one in intervals])
        return output.sequences

    noting = copy.copy(model)
    noting.generate = generate
    return noting


async def _read(request: Request) -> _Chat:
    """The request; one that is too large is read to its end, so that the client hears why, and not kept."""
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        body += chunk if size <= MAX_BODY else b""
    if size > MAX_BODY:
        raise HTTPException(413, f"The request is larger than {MAX_BODY / 2**20:.0f} MiB.")
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise ValueError("The request is no JSON object.")
    if "max_completion_tokens" in fields:  # the newer name
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    return build("", _Chat, fields)
