"""`qtsplus mcp`: real processes, the SDK's own client, and calls that mean harm."""

import asyncio
import base64
import contextlib
import http.client
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from clips import make_world, render_world, write_mp4
from qtsplus.cli import app
from qtsplus.hub.loading import load
from qtsplus.library.indexing import index
from qtsplus.library.library import Library
from server_process import running_server

mcp = pytest.importorskip("mcp", reason="needs the extra mcp")
httpx2 = pytest.importorskip("httpx2")

from qtsplus.serve.agents import Shelf  # noqa: E402, which needs it

QUESTION, KEY = "What is in the red circle?", "correct horse"
WORLDS = {name: make_world(160 + seed, 6) for seed, name in enumerate(("a.mp4", "b [1].mp4", "more/c.mp4"))}
TOOLS = ["list_videos", "find_moments", "ask", "look"]


@pytest.fixture(scope="module")
def library(tmp_path_factory, tiny_published) -> Library:
    folder = tmp_path_factory.mktemp("agents")
    for name, world in WORLDS.items():
        (folder / "films" / name).parent.mkdir(parents=True, exist_ok=True)
        write_mp4(folder / "films" / name, render_world(world), 2)
    shutil.copy(folder / "films/a.mp4", folder / "secret.mp4")
    model = load(tiny_published, "cpu")
    index(folder / "films", folder / "library", *model)
    return Library(folder / "library", *model)


def command(library, model, *more):
    return ["-m", "qtsplus.cli", "mcp", str(library.folder), "--model", str(model), *map(str, more)]


AUDIT = """
import sys
log = open(sys.argv.pop(1), "w", buffering=1, errors="backslashreplace")
sys.addaudithook(lambda event, args: event == "open" and isinstance(args[0], str) and print(args[0], file=log))
from qtsplus.cli import app
app()
"""


@pytest.fixture(scope="module")
def stdio(library, tiny_published, tmp_path_factory):
    """What the client starts: `qtsplus mcp`, which notes every file that it opens in its first argument."""
    log = tmp_path_factory.mktemp("log") / "opened"
    arguments = ["-c", AUDIT, str(log), *command(library, tiny_published)[2:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return mcp.StdioServerParameters(command=sys.executable, args=arguments, env=environment)


@pytest.fixture(scope="module")
def port(library, tiny_published, tmp_path_factory):
    """That of a server that wants a key."""
    log = tmp_path_factory.mktemp("log") / "log"
    places = ("--http", "127.0.0.1:{port}", "--watch", f"door={library.index.videos}/a.mp4")
    line = command(library, tiny_published, *places, "--api-key", KEY)
    with running_server(log, *line, path="/mcp") as port:
        yield port
    assert "Traceback" not in log.read_text()


def status(port, body=b"{}", **headers):
    """What a server says to a message that no client of the SDK would send."""
    sent = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **headers}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/mcp", body, sent)
        return connection.getresponse().status


@contextlib.asynccontextmanager
async def over_http(port):
    from mcp.client.streamable_http import streamable_http_client

    headers, limits = {"Authorization": f"Bearer {KEY}"}, httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(headers=headers, timeout=300, limits=limits) as connection:
        transport = streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=connection)
        async with mcp.Client(transport) as client:
            yield client


def call(where, *calls):
    """The results of calls, one after another, in one connection: to a process, a port, or a server in this process."""

    async def run():
        async with over_http(where) if isinstance(where, int) else mcp.Client(where) as client:
            tools = (await client.list_tools()).tools
            assert [tool.name for tool in tools][:4] == TOOLS and all(
                one.annotations.read_only_hint for one in tools[:4]
            )
            return [await client.call_tool(name, given) for name, given in calls]

    return asyncio.run(run())


async def told(client, name="door"):
    (content,) = (await client.read_resource(f"watch://{name}")).contents
    return json.loads(content.text)


