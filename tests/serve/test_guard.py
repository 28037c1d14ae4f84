"""The guard in front of every server: which requests reach the server behind it."""

import asyncio

import pytest
from typer.testing import CliRunner

pytest.importorskip("starlette", reason="needs the extra mcp")
from starlette.applications import Starlette  # noqa: E402
from starlette.middleware import Middleware  # noqa: E402
from starlette.routing import Route  # noqa: E402

from qtsplus.cli import app as command  # noqa: E402
from qtsplus.serve.guard import Guard  # noqa: E402

KEY = "correct horse"
RIGHT = ("Authorization", f"Bearer {KEY}")
ELSEWHERE = ("Sec-Fetch-Site", "cross-site")


def send(guard_options, scope) -> list[dict]:
    """The messages that come back for a request; a request that reaches the server behind the guard gets status 200."""
    sent = []

    async def server(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def keep(message):
        sent.append(message)

    guard = Guard(server, hosts=["ask.example", "*.videos.example"], largest=1000, **guard_options)
    asyncio.run(guard(scope, None, keep))
    return sent


def status(*headers, path="/ask", host="localhost", method="POST", **guard_options) -> int:
    pairs = [("Host", host)] + list(headers)
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs]
    scope = {"type": "http", "path": path, "method": method, "headers": raw}
    return send(guard_options, scope)[0]["status"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("[::1]:8000", 200),
        ("ask.example", 200),
        ("a.videos.example", 200),
        ("othervideos.example", 400),
        ("videos.example.evil", 400),
        ("evil.example", 400),
        ("evil.example@localhost", 400),
        ("", 400),
    ],
)
def test_a_request_names_this_machine(host, expected):
    assert status(host=host) == expected


def test_a_request_names_one_host():
    assert status(("Host", "localhost")) == 400


@pytest.mark.parametrize("brought", ["", "Bearer wrong", "Bearer ", f"Basic {KEY}", KEY, "Bearer größe"])
def test_a_request_without_the_key_is_refused(brought):
    assert status(RIGHT, key=KEY) == 200
    assert status(("Authorization", brought), key=KEY) == 401
    assert status(key=KEY) == 401


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], 200),
        ([ELSEWHERE], 403),
        ([("Sec-Fetch-Site", "same-site")], 403),
        ([("Origin", "https://evil.example")], 403),
        ([("Origin", "null")], 403),
        ([("Origin", "https://ask.example")], 200),
        ([("Sec-Fetch-Site", "same-origin"), ("Origin", "https://behind.example")], 200),
    ],
)
def test_browsers_send_only_from_pages_of_this_machine(headers, expected):
    assert status(*headers, own_pages=True) == expected
    assert status(*headers) == 200


def test_a_page_elsewhere_may_lead_here():
    assert status(ELSEWHERE, method="GET", own_pages=True) == 200


def test_health_is_for_everyone_to_read():
    assert status(path="/health", host="10.0.0.7", method="GET", key=KEY) == 200
    assert status(path="/health", host="10.0.0.7", key=KEY) == 400
    assert status(path="/health", key=KEY) == 401


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("Content-Length", "1000")], 200),
        ([("Content-Length", "1001")], 413),
        ([("Content-Length", "-1")], 411),
        ([("Transfer-Encoding", "chunked")], 411),
        ([("Transfer-Encoding", "chunked"), ("Content-Length", "10")], 411),
    ],
)
def test_a_request_states_a_length_within_the_bound(headers, expected):
    assert status(*headers) == expected


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_error():
    """In front of a page the guard is inside what logs the errors of the page."""
    arriving = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return arriving.pop(0)

    async def read(request):
        await request.body()

    guard = Middleware(Guard, hosts=[], largest=1000)
    page = Starlette(routes=[Route("/ask", read, methods=["POST"])], middleware=[guard])
    scope = {"type": "http", "path": "/ask", "method": "POST", "headers": [(b"host", b"localhost")]}
    asyncio.run(page(scope, receive, None))
    assert not arriving


@pytest.mark.parametrize("path", ["/ask", "/health"])
def test_websockets_are_refused(path):
    (message,) = send({}, {"type": "websocket", "path": path, "headers": []})
    assert message["type"] == "websocket.close"


@pytest.mark.parametrize("key", ["", " "])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("QTSPLUS_API_KEY", ["serve", "model"]),
        ("QTSPLUS_API_KEY", ["mcp", "library", "--port", "1"]),
        ("VLLM_API_KEY", ["serve", "model"]),
    ],
)
def test_an_empty_key_starts_no_server(key, name, line):
    result = CliRunner().invoke(command, line, env={name: key})
    assert result.exit_code == 2
    assert name in result.stderr
    assert "is empty" in result.stderr
