"""`qtsplus mcp`: real processes, the SDK's own client, and calls that mean harm."""

import asyncio
import base64
import contextlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import anyio
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from clips import make_world, render_world, write_mp4
from qtsplus import __version__
from qtsplus.cli import app
from qtsplus.hub.loading import load
from qtsplus.library.indexing import index
from qtsplus.library.library import Library
from server_process import running_server

mcp = pytest.importorskip("mcp", reason="needs the extra mcp")
httpx2 = pytest.importorskip("httpx2")

from qtsplus.serve.agents import Shelf  # noqa: E402, which needs it

QUESTION = "What is in the red circle?"
KEY = "correct horse"
BEARER = {"Authorization": f"Bearer {KEY}"}
WORLDS = {"a.mp4": make_world(160, 6), "b [1].mp4": make_world(161, 6), "more/c.mp4": make_world(162, 6)}


@pytest.fixture(scope="module")
def library(tmp_path_factory, tiny_published) -> Library:
    folder = tmp_path_factory.mktemp("agents")
    videos = folder / "videos"
    (videos / "more").mkdir(parents=True)
    for name, world in WORLDS.items():
        write_mp4(videos / name, render_world(world), 2)
    shutil.copy(videos / "a.mp4", folder / "secret.mp4")
    model = load(tiny_published, "cpu")
    index(videos, folder / "library", *model)
    return Library(folder / "library", *model)


@pytest.fixture
def shelf(library, tmp_path) -> Shelf:
    """Serves a copy of the library."""
    folder = shutil.copytree(library.folder, tmp_path / "library")
    return Shelf(Library(folder, library.model, library.processor))


@pytest.fixture
def videos(library, tmp_path) -> Path:
    """A copy of the library's videos."""
    return Path(shutil.copytree(library.index.made["videos"], tmp_path / "videos"))


@pytest.fixture
def own_shelf(library, videos, tmp_path) -> Shelf:
    """Serves a library of the copied videos."""
    index(videos, tmp_path / "library", library.model, library.processor)
    return Shelf(Library(tmp_path / "library", library.model, library.processor))


def command(library, model, *options):
    line = ["-m", "qtsplus.cli", "mcp", library.folder, "--model", model, *options]
    return [str(word) for word in line]


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
    """The port of a server that wants a key."""
    log = tmp_path_factory.mktemp("log") / "log"
    line = command(library, tiny_published, "--port", "{port}", "--api-key", KEY)
    with running_server(log, *line, path="/mcp") as port:
        yield port
    assert "Traceback" not in log.read_text()


def status(port, body=b"{}", **headers):
    """What a server says to a message that no client of the SDK would send."""
    sent = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"} | headers
    server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(server) as connection:
        connection.request("POST", "/mcp", body, sent)
        return connection.getresponse().status


@contextlib.asynccontextmanager
async def over_http(port):
    from mcp.client.streamable_http import streamable_http_client

    async with httpx2.AsyncClient(headers=BEARER, timeout=300) as connection:
        transport = streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=connection)
        async with mcp.Client(transport) as client:
            yield client


def call(where, *calls):
    """The results of calls, one after another, in one connection: to a process, a port, or a server in this process."""

    async def run():
        client_of = over_http if isinstance(where, int) else mcp.Client
        async with client_of(where) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(run())


def refused(shelf, name, **arguments) -> str:
    """The message of a refused call."""
    (result,) = call(shelf, (name, arguments))
    (content,) = result.content
    assert result.is_error
    return content.text


def said(shelf, name, **arguments) -> dict:
    (result,) = call(shelf, (name, arguments))
    assert not result.is_error
    return result.structured_content


LONG = "x" * 100_000
NO_NAMES = ["../secret.mp4", "/etc/passwd", "", "a.mp4\0", "*", "more/../a.mp4", "./a.mp4", "file:///a.mp4", LONG]
NO_NAMES += ["http://[::1]/"]
ASKING = {"question": QUESTION}
LOOKING = {"video": "a.mp4", "seconds": 0}

