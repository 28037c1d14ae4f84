"""What stands around vLLM's server, without an engine: what it lets in, reads, and puts beside answers."""

import asyncio
import base64
import contextlib
import json
import os
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from qtsplus.vllm import server
from qtsplus.vllm.server import Connection, Media
from server_process import hosting

BASES = {"a": {"kept_tokens": 1}, "b": {"kept_tokens": 2}}


class Engine:
    """Answers to what was asked with the hash of its video."""

    def __init__(self, engines=1):
        self.together, self.processor = Barrier(3), SimpleNamespace(release=None)
        self.renderer = SimpleNamespace(get_mm_processor=lambda: self.processor, _process_multimodal=self.together.wait)
        multimodal = SimpleNamespace(media_io_kwargs={"video": {"num_frames": 9}})
        config = SimpleNamespace(model="tiny", revision=None, multimodal_config=multimodal)
        self.vllm_config = SimpleNamespace(
            model_config=config, parallel_config=SimpleNamespace(data_parallel_size=engines)
        )
        self.released = []

    def generate(self, prompt, *_, **__):
        return prompt

    async def collective_rpc(self, method, args):
        if method == "qtsplus_release":
            return self.released.extend(args)
        assert method == "qtsplus_basis"
        return [BASES.get(*args)]


def choice(index=0, end: "str | None" = "stop"):
    return {"index": index, "message": {"content": "grün"}, "finish_reason": end}


def request(
    connection, *, asked=("a",), answers=(), headers=(), path="/v1/chat/completions", parts=(b"{}",), method="POST"
):
    """(status, headers, body, what came of the request) of an app that asks the engine and sends `answers`."""
    sent, seen, left = [], [], list(parts)

    async def app(scope, receive, send):
        while (message := await receive())["type"] == "http.request":
            seen.append(message["body"])
            if not message["more_body"]:
                break
        for key in asked:
            prompt = {"prompt_token_ids": [1], **({"mm_hashes": {"video": [key]}} if key else {})}
            scope["app"].state.engine_client.generate(prompt, None, "id")
        length = [(b"content-length", str(len(answers[0])).encode())] if len(answers) == 1 else []
        await send({"type": "http.response.start", "status": 200, "headers": length})
        for answer in answers:
            await send({"type": "http.response.body", "body": answer, "more_body": answer is not answers[-1]})

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    connection.app = app
    named = {b"host": b"localhost", b"content-length": str(sum(map(len, parts))).encode(), **dict(headers)}
    state = SimpleNamespace(engine_client=connection.engine or Engine())
    scope = {
        "type": "http",
        "path": path,
        "method": method,
        "headers": list(named.items()),
        "app": SimpleNamespace(state=state),
    }
    asyncio.run(connection(scope, receive, send))
    start, *bodies = sent
    return start["status"], dict(start["headers"]), b"".join(one.get("body", b"") for one in bodies), b"".join(seen)


@pytest.fixture
def connection(monkeypatch):
    monkeypatch.setattr(server, "load_processor", lambda *_: None)
    monkeypatch.setenv("QTSPLUS_HOSTS", '["localhost", "ask.example.org"]')
    return Connection(None)


def test_an_answer_has_what_it_rests_on_beside_each_choice(connection):
    for asked, choices, expected in (
        (["a"], [choice(0), choice(1)], ["a", "a"]),  # n=2
        (["a", "b"], [choice(0), choice(1)], ["a", "b"]),  # /v1/chat/completions/batch
        (["a", "a", "a"], [choice(0)], ["a"]),  # beams
        (["a", ""], [choice(0), choice(1)], ["a", None]),
    ):
        body = json.dumps({"choices": choices, "usage": {}}).encode()
        status, headers, told, _ = request(connection, asked=asked, answers=[body])
        assert status == 200 and int(headers[b"content-length"]) == len(told)
        for one, key, before in zip(json.loads(told)["choices"], expected, choices, strict=True):
            assert one == {**before, "qtsplus": BASES.get(key)}


def test_a_stream_has_it_in_the_last_part_of_each_choice(connection):
    events = [{"choices": [choice(0, None)]}, {"choices": [choice(1)]}, {"choices": [choice(0, "length")]}]
    events.append({"choices": [], "usage": {"prompt_tokens": 3}})
    parts = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    answers = [*parts[:2], b": keep-alive\n\n", *parts[2:], b"data: [DONE]\n\n"]
    _, _, told, _ = request(connection, answers=answers)
    first, second, alive, third, usage, done = told.removesuffix(b"\n\n").split(b"\n\n")
    assert (first, alive, usage, done) == tuple(answers[n].removesuffix(b"\n\n") for n in (0, 2, 4, 5))
    for event, line in zip(events[1:3], (second, third), strict=True):
        assert json.loads(line.removeprefix(b"data: "))["choices"] == [{**event["choices"][0], "qtsplus": BASES["a"]}]