LONG = "x" * 100_000
NO_NAMES = ("../secret.mp4", "/etc/passwd", "", "a.mp4\0", "*", "more/../a.mp4", "./a.mp4", "file:///a.mp4", LONG)
HOSTILE = [
    *(("look", {"video": video, "seconds": 0}) for video in NO_NAMES),
    *(("find_moments", {"question": QUESTION, "videos": [video]}) for video in (*NO_NAMES, 5, None, "http://[::1]/")),
    *(("ask", {"question": QUESTION, "videos": [video]}) for video in NO_NAMES),
    *(("ask", {"question": QUESTION, "videos": videos}) for videos in ("a.mp4", ["a.mp4"] * 101, {"a.mp4": 1})),
    *(("look", {"video": "a.mp4", "seconds": seconds}) for seconds in (-1, 7, 1e300, "NaN", "inf", None, [0])),
    *(("look", {"video": "a.mp4", "seconds": 0, "side": side}) for side in (0, 31, 1025, 10**9, "big")),
    *(("find_moments", {"question": question}) for question in ("", " ", "x" * 2001, LONG, 5, None, [QUESTION])),
    *(("find_moments", {"question": QUESTION, "count": count}) for count in (0, 51, 10**30, -1, 1.5)),
    *(("ask", {"question": QUESTION, "max_new_tokens": count}) for count in (0, 513, 10**6)),
    ("ask", {"question": QUESTION, "selection": "file.py:function"}),
    ("ask", {}),
    *(("list_videos", given) for given in ({"count": 51}, {"first": -1}, {"first": 1e300}, {"text": LONG})),
    *((tool, {"source": "/dev/video0"}) for tool in ("watch", "", "../look", LONG)),
    *((tool, {"source": "/dev/video0"}) for tool in ("watch_start", "watch_ask", "watch_stop")),
]
ASKED = [
    ("list_videos", {}),
    ("list_videos", {"text": "A.MP4", "count": 1}),
    ("list_videos", {"first": 10**9}),
    ("find_moments", {"question": QUESTION, "count": 3}),
    ("find_moments", {"question": QUESTION, "videos": ["b [1].mp4"]}),
    ("ask", {"question": QUESTION, "max_new_tokens": 8}),
    ("look", {"video": "a.mp4", "seconds": 2.2, "side": 64}),
]


@pytest.fixture(scope="module", params=["stdio", "port"])
def results(request, library):
    """What a server says to HOSTILE, and then to ASKED."""
    return call(request.getfixturevalue(request.param), *HOSTILE, *ASKED)


def test_an_agent_is_told_what_the_library_says(results, library):
    listed, some, none, moments, one, answer, look = results[len(HOSTILE) :]
    videos = [{"video": name, "start": 0.0, "seconds": 6.0} for name in sorted(WORLDS)]
    assert listed.structured_content == {"videos": videos, "of": 3, "not_encoded_yet": []}
    assert some.structured_content == {"videos": videos[:1], "of": 1, "not_encoded_yet": []}
    assert none.structured_content == {"videos": [], "of": 3, "not_encoded_yet": []}
    for truth, told in (
        (library.find(QUESTION, 3), moments),
        (library.find(QUESTION, 5, ["b [1].mp4"]), one),
        (library.ask(QUESTION, max_new_tokens=8).evidence, answer),
    ):
        told = told.structured_content
        for own, given in zip(truth, told.get("moments") or told["evidence"], strict=True):
            fields = asdict(own)
            assert given.pop("weight") == pytest.approx(own.weight, rel=1e-4) and given.pop("video") == own.name
            assert given == json.loads(json.dumps({name: fields[name] for name in given}))
    truth, said = library.ask(QUESTION, max_new_tokens=8), answer.structured_content
    assert (said["answer"], said["video"], said["kept_tokens"]) == (truth.answer, truth.video, truth.kept_tokens)
    frame = np.asarray(Image.open(io.BytesIO(base64.b64decode(look.content[0].data))))
    assert frame.shape[0] == 64 and look.content[0].mime_type == "image/jpeg"
    shown, before, other = (render_world(WORLDS[name])[n] for name, n in (("a.mp4", 4), ("a.mp4", 3), ("b [1].mp4", 4)))
    small = [np.asarray(Image.fromarray(one).resize((64, 64)), float) for one in (shown, before, other)]
    here, *elsewhere = [np.abs(frame - one).mean() for one in small]
    assert here < 8 and here < min(elsewhere)


def test_a_hostile_call_is_one_line(results, library):
    for (name, given), result in zip(HOSTILE, results, strict=False):
        (text,) = [part.text for part in result.content]
        assert result.is_error and 0 < len(text) <= 500 and text.isprintable(), (name[:20], str(given)[:200], text)
        assert str(library.folder.parent) not in text and "pydantic" not in text and "Error executing" not in text


