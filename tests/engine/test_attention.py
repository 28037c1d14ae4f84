"""A folder that says `lm_attention` is served as it is: many clients get what Transformers answers."""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from compressed_tensors.quantization import QuantizationConfig

import qtsplus
from clips import render_clip
from engine_runs import TOKENS, ask_server, build, processor_of, same_basis, serving, shown_text, write_folder
from qtsplus.model import layout_qtsplus
from qtsplus.vllm.attention import causal_attention
from tiny_backbones import QWEN2_5_VL, QWEN2_VL, QWEN3_VL

CLIENTS = 8
COUNT = int(os.environ.get("QUESTIONS", "24"))
VIDEOS = 4
BUDGETS = ({}, {"retention": 0.2}, {"max_visual_tokens": 6}, {"retention": 0.5, "max_visual_tokens": 9})


@pytest.fixture(scope="module", params=[QWEN2_5_VL, QWEN2_VL, QWEN3_VL], ids=lambda backbone: backbone.name)
def model(request):
    """(model, processor)."""
    processor = processor_of(request.param)
    return build(request.param, processor, selection="lm_attention", attention_group=64), processor


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for seed in range(VIDEOS):
        render_clip(folder / f"{seed}.mp4", seconds=2 + seed // 2, fps=8, size=(112, 112), seed=seed)
    return folder


def questions():
    """(number of a video, question, budget): no two are alike."""
    draw = random.Random(0)
    for number in range(COUNT):
        colour = draw.choice(("red", "blue", "green", "white"))
        yield draw.randrange(VIDEOS), f"Where is the {colour} circle number {number}?", draw.choice(BUDGETS)


def test_many_clients_get_what_transformers_answers(model, clips, tmp_path_factory, monkeypatch):
    published = write_folder(*model, tmp_path_factory.mktemp("served"))
    asked = list(questions())

    def ask(question):
        video, text, budget = question
        return ask_server(server, "tiny", clips / f"{video}.mp4", text, budget)

    keeps = {"qtsplus_keep_keys": True, "qtsplus_cache_gb": 2e-4}  # of about two videos
    options = ["--additional-config", json.dumps(keeps)]
    with serving(published, clips, *options) as server, ThreadPoolExecutor(CLIENTS) as pool:
        choices = list(pool.map(ask, asked))

    videos = [qtsplus.encode(*model, clips / f"{number}.mp4") for number in range(VIDEOS)]
    length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    kept_counts = set()
    for (video, text, budget), choice in zip(asked, choices, strict=True):
        here = qtsplus.ask(*model, videos[video], text, **length, **budget)
        same_basis(choice.qtsplus, here.as_dict())
        kept_counts.add(here.kept_tokens)
        kept = here.keep_map.flatten().nonzero()[:, 0]
        with monkeypatch.context() as patch:
            # vLLM keeps the times of all frames in the prompt (docs/serving.md), which matter to an answer's words.
            patch.setattr(layout_qtsplus, "find_separators", lambda spans, size: torch.zeros(3, 0, dtype=torch.long))
            again = qtsplus.ask(
                *model,
                videos[video],
                text,
                selection=lambda candidates, n, kept=kept: kept,
                retention=1.0,
                max_visual_tokens=len(kept),
                **length,
            )
        assert shown_text(choice.message.content) == shown_text(again.answer), (text, budget)
    assert len(kept_counts) > len(BUDGETS)  # the question decides


def test_quantized_layers_read_a_video_as_the_weights_do_that_they_stand_for(clips, tmp_path):
    processor = processor_of(QWEN2_5_VL)
    model = build(QWEN2_5_VL, processor, selection="lm_attention", attention_group=64)
    published = write_folder(model, processor, tmp_path)
    weights = published / "model.safetensors"
    tensors = load_file(weights)
    for name in model.state_dict():
        if "language_model.layers" in name and name.endswith("_proj.weight"):
            scale = tensors[name].abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensors[name] / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
            model.get_parameter(name).data = tensors[name] * scale
    save_file(tensors, weights, {"format": "pt"})
    quantization = QuantizationConfig(
        config_groups={"W8A8": ["Linear"]},
        format="int-quantized",
        ignore=["re:.*(visual|qtsplus|lm_head).*"],
    )
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"] = quantization.to_dict()
    (published / "config.json").write_text(json.dumps(config))
    with serving(published, clips) as server:
        for video in clips.iterdir():
            told = ask_server(server, "tiny", video, "What moves?", {}).qtsplus
            here = qtsplus.ask(model, processor, video, "What moves?", max_new_tokens=1)
            assert told["kept_tokens"] == pytest.approx(here.kept_tokens, abs=2)  # the engine rounds activations too
            assert told["evidence"]


def test_attention_takes_memory_for_blocks_of_tokens_only():
    queries = torch.randn(4, 40, 16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # or an error
        causal_attention(queries, queries[:2], queries[:2], scale=0.25)
