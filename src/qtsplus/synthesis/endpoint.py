"""A teacher behind an OpenAI-compatible endpoint: asked with patience, and without telling its key."""

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError
from pydantic import BaseModel, Field

from ..data.records import break_special_tokens
from .engine import ItemFailed, Ledger
from .video_steps import Reply

NO_KEY = "none"  # what servers without keys are sent
MOST_PATIENCE = 300.0  # seconds that one answer may ask to wait
LONGEST_BACKOFF = 60.0  # seconds
LARGEST_REPLY = 2**20  # bytes
LONGEST_TIMEOUT = 86_400.0  # seconds


@dataclass(frozen=True)
class EndpointSettings:
    """
    A model behind an API.

    Raises:
        ValueError: a value out of range, or an address that is none or that holds a password.
    """

    url: str  # such as `http://localhost:8000/v1`
    model: str  # its name there
    key: str = field(default=NO_KEY, repr=False)  # never printed, logged or written
    timeout: float = 300.0  # seconds until a reply must be whole
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # further fields of each request
    attempts: int = 6  # how often a request is sent at most
    backoff: float = 1.0  # seconds; about what is waited before the second attempt, then twice as long each time

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
        if not self.model.strip():
            raise ValueError("The teacher's name is empty; expected the model's name at the endpoint.")
        if not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise ValueError(f"timeout is {self.timeout:g}; expected more than 0 and at most {LONGEST_TIMEOUT:g} s.")
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; expected at least 1.")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature is {self.temperature:g}; expected a number from 0 to 2.")

    def shown(self) -> dict[str, Any]:
        """What decides the replies, as it is written down."""
        return {"model": self.model, "temperature": self.temperature, "extra_body": dict(self.extra_body)}

    def redact(self, text: str) -> str:
        """The text without the key, should a server have put it there."""
        return text if self.key == NO_KEY else text.replace(self.key, "[key]")


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


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": break_special_tokens(content)}
    parts = [{**part, "text": break_special_tokens(part["text"])} if "text" in part else part for part in content]
    return {**message, "content": parts}


class _Again(Exception):
    """A request that may do better the next time, after `wait` seconds at least."""

    def __init__(self, reason: str, wait: float = 0.0, everyone: bool = False):
        super().__init__(reason)
        self.wait, self.everyone = wait, everyone


