"""Which requests a server lets in: [`Guard`] is in front of the page's, the agents' and vLLM's."""

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..common.files import size

HEALTH = "/health"  # everyone may ask for its status: a cluster's probes name the address of a pod as the host


class Guard:
    """
    ASGI in front of a server: the page's, the agents' or vLLM's. It lets in requests over HTTP that name this machine,
    bring the key, and state a length within the bound. Websockets are refused.

    Slow requests, waiting requests and connections are not limited here: that is up to the HTTP server or a proxy.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Sequence[str],
        largest: int,
        key: str | None = None,
        own_pages: bool = False,
    ):
        """
        Args:
            hosts: names of this machine that requests may use beside localhost; `*` for all, `*.example.org` for all
                below a name.
            largest: bytes that the body of a request may have.
            key: what requests have to bring as `Authorization: Bearer KEY`.
            own_pages: whether browsers may send requests only from pages of this machine.
        """
        self.app = app
        self.hosts = [host.lower().strip("[]") for host in ("localhost", "127.0.0.1", "::1", *hosts)]
        self.largest = largest
        self.key = key
        self.own_pages = own_pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is not None:
                return await refusal(scope, receive, send)
        with suppress(ClientDisconnect):  # a client that leaves in the middle of its request waits for nothing
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """The response to a request that is not let in, by its headers."""
        is_reading = scope["method"] in ("GET", "HEAD")
        if scope["path"] == HEALTH and is_reading:
            return None
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return refuse(400, "The request names another host; --allow-host adds a name of this one.")
        if self.own_pages and not is_reading and not self._is_own_page(headers):
            return refuse(403, "A page of another site sent this request.")
        if not self._has_key(headers):
            return refuse(401, "Expected the server's key as Authorization: Bearer KEY.")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdecimal():
            return refuse(411, "The length of the request is not clear; expected Content-Length, and no chunks.")
        if int(length) > self.largest:
            return refuse(413, f"The request is larger than {size(self.largest)}.")
        return None

    def _is_own(self, netloc: str) -> bool:
        """Whether a host, with a port or without, is a name of this machine."""
        match = re.fullmatch(r"([\w.-]+|\[[\da-f:.]+\])(:\d*)?", netloc.lower(), re.ASCII)
        if match is None:
            return False
        host = match[1].strip("[]")
        return any(fnmatchcase(host, name) for name in self.hosts)

    def _is_own_page(self, headers: Headers) -> bool:
        site = headers.get("sec-fetch-site")
        if site is not None:  # a browser says so
            return site in ("same-origin", "none")
        origin = headers.get("origin")
        return origin is None or self._is_own(origin.partition("://")[2])

    def _has_key(self, headers: Headers) -> bool:
        if self.key is None:
            return True
        kind, _, brought = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and secrets.compare_digest(brought.encode(), self.key.encode())


def refuse(status: int, message: str) -> Response:
    """The response to a request that is not let in."""
    error = {"message": message, "type": "invalid_request_error"}
    return JSONResponse({"error": error}, status)
