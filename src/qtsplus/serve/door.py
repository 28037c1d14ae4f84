"""Whose requests come in, which videos they may name, and how one is fetched: from the very host that was checked."""

import asyncio
import http.client
import ipaddress
import json
import os
import re
import secrets
import socket
import ssl
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.requests import ClientDisconnect

from ..common.files import path_of, size
from ..model.addresses_qtsplus import ADDRESS_TIMEOUT, fetch, is_address, is_inline, parse_address, shown_name

ARRIVAL_SECONDS = 120.0  # in which a request over HTTP has to arrive whole
HEALTH = "/health"  # everyone may ask for its status: a cluster's probes name the address of a pod as the host
MAX_ADDRESS = 8192  # characters of one that is fetched or of a file; a signed one has about 2,000
# What `is_global` of some versions of Python takes for public: IETF's protocols, the relays of 6to4.
_SPECIAL = [ipaddress.ip_network(network) for network in ("192.0.0.0/24", "192.88.99.0/24")]
# IPv6 has public addresses in one range alone, and in there such as lead on (Teredo, 6to4) or are for examples.
_PUBLIC_6 = ipaddress.ip_network("2000::/3")
_SPECIAL_6 = [
    ipaddress.ip_network(network)
    for network in ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
]


class Guard:
    """
    ASGI in front of a server: the page's, that of agents, and vLLM's. It lets in requests over HTTP that name this
    machine and bring the key, and whose body comes whole, in time, and in its bounds. Of others the server hears
    nothing, or that the client has left. Websockets are refused.

    How long a client may take over the headers of a request, and how many may be connected, is for the HTTP server or
    a reverse proxy to say.
    """

    def __init__(
        self,
        app: Any,
        *,
        hosts: Sequence[str],
        most: Callable[[str, str], int | None],
        total: int,
        seconds: float = ARRIVAL_SECONDS,
        key: str | None = None,
        own_pages: bool = False,
        make_room: Callable[[int], object] | None = None,
    ):
        """
        Args:
            hosts: names of this machine that requests may use beside localhost; `*` for all, `*.example.org` for all
                below a name.
            most: bytes that the body of a request may have, by its method and path; `None` where nothing is served.
            total: bytes of all requests that were not answered yet.
            seconds: in which a request has to arrive.
            key: what requests have to bring as `Authorization: Bearer KEY`.
            own_pages: whether browsers may send requests only from pages of this machine.
            make_room: called with the bytes of all requests on their way, before another one is read.

        Raises:
            ValueError: an empty key, which would let everyone in.
        """
        if key is not None and not key.strip():
            raise ValueError("The API key is empty; expected one, or None for a server without a key.")
        self.app = app
        self.hosts = [host.lower().strip("[]") for host in ("localhost", "127.0.0.1", "::1", *hosts)]
        self.most = most
        self.total = total
        self.seconds = seconds
        self.key = key
        self.own_pages = own_pages
        self.make_room = make_room
        self.coming = 0  # bytes of the requests that were not answered yet

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["path"] == HEALTH and scope["method"] in ("GET", "HEAD"):
            return await self.app(scope, receive, _status_alone(send))
        most = self.most(scope["method"], scope["path"])
        refusal = self._refusal(scope, most)
        if refusal is not None:
            return await refusal.say(receive, send)
        length = _length(scope, most or 0)
        self.coming += length
        try:
            if length and self.make_room is not None:
                self.make_room(self.coming)
            await self._serve(scope, _Arrival(receive, length, self.seconds), send)
        finally:
            self.coming -= length

    def _refusal(self, scope: Any, most: int | None) -> "_Refusal | None":
        """Why a request is not let in, by what its headers say."""
        if not self._is_own(_header(scope, b"host")):
            return _Refusal(400, "The request names another host; --allow-host adds a name of this one.")
        if self.own_pages and scope["method"] not in ("GET", "HEAD") and not self._is_own_page(scope):
            return _Refusal(403, "A page elsewhere sent this.")
        if not self._has_key(_header(scope, b"authorization")):
            return _Refusal(401, "Expected the server's key as Authorization: Bearer KEY.")
        if most is None:
            return _Refusal(404, "There is nothing here for clients.")
        stated = _header(scope, b"content-length")
        if stated and (not stated.isdecimal() or _header(scope, b"transfer-encoding")):
            return _Refusal(400, "The length of the request is not clear; expected one Content-Length, or chunks.")
        length = _length(scope, most)
        if length > min(most, self.total):
            return _Refusal(413, f"The request is larger than {size(min(most, self.total))}.", most, self.seconds)
        if self.coming + length > self.total:
            return _Refusal(503, "Too many requests wait for their answer; try again.")
        return None

    def _is_own(self, netloc: str) -> bool:
        """Whether a host, with a port or without, is a name of this machine."""
        match = re.fullmatch(r"([\w.-]+|\[[\da-f:.]+\])(:\d*)?", netloc.lower(), re.ASCII)
        host = match[1].strip("[]") if match else ""
        below = any(name.startswith("*.") and host.endswith(name[1:]) for name in self.hosts)
        return match is not None and (host in self.hosts or below or "*" in self.hosts)

    def _is_own_page(self, scope: Any) -> bool:
        site = _header(scope, b"sec-fetch-site")
        if site:  # a browser says so
            return site in ("same-origin", "none")
        origin = _header(scope, b"origin")
        return not origin or self._is_own(origin.partition("://")[2])

    def _has_key(self, authorization: str) -> bool:
        kind, _, brought = authorization.partition(" ")
        if self.key is None:
            return True
        return kind.lower() == "bearer" and secrets.compare_digest(brought.encode(), self.key.encode())

    async def _serve(self, scope: Any, arrival: "_Arrival", send: Any) -> None:
        """Has the server answer a request; where its body did not come as it should, the client hears why."""
        is_begun = False

        async def answer(message: Any) -> None:
            nonlocal is_begun
            if arrival.refusal is None or is_begun:
                is_begun = True
                await send(message)

        try:
            await self.app(scope, arrival.receive, answer)
        except ClientDisconnect:
            if arrival.refusal is None:
                raise
        if arrival.refusal is not None and not is_begun:
            await arrival.refusal.say(arrival.receive, send)


