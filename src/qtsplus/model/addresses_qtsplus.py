"""
Where a video is read from: a file, an `http(s)` address, or a `data:` address that holds the file itself.

Any `http(s)` address is fetched that a command or a Python call names, within the bounds below and along redirects to
other `http(s)` addresses. Images beside videos are fetched by Transformers (`fetch_images` in reading_qtsplus.py). For
the requests of others, serve/door.py decides which may be fetched. The addresses of `qtsplus watch` are in
live/watching.py.
"""

import base64
import http.client
import io
import os
import re
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import IO, Any

ADDRESS_TIMEOUT = 30.0  # seconds in which a server may send nothing
ADDRESS_SECONDS = 1800.0  # in which a whole file has to arrive
ADDRESS_BYTES = 2**30  # of a video at an address, which is read into memory
_TOO_LARGE = "it is larger than {:,} bytes, the most that is read from an address; download it, and give the file"


def find_video(path: str) -> str | io.BytesIO:
    """The path of a file, or the file itself in memory."""
    if is_address(path):
        return download(path)
    if is_inline(path):
        return _decode_inline(path)
    path = local_path(path)
    if os.path.isfile(path):
        return path
    if path == "-" or (os.path.exists(path) and not os.path.isdir(path)):
        raise ValueError(f"{path!r} is a pipe or a device; expected a plain file. `qtsplus watch {path}` reads it.")
    raise ValueError(
        f"There is no video at {shown_name(path)!r}; expected a video file, a folder of frames or an http(s) address."
    )


def local_path(name: str) -> str:
    """The path in a `file://` address: as it is written where something is there, else with its `%20` as spaces."""
    path = name.removeprefix("file://")
    if path == name or os.path.exists(path):
        return path
    return urllib.parse.unquote(path)


def is_address(video: str) -> bool:
    """Whether a video is fetched from a server."""
    return video.lower().startswith(("http://", "https://"))


def is_inline(video: str) -> bool:
    """Whether a video is a `data:` address, which holds the file itself."""
    return video[:5].lower() == "data:"


def _decode_inline(address: str) -> io.BytesIO:
    """The file that `data:video/mp4;base64,...` holds."""
    kind, _, content = address.partition(",")
    try:
        if not kind.lower().endswith(";base64"):
            raise ValueError("it does not begin with data:video/...;base64,")
        if len(content) > ADDRESS_BYTES * 4 / 3:
            raise ValueError(_TOO_LARGE.format(ADDRESS_BYTES))
        return io.BytesIO(base64.b64decode(content, validate=True))
    except ValueError as error:
        raise ValueError(f"Cannot read the video in {shown_name(address)!r}: {error}.") from error


def shown_name(video: str) -> str:
    """How messages and results call a video: its path, or its address without user and password, or without a file."""
    if is_inline(video):
        return f"{video[:30]}..."
    # Also behind white space, and of a stream. It begins where a word does, or the time would grow with the square.
    scheme = re.search(r"(?<![\w+.-])(?=[\w+.-]*[A-Za-z])[\w+.-]+://", video)
    if scheme is None:
        return video
    rest = video[scheme.end() :]
    host = re.split(r"[/?#]", rest)[0]
    if "@" not in host and re.fullmatch(r"[^:]*(:\d*)?|\[.*", host):
        return video
    return video[: scheme.end()] + re.sub(r"^.*@", "***@", rest, flags=re.DOTALL)


def parse_address(address: str) -> urllib.request.Request:
    """Raises `ValueError`, without a text that may hold a part of the password, for a wrong host or port."""
    try:
        parts = urllib.parse.urlsplit(address)
        host = (parts.hostname or "").encode("idna").decode()
        if ":" in host:
            host = f"[{host}]"
        if not re.fullmatch(r"[\w.-]+|\[[\da-f:.]+\]", host, re.ASCII):  # such as %40, which urllib would take for an @
            raise ValueError(host)
        if parts.port is not None:
            host = f"{host}:{parts.port}"
        url = parts._replace(netloc=host, fragment="").geturl()
        request = urllib.request.Request(urllib.parse.quote(url, safe="%/:=&?~+!$,;'@()*[]"))
    except ValueError as error:
        raise ValueError(f"Cannot load the video at {shown_name(address)!r}: expected http(s)://HOST/PATH.") from error
    if parts.username is not None:
        user = urllib.parse.unquote_to_bytes(f"{parts.username}:{parts.password or ''}")
        # Not sent on to wherever the server redirects to.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(user).decode()}")
    return request


Connect = Callable[[http.client.HTTPConnection], socket.socket]


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPRedirectHandler):
    """
    Opens every connection by `connect`, if that is given, and then follows no redirect. All responses together have to
    arrive before one deadline.
    """

    def __init__(self, connect: Connect | None):
        super().__init__()
        self.connect = connect
        self.deadline = time.monotonic() + ADDRESS_SECONDS

    def do_open(self, http_class: Callable, req: urllib.request.Request, **options):
        def open_connection(*arguments, **more) -> http.client.HTTPConnection:
            connection = http_class(*arguments, **more)
            connection.response_class = self.open_response
            if self.connect is not None:
                connection.sock = self.connect(connection)
            return connection

        return super().do_open(open_connection, req, **options)

    def open_response(self, sock: socket.socket, *arguments, **options) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(sock, *arguments, **options)
        raw: Any = response.fp.raw
        read = raw.readinto

        def read_in_time(buffer) -> int | None:
            # This reads headers, chunks and trailers too, of which a slow host could send a few bytes for ever.
            if time.monotonic() > self.deadline:
                raise TimeoutError(f"it takes longer than {ADDRESS_SECONDS:g} s; download it, and give the file")
            return read(buffer)

        raw.readinto = read_in_time
        return response

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if self.connect is not None or not is_address(newurl):
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(address: str) -> io.BytesIO:
    """The file at an `http(s)` address."""
    data = io.BytesIO()
    fetch(address, data)
    data.seek(0)
    return data


def fetch(address: str, data: IO[bytes], connect: Connect | None = None) -> None:
    """
    Writes the file at an `http(s)` address to `data`.

    Args:
        connect: opens the socket of a connection, to the very host that is named: redirects and proxies, which could
            lead elsewhere, are then not followed.

    Raises:
        ValueError: an address that is wrong, does not answer, or does not send the whole file, or sends more than 1
            GiB or longer than half an hour.
    """
    request = parse_address(address)
    handlers: list[urllib.request.BaseHandler] = [_Handler(connect)]
    if connect is not None:
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        opener = urllib.request.build_opener(*handlers)
        with opener.open(request, timeout=ADDRESS_TIMEOUT) as response:
            _receive(response, data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"Cannot load the video at {shown_name(address)!r} ({reason}).") from error


def _receive(response: http.client.HTTPResponse, data: IO[bytes]) -> None:
    """Writes what a server sends to `data`; an `OSError` for too much, and for a part."""
    stated = response.length or 0  # a server need not state it
    size = 0
    while max(size, stated) <= ADDRESS_BYTES:
        block = response.read1(2**20)
        if not block:
            break
        data.write(block)
        size += len(block)
    if max(size, stated) > ADDRESS_BYTES:
        raise OSError(_TOO_LARGE.format(ADDRESS_BYTES))
    if size < stated:
        raise ConnectionError(f"it ended after {size} of {stated} bytes; try again")