def test_what_a_request_held_is_released_later(connection, monkeypatch):
    monkeypatch.setattr(server, "RELEASE_SECONDS", 0.05)

    async def end(engine):
        connection._connect(engine)
        engine.processor.release(["a"])
        await asyncio.sleep(0)
        early = list(engine.released)
        await asyncio.sleep(0.2)
        return early

    engine, many = Engine(), Engine(engines=2)
    assert asyncio.run(end(engine)) == [] and engine.released == [["a"]]
    engine.processor.release(["b"])  # the loop is closed
    asyncio.run(_connected(connection, many))
    assert many.processor.release is None and many.processor.call_engine


async def _connected(connection, engine):
    connection._connect(engine)


def test_what_is_about_no_video_stays_as_it_is(connection):
    body = json.dumps({"choices": [choice()]}, indent=1).encode()
    assert request(connection, asked=[""], answers=[body])[2] == body
    assert request(connection, asked=[], answers=[body])[2] == body
    assert Media.most_frames == 9
    assert request(connection, asked=["a"], answers=[b'{"error": {}}'])[2] == b'{"error": {}}'


def test_a_request_is_bounded_and_comes_whole(connection):
    connection.guard.largest = 10
    assert request(connection, parts=[b"12345", b"67890"], answers=[b"x"])[3] == b"1234567890"
    status, _, body, seen = request(connection, parts=[b"12345", b"67890", b"1"], answers=[b"x"])
    assert (status, seen) == (413, b"") and b"larger than" in body


def test_nobody_hands_the_engine_items_of_his_own(connection):
    status, _, body, seen = request(connection, path="/inference/v1/generate", answers=[b"x"])
    assert (status, seen) == (404, b"") and b"nothing here" in body


def test_a_name_and_a_key_are_asked_for(connection):
    connection.guard.key = "correct horse"
    right = {b"authorization": b"Bearer correct horse"}
    for headers, path, expected in (
        ({}, "/v1/models", 401),
        ({}, "/invocations", 401),  # which vLLM answers without a key
        ({b"authorization": b"Bearer correct"}, "/v1/models", 401),
        ({b"authorization": b"Basic correct horse"}, "/v1/models", 401),
        ({b"authorization": "Bearer größe".encode()}, "/v1/models", 401),
        (right, "/v1/models", 200),
        ({b"host": b"ask.example.org:80", **right}, "/v1/models", 200),
        ({b"host": b"evil.example.org", **right}, "/v1/models", 400),
    ):
        assert request(connection, headers=headers.items(), path=path, answers=[b"x"])[0] == expected, (headers, path)
    probe = {b"host": b"10.0.0.7:8000"}
    assert request(connection, headers=probe.items(), path="/health", answers=[b"x"], method="GET")[0] == 200


def test_videos_are_those_that_ask_looks_at(tiny_processor, tiny_mp4, tmp_path, monkeypatch):
    monkeypatch.setattr(Media, "processor", tiny_processor)
    media = Media({"video": {"fps": 1}}, allowed_local_media_path=str(tiny_mp4.parent))
    inline = "data:video/mp4;base64," + base64.b64encode(tiny_mp4.read_bytes()).decode()
    chunks = tiny_processor.video_chunks(tiny_mp4, fps=1)
    expected = np.stack(list(map(chunks.resize, chunks.decode())))
    for url in (f"file://{tiny_mp4}", inline):
        frames, told = asyncio.run(media.fetch_video_async(url))
        assert np.array_equal(frames, expected)
        assert told["frames_indices"] == list(chunks.about.metadata.frames_indices)
        assert told["about"]["start"] == chunks.about.start
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(tiny_mp4.read_bytes()[:300])
    with pytest.raises(ValueError, match="Cannot decode"):
        Media(allowed_local_media_path=str(tmp_path)).fetch_video(f"file://{cut}")
    with pytest.raises(ValueError, match="names video_backend for a video; expected fps or num_frames"):
        Media({"video": {"video_backend": "opencv"}}).fetch_video(inline)
    for count in (0, 2.5, True, 769):
        with pytest.raises(ValueError, match="num_frames="):
            Media({"video": {"num_frames": count}}).fetch_video(inline)
    for stated in ({"fps": [1]}, {"fps": "1"}, {"fps": 0}, {"fps": {}}, {"num_frames": [1]}, [1], 5, "fps"):
        with pytest.raises(ValueError, match="expected|fps="):
            Media({"video": stated}).fetch_video(inline)
    frames, told = Media({"video": {"num_frames": 1}}).fetch_video(inline)
    assert len(frames) == 2 and np.array_equal(*frames) and len(told["frames_indices"]) == 1, "a tower wants two"
    monkeypatch.setattr(Media, "most_frames", 800)
    assert len(Media({"video": {"num_frames": 769}}).fetch_video(inline)[0]) == 8


