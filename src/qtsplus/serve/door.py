"""Which requests are let in, which videos they may name, and how one is fetched: from the host that was checked."""

import http.client
import ipaddress
import os
import re
import secrets
import socket
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..common.files import size
from ..model.addresses_qtsplus import ADDRESS_TIMEOUT, fetch, is_address, is_inline, parse_address, shown_name
from ..model.containers_qtsplus import open_file

OPEN_FILES = Path("/proc/self/fd")  # on Linux, where a process finds the files that it has opened
HEALTH = "/health"  # everyone may ask for its status: a cluster's probes name the address of a pod as the host
MAX_ADDRESS = 8192  # characters of an address that is fetched; a signed one has about 2,000
_PORTS = {"http": ":80", "https": ":443"}  # the ports of addresses that state none
_PUBLIC_6 = ipaddress.ip_network("2000::/3")  # the one range of IPv6 in which addresses are public
# Addresses that `is_global` of some versions of Python takes for public: IETF's protocols, and the relays of 6to4.
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
]


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

        Raises:
            ValueError: an empty key, which would let everyone in.
        """
        if key is not None and not key.strip():
            raise ValueError("The API key is empty; expected one, or None for a server without a key.")
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
        is_below = any(name.startswith("*.") and host.endswith(name[1:]) for name in self.hosts)
        return host in self.hosts or is_below or "*" in self.hosts

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


@dataclass(frozen=True)
class Door:
    """
    Which videos a request may name: in the request itself (`data:`), in a folder (`file:///...`), or at some hosts.

    A domain is `host:port`, or a host whose default port is meant. Its name has to lead to a public address, unless the
    domain is localhost or an IP address.
    """

    media_root: Path | None = None
    domains: Sequence[str] = ()

    @contextmanager
    def place(self, url: str) -> Iterator[str]:
        """
        The video as the processor takes it, until the context ends. A file is opened once, and the open file is handed
        on, so swapping a folder for a link meanwhile has no effect. A video at an address is fetched.

        Raises:
            ValueError: a video that may not be read or is not there; any file on a system other than Linux.
        """
        if is_inline(url):
            yield url
        elif is_address(url):
            with self._fetched(url) as path:
                yield path
        else:
            with self._opened(url) as path:
                yield path

    @contextmanager
    def _fetched(self, url: str) -> Iterator[str]:
        if len(url) > MAX_ADDRESS:
            raise _refused(url)
        request = parse_address(url)
        default_port = _PORTS[request.type]
        host = request.host.removesuffix(default_port)
        if host not in self.domains and host + default_port not in self.domains:
            raise _refused(url)
        with tempfile.NamedTemporaryFile(prefix="qtsplus-") as file:
            fetch(url, file, _connect)
            file.flush()
            yield file.name

    @contextmanager
    def _opened(self, url: str) -> Iterator[str]:
        parts = urlsplit(url)
        path = unquote(parts.path)
        is_local = parts.scheme == "file" and parts.netloc in ("", "localhost")
        if self.media_root is None or not is_local:
            raise _refused(url)
        if not OPEN_FILES.is_dir():
            raise ValueError("This system does not say where an open file is; expected a video as data: or http(s).")
        try:
            file = open_file(path)  # the open file is checked below, since somebody may swap the path at any time
        except (OSError, ValueError) as error:
            raise _refused(url) from error
        with file:
            opened = OPEN_FILES / str(file.fileno())
            if not Path(os.readlink(opened)).is_relative_to(os.path.realpath(self.media_root)):
                raise _refused(url)
            yield str(opened)


def _refused(url: str) -> ValueError:
    return ValueError(
        f"The video {shown_name(url)[:200]!r} may not be read: expected data:video/mp4;base64,..., or what the "
        "server allows with --allow-media-root (as file:///...) or --allow-media-domain."
    )


def _connect(connection: http.client.HTTPConnection) -> socket.socket:
    """A socket to the host that a connection names; refuses a name that leads to an address that is not public."""
    host = connection.host
    opened = socket.create_connection((host, connection.port), ADDRESS_TIMEOUT)
    address = opened.getpeername()[0]
    if host not in ("localhost", address) and not _is_public(address):
        opened.close()
        raise ConnectionRefusedError(
            "its name leads to an address that is not public; --allow-media-domain may name that address itself"
        )
    if isinstance(connection, http.client.HTTPSConnection):
        return ssl.create_default_context().wrap_socket(opened, server_hostname=host)
    return opened


def _is_public(text: str) -> bool:
    """Whether an address is one of the public Internet, by IANA's registries of special-purpose addresses."""
    address = ipaddress.ip_address(text)
    address = getattr(address, "ipv4_mapped", None) or address
    if not address.is_global or address.is_multicast:
        return False
    is_special = any(address in network for network in _NOT_PUBLIC)
    return not is_special and (address.version == 4 or address in _PUBLIC_6)
