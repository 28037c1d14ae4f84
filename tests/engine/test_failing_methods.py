"""A method of one's own that fails costs the request that asked for it, and no other."""

import json
import os
import random
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import openai

import qtsplus
from clips import render_clip
from engine_runs import BREAKING, ONCE, TOKENS, build, engine_environment, processor_of, write_folder
from qtsplus.model.methods_qtsplus import add_method
from server_process import running_server
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
    folder = tmp_path_factory.mktemp("served")
    published = write_folder(*model, folder)
    command = ["-m", "qtsplus.cli", "serve", published, "--port", "{port}", "--allow-media-root", clip.parent, "--"]
    command += ["--mm-processor-kwargs", json.dumps({"selection": METHOD})]
    command += ["--served-model-name", "tiny", "--enforce-eager", "--max-model-len", 1024]
    environment = engine_environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with running_server(folder / "server.log", *map(str, command), environment=environment) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def ask(server, clip):
    """Asks for a number of kept tokens; the answer, or the status of a refusal."""
    content = [{"type": "video_url", "video_url": {"url": f"file://{clip}"}}, {"type": "text", "text": QUESTION}]
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(count):
        try:
            answer = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": content}],
                temperature=0,
                max_tokens=TOKENS,
                extra_body={"mm_processor_kwargs": {"retention": 1.0, "max_visual_tokens": count}, "ignore_eos": True},
            )
        except openai.APIStatusError as error:
            return error.status_code  # of a refusal
        return answer.choices[0].message.content

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
        # vLLM waits for the rest of a character.
        good[count] = answer.answer.rstrip("\N{REPLACEMENT CHARACTER}")
    draw = random.Random(0)
    asked = [draw.choice([*BREAKING, *good]) for _ in range(REQUESTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, asked))
    for count, answer in zip(asked, answers, strict=True):
        if count in good:
            assert answer.strip() == good[count]
        else:
            assert answer == 400


def test_a_repeated_question_that_vllm_forgot_is_not_chosen_again_inside_the_engine(server, ask):
    answer = ask(ONCE)
    assert isinstance(answer, str)
    for name in ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"):
        urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="POST"), timeout=30).close()
    assert ask(ONCE) == answer
    assert isinstance(ask(8), str), "the engine lives"