def test_a_film_is_read_once_and_again_when_it_changes(tiny_processor, tiny_mp4, tmp_path, monkeypatch):
    read = []

    class Counting:
        video_processor = tiny_processor.video_processor

        def video_chunks(self, video, **reading):
            read.append(reading)
            return tiny_processor.video_chunks(video, **reading)

    monkeypatch.setattr(Media, "processor", Counting())
    film = tmp_path / "film.mp4"
    film.write_bytes(tiny_mp4.read_bytes())

    async def ask_together(fps):
        media = [Media({"video": {"fps": fps}}, allowed_local_media_path=str(tmp_path)) for _ in range(8)]
        return await asyncio.gather(*(one.fetch_video_async(f"file://{film}") for one in media))

    for _ in range(2):
        asyncio.run(ask_together(1))
    assert len(read) == 1
    asyncio.run(ask_together(2))
    state = film.stat()
    film.write_bytes(tiny_mp4.read_bytes())
    os.utime(film, ns=(state.st_atime_ns, state.st_mtime_ns))
    asyncio.run(ask_together(2))
    assert [one["fps"] for one in read] == [1, 2, 2]


def test_questions_about_an_address_that_come_together_download_it_once(tiny_processor, tiny_mp4, monkeypatch):
    placed = []

    class Counting(server.Door):
        @contextlib.contextmanager
        def place(self, url):
            placed.append(url)
            yield str(tiny_mp4)

    monkeypatch.setattr(Media, "processor", tiny_processor)
    monkeypatch.setattr(server, "Door", Counting)

    async def ask_together():
        return await asyncio.gather(*(Media().fetch_video_async("https://example.org/clip.mp4") for _ in range(5)))

    answers = asyncio.run(ask_together())
    assert placed == ["https://example.org/clip.mp4"]
    assert len({about["mark"] for _, about in answers}) == 1


def test_a_warning_names_the_video_as_the_request_does(tiny_processor, tiny_mp4, monkeypatch):
    class Warning:
        video_processor = tiny_processor.video_processor

        def video_chunks(self, video, **reading):
            chunks = tiny_processor.video_chunks(video, **reading)
            chunks.about.warnings.append(f"The video {video!r} is damaged.")
            return chunks

    monkeypatch.setattr(Media, "processor", Warning())
    _, told = Media(allowed_local_media_path=str(tiny_mp4.parent)).fetch_video(f"file://{tiny_mp4}")
    assert told["about"]["warnings"] == [f"The video 'file://{tiny_mp4}' is damaged."]


def test_nothing_is_read_that_was_not_allowed(tiny_processor, tiny_mp4, tmp_path, monkeypatch):
    monkeypatch.setattr(Media, "processor", tiny_processor)
    with hosting() as (port, seen):
        opened = Media(allowed_local_media_path=str(tmp_path), allowed_media_domains=[f"localhost:{port}"])
        for media, url in (
            (Media(), f"file://{tiny_mp4}"),
            (Media(), f"http://localhost:{port}/a.mp4"),
            (opened, f"file://{tiny_mp4}"),
            (opened, f"http://127.0.0.1:{port}/a.mp4"),
        ):
            for fetch in (media.fetch_video, media.fetch_image):
                with pytest.raises(ValueError, match="may not be read"):
                    fetch(url)
        assert seen == []
        for path in ("/there", "/list"):  # a redirect, and what names other files
            with pytest.raises(ValueError, match=r"^(?!.*/qtsplus-).*localhost"):  # with no path of this machine
                opened.fetch_video(f"http://localhost:{port}{path}")
        with pytest.raises(ValueError):
            opened.fetch_image(f"http://localhost:{port}/picture.png")
        assert seen == ["/there", "/list", "/picture.png"]


def test_questions_wait_for_their_budget_together(connection):
    async def ask():
        engine = Engine()
        connection._connect(engine)
        return await asyncio.gather(*(engine.renderer._process_multimodal_async(20) for _ in range(3)))

    assert sorted(asyncio.run(ask())) == [0, 1, 2]  # in one thread the first would wait in vain
