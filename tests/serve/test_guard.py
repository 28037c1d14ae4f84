"""The guard in front of every server: a real HTTP server over loopback, and clients that mean harm."""

import asyncio
import contextlib
import json
import socket
import time
from itertools import chain
from threading import Thread

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra mcp")
from starlette.applications import Starlette  # noqa: E402
from starlette.responses import JSONResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from qtsplus.cli import app as command  # noqa: E402
from qtsplus.serve.door import Guard  # noqa: E402

MOST, TOTAL, KEY = 1000, 2500, "correct horse"


class Served:
    """What reached the server behind a guard, and what guards it."""

    def __init__(self, **options):
        self.whole: list[int] = []  # bytes of the bodies that came whole
        self.read: list[int] = []  # bytes of the parts that the server was given
        self.rooms: list[int] = []

        async def answer(request):
            size = 0
            async for part in request.stream():
                self.read.append(len(part))
                size += len(part)
            self.whole.append(size)
            return JSONResponse({"size": size})

        places = [Route("/ask", answer, methods=["GET", "POST"]), Route("/health", answer)]
        options = {"hosts": ["ask.example", "*.films.example"], "most": _most, "total": TOTAL, **options}
        self.guard = Guard(Starlette(routes=places), make_room=self.rooms.append, **options)


def _most(method, path):
    return {"/ask": MOST}.get(path)


@contextlib.contextmanager
def serving(**options):
    """A port, and what is [`Served`] there."""
    served = Served(**options)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(served.guard, log_level="critical", ws="none"))
        thread = Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()[1], served
        finally:
            server.should_exit = True
            thread.join()


