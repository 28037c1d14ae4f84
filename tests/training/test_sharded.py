"""Two processes that share out a model train as one process does with the same global batch: real processes, by the
configurations in recipes/accelerate.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_recipe import write_records
from transformers import AutoModelForImageTextToText, AutoProcessor

from clips import render_clip
from qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.training.running import BEGUN_FILE
from tiny import chat_inputs
from tiny_backbones import BACKBONES

pytestmark = pytest.mark.slow
CONFIGURATIONS = Path(__file__).parents[2] / "recipes/accelerate"
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
MODES = ["ddp", "fsdp2", pytest.param("zero2", marks=needs_deepspeed)]

TRAINING = """
training:
  {output_dir: runs, max_steps: 4, per_device_train_batch_size: 1, learning_rate: 1.0e-3, lr_scheduler_type: constant,
   gradient_accumulation_steps: 2, gradient_checkpointing: true, max_grad_norm: 1.0, max_skipped: 0.2, use_cpu: true,
   save_strategy: "no", logging_steps: 1, report_to: none, retention_range: [0.1, 0.3]}
"""
# From pixels: the attention of the sharded model itself, then a model all of which is trained, and which is evaluated.
PIXELS = """
  relevance: {training: {relevance_weight: 1.0, retention_share: 1.0}}
  answers: {training: {freeze_scores: true, freeze_language_model: false, freeze_vision_model: false,
    retention_share: 0.5, eval_strategy: steps, eval_steps: 2, per_device_eval_batch_size: 5}}
"""
# From features: a frozen teacher, then adapters on a teacher that changes.
FEATURES = """
  relevance: {training: {relevance_weight: 1.0, retention_share: 1.0}}
  adapters: {training: {relevance_weight: 1.0, lora_rank: 4, retention_share: 0.0}}