def _status_alone(send: Any) -> Any:
    """Sends the status of an answer, and nothing else of it."""

    async def send_status(message: Any) -> None:
        if message["type"] == "http.response.start":
            await send({"type": message["type"], "status": message["status"], "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    return send_status


class _Arrival:
    """The body of a request as it comes, of at most so many bytes and within so many seconds."""

    def __init__(self, receive: Any, most: int, seconds: float):
        self.source = receive
        self.most = most
        self.left = most
        self.deadline = time.monotonic() + seconds
        self.seconds = seconds
        self.is_whole = False
        self.refusal: _Refusal | None = None

    async def receive(self) -> Any:
        """As the server's; a client that sends too much or too slowly has left."""
        if self.is_whole:
            return await self.source()
        if self.refusal is not None:
            return {"type": "http.disconnect"}
        try:
            message = await asyncio.wait_for(self.source(), self.deadline - time.monotonic())
        except asyncio.TimeoutError:
            self.refusal = _Refusal(408, f"The request did not arrive within {self.seconds:g} seconds.")
            return {"type": "http.disconnect"}
        if message["type"] != "http.request":
            return message
        self.left -= len(message.get("body", b""))
        if self.left < 0:
            self.refusal = _Refusal(413, f"The request is larger than {size(self.most)}.")
            return {"type": "http.disconnect"}
        self.is_whole = not message.get("more_body", False)
        return message


@dataclass(frozen=True)
class _Refusal:
    """Why a request is not answered; before it is said, so much is read of a body that is on its way."""

    status: int
    message: str
    passed_over: int = 0  # bytes: a client that still sends hears nothing
    seconds: float = 0.0

    async def say(self, receive: Any, send: Any) -> None:
        arrival = _Arrival(receive, self.passed_over, self.seconds)
        while self.passed_over and not arrival.is_whole:
            message = await arrival.receive()
            if message["type"] != "http.request":
                break
        error = {"error": {"message": self.message, "type": "invalid_request_error"}}
        body = json.dumps(error).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _length(scope: Any, most: int) -> int:
    """Bytes that the body of a request has at most: in chunks as many as are allowed, and none without a length."""
    if _header(scope, b"transfer-encoding"):
        return most
    return int(_header(scope, b"content-length") or 0)


def _header(scope: Any, name: bytes) -> str:
    """A header of a request; empty where there is none, and where it is there twice no good value of any."""
    return ",".join(value.decode("latin-1") for key, value in scope["headers"] if key == name)


@dataclass(frozen=True)
class Door:
    """
    Which videos a request may name: those in it (`data:`), in a folder (`file:///...`), at addresses of hosts.

    A domain is a host, of which the default port is open, or `host:port`. Its name has to lead to a public address,
    unless the domain is localhost or an address itself.
    """

    media_root: Path | None = None
    domains: Sequence[str] = ()

    @contextmanager
    def place(self, url: str) -> Iterator[str]:
        """
        The video as the processor takes it, until the context ends. A file is opened once, and what is handed on is the
        open file: a folder that is swapped for a link meanwhile leads nowhere. A video at an address is fetched.

        Raises:
            ValueError: a video that may not be read or is not there; a file, on a system that cannot open it folder by
                folder, such as Windows.
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
        kind = http.client.HTTPSConnection if request.type == "https" else http.client.HTTPConnection
        if not self._allows(kind(request.host)):
            raise _refused(url)
        with tempfile.NamedTemporaryFile(prefix="qtsplus-") as file:
            fetch(url, file, _connect)
            file.flush()
            yield file.name

    @contextmanager
    def _opened(self, url: str) -> Iterator[str]:
        if self.media_root is None:
            raise _refused(url)
        try:
            root = Path(os.path.realpath(self.media_root))
            path = _path_below(root, url)
            descriptor = None if path is None else _open_below(root, path)
        except OSError as error:  # such as for a folder that has become a link since its path was resolved
            raise _refused(url) from error
        if descriptor is None:
            raise _refused(url)
        with open(descriptor, "rb") as file, path_of(file) as path_of_file:
            yield path_of_file

    def _allows(self, connection: http.client.HTTPConnection) -> bool:
        host = f"[{connection.host}]" if ":" in connection.host else connection.host
        names = {f"{host}:{connection.port}"} | ({host} if connection.port == connection.default_port else set())
        return not names.isdisjoint(self.domains)


def _refused(url: str) -> ValueError:
    return ValueError(
        f"The video {shown_name(url)[:200]!r} may not be read: expected data:video/mp4;base64,..., or what the "
        "server allows with --allow-media-root (as file:///...) or --allow-media-domain."
    )


def _path_below(root: Path, url: str) -> Path | None:
    """The path of the file that a `file:` address names, relative to a folder; `None` where it is not in there."""
    if len(url) > MAX_ADDRESS:
        return None
    parts = urlsplit(url)
    path = unquote(parts.path)
    # Asked first whether it is a file: for a text that cannot be a name that is False, and not an error.
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not os.path.isfile(path):
        return None
    resolved = Path(os.path.realpath(path))
    if not resolved.is_relative_to(root):
        return None
    return resolved.relative_to(root)


def _open_below(root: Path, path: Path) -> int:
    """A descriptor of the file at a path below a folder, none of which is a link; an `OSError` for another."""
    if os.open not in os.supports_dir_fd:
        raise ValueError("This system cannot open a file folder by folder; serve files as data: or http(s) addresses.")
    # With O_PATH, which only Linux has, a folder need not be one that may be listed.
    folder_flags = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
    place = os.open(root, folder_flags)
    for name in path.parts[:-1]:
        above = place
        try:
            place = os.open(name, folder_flags, dir_fd=above)
        finally:
            os.close(above)
    try:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a plain file")
    return descriptor


def _connect(connection: http.client.HTTPConnection) -> socket.socket:
    """A socket to the host that a connection names."""
    host = connection.host
    found = socket.getaddrinfo(host, connection.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in found))
    if host != "localhost" and addresses != [host] and not all(map(_is_public, addresses)):
        raise ConnectionRefusedError(
            "its name leads to an address that is not public; --allow-media-domain may name that address itself"
        )
    opened = _open(addresses, connection)
    if isinstance(connection, http.client.HTTPSConnection):
        return ssl.create_default_context().wrap_socket(opened, server_hostname=host)
    return opened


def _open(addresses: list[str], connection: http.client.HTTPConnection) -> socket.socket:
    """Connects to the addresses that were checked: asked for again, the name could lead elsewhere."""
    deadline = time.monotonic() + ADDRESS_TIMEOUT
    problem: OSError = TimeoutError("no address of it can be reached in time")
    for address in addresses:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        try:
            opened = socket.create_connection((address, connection.port), seconds)
        except OSError as error:
            problem = error
        else:
            opened.settimeout(ADDRESS_TIMEOUT)
            return opened
    raise problem


def _is_public(text: str) -> bool:
    """Whether an address is one of the public Internet, by IANA's registries of special-purpose addresses."""
    address = ipaddress.ip_address(text)
    address = getattr(address, "ipv4_mapped", None) or address
    if not address.is_global or address.is_multicast:
        return False
    if address.version == 4:
        return not any(address in network for network in _SPECIAL)
    return address in _PUBLIC_6 and not any(address in network for network in _SPECIAL_6)