@pytest.mark.parametrize("results", ["stdio"], indirect=True)
def test_no_film_is_opened_but_the_one_that_is_looked_at(results, stdio, library):
    opened = Path(stdio.args[2]).read_text().splitlines()  # whatever Python opened since the server started
    films = {path for path in opened if path.endswith((".mp4", "passwd"))}
    assert films == {str(library.folder.parent / "films/a.mp4")}


def test_two_hundred_calls_at_once_are_answered_or_refused(port):
    async def run():
        async with over_http(port) as client:
            calls = (client.call_tool("ask", {"question": QUESTION, "max_new_tokens": 2}) for _ in range(200))
            results = await asyncio.gather(*calls)
            return results, await client.call_tool("list_videos", {})

    results, after = asyncio.run(run())
    texts = [result.content[0].text for result in results if result.is_error]
    assert texts == ["32 calls wait already; try again later."] * len(texts)
    assert 32 <= len(results) - len(texts) < 200 and not after.is_error
    assert len({result.structured_content["answer"] for result in results if not result.is_error}) == 1


def test_one_call_at_a_time_has_the_model(library, monkeypatch):
    inside, most = 0, 0

    def find(*_):
        nonlocal inside, most
        inside, most = inside + 1, max(most, inside + 1)
        time.sleep(0.02)
        inside -= 1
        return []

    monkeypatch.setattr(library, "find", find)
    shelf = Shelf(library)

    async def run():
        async with mcp.Client(shelf) as client:
            await asyncio.gather(*(client.call_tool("find_moments", {"question": QUESTION}) for _ in range(8)))

    asyncio.run(run())
    assert most == 1 and shelf.waiting == 0


def test_changes_are_told_over_http(port):
    async def run():
        async with over_http(port) as client, client.listen(resource_subscriptions=["watch://door"]) as events:
            begun = await client.call_tool("watch_start", {"source": "door", "question": QUESTION})
            event = await anext(aiter(events))
            last = await told(client)
            stopped = await client.call_tool("watch_stop", {"source": "door"})
            return begun, event, last, stopped

    begun, event, last, stopped = asyncio.run(run())
    assert not begun.is_error and event.uri == "watch://door" and last["answer"]["answer"] and not stopped.is_error


def test_what_is_not_encoded_is_said(library, tmp_path):
    folder = Path(shutil.copytree(library.folder, tmp_path / "library"))
    (folder / library.files["a.mp4"].name).unlink()
    shelf = Shelf(Library(folder, library.model, library.processor))
    listed, answer = call(shelf, ("list_videos", {}), ("ask", {"question": QUESTION, "max_new_tokens": 2}))
    assert listed.structured_content["not_encoded_yet"] == ["a.mp4"] and listed.structured_content["of"] == 2
    assert answer.structured_content["warnings"] == shelf.library.warnings != []
    shutil.rmtree(folder)
    (gone,) = call(shelf, ("look", {"video": "b [1].mp4", "seconds": 99}))
    assert gone.is_error and gone.content[0].text


def test_a_library_that_is_indexed_again_is_the_new_one(library, tmp_path):
    films = Path(shutil.copytree(library.index.videos, tmp_path / "films"))
    model = library.model, library.processor
    index(films, tmp_path / "library", *model)
    shelf = Shelf(Library(tmp_path / "library", *model))
    (films / "a.mp4").rename(films / "new.mp4")
    write_mp4(films / "b [1].mp4", render_world(make_world(170, 6)), 2)
    index(films, tmp_path / "library", *model)
    listed, answer = call(shelf, ("list_videos", {}), ("ask", {"question": QUESTION, "videos": ["b [1].mp4"]}))
    assert [one["video"] for one in listed.structured_content["videos"]] == ["b [1].mp4", "more/c.mp4", "new.mp4"]
    assert (
        answer.structured_content["answer"]
        == Library(tmp_path / "library", *model).ask(QUESTION, names=["b [1].mp4"]).answer
    )


def test_a_library_that_was_damaged_is_refused_without_its_place(library, tmp_path):
    folder = Path(shutil.copytree(library.folder, tmp_path / "library"))
    shelf, journal = Shelf(Library(folder, library.model, library.processor)), folder / "library.jsonl"
    text = journal.read_text()
    for damaged in ("", text.partition("\n")[0] + "\n", text.partition("\n")[2], "[]\n"):
        journal.write_text(damaged)
        (refused,) = call(shelf, ("list_videos", {}))
        assert refused.is_error and str(tmp_path) not in refused.content[0].text != ""
    journal.write_text(text)
    assert not call(shelf, ("list_videos", {}))[0].is_error