"""


def make_model(folder: Path, tiny: Path, processor, tied: bool, **selector) -> Path:
    """A random model."""
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(tiny)
    vars(config.qtsplus_config).update(selector)
    config.text_config.intermediate_size = 1024
    config.tie_word_embeddings = tied
    return save(folder, Qwen2_5_VLQTSplusForConditionalGeneration, config, processor)


def save(folder: Path, model, config, processor) -> Path:
    torch.manual_seed(0)
    model(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_recipe(folder: Path, model: Path, stages: str, features: str = "") -> Path:
    """Two videos, rows of text and one whose video is broken: in some steps a process sees no video."""
    render_clip(folder / "a.mp4", seconds=4, fps=8, size=(112, 112), seed=4)
    render_clip(folder / "b.mp4", seconds=2, fps=8, size=(112, 112), seed=2)
    (folder / "broken.mp4").write_bytes(b"no video")
    videos = ["a.mp4", "b.mp4", None, None, "b.mp4", "a.mp4", "a.mp4", "b.mp4", "broken.mp4", "b.mp4", "a.mp4", None]
    answers = ["A red circle.", "It is blue, and large.", "Two."]
    rows = [
        {"video": video, "question": f"What is seen, number {row}?", "answer": answers[row % 3]}
        for row, video in enumerate(videos)
    ]
    write_records(folder / "train.jsonl", *rows)
    records = f"[{folder}/train.jsonl]"
    path = folder / "recipe.yaml"
    path.write_text(
        f"model: {{weights: {model}, selector: {{gate: detached, reduction: mean, query_states: layer}}}}\n"
        f"data: {{train_files: {records}, eval_files: {records}, processor_kwargs: {{fps: 2}}{features}}}"
        f"{TRAINING}stages:{stages}"
    )
    return path


def train(
    recipe: Path,
    out: Path,
    mode: str = "one",
    *overrides: str,
    processes: int = 2,
    resume: bool = False,
    options: tuple[str, ...] = (),
):
    """Runs a recipe by a configuration of accelerate and its options, or in one process with a batch for two."""
    command = [sys.executable, "-m"]
    if mode == "one":
        processes = 1
        command += ["qtsplus.cli"]
    else:
        command += ["accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
        command += ["--config_file", str(CONFIGURATIONS / f"{mode}.yaml"), "--num_processes", str(processes)]
        command += [*options, str(Path(__file__).with_name("on_cpu.py"))]
    command += ["train", str(recipe), "--set", f"training.output_dir={out}"]
    for override in (*overrides, f"training.per_device_train_batch_size={2 // processes}"):
        command += ["--set", override]
    if resume:
        command.append("--resume")
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(sys.path),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",  # else it looks for CUDA's compiler
    )
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)


def train_well(recipe: Path, out: Path, mode: str = "one", *overrides: str, **options) -> None:
    """As [`train`], for a run that comes to its end."""
    result = train(recipe, out, mode, *overrides, **options)
    assert result.returncode == 0, result.stderr[-3000:]


def steps(folder: Path) -> list[dict]:
    """The lines of steps and of evaluations."""
    lines = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [line for line in lines if "loss" in line or "eval_loss" in line]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def assert_same_run(folder: Path, expected: Path, weights: str = "model.safetensors") -> None:
    """Losses of every step to 1e-5 of their size, and weights to what Adam makes of that in four steps of 1e-3."""
    for line, other in zip(steps(folder), steps(expected), strict=True):
        for name, value in other.items():
            is_loss = "loss" in name
            is_budget = name in ("rho", "n", "n_asked", "token_price")
            if is_loss or is_budget:
                assert line[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert files(folder) == files(expected)
    saved = load_file(folder / weights)
    others = load_file(expected / weights)
    for name in list(others):
        # What is added to all keys changes no attention: its gradient is rounding, which Adam makes steps of.
        if name.endswith(("rho_history", "scoring_layers.0.k_proj.bias")):
            mine = saved.pop(name)
            other = others.pop(name)
            assert mine.dtype == other.dtype
    torch.testing.assert_close(saved, others, rtol=1e-3, atol=5e-4)


def answer(folder: Path, video: Path) -> torch.Tensor:
    """Greedy tokens of a folder that is loaded as a user of the Hub loads it."""
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    inputs = chat_inputs(processor, video, "What is seen, number 1?", fps=2)
    return model.generate(**inputs, max_new_tokens=8, do_sample=False)


@pytest.fixture(scope="module")
def pixels(tmp_path_factory, tiny_published, tiny_processor) -> Path:
    folder = tmp_path_factory.mktemp("pixels")
    return make_recipe(folder, make_model(folder / "model", tiny_published, tiny_processor, tied=True), PIXELS)


@pytest.fixture(scope="module")
def features(tmp_path_factory, tiny_published, tiny_processor) -> Path:
    folder = tmp_path_factory.mktemp("features")
    model = make_model(folder / "model", tiny_published, tiny_processor, tied=False)
    recipe = make_recipe(folder, model, FEATURES, f", features: {folder}/kept")
    train_well(recipe, folder / "run")
    return recipe


@pytest.fixture(scope="module")
def run_by(pixels) -> Callable[[str], Path]:
    """The folder of a run by a configuration, with a checkpoint in the middle of its last stage."""

    @cache
    def run(mode: str) -> Path:
        folder = pixels.parent / mode / "run"
        train_well(pixels, folder, mode, "training.save_strategy=steps", "training.save_steps=2")
        return folder

    return run


@pytest.mark.parametrize("mode", MODES)
def test_both_stages_from_pixels(mode, pixels, run_by):
    """Distillation with the sharded model as its own teacher, then the language model with a measured budget."""
    folder = run_by(mode)
    one = run_by("one")
    video = pixels.parent / "a.mp4"
    assert_same_run(folder / "relevance", one / "relevance")
    assert_same_run(folder, one)
    assert torch.equal(answer(folder, video), answer(one, video))


@pytest.fixture(scope="module", params=BACKBONES[1:], ids=lambda backbone: backbone.name)
def other(request, tmp_path_factory) -> Path:
    """The recipe of another backbone, and its run in one process."""
    folder = tmp_path_factory.mktemp("other")
    processor = request.param.processor()
    config = request.param.config(processor, {})
    config.text_config.intermediate_size = 2048
    recipe = make_recipe(folder, save(folder / "model", request.param.model, config, processor), PIXELS)
    train_well(recipe, folder / "run", "one", "training.max_steps=2")
    return recipe


def test_other_backbones(other, tmp_path):
    train_well(other, tmp_path / "run", "fsdp2", "training.max_steps=2")
    assert_same_run(tmp_path / "run/relevance", other.parent / "run/relevance")
    assert_same_run(tmp_path / "run", other.parent / "run")


GOES_ON = [("ddp", "one", 1), ("one", "ddp", 2), ("fsdp2", "fsdp2", 1)]
GOES_ON += [pytest.param("zero2", "zero2", 2, marks=needs_deepspeed)]


def interrupted(run: Path, folder: Path) -> Path:
    """What a run had written when its last stage was half done."""
    for name in ("relevance", "checkpoint-2"):
        shutil.copytree(run / name, folder / name)
    shutil.copy(run / BEGUN_FILE, folder)
    return folder


@pytest.mark.parametrize(("mode", "other", "processes"), GOES_ON)
def test_another_number_of_processes_goes_on(mode, other, processes, pixels, run_by, tmp_path):
    folder = interrupted(run_by(mode), tmp_path / "run")
    train_well(pixels, folder, other, processes=processes, resume=True)
    assert_same_run(folder, run_by("one"))


def test_fsdp_does_not_round_relevance_to_bfloat16(pixels, tmp_path):
    """It would make the divergence of the first step, which is small, several times as large."""
    for mode in ("one", "fsdp2"):
        train_well(pixels, tmp_path / mode, mode, "training.bf16=true", "training.max_steps=1")
    first = steps(tmp_path / "fsdp2/relevance")[0]
    expected = steps(tmp_path / "one/relevance")[0]
    for name in ("loss", "loss_relevance", "rho", "grad_norm"):
        assert first[name] == pytest.approx(expected[name], rel=0.02), name


WITHOUT_A_FOLDER = [
    ("fsdp2", ("--fsdp_state_dict_type", "SHARDED_STATE_DICT"), "expected fsdp_version 2, fsdp_state_dict_type FULL"),
    ("fsdp2", ("--fsdp_cpu_ram_efficient_loading", "true"), "and fsdp_cpu_ram_efficient_loading false"),
    pytest.param("zero2", ("--zero_stage", "3"), "use recipes/accelerate/fsdp2.yaml", marks=needs_deepspeed),
]


@pytest.mark.parametrize(("mode", "options", "message"), WITHOUT_A_FOLDER)
def test_a_configuration_that_would_end_without_a_folder_is_refused(mode, options, message, pixels, tmp_path):
    result = train(pixels, tmp_path / "run", mode, options=options)
    assert message in result.stderr
    assert result.returncode != 0


def test_groups_of_frames_are_not_read_from_shared_layers(pixels, tmp_path):
    settings = ("model.selector.selection=lm_attention", "training.relevance_weight=0")
    result = train(pixels, tmp_path / "run", "fsdp2", *settings)
    assert "lm_attention reads the first layers by themselves" in result.stderr
    assert result.returncode != 0


@pytest.mark.parametrize("mode", MODES)
def test_features_and_adapters(mode, features, tmp_path):
    train_well(features, tmp_path / "run", mode, f"data.features={tmp_path}/kept")
    one = features.parent / "run"
    assert_same_run(tmp_path / "run/relevance", one / "relevance")
    assert_same_run(tmp_path / "run", one, "adapter_model.safetensors")
