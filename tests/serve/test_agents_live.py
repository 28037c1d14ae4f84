"""What `qtsplus mcp --watch` lets an agent do: begin, ask, be told of changes, end; and no source that nobody named."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from test_agents import QUESTION, library  # noqa: F401, one of which is a fixture

from qtsplus.live.watching import watch
from server_process import hosting

mcp = pytest.importorskip("mcp", reason="needs the extra mcp")

from qtsplus.live import standing as live  # noqa: E402, which needs it
from qtsplus.serve.agents import Shelf  # noqa: E402

OTHER = "What is in the yellow ring?"
LIVE = ["watch_start", "watch_ask", "watch_stop"]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(live, "EVERY", 2.0)
    monkeypatch.setattr(live, "PATIENCE", 0.3)


async def told(client, name="door"):
    (content,) = (await client.read_resource(f"watch://{name}")).contents
    return json.loads(content.text)


async def until_it_ends(client, name, question=QUESTION):
    """What a source tells at last, and how often it told of a change."""
    async with client.listen(resource_subscriptions=[f"watch://{name}"]) as events:
        begun = await client.call_tool("watch_start", {"source": name, "question": question})
        assert not begun.is_error, begun.content
        count = 0
        async for event in events:
            assert event.uri == f"watch://{name}"
            count += 1
            if (last := await told(client, name))["ended"]:
                return last, count


def test_a_source_is_begun_asked_and_ended(library, quick):  # noqa: F811
    film = str(library.index.videos / "a.mp4")
    shelf = Shelf(library, {"door": film})

    async def run():
        async with mcp.Client(shelf) as client:
            assert [tool.name for tool in (await client.list_tools()).tools][4:] == LIVE
            none = await told(client)
            last, count = await until_it_ends(client, "door")
            ask = {"source": "door", "question": OTHER}
            other, twice = [await client.call_tool(*one) for one in (("watch_ask", ask), ("watch_start", ask))]
            stopped, gone, again = [
                await client.call_tool(name, {"source": "door", **more})
                for name, more in (("watch_stop", {}), ("watch_ask", {}), ("watch_start", {"question": OTHER}))
            ]
            await client.call_tool("watch_stop", {"source": "door"})
            return none, last, count, other, twice, stopped, gone, again

    none, last, count, other, twice, stopped, gone, again = asyncio.run(run())
    *_, truth = watch(library.model, library.processor, {"door": film}, QUESTION, every=2, timeout=0.3)
    assert none == {"watched": False, "question": None, "answer": None, "ended": None}
    assert (last["question"], last["ended"]) == (QUESTION, "The source has ended.") and count >= 1
    for name in ("answer", "kept_tokens", "seconds_of_video"):
        assert last["answer"][name] == getattr(truth, name)
    assert {one["video"] for one in last["answer"]["evidence"]} == {"door"}
    assert not other.is_error and other.structured_content["question"] == QUESTION
    assert twice.is_error and "that is not watched" in twice.content[0].text
    assert stopped.structured_content == none and gone.is_error and "not watched" in gone.content[0].text
    assert again.structured_content["question"] == OTHER


def test_what_is_new_is_told_and_a_watch_that_was_stopped_tells_nothing(monkeypatch):
    stream, seen = SimpleNamespace(model=None, processor=None), []
    answers = [SimpleNamespace(answer=text) for text in ("ball", "ball", "book", "book")]
    monkeypatch.setattr(live, "watch", lambda *_, **__: iter(answers))
    one = live.Watch(stream, "door", "rtsp://door", QUESTION, lambda: seen.append((one.last.answer, one.ended)))
    one.run()
    assert seen == [("ball", None), ("book", None), ("book", "The source has ended.")]
    one.last, one.is_stopped = None, True
    one.run()
    assert len(seen) == 3 and one.last is None


def test_no_address_of_an_agent_is_asked_and_none_of_the_operator_is_said(library, quick):  # noqa: F811
    with hosting() as (port, seen):
        address = f"http://127.0.0.1:{port}/film?token=SECRET"
        shelf = Shelf(library, {"web": address, "gone": "/no/such/place.ts"})
        wrong = (
            address,
            "/dev/video0",
            str(library.index.videos / "a.mp4"),
            "",
            "WEB",
            "web\0",
            "watch://web",
            "x" * 10**5,
        )

        async def run():
            async with mcp.Client(shelf) as client:
                calls = [(tool, name) for tool in LIVE for name in wrong]
                question = {"question": QUESTION}
                results = [
                    await client.call_tool(tool, {"source": name, **(question if tool != "watch_stop" else {})})
                    for tool, name in calls
                ]
                before = list(seen)
                return results, before, *[(await until_it_ends(client, name))[0] for name in ("web", "gone")]

        results, before, web, gone = asyncio.run(run())
    for result in results:
        text = result.content[0].text
        assert result.is_error and text.isprintable() and len(text) <= 500 and "Error executing" not in text
    assert not before and seen == ["/film?token=SECRET"], "what the operator has named is asked"
    assert "'web'" in web["ended"] and "'gone'" in gone["ended"]
    assert not any(word in web["ended"] + gone["ended"] for word in ("127.0.0.1", "SECRET", "film", "place"))
