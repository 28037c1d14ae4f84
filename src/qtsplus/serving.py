"""Chat completions of `transformers serve` for one QTSplus model, to try it: no path and no address is read unasked."""

import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState, Modality

from .data.records import String, Text, explain
from .decoding_qtsplus import is_inline, shown_name

MAX_BODY = 100 * 2**20  # bytes of a request, with the videos in it
_MAX_TOKENS = AliasChoices("max_tokens", "max_completion_tokens")  # the older name and the newer one


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _TextPart(_Strict):
    type: Literal["text"]
    text: String


class _Address(_Strict):
    url: Text


class _VideoPart(_Strict):
    type: Literal["video_url"]
    video_url: _Address


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Message(_Strict):
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[Annotated[_TextPart | _VideoPart, Field(discriminator="type")]], BeforeValidator(_parts)]


class _Budget(_Strict):
    retention: Annotated[float, Field(gt=0, le=1)] | None = None
    max_visual_tokens: Annotated[int, Field(ge=1)] | None = None


class _Chat(_Strict):
    """A request; a field of another engine is refused, since it would have no effect."""

    model: str
    messages: Annotated[list[_Message], Field(min_length=1)]
    mm_processor_kwargs: _Budget = _Budget()  # as vLLM takes it
    max_tokens: Annotated[int, Field(ge=1, le=8192, validation_alias=_MAX_TOKENS)] = 1024
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stream: bool = False


@dataclass(frozen=True)
class Door:
    """
    What a request may name: videos in it (`data:`), in a folder (`file:///...`), and at addresses of some hosts.

    Redirects are not followed: an allowed host could lead to one that is not.
    """

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


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class _Prepared:
    """The processor of a request whose inputs were made before, beside the event loop."""

    def __init__(self, processor: Any):
        self.processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor, name)

    def apply_chat_template(self, *_: Any, prepared: Any, **__: Any) -> Any:
        return prepared


class _OneModel(ModelManager):
    """`transformers serve` finds no class of remote code; here the model is loaded already."""

    def __init__(self, name: str, model: Any, processor: Any):
        super().__init__(device=str(model.device))
        self.force_model, self.loaded = name, (model, _Prepared(processor))

    def load_model_and_processor(self, *_: Any, **__: Any) -> Any:
        return self.loaded

    @staticmethod
    def get_model_modality(*_: Any, **__: Any) -> Modality:
        return Modality.VLM


def build_app(name: str, model: Any, processor: Any, door: Door, budget: dict[str, Any]) -> FastAPI:
    """
    The server's app: chat completions, the list of its one model, and its health.

    Args:
        budget: `retention` and `max_visual_tokens` of requests that say neither.
    """
    urllib.request.install_opener(urllib.request.build_opener(_NoRedirects))
    handler = ChatCompletionHandler(model_manager=_OneModel(name, model, processor), generation_state=GenerationState())
    app = FastAPI(openapi_url=None)

    @app.exception_handler(ValueError)
    async def refuse(_: Request, error: ValueError) -> JSONResponse:
        text = explain(error) if isinstance(error, ValidationError) else str(error)
        return JSONResponse({"error": {"message": " ".join(text.split()), "type": "invalid_request_error"}}, 400)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        asked = _Chat.model_validate_json(await _read(request))
        own = asked.mm_processor_kwargs.model_dump(exclude_none=True)
        inputs = await run_in_threadpool(_prepare, processor, asked.messages, door)
        inputs.update(own or budget)
        body = asked.model_dump(include={"model", "max_tokens", "temperature", "top_p", "seed", "stream"})
        body |= {"messages": [], "chat_template_kwargs": {"prepared": inputs}}
        return await handler.handle_request(body, f"chatcmpl-{uuid.uuid4().hex}")

    @app.get("/v1/models")
    def models() -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "qtsplus"}]}

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok"}

    return app


async def _read(request: Request) -> bytes:
    """The body; what is too large is read to its end, so that the client hears why, and not kept."""
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY:
            body += chunk
    if size > MAX_BODY:
        raise HTTPException(413, f"The request is larger than {MAX_BODY / 2**20:.0f} MiB.")
    return bytes(body)


def _prepare(processor: Any, messages: list[_Message], door: Door) -> Any:
    """The model's inputs; all text is text."""
    conversation, videos = [], []
    for message in messages:
        videos += [door.place(part.video_url.url) for part in message.content if isinstance(part, _VideoPart)]
        content = [{"type": "video"} if isinstance(part, _VideoPart) else part.model_dump() for part in message.content]
        conversation.append({"role": message.role, "content": content})
    return processor.conversation_inputs([conversation], videos=videos or None)
