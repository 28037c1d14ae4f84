"""An adapter on the language model answers in vLLM as with PEFT in Transformers, and the base beside it as without."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from peft import LoraConfig, get_peft_model

import qtsplus
from clips import render_clip
from engine_runs import TOKENS, ask_server, build, processor_of, serving, shown_text, write_folder
from tiny_backbones import QWEN2_5_VL

QUESTIONS = [f"Where is the circle number {number}?" for number in range(6)]
BUDGET = {"retention": 0.3}


def test_an_adapter_answers_as_with_peft_and_the_base_beside_it_as_without(tmp_path):
    clip = tmp_path / "clip.mp4"
    render_clip(clip, seconds=4, fps=4, size=(112, 112))
    processor = processor_of(QWEN2_5_VL)
    model = build(QWEN2_5_VL, processor)
    published = write_folder(model, processor, tmp_path)
    modules = rf".*language_model\.layers\.\d+\.({model.projections})"
    config = LoraConfig(r=8, lora_alpha=32, target_modules=modules, init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), config)
    adapted.save_pretrained(tmp_path / "adapter")
    models = {"mine": adapted.get_base_model(), "tiny": model}
    asked = list(itertools.product(QUESTIONS, models))

    def ask(question, name):
        return shown_text(ask_server(server, name, clip, question, BUDGET).message.content)

    options = ["--enable-lora", "--max-loras", 2, "--lora-modules", f"mine={tmp_path / 'adapter'}"]
    with serving(published, tmp_path, *options) as server, ThreadPoolExecutor() as pool:
        answers = list(pool.map(ask, *zip(*asked, strict=True)))
    length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    for (question, name), text in zip(asked, answers, strict=True):
        assert text == shown_text(qtsplus.ask(models[name], processor, clip, question, **length, **BUDGET).answer)
    assert answers[::2] != answers[1::2]