class Endpoint:
    """
    Sends requests; entered within an event loop before the first and left after the last.

    A rate limit holds up every request, not only the one that met it.
    """

    def __init__(self, settings: EndpointSettings):
        self.settings = settings
        self.takes_schema = True
        self.not_before = 0.0

    async def __aenter__(self) -> "Endpoint":
        key, url = self.settings.key, self.settings.url
        self.client = AsyncOpenAI(api_key=key, base_url=url, timeout=None, max_retries=0, http_client=_Client())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        ledger: Ledger,
        *,
        max_tokens: int,
        seed: int,
        schema: Mapping[str, Any] | None = None,
    ) -> Reply:
        """
        One reply.

        Args:
            messages: as the API takes them. Special tokens in them are broken by a space, for servers would take them
                for the prompt's own.
            ledger: notes what it costs, and why something was sent again.
            schema: JSON schema of the reply. A server that refuses it is asked without, from then on.

        Raises:
            ItemFailed: the server refuses this request, or answers none of the attempts.
            ValueError: it takes no request at all: a wrong key, model or address.
        """
        request: dict[str, Any] = {
            "model": self.settings.model,
            "messages": [_as_text(message) for message in messages],
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": self.settings.temperature,
            **self.settings.extra_body,
        }
        if schema is None or not self.takes_schema:
            return await self._patiently(request, ledger)
        form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema, "strict": True}}
        try:
            return await self._patiently({**request, "response_format": form}, ledger)
        except _Refused:
            # Servers say in many ways that they know no schema; that the same request passes without says it best.
            reply = await self._patiently(request, ledger)
            self.takes_schema = False
            return reply

    async def _patiently(self, request: Mapping[str, Any], ledger: Ledger) -> Reply:
        for attempt in range(1, self.settings.attempts + 1):
            try:
                return await self._send(request, ledger)
            except _Again as error:
                if attempt == self.settings.attempts and error.everyone:
                    raise ValueError(f"The endpoint {self.settings.url} takes no request: {error}") from None
                wait = max(error.wait, random.uniform(0, min(self.settings.backoff * 2**attempt, LONGEST_BACKOFF)))
            if attempt < self.settings.attempts:
                await asyncio.sleep(wait)
        raise ItemFailed

    async def _send(self, request: Mapping[str, Any], ledger: Ledger) -> Reply:
        while (pause := self.not_before - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(pause)
        ledger.spend(requests=1)
        try:
            # Not `chat.completions.create`, which walks through schema and messages for longer than it takes to send.
            posted = self.client.post("/chat/completions", body=request, cast_to=str)
            text = await asyncio.wait_for(posted, self.settings.timeout)
            completion = _Completion.model_validate(json.loads(text))
        except asyncio.TimeoutError:
            raise self._again(ledger, f"No whole reply came within {self.settings.timeout:g} s.") from None
        except OpenAIError as error:
            raise self._explained(error, ledger) from None
        except _ReplyTooLong as error:
            raise self._again(ledger, str(error)) from None
        except (ValueError, RecursionError):
            raise self._again(ledger, "The server's reply is no chat completion.") from None
        if completion.usage is not None:
            ledger.spend(0, completion.usage.prompt_tokens or 0, completion.usage.completion_tokens or 0)
        choice = completion.choices[0]
        # A reply may hold halves of surrogate pairs, which no file takes.
        said = (choice.message.content or "").encode("utf-8", "replace").decode()
        return Reply(self.settings.redact(said), choice.finish_reason != "length")

    def _again(self, ledger: Ledger, reason: str, wait: float = 0.0, everyone: bool = False) -> _Again:
        ledger.reasons.append(reason)
        return _Again(reason, wait, everyone)

    def _explained(self, error: OpenAIError, ledger: Ledger) -> Exception:
        """What an error means: try again, leave this item, or leave them all."""
        if isinstance(error.__cause__, _ReplyTooLong):
            return self._again(ledger, str(error.__cause__))
        if isinstance(error, APIConnectionError):
            kind = type(error.__cause__).__name__
            reason = f"No connection: {self._line(str(error.__cause__ or error) or kind)}."
            # A server that is gone answers nobody; one that hangs up may do so only for this request.
            return self._again(ledger, reason, everyone=kind in ("ConnectError", "ConnectTimeout"))
        if not isinstance(error, APIStatusError):
            return self._again(ledger, f"The request failed: {self._line(str(error))}.")
        status = error.status_code
        said = f"The server answered {status}: {self._line(error.message)}"
        if status in (401, 403, 404):
            return ValueError(
                f"The endpoint {self.settings.url} refuses the model {self.settings.model!r}. {said} Check the "
                "address, the model's name and the API key."
            )
        if status == 429:
            wait = _retry_after(error.response.headers)
            loop = asyncio.get_running_loop()
            self.not_before = max(self.not_before, loop.time() + wait)
            return self._again(ledger, said, wait, everyone=True)
        if status in (408, 409) or status >= 500:
            return self._again(ledger, said, _retry_after(error.response.headers))
        ledger.reasons.append(said)
        return _Refused()

    def _line(self, text: str) -> str:
        """The first words of a message, without the key."""
        return " ".join(self.settings.redact(text).split())[:300]


class _Refused(ItemFailed):
    """The server does not take this request."""


class _ReplyTooLong(Exception):
    """More than a teacher has to say."""


class _Client(DefaultAsyncHttpxClient):
    """Reads no more than [`LARGEST_REPLY`] of a reply, whatever its status."""

    async def send(self, request: Any, **options: Any) -> Any:
        response = await super().send(request, **{**options, "stream": True})
        body = bytearray()
        try:
            async for block in response.aiter_bytes():
                body += block
                if len(body) > LARGEST_REPLY:
                    raise _ReplyTooLong(f"The server's reply is longer than {LARGEST_REPLY / 2**20:.0f} MiB.")
        finally:
            await response.aclose()
        headers = {name: value for name, value in response.headers.items() if name != "content-encoding"}
        return type(response)(response.status_code, headers=headers, content=bytes(body), request=request)


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


def _retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that a `Retry-After` header asks to wait; a date asks for none."""
    try:
        return min(max(0.0, float(headers.get("retry-after", "0"))), MOST_PATIENCE)
    except ValueError:
        return 0.0