# For each tool and argument: the values that are refused, beside arguments that are not.
REFUSED = [
    ("look", {"seconds": 0}, "video", NO_NAMES),
    ("look", LOOKING, "seconds", [-1, 7, "NaN", None]),
    ("look", LOOKING, "side", [31, 1025]),
    ("find_moments", ASKING, "videos", ["a.mp4", []]),
    ("find_moments", ASKING, "count", [0, 51]),
    ("find_moments", {}, "question", ["", " ", LONG, None]),
    ("ask", ASKING, "max_new_tokens", [0, 513]),
    ("ask", ASKING, "videos", [[]]),
    ("ask", ASKING, "selection", ["file.py:function"]),
    ("list_videos", {}, "count", [51]),
    ("list_videos", {}, "first", [-1]),
    ("list_videos", {}, "text", [LONG]),
]
HOSTILE = [("ask", {}), ("watch", ASKING), ("../look", LOOKING)]
for tool, arguments, argument, values in REFUSED:
    HOSTILE += [(tool, arguments | {argument: value}) for value in values]
HOSTILE += [("find_moments", ASKING | {"videos": [name]}) for name in NO_NAMES]
HOSTILE += [("ask", ASKING | {"videos": [name]}) for name in NO_NAMES]

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


def test_tools_only_read(stdio):
    async def run():
        async with mcp.Client(stdio) as client:
            return (await client.list_tools()).tools

    tools = asyncio.run(run())
    assert [tool.name for tool in tools] == ["list_videos", "find_moments", "ask", "look"]
    for tool in tools:
        assert tool.annotations.read_only_hint


def test_an_agent_is_told_the_version_and_when_not_to_rely_on_an_answer(library):
    async def run():
        async with mcp.Client(Shelf(library)) as client:
            return client.server_info, client.instructions

    server, instructions = asyncio.run(run())
    assert server.version == __version__
    for field in ("box", "weight", "seen", "seen_threshold", "warnings"):
        assert f" {field} " in f" {re.sub('[.,;]', ' ', instructions)} ", field


def test_an_agent_is_told_what_the_library_lists(results):
    whole, some, none = results[len(HOSTILE) :][:3]
    videos = [{"video": name, "start": 0.0, "seconds": 6.0} for name in WORLDS]
    assert whole.structured_content == {"videos": videos, "of": 3, "not_encoded_yet": []}
    assert some.structured_content == {"videos": videos[:1], "of": 1, "not_encoded_yet": []}
    assert none.structured_content == {"videos": [], "of": 3, "not_encoded_yet": []}


def assert_are_moments(given, moments):
    for fields, moment in zip(given, moments, strict=True):
        expected = json.loads(json.dumps(asdict(moment)))
        assert fields.pop("weight") == pytest.approx(moment.weight, rel=1e-4)
        assert fields.pop("video") == moment.name
        assert fields == {name: expected[name] for name in fields}


def test_an_agent_is_told_what_the_library_finds_and_answers(results, library):
    answers = results[len(HOSTILE) :]
    moments, of_one, answer = [result.structured_content for result in answers[3:6]]
    assert_are_moments(moments["moments"], library.find(QUESTION, 3))
    assert_are_moments(of_one["moments"], library.find(QUESTION, 5, ["b [1].mp4"]))
    expected = library.ask(QUESTION, max_new_tokens=8)
    assert_are_moments(answer["evidence"], expected.evidence)
    assert answer["answer"] == expected.answer
    assert answer["video"] == expected.video
    assert answer["kept_tokens"] == expected.kept_tokens


def test_an_agent_sees_the_frame_of_its_second(results):
    (image,) = results[-1].content
    assert image.mime_type == "image/jpeg"
    file = io.BytesIO(base64.b64decode(image.data))
    frame = np.asarray(Image.open(file))
    assert frame.shape[0] == 64

    def difference(name, number):
        rendered = render_world(WORLDS[name])[number]
        small = Image.fromarray(rendered).resize((64, 64))
        return np.abs(frame - np.asarray(small, float)).mean()

    shown = difference("a.mp4", 4)
    assert shown < 8
    assert shown < difference("a.mp4", 3)
    assert shown < difference("b [1].mp4", 4)


