"""What stands around vLLM's server, without an engine: what it lets in, reads, and puts beside answers."""

import asyncio
import base64
import contextlib
import json
import os
from collections import Counter
from operator import attrgetter
from threading import Barrier, Lock
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from cachetools import LRUCache
from safetensors.torch import load, save_file

from qtsplus.vllm import models, server, worker
from qtsplus.vllm.models import QTSplusForVLLM
from qtsplus.vllm.processing import as_bytes
from qtsplus.vllm.server import Connection, Media
from server_process import hosting

BASES = {"a": {"kept_tokens": 1}, "b": {"kept_tokens": 2}}


class Engine:
    """Answers to what was asked with the hash of its video."""

    def __init__(self):
        self.together = Barrier(3)
        self.processor = SimpleNamespace()
        self.renderer = SimpleNamespace(
            get_mm_processor=lambda: self.processor,
            _process_multimodal=self.together.wait,
        )
        multimodal = SimpleNamespace(media_io_kwargs={"video": {"num_frames": 9}})
        config = SimpleNamespace(model="tiny", revision=None, multimodal_config=multimodal)
        self.vllm_config = SimpleNamespace(model_config=config)
        self.released = []
        self.aborted = []

    async def add_request(self, name):
        await asyncio.sleep(0)
        return SimpleNamespace(request_id=f"{name} in vLLM")

    async def abort(self, name, internal):
        self.aborted.append((name, internal))

    async def add_lora(self, request):
        return True

    def generate(self, prompt, *_, **__):
        return prompt

    async def collective_rpc(self, method, args):
        if method == "qtsplus_release":
            return self.released.extend(args)
        assert method == "qtsplus_basis"
        return [BASES.get(*args)]


def choice(index=0):
    return {"index": index, "message": {"content": "grün"}, "finish_reason": "stop"}