def test_http_refuses_what_no_client_sends(port):
    prompt = {"jsonrpc": "2.0", "id": 1, "method": "prompts/get", "params": {"name": "x"}}
    bearer = {"Authorization": f"Bearer {KEY}"}
    assert status(port, json.dumps(prompt).encode(), **bearer) in (200, 400)  # and the log has no traceback
    own = {"Authorization": f"Bearer {KEY}"}
    assert status(port) == status(port, Authorization="Bearer wrong") == status(port, Authorization=KEY) == 401
    assert status(port, b"x" * 2**18 + b"x", **own) == 413
    assert status(port, b"[" * 100_000, **own) == 400
    assert status(port, **own, Host="evil.example") == 400
    assert status(port, **own, Origin="https://evil.example") == 403
    assert status(port, **{**own, "Content-Type": "text/plain"}) == 400


def test_a_client_that_leaves_within_a_message_leaves_no_traceback(port):
    """The fixture looks for one in the log."""
    head = f"POST /mcp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n"
    accepted = "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(f"{head}{accepted}{{".encode())
    assert status(port) == 401


def test_lines_that_are_no_messages_end_nothing(library, tiny_published):
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    asked = [
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "list_videos", "arguments": {}}},
    ]
    lines = [json.dumps({"jsonrpc": "2.0", **one}) for one in asked]
    half = lines[2].replace("{}", '{"text": "\\ud800"}').replace('"id": 2', '"id": 5')  # of a character
    junk = [LONG, "[" * 10**6, half, '{"jsonrpc"', "\x00\x07", "5", json.dumps({"jsonrpc": "2.0", "id": 9})]
    line = [sys.executable, *command(library, tiny_published)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write("\n".join([*junk, lines[0], *junk, *lines[1:]]) + "\n")
        process.stdin.flush()
        replies = [json.loads(process.stdout.readline())]
        while replies[-1].get("id") != 2:
            replies.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        assert process.wait() == 0
    assert replies[-1]["result"]["structuredContent"]["of"] == 3
    halves = [reply["error"]["message"] for reply in replies if reply.get("id") == 5]
    assert len(halves) == 2 and all("half a character" in message for message in halves), replies
    assert sum(len(json.dumps(reply)) for reply in replies) < 10_000


def test_a_film_that_was_changed_is_not_shown(library, tmp_path):
    shutil.copytree(library.folder.parent / "films", tmp_path / "films")
    model = library.model, library.processor
    index(tmp_path / "films", tmp_path / "library", *model)
    shutil.copy(library.folder.parent / "secret.mp4", tmp_path / "films/b [1].mp4")
    shelf = Shelf(Library(tmp_path / "library", *model))
    changed, kept = call(shelf, *(("look", {"video": name, "seconds": 1}) for name in ("b [1].mp4", "a.mp4")))
    assert changed.is_error and "was changed since" in changed.content[0].text and not kept.is_error
    next((tmp_path / "library").glob("*.safetensors")).write_bytes(b"x")
    (damaged,) = call(shelf, ("find_moments", {"question": QUESTION}))
    assert damaged.is_error and str(tmp_path) not in damaged.content[0].text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["{library}", "--http", "8765"], "expected HOST:PORT"),
        (["{library}", "--http", "127.0.0.1:70000"], "expected HOST:PORT"),
        (["{library}", "--api-key", "x"], "are about --http"),
        (["{library}", "--allow-host", "a.org"], "are about --http"),
        (["{library}", "--watch", "a b=/dev/video0"], "expected NAME=SOURCE"),
        (["{library}", "--watch", "door=-"], "expected NAME=SOURCE"),
        (["{missing}"], "There is no library"),
    ],
)
def test_bad_command_lines_end_in_one_line(library, tmp_path, line, reason):
    places = {"library": library.folder, "missing": tmp_path}
    result = CliRunner().invoke(app, ["mcp", *(one.format(**places) for one in line)])
    assert result.exit_code == 2 and reason in result.stderr.splitlines()[-1], result.output
