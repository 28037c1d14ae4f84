"""vLLM's own OpenAI server with a published folder: many clients at once, budgets that cannot be, one who hangs up."""

import contextlib
import json
import os
import random
import socket
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import openai

import qtsplus
from clips import render_clip
from engine_runs import TOKENS, build, engine_environment, processor_of, same_basis, write_folder
from server_process import running_server
from tiny_backbones import QWEN2_5_VL

VIDEOS, CLIENTS, KEY = 8, 32, "correct horse"
COLOURS = ("red", "blue", "green", "yellow", "white", "black")
QUESTIONS = [f"{words} the {colour} circle?" for colour in COLOURS for words in ("Where is", "When do you see")]
ATTENTION = {"selection": "lm_attention"}
BUDGETS = (
    {"retention": 0.1},
    {"retention": 0.4},
    {"max_visual_tokens": 9},
    {},  # the model's own
    ATTENTION,
    ATTENTION | {"retention": 0.2},
)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for seed in range(VIDEOS):  # 12 frames of the first, 4 of the others
        render_clip(folder / f"{seed}.mp4", seconds=2 if seed else 6, fps=8, size=(112, 112), seed=seed)
    return folder


@pytest.fixture(scope="module")
def model():
    """(model, processor)."""
    processor = processor_of(QWEN2_5_VL)
    return build(QWEN2_5_VL, processor, attention_group=64), processor


@pytest.fixture(scope="module")
def server(tmp_path_factory, clips, model):
    folder = tmp_path_factory.mktemp("served")
    published = write_folder(*model, folder)
    command = ["-m", "qtsplus.cli", "serve", published, "--port", "{port}", "--allow-media-root", clips]
    command += ["--api-key", KEY, "--"]
    command += ["--served-model-name", "tiny", "--enforce-eager", "--max-model-len", 1024]
    command += ["--limit-mm-per-prompt", json.dumps({"video": 3, "image": 2})]
    command += ["--additional-config", json.dumps({"qtsplus_cache_gb": 3e-5})]  # room for the features of two films
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**engine_environment(), "PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with running_server(folder / "server.log", *map(str, command), environment=environment) as port:
        yield f"http://127.0.0.1:{port}"


def picture(clips):
    path = clips / "picture.png"
    Image.new("RGB", (84, 56), "red").save(path)
    return path


def forget(server):
    """What vLLM remembers of prompts and videos; the features of videos stay."""
    for name in ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"):
        asked = urllib.request.Request(f"{server}/{name}", method="POST", headers={"Authorization": f"Bearer {KEY}"})
        urllib.request.urlopen(asked, timeout=30).close()


def video_part(clips, video):
    return {"type": "video_url", "video_url": {"url": f"file://{clips / f'{video}.mp4'}"}}


def ask(server, clips, videos, question, budget, timeout=120.0, **more):
    """(text, tokens of the prompt, kept tokens, what it rests on)."""
    return ask_about(server, [video_part(clips, video) for video in videos], question, budget, timeout, **more)


def ask_about(server, content, question, budget, timeout=120.0, **more):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, timeout=timeout, max_retries=0)
    with client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [*content, {"type": "text", "text": question}]}],
            temperature=0,
            max_tokens=TOKENS,
            extra_body={"mm_processor_kwargs": budget, "ignore_eos": True, "min_tokens": TOKENS},
            **more,
        )
        if more.get("stream"):
            *parts, last, usage = answer
            text = "".join(part.choices[0].delta.content or "" for part in [*parts, last])
            assert not any(hasattr(part.choices[0], "qtsplus") for part in parts)
            return text, usage.usage.prompt_tokens, None, getattr(last.choices[0], "qtsplus", None)
    details, choice = answer.usage.prompt_tokens_details.model_dump(), answer.choices[0]
    basis = getattr(choice, "qtsplus", None)
    return choice.message.content, answer.usage.prompt_tokens, details["multimodal_tokens"], basis


def test_answers_and_what_they_rest_on_are_those_of_transformers(server, clips, model):
    """As many clients at once ask their own questions about one video, of half of them the answer is streamed."""
    film, counts, streams = qtsplus.encode(*model, clips / "0.mp4"), set(), {"include_usage": True}
    asked = [(question, budget) for budget in BUDGETS for question in QUESTIONS]

    def answered(number):
        more = {"stream": True, "stream_options": streams} if number % 2 else {}
        return ask(server, clips, [0], *asked[number], **more)

    with ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(answered, range(len(asked))))
    for (question, budget), (text, _, kept, basis) in zip(asked, together, strict=True):
        lengths = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        here = qtsplus.ask(*model, film, question, **budget, **lengths).as_dict()
        assert text.strip() == here["answer"].rstrip("\N{REPLACEMENT CHARACTER}")  # vLLM waits for a character's rest
        assert kept is None or kept["video"] == here["kept_tokens"]
        same_basis(basis, here)
        counts.add((str(budget), basis["kept_tokens"]))
    assert len(counts) > len(BUDGETS)  # the question decides
    assert [answered(number) for number in range(len(asked))] == together  # from vLLM's caches
    first, second = ask(server, clips, [1, 0], *asked[0])[3], ask(server, clips, [0, 1], *asked[0])[3]
    assert {one["video"] for one in [*first["evidence"], *second["evidence"]]} == {"1", "2"}
    assert ask(server, clips, [], QUESTIONS[0], {})[3] is None