def test_a_hostile_call_is_refused(results):
    for (name, arguments), result in zip(HOSTILE, results, strict=False):
        (content,) = result.content
        assert result.is_error, (name, str(arguments)[:200])
        assert content.text


@pytest.mark.parametrize("results", ["stdio"], indirect=True)
def test_no_video_is_opened_but_the_one_that_is_looked_at(results, stdio, library):
    opened = Path(stdio.args[2]).read_text().splitlines()  # whatever Python opened since the server started
    videos = {path for path in opened if path.endswith((".mp4", "passwd"))}
    assert videos == {str(Path(library.index.made["videos"], "a.mp4"))}


# Versions of the protocol: the SDK reads messages of each in another way.
@pytest.mark.parametrize("version", ["2025-06-18", "2026-07-28"])
def test_a_client_that_leaves_in_the_middle_of_its_message(port, version):
    """The server's log says nothing of it, which the fixture checks at the end."""
    sent = BEARER | {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    client = http.client.HTTPConnection("127.0.0.1", port)
    client.request("POST", "/mcp", b"{", sent | {"MCP-Protocol-Version": version, "Content-Length": "99"})
    client.close()


def test_one_call_at_a_time_has_the_model(library, monkeypatch):
    model = threading.Lock()

    def find(*_):
        assert model.acquire(blocking=False), "another call has the model"
        time.sleep(0.02)
        model.release()
        return []

    monkeypatch.setattr(library, "find", find)
    shelf = Shelf(library)

    async def run():
        async with mcp.Client(shelf) as client:
            calls = [client.call_tool("find_moments", {"question": QUESTION}) for _ in range(8)]
            return await asyncio.gather(*calls)

    for result in asyncio.run(run()):
        assert result.structured_content == {"moments": []}


def test_videos_that_are_not_encoded_are_said(shelf):
    shelf.library.index.files["a.mp4"].unlink()
    shelf = Shelf(Library(shelf.library.folder, shelf.library.model, shelf.library.processor))
    listed = said(shelf, "list_videos")
    assert listed["not_encoded_yet"] == ["a.mp4"]
    assert listed["of"] == 2
    warnings = said(shelf, "ask", question=QUESTION, max_new_tokens=2)["warnings"]
    assert warnings
    assert warnings == shelf.library.warnings


def test_an_answer_is_as_long_as_the_model_says(library, monkeypatch):
    monkeypatch.setattr(library.model.generation_config, "max_new_tokens", 4)
    monkeypatch.setattr(library.model.generation_config, "eos_token_id", None)  # it never ends by itself
    assert said(Shelf(library), "ask", question=QUESTION)["answer"] == library.ask(QUESTION).answer


def test_a_cancelled_question_ends_at_its_next_token(shelf, monkeypatch):
    """As all do when the program ends that started the server."""
    model = shelf.library.model
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    steps = []

    async def ask_and_cancel():
        with anyio.CancelScope() as scope:

            def note(*_):
                steps.append(len(steps))
                if len(steps) == 3:
                    anyio.from_thread.run_sync(scope.cancel)

            hook = model.model.language_model.register_forward_pre_hook(note)
            await shelf.ask(QUESTION, max_new_tokens=64)
        hook.remove()

    anyio.run(ask_and_cancel)
    assert len(steps) == 3


def test_a_library_that_was_removed_is_refused(shelf):
    shutil.rmtree(shelf.library.folder)
    refused(shelf, "look", video="b [1].mp4", seconds=99)


def test_a_library_that_is_indexed_again_is_the_new_one(own_shelf, videos):
    library = own_shelf.library
    (videos / "a.mp4").rename(videos / "new.mp4")
    write_mp4(videos / "b [1].mp4", render_world(make_world(170, 6)), 2)
    index(videos, library.folder, library.model, library.processor)
    listed = said(own_shelf, "list_videos")
    assert [video["video"] for video in listed["videos"]] == ["b [1].mp4", "more/c.mp4", "new.mp4"]
    answer = said(own_shelf, "ask", question=QUESTION, videos=["b [1].mp4"])
    again = Library(library.folder, library.model, library.processor)
    assert answer["answer"] == again.ask(QUESTION, names=["b [1].mp4"]).answer


def test_a_damaged_library_is_refused(shelf):
    journal = shelf.library.folder / "library.jsonl"
    text = journal.read_text()
    first, _, others = text.partition("\n")
    for damaged in ("", f"{first}\n", others, "[]\n"):
        journal.write_text(damaged)
        assert str(shelf.library.folder) not in refused(shelf, "list_videos")
    journal.write_text(text)
    assert said(shelf, "list_videos")


def test_a_video_that_was_changed_is_not_shown(own_shelf, library, videos):
    shutil.copy(library.folder.parent / "secret.mp4", videos / "b [1].mp4")
    reason = refused(own_shelf, "look", video="b [1].mp4", seconds=1)
    assert "is gone or was changed" in reason
    assert str(videos) not in reason
    (kept,) = call(own_shelf, ("look", {"video": "a.mp4", "seconds": 1}))
    assert not kept.is_error


def test_damaged_features_are_refused(shelf):
    features = next(shelf.library.folder.glob("*.safetensors"))
    features.write_bytes(b"x")
    reason = refused(shelf, "find_moments", question=QUESTION)
    assert features.name in reason
    assert str(features.parent) not in reason


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}], ids=str)
def test_http_refuses_a_client_without_the_key(port, headers):
    assert status(port, **headers) == 401


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b"x" * (2**18 + 1), {}, 413),
        (b"[" * 100_000, {}, 400),
        (b"{}", {"Host": "evil.example"}, 400),
        (b"{}", {"Origin": "https://evil.example"}, 403),
        (b"{}", {"Content-Type": "text/plain"}, 400),
    ],
    ids=["large", "nested", "host", "origin", "type"],
)
def test_http_refuses_requests_that_no_client_sends(port, body, headers, code):
    assert status(port, body, **BEARER, **headers) == code


