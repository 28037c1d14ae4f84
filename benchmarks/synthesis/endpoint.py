"""A teacher behind an OpenAI-compatible endpoint: asked with patience, and without telling its key."""

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAIError
from pydantic import BaseModel, Field

from .engine import ItemFailed, Ledger

# What tokenizers read as one token of the prompt's own.
SPECIAL_TOKEN = re.compile(r"<(\|[^<>|\s]{1,40}\||/?(?:s|img|image|video|IMG_CONTEXT)|｜[^<>｜]{1,40}｜)>")
NO_KEY = "none"  # what servers without keys are sent


class Reply(NamedTuple):
    """What a teacher said."""

    text: str
    complete: bool  # it ended by itself, not at the most tokens that it may say


def read_key() -> str:
    """
    The key in `OPENAI_API_KEY`; that of servers without keys where it is not set. A `ValueError` for one that is too
    short to be kept out of all that is written.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip() or NO_KEY
    if key != NO_KEY and (len(key) < 8 or not key.isascii() or not key.isprintable()):
        raise ValueError(
            "The environment variable OPENAI_API_KEY holds no API key; expected one with at least 8 plain characters."
        )
    return key


def break_special_tokens(text: str) -> str:
    """The text with a space in each special token, so that no tokenizer takes it for one."""
    return SPECIAL_TOKEN.sub(lambda token: f"< {token[1]}>", text)


def _as_text(content: Any) -> Any:
    """The content of a message, or of a part of it, without special tokens."""
    if isinstance(content, str):
        return break_special_tokens(content)
    return [{**part, "text": _as_text(part["text"])} if "text" in part else part for part in content]


@dataclass
class Endpoint:
    """
    A model behind an API. Entered within an event loop before the first request and left after the last.

    Raises:
        ValueError: an address that is none or that holds a password, or a key in what is written down.
    """

    url: str  # such as `http://localhost:8000/v1`
    model: str  # its name there
    key: str = field(default=NO_KEY, repr=False)  # never printed, logged or written
    timeout: float = 600.0  # seconds until a reply must be whole, with all waiting for a server that is busy
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # further fields of each request
    retries: int = 8  # after a rate limit, a server's error or a broken connection, as the openai client waits for them

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            address = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:  # a port or an IPv6 address that is none
            address = False
        if not address or " " in self.url or not (self.url.isascii() and self.url.isprintable()):
            raise ValueError("The endpoint is no http(s) address; expected such as http://localhost:8000/v1.")
        if "@" in parts.netloc or parts.query:
            raise ValueError("The endpoint's address holds a password or a query; give the key as a key.")
        if self.key != NO_KEY and self.key in f"{self.url} {self.model} {json.dumps(dict(self.extra_body))}":
            raise ValueError("The API key stands in another setting, which is written down; give it only as the key.")

    def settings(self) -> dict[str, Any]:
        """What decides the replies, as it is written down."""
        return {"model": self.model, "temperature": self.temperature, "extra_body": dict(self.extra_body)}

    async def __aenter__(self) -> "Endpoint":
        self.client = AsyncOpenAI(api_key=self.key, base_url=self.url, timeout=None, max_retries=self.retries)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()

    async def chat(self, messages: Sequence[Mapping[str, Any]], ledger: Ledger, *, max_tokens: int, seed: int) -> Reply:
        """
        One reply to messages as the API takes them, in which special tokens are broken by a space: servers would take
        them for the prompt's own. The ledger notes what it costs, and why it failed.

        Raises:
            ItemFailed: the server refuses this request, or does not answer it well.
            ValueError: it takes no request at all: a wrong key, model or address.
        """
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [{**message, "content": _as_text(message["content"])} for message in messages],
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": self.temperature,
            **self.extra_body,
        }
        ledger.costs.update(requests=1)
        try:
            # Not `chat.completions.create`, which walks through the messages for longer than it takes to send.
            posted = self.client.post("/chat/completions", body=request, cast_to=str)
            text = await asyncio.wait_for(posted, self.timeout)
            completion = _Completion.model_validate(json.loads(text))
        except asyncio.TimeoutError:
            reason = f"No whole reply came within {self.timeout:g} s."
        except OpenAIError as error:
            reason = self._explain(error)
        except (ValueError, RecursionError):
            reason = "The server's reply is no chat completion."
        else:
            if completion.usage is not None:
                ledger.costs.update(completion.usage.model_dump(exclude_none=True))
            choice = completion.choices[0]
            # A reply may hold halves of surrogate pairs, which no file takes.
            said = (choice.message.content or "").encode("utf-8", "replace").decode()
            return Reply(self._redact(said), choice.finish_reason != "length")
        ledger.reasons.append(reason)
        raise ItemFailed

    def _explain(self, error: OpenAIError) -> str:
        """Why one request failed; a `ValueError` for what no other would do better with."""
        if isinstance(error, APIStatusError):
            said = f"The server answered {error.status_code}: {' '.join(self._redact(error.message).split())[:300]}"
            if error.status_code in (401, 403, 404):
                raise ValueError(
                    f"The endpoint {self.url} refuses the model {self.model!r}. {said} Check the "
                    "address, the model's name and the API key."
                ) from None
            return said
        cause = error.__cause__ or error
        words = self._redact(str(cause) or type(cause).__name__).split()
        reason = f"The request failed: {' '.join(words)[:300]}."
        if isinstance(error, APIConnectionError) and type(cause).__name__ in ("ConnectError", "ConnectTimeout"):
            raise ValueError(f"The endpoint {self.url} takes no request. {reason}") from None
        return reason

    def _redact(self, text: str) -> str:
        """The text without the key, should a server have put it there."""
        return text if self.key == NO_KEY else text.replace(self.key, "[key]")


# What is read of a chat completion; servers leave out, or set to null, all but the message.
_Tokens = Annotated[int, Field(ge=0, lt=2**40)]


class _Usage(BaseModel):
    prompt_tokens: _Tokens | None = 0
    completion_tokens: _Tokens | None = 0


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _Usage | None = None
