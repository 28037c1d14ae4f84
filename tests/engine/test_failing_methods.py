"""A method of one's own that fails costs the request that asked for it, and no other."""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import openai

import qtsplus
from clips import render_clip
from engine_runs import (
    BREAKING,
    LOST,
    ONCE,
    TOKENS,
    ask_server,
    build,
    forget,
    processor_of,
    serving,
    shown_text,
    write_folder,
)
from qtsplus.model.methods_qtsplus import add_method
from tiny_backbones import QWEN2_5_VL

METHOD = "engine_runs:breaking"
QUESTION = "What moves?"
CLIENTS = 8
REQUESTS = int(os.environ.get("STORM", "120"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    render_clip(path, seconds=4, fps=4, size=(112, 112))
    return path


@pytest.fixture(scope="module")
def model():
    """(model, processor)."""
    processor = processor_of(QWEN2_5_VL)
    return build(QWEN2_5_VL, processor), processor


@pytest.fixture(scope="module")
def server(tmp_path_factory, clip, model):
    published = write_folder(*model, tmp_path_factory.mktemp("served"))
    options = ["--mm-processor-kwargs", json.dumps({"selection": METHOD}), "--middleware", "engine_runs.Losing"]
    with serving(published, clip.parent, *options) as address:
        yield address


@pytest.fixture
def ask(server, clip):
    """Asks for a number of kept tokens; the answer, or the status of a refusal."""

    def ask(count):
        budget = {"retention": 1.0, "max_visual_tokens": count}
        try:
            return ask_server(server, "tiny", clip, QUESTION, budget).message.content
        except openai.APIStatusError as error:
            return error.status_code  # of a refusal

    return ask


def test_a_failing_method_ends_its_own_request_alone(ask, model, clip):
    add_method(METHOD)
    good = {}
    for count in (8, 9, 10):
        answer = qtsplus.ask(
            *model,
            clip,
            QUESTION,
            selection=METHOD,
            retention=1.0,
            max_visual_tokens=count,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
        )
        good[count] = shown_text(answer.answer)
    draw = random.Random(0)
    asked = [draw.choice([*BREAKING, *good]) for _ in range(REQUESTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, asked))
    for count, answer in zip(asked, answers, strict=True):
        if count in good:
            assert shown_text(answer) == good[count]
        else:
            assert answer == 400


def test_a_repeated_question_that_vllm_forgot_is_not_chosen_again_inside_the_engine(server, ask):
    answer = ask(ONCE)
    assert isinstance(answer, str)
    forget(server)
    assert ask(ONCE) == answer
    assert isinstance(ask(8), str), "the engine lives"


def test_an_answer_whose_tokens_were_lost_is_an_error_and_no_answer(ask):
    assert ask(LOST) == 500
    assert isinstance(ask(8), str), "the engine lives"