def message(method, number=None, **params):
    content = {"jsonrpc": "2.0", "method": method, "params": params}
    if number is not None:
        content["id"] = number
    return json.dumps(content)


def test_lines_that_are_no_messages_get_errors_and_end_nothing(library, tiny_published):
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    half_a_character = message("tools/call", 5, name="list_videos", arguments={"text": "\ud800"})
    junk = [LONG, "[" * 10**6, half_a_character, '{"jsonrpc"', "\x00\x07", "5", '{"jsonrpc": "2.0", "id": 9}']
    hello = message("initialize", 1, **client)
    ready = message("notifications/initialized")
    call = message("tools/call", 2, name="list_videos", arguments={})
    lines = junk + [hello] + junk + [ready, call]

    server = [sys.executable] + command(library, tiny_published)
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write("\n".join(lines) + "\n")
        process.stdin.flush()
        replies = []
        for line in process.stdout:
            replies.append(json.loads(line))
            if replies[-1]["id"] == 2:
                break
        process.stdin.close()
        assert process.wait() == 0
    errors = [reply["id"] for reply in replies if "error" in reply]
    assert errors == [None, None, 5, None, None, None, 9] * 2
    assert replies[-1]["result"]["structuredContent"]["of"] == 3


@pytest.mark.parametrize("option", ["--host", "--api-key", "--allow-host"])
def test_options_that_need_a_port_end_in_one_line(library, option):
    result = CliRunner().invoke(app, ["mcp", str(library.folder), option, "a.org"])
    assert result.exit_code == 2
    assert "are about HTTP; give --port" in result.stderr.splitlines()[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals of pipes")
def test_the_server_ends_with_the_program_that_started_it(library, tiny_published):
    server = [sys.executable] + command(library, tiny_published)
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        process.stdin.write("what is not a message is replied to\n")
        process.stdin.flush()
        assert process.wait(timeout=60) == -signal.SIGPIPE