class Exchange:
    """An app that asks the engine about videos and sends `answers`, with its client."""

    def __init__(self, asked, answers):
        self.asked = asked
        self.answers = answers
        self.sent = []

    async def app(self, scope, receive, send):
        await receive()
        for key in self.asked:
            prompt = {"prompt_token_ids": [1]}
            if key:
                prompt["mm_hashes"] = {"video": [key]}
            scope["app"].state.engine_client.generate(prompt, None, "id")
        headers = []
        if len(self.answers) == 1:
            length = str(len(self.answers[0]))
            headers.append((b"content-length", length.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for answer in self.answers:
            more = answer is not self.answers[-1]
            await send({"type": "http.response.body", "body": answer, "more_body": more})

    async def receive(self):
        return {"type": "http.request", "body": b"{}"}

    async def send(self, message):
        self.sent.append(message)


def request(
    connection,
    asked=("a",),
    answers=(b"x",),
    headers=None,
    path="/v1/chat/completions",
    app=None,
):
    exchange = Exchange(asked, answers)
    connection.server = app or exchange.app
    named = {b"host": b"localhost", b"content-length": b"2"}
    named.update(headers or {})
    state = SimpleNamespace(engine_client=connection.engine or Engine())
    scope = {
        "type": "http",
        "path": path,
        "method": "POST",
        "headers": list(named.items()),
        "app": SimpleNamespace(state=state),
    }
    asyncio.run(connection(scope, exchange.receive, exchange.send))
    start, *bodies = exchange.sent
    body = b"".join(message["body"] for message in bodies)
    return SimpleNamespace(status=start["status"], headers=dict(start["headers"]), body=body)


@pytest.fixture
def connection(monkeypatch):
    monkeypatch.setattr(server, "load_processor", lambda *_: None)
    monkeypatch.setenv("QTSPLUS_HOSTS", '["localhost", "ask.example.org"]')
    return Connection(None)


@pytest.mark.parametrize(
    ("asked", "count", "expected"),
    [
        (["a"], 2, ["a", "a"]),  # n=2
        (["a", "b"], 2, ["a", "b"]),  # /v1/chat/completions/batch
        (["a", "a", "a"], 1, ["a"]),  # beams
        (["a", ""], 2, ["a", None]),
    ],
)
def test_an_answer_has_what_it_rests_on_beside_each_choice(connection, asked, count, expected):
    choices = [choice(index) for index in range(count)]
    body = json.dumps({"choices": choices, "usage": {}})
    reply = request(connection, asked, [body.encode()])
    assert reply.status == 200
    assert int(reply.headers[b"content-length"]) == len(reply.body)
    told = json.loads(reply.body)["choices"]
    for before, after, key in zip(choices, told, expected, strict=True):
        assert after == {**before, "qtsplus": BASES.get(key)}


def test_a_stream_has_it_in_the_last_part_of_each_choice(connection):
    parts = [choice(0), choice(1), choice(0)]
    parts[0]["finish_reason"] = None
    events = [b"data: %s\n\n" % json.dumps({"choices": [part]}).encode() for part in parts]
    told = request(connection, answers=events).body.split(b"data: ")[1:]
    for part in parts[1:]:
        part["qtsplus"] = BASES["a"]
    assert [json.loads(event)["choices"] for event in told] == [[part] for part in parts]


def test_what_a_request_held_is_released_later(connection, monkeypatch):
    monkeypatch.setattr(server, "RELEASE_SECONDS", 0.05)
    engine = Engine()

    async def end():
        connection._connect(engine)
        engine.processor.release("a")
        await asyncio.sleep(0)
        early = list(engine.released)
        await asyncio.sleep(0.2)
        return early

    assert asyncio.run(end()) == []
    assert engine.released == ["a"]
    engine.processor.release("b")  # the loop is closed


def test_a_request_whose_client_leaves_while_it_is_sent_is_ended(connection):
    """Or the engine would run it after its tokens were released, and keep the result for the same question."""
    engine = Engine()

    async def leave():
        connection._connect(engine)
        sent = await engine.add_request("a")
        sending = asyncio.create_task(engine.add_request("b"))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        return sent.request_id

    assert asyncio.run(leave()) == "a in vLLM"
    assert engine.aborted == [("b in vLLM", True)]


def test_a_request_for_an_adapter_that_holds_a_selector_is_told_to_merge_it(connection, tmp_path):
    weights = tmp_path / "adapter_model.safetensors"
    save_file({"base_model.model.model.qtsplus.norm.weight": torch.zeros(1)}, weights)
    taken = []

    async def load(scope, receive, send):
        """As vLLM does."""
        engine = scope["app"].state.engine_client
        status = 200
        try:
            taken.append(await engine.add_lora(SimpleNamespace(lora_path=str(tmp_path))))
        except Exception:
            status = 500
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    reply = request(connection, app=load)
    assert reply.status == 400
    assert b"merge_lora" in reply.body
    save_file({"base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(1)}, weights)
    reply = request(connection, app=load)
    assert reply.status == 200
    assert reply.body == b"{}"
    assert taken == [True]


def test_what_is_about_no_video_stays_as_it_is(connection):
    body = json.dumps({"choices": [choice()]}, indent=1).encode()
    error = b'{"error": {}}'
    assert request(connection, [""], [body]).body == body
    assert request(connection, [], [body]).body == body
    assert request(connection, ["a"], [error]).body == error
    assert Media.most_frames == 9


def test_nobody_hands_the_engine_items_of_his_own(connection):
    reply = request(connection, path="/inference/v1/generate")
    assert reply.status == 404


RIGHT = {b"authorization": b"Bearer correct horse"}


@pytest.mark.parametrize(
    ("headers", "path", "expected"),
    [
        ({}, "/invocations", 401),  # which vLLM answers without a key
        (RIGHT, "/v1/models", 200),
        ({b"host": b"evil.example.org", **RIGHT}, "/v1/models", 400),
    ],
)
def test_a_name_and_a_key_are_asked_for(connection, headers, path, expected):
    connection.key = "correct horse"
    assert request(connection, headers=headers, path=path).status == expected


@pytest.fixture
def tiny_media(monkeypatch, tiny_processor, tiny_mp4):
    """Makes the connector of a request that may read the folder of the tiny clip, by its `media_io_kwargs`."""
    monkeypatch.setattr(Media, "processor", tiny_processor)

    def media(**reading):
        return Media({"video": reading}, allowed_local_media_path=str(tiny_mp4.parent))

    return media


def inline(path):
    content = base64.b64encode(path.read_bytes())
    return "data:video/mp4;base64," + content.decode()


def test_videos_are_those_that_ask_looks_at(tiny_media, tiny_processor, tiny_mp4):
    chunks = tiny_processor.video_chunks(tiny_mp4, fps=1)
    expected = np.stack([chunks.resize(frame) for frame in chunks.decode()])
    for url in (f"file://{tiny_mp4}", inline(tiny_mp4)):
        frames, told = asyncio.run(tiny_media(fps=1).fetch_video_async(url))
        assert np.array_equal(frames, expected)
        assert told["frames_indices"] == list(chunks.about.metadata.frames_indices)
        assert told["about"]["start"] == chunks.about.start


def test_a_damaged_video_is_refused(tiny_media, tiny_mp4, tmp_path):
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(tiny_mp4.read_bytes()[:300])
    with pytest.raises(ValueError, match="Cannot decode"):
        Media(allowed_local_media_path=str(tmp_path)).fetch_video(f"file://{cut}")


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        ({"video_backend": "opencv"}, "names video_backend for a video; expected fps or num_frames"),
        ({"num_frames": 0}, "num_frames="),
        ({"num_frames": 769}, "num_frames="),
        ({"fps": "1"}, "fps="),
    ],
)
def test_a_way_to_read_that_cannot_be_is_refused(tiny_media, tiny_mp4, reading, message):
    with pytest.raises(ValueError, match=message):
        tiny_media(**reading).fetch_video(inline(tiny_mp4))


def test_a_request_states_how_many_frames_are_looked_at(tiny_media, tiny_mp4, monkeypatch):
    frames, told = tiny_media(num_frames=1).fetch_video(inline(tiny_mp4))
    assert len(told["frames_indices"]) == 1
    assert len(frames) == 2, "a vision tower wants two"
    assert np.array_equal(*frames)
    monkeypatch.setattr(Media, "most_frames", 800)
    frames, _ = tiny_media(num_frames=769).fetch_video(inline(tiny_mp4))
    assert len(frames) == 8


def fetch_together(count, url, media):
    async def fetch():
        return await asyncio.gather(*(media.fetch_video_async(url) for _ in range(count)))

    return asyncio.run(fetch())


def test_a_video_is_read_once_and_again_when_it_changes(tiny_processor, tiny_mp4, tmp_path, monkeypatch):
    rates = []

    class Counting:
        video_processor = tiny_processor.video_processor

        def video_chunks(self, video, **reading):
            rates.append(reading["fps"])
            return tiny_processor.video_chunks(video, **reading)

    monkeypatch.setattr(Media, "processor", Counting())
    video = tmp_path / "video.mp4"
    video.write_bytes(tiny_mp4.read_bytes())

    def ask(fps):
        media = Media({"video": {"fps": fps}}, allowed_local_media_path=str(tmp_path))
        fetch_together(8, f"file://{video}", media)

    ask(1)
    ask(1)
    assert rates == [1]
    ask(2)
    state = video.stat()
    video.write_bytes(tiny_mp4.read_bytes())
    os.utime(video, ns=(state.st_atime_ns, state.st_mtime_ns))
    ask(2)
    assert rates == [1, 2, 2]


def test_a_video_at_an_address_is_downloaded_once_a_minute(tiny_media, tiny_mp4, monkeypatch):
    placed = []
    now = 600.0

    class Counting(server.Door):
        @contextlib.contextmanager
        def place(self, url):
            placed.append(url)
            yield str(tiny_mp4)

    monkeypatch.setattr(server, "Door", Counting)
    monkeypatch.setattr(server, "monotonic", lambda: now)
    url = "https://example.org/clip.mp4"
    answers = fetch_together(5, url, tiny_media())
    assert placed == [url]
    marks = {about["mark"] for _, about in answers}
    assert len(marks) == 1
    now += server.FRESH_SECONDS
    fetch_together(5, url, tiny_media())
    assert placed == [url, url]


def test_a_warning_names_the_video_as_the_request_does(tiny_processor, tiny_mp4, monkeypatch):
    class Warning:
        video_processor = tiny_processor.video_processor

        def video_chunks(self, video, **reading):
            chunks = tiny_processor.video_chunks(video, **reading)
            chunks.about.warnings.append(f"The video {video!r} is damaged.")
            return chunks

    monkeypatch.setattr(Media, "processor", Warning())
    url = f"file://{tiny_mp4}"
    _, told = Media(allowed_local_media_path=str(tiny_mp4.parent)).fetch_video(url)
    assert told["about"]["warnings"] == [f"The video {url!r} is damaged."]


def test_nothing_is_read_that_was_not_allowed(tiny_processor, tiny_mp4, tmp_path, monkeypatch):
    monkeypatch.setattr(Media, "processor", tiny_processor)
    with hosting() as (port, seen):
        opened = Media(allowed_local_media_path=str(tmp_path), allowed_media_domains=[f"localhost:{port}"])
        closed = Media()
        for media, url in (
            (closed, f"file://{tiny_mp4}"),
            (closed, f"http://localhost:{port}/a.mp4"),
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


def test_a_question_waits_while_others_hold_too_much_and_sends_frames_in_chunks(monkeypatch):
    monkeypatch.setattr(worker, "BUSY_SECONDS", 0)
    answers = [worker.BUSY, [1, 0, 2], [1, 0, 2], worker.BUSY, [1, 2, 4], worker.AGAIN, 3]
    sent = []

    def call_engine(method, args):
        sent.append(len(load(*args).get(worker.PIXELS, "")))
        return [answers.pop(0)]

    data = {worker.PIXELS: [torch.zeros(9), torch.zeros(3)], "query_mask": torch.ones(2)}
    item = SimpleNamespace(get_data=lambda: dict(data))
    assert worker.prepare(call_engine, item, Lock()) == 3
    assert sent == [0, 0, 0, 2, 2, 1, 0]


class Tower:
    """Passes patches on as features."""

    def embed_multimodal(self, pixel_values_videos, video_grid_thw):
        return [pixel_values_videos]


class Encoder(QTSplusForVLLM, Tower):
    pass


def test_questions_that_come_together_encode_a_video_once():
    model = object.__new__(Encoder)
    model.visual = SimpleNamespace(device="cpu")
    model.cache = LRUCache(100, len)
    item = {"settings": {"hashes": ["a"]}, "video_grid_thw": torch.tensor([[4, 1, 1]])}
    encoded = [[], []]
    first, second = [model._encode(item, features) for features in encoded]
    assert next(first) == next(second)
    assert first.send(torch.arange(4)) is None
    assert next(second) is None
    assert encoded[0][0] is encoded[1][0]


def test_what_requests_hold_counts_with_the_cache(monkeypatch):
    """Of a model without weights, that chooses a token of 400 bytes, with room for three."""
    monkeypatch.setattr(models, "LEAST_HELD", 0)
    model = object.__new__(QTSplusForVLLM)
    model.cache = LRUCache(1200, attrgetter("nbytes"))
    model.held, model.users, model.preparations = {}, Counter(), {}
    model._encode = lambda *_: (None for _ in range(1))
    model._choose = lambda item, features: models.Choice(torch.zeros(100), torch.zeros(1).long(), {})

    def prepare(key):
        settings = as_bytes({"key": key, "hashes": [], "prefix": "", "selection": "uniform"})
        return model.prepare({"settings": settings})

    assert prepare("a") == 1
    model.release("a")
    assert list(model.cache) == ["a"]
    assert prepare("b") == prepare("b") == prepare("c") == 1
    assert list(model.cache) == ["a"]
    assert prepare("d") == 1
    assert list(model.cache) == [], "what is held takes the room"
    assert prepare("e") == worker.BUSY
    model.release("b")
    assert prepare("e") == worker.BUSY, "another request holds it"
    model.release("b")
    assert prepare("e") == 1
    assert model.find_choice("b") is None, "there is no room for it"