@contextlib.contextmanager
def silent_client(server):
    """One that announces a request and does not send it."""
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: tiny\r\nContent-Length: 999\r\n\r\n{")
        yield


def test_many_clients_get_what_each_would_get_alone(server, clips):
    draw = random.Random(0)
    asked = [
        (draw.sample(range(VIDEOS), draw.choice((1, 1, 2))), draw.choice(QUESTIONS), draw.choice(BUDGETS))
        for _ in range(2 * CLIENTS)
    ]
    asked.append(([], QUESTIONS[0], {}))

    def hang_up(number):
        with contextlib.suppress(openai.APITimeoutError):
            ask(server, clips, range(3), f"What is number {number}?", {"retention": 1.0}, timeout=0.3)

    with silent_client(server), ThreadPoolExecutor(CLIENTS) as pool:
        gone = [pool.submit(hang_up, number) for number in range(2)]
        together = list(pool.map(lambda one: ask(server, clips, *one), asked))
        [one.result() for one in gone]
    forget(server)
    assert [ask(server, clips, *one) for one in asked] == together
    assert len(set(map(str, together))) > CLIENTS  # the requests are not all the same


def test_a_budget_is_the_prompts_length(server, clips):
    budgets = [{"retention": 1, "max_visual_tokens": count} for count in (5, 10.0, 1e300)]
    lengths = [ask(server, clips, [0], QUESTIONS[0], budget)[1] for budget in budgets]
    assert lengths[1] - lengths[0] == 5
    assert lengths[2] == ask(server, clips, [0], QUESTIONS[0], {"selection": "all"})[1]


REFUSED = (
    ({"retention": 0}, "(0, 1]"),
    ({"retention": -1}, "(0, 1]"),
    ({"retention": 1.5}, "(0, 1]"),
    ({"retention": "much"}, "(0, 1]"),
    ({"retention": [0.5]}, "(0, 1]"),
    ({"retention": True}, "(0, 1]"),
    ({"max_visual_tokens": 0}, "at least 1"),
    ({"max_visual_tokens": 2.5}, "at least 1"),
    ({"max_visual_tokens": {"a": 1}}, "at least 1"),
    ({"retention": 0.5, "selection": "best"}, "selection='best'"),
    ({"retention": 0.5, "selection": ["uniform"]}, "selection="),
    ({"retention": 0.5, "selection": "all"}, "keeps every visual token"),
    ({"retention": 0.5, "reencode": "no"}, "reencode='no'"),
    ({"retentoin": 0.5}, "mm_processor_kwargs has retentoin"),
    ({"min_pixels": 2_000_000, "max_pixels": 3_000_000}, "has max_pixels, min_pixels"),
)


def test_what_cannot_be_is_refused_and_the_server_stays(server, clips):
    for budget, reason in REFUSED:
        with pytest.raises(openai.BadRequestError) as refusal:
            ask(server, clips, [0], QUESTIONS[0], budget)
        assert reason in str(refusal.value), budget
    with pytest.raises(openai.BadRequestError, match="no text to select by"):
        ask(server, clips, [0], "", {"retention": 0.5})
    image = {"type": "image_url", "image_url": {"url": f"file://{picture(clips)}"}}
    first, second = video_part(clips, 0), video_part(clips, 1)
    with pytest.raises(openai.BadRequestError, match="between two videos"):
        ask_about(server, [first, image, second], QUESTIONS[0], {"retention": 0.5})
    for content in ([image, first, second], [first, second, image]):
        assert ask_about(server, content, QUESTIONS[0], {"retention": 0.5})
    with pytest.raises(openai.BadRequestError, match=r"A text holds <\|video_pad\|>"):
        ask_about(server, [first], "What is <|video_pad|>?", {"retention": 0.5})
    for content, reason in (
        ({"type": "image_pil", "image_pil": str(picture(clips))}, "came as no image_url"),
        ({"image_pil": [f"http://{server.removeprefix('http://')}/health"]}, "came as no image_url"),
        ({"type": "video_url", "video_url": None, "uuid": "none"}, "came as no video_url"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            ask_about(server, [first, content], QUESTIONS[0], {"retention": 0.5})


def test_a_prompt_that_is_truncated_is_answered_or_refused(server, clips):
    """By vLLM, in its text alone; a positions' table of another length ended the engine once."""
    content = [{"type": "text", "text": "Look. " * 20}, video_part(clips, 0)]
    whole = ask_about(server, content, QUESTIONS[0], {"max_visual_tokens": 9})
    lengths = set()
    for length in range(whole[1], 4, -5):
        for side in ("left", "right"):
            with contextlib.suppress(openai.BadRequestError):  # of what the video or the question would lose
                more = {"truncate_prompt_tokens": length, "truncation_side": side}
                lengths.add(truncated(server, content, more))
    assert len(lengths) > 2 and ask_about(server, content, QUESTIONS[0], {"max_visual_tokens": 9}) == whole


def truncated(server, content, more):
    """How many tokens the prompt had."""
    asked = {"mm_processor_kwargs": {"max_visual_tokens": 9}, "ignore_eos": True, **more}
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": QUESTIONS[0]}]}]
    with openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=TOKENS, extra_body=asked)
    return answer.usage.prompt_tokens


def test_a_film_is_itself_whatever_a_client_calls_it(server, clips):
    """Twice in one request, unseen before; and under a name that another film had."""
    forget(server)
    twice = ask(server, clips, [7, 7], QUESTIONS[0], {})
    assert twice[3]["visual_tokens"] == 2 * ask(server, clips, [7], QUESTIONS[0], {})[3]["visual_tokens"]
    named = [{**video_part(clips, video), "uuid": "mine"} for video in (0, 1)]
    answers = [ask_about(server, [one], QUESTIONS[0], {}) for one in named]
    assert answers == [ask(server, clips, [video], QUESTIONS[0], {}) for video in (0, 1)]