def send(port, text, *parts, more=(), hang_up=False):
    """The status and the error that a server gives to a request, which comes in parts; 0 where it says nothing."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        with contextlib.suppress(ConnectionError):
            for part in chain((text, *parts), more):
                connection.sendall(part if isinstance(part, bytes) else part.replace("\n", "\r\n").encode())
        if hang_up:
            return 0, ""
        answer = b""
        with contextlib.suppress(ConnectionError):
            while block := connection.recv(10_000):
                answer += block
    if not answer:
        return 0, ""
    head, _, body = answer.partition(b"\r\n\r\n")
    content = json.loads(body) if body.startswith(b"{") else {}
    return int(head.split()[1]), content.get("error", {}).get("message", "")


def post(*headers, path="/ask", host="localhost", method="POST"):
    return "\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", ""])


def test_a_body_in_its_bounds_comes_through_and_gives_its_room_back():
    with serving() as (port, served):
        assert send(port, post("Content-Length: 1000"), b"x" * 600, b"x" * 400)[0] == 200
        chunks = f"{500:x}\n", b"x" * 500, "\n0\n\n"
        assert send(port, post("Transfer-Encoding: chunked"), *chunks)[0] == 200
        assert send(port, post(method="GET"))[0] == 200
        assert served.whole == [1000, 500, 0] and served.guard.coming == 0
        assert served.rooms == [1000, 1000], "chunks may be as many as are allowed"


def test_a_stated_length_beside_chunks_is_not_believed():
    with serving() as (port, served):
        both = post("Content-Length: 10", "Transfer-Encoding: chunked")
        status, why = send(port, both, f"{100_000:x}\n", b"x" * 100_000, "\n0\n\n")
        assert status == 400 and "not clear" in why
        status, why = send(port, post("Transfer-Encoding: chunked"), f"{5000:x}\n", b"x" * 5000, "\n0\n\n")
        assert status == 413 and "larger than 1 kB" in why
        assert served.whole == [] and sum(served.read) <= MOST and served.guard.coming == 0


def test_what_is_too_large_or_too_much_at_once_is_refused_and_the_client_hears_why():
    with serving() as (port, served):
        status, why = send(port, post("Content-Length: 1500"), b"x" * 1500)
        assert status == 413 and "larger than 1 kB" in why
        served.guard.coming = 2000
        assert send(port, post("Content-Length: 600"))[0] == 503
        served.guard.coming = 0
        assert served.read == []


def test_a_client_that_leaves_in_the_middle_is_no_whole_request():
    with serving() as (port, served):
        send(port, post("Content-Length: 1000"), b"x" * 400, hang_up=True)
        send(port, post("Transfer-Encoding: chunked"), "190\n", b"x" * 400, hang_up=True)
        while served.guard.coming or len(served.read) < 2:
            time.sleep(0.01)
        assert served.whole == []


def drops():
    for _ in range(20):
        time.sleep(0.05)
        yield b"x"


def test_a_client_that_drips_is_late():
    with serving(seconds=0.2) as (port, served):
        for start in (post("Content-Length: 20"), post("Transfer-Encoding: chunked") + "14\n"):
            status, why = send(port, start, b"x")  # and then nothing
            assert status == 408 and "within 0.2 seconds" in why
        status, why = send(port, post("Content-Length: 20"), more=drops())
        assert status == 408, "each drop comes in time, and the whole does not"
        assert served.whole == [] and served.guard.coming == 0


def test_names_keys_pages_and_paths():
    with serving(key=KEY, own_pages=True) as (port, served):
        right = f"Authorization: Bearer {KEY}"
        elsewhere = "Sec-Fetch-Site: cross-site"
        for expected, text in (
            (200, post(right)),
            (200, post(right, host="LOCALHOST:80")),
            (200, post(right, host=f"[::1]:{port}")),
            (200, post(right, host="a.films.example")),
            (200, post(path="/health", host="10.0.0.7", method="GET")),
            (400, post(path="/health", host="10.0.0.7")),
            (401, post(path="/health")),
            (400, post(right, host="evil.example")),
            (400, post(right, host="evil.example@localhost")),
            (400, post(right, "Host: evil.example")),
            (400, post(right, host="films.example.evil")),
            (401, post()),
            (401, post("Authorization: Bearer wrong")),
            (401, post("Authorization: Bearer ")),
            (401, post(f"Authorization: Basic {KEY}")),
            (401, post("Authorization: Bearer größe")),
            (403, post(right, elsewhere)),
            (403, post(right, "Origin: https://evil.example")),
            (403, post(right, "Origin: null")),
            (200, post(right, "Origin: https://ask.example")),
            (200, post(right, elsewhere, method="GET")),
            (200, post(right, "Sec-Fetch-Site: same-origin", "Origin: https://behind.example")),
            (404, post(right, path="/other")),
        ):
            assert send(port, text)[0] == expected, text
        assert len(served.whole) == 8


def test_health_tells_everyone_a_status_and_nothing_else():
    sent = []

    async def server(scope, receive, send):
        await send({"type": "http.response.start", "status": 503, "headers": [(b"server", b"version 1.2")]})
        await send({"type": "http.response.body", "body": b"the model ", "more_body": True})
        await send({"type": "http.response.body", "body": b"in /home/me"})

    async def keep(message):
        sent.append(message)

    guard = Guard(server, hosts=[], key=KEY, most=_most, total=TOTAL)
    headers = [(b"host", b"10.0.0.7")]
    asyncio.run(guard({"type": "http", "method": "GET", "path": "/health", "headers": headers}, None, keep))
    start, body = sent
    assert start["status"] == 503 and start["headers"] == [(b"content-length", b"0")]
    assert body == {"type": "http.response.body"}


def test_websockets_are_refused():
    sent, reached = [], []

    async def server(scope, receive, send):
        reached.append(scope)

    async def keep(message):
        sent.append(message["type"])

    guard = Guard(server, hosts=["*"], most=_most, total=TOTAL)
    for path in ("/ask", "/health"):
        asyncio.run(guard({"type": "websocket", "path": path, "headers": []}, None, keep))
    assert sent == ["websocket.close"] * 2 and not reached


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_starts_no_server(key, tmp_path):
    with pytest.raises(ValueError, match="key is empty"):
        Served(key=key)
    for name, line in (
        ("QTSPLUS_API_KEY", ["serve", "model"]),
        ("QTSPLUS_API_KEY", ["mcp", str(tmp_path), "--http", "127.0.0.1:1"]),
        ("VLLM_API_KEY", ["serve", "model"]),
    ):
        result = CliRunner().invoke(command, line, env={name: key})
        assert result.exit_code == 2 and name in result.stderr and "is empty" in result.stderr, result.output
