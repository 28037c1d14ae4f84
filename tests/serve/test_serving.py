"""What `qtsplus serve` starts vLLM's server with; tests/engine has the server."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.hub import loading
from tiny_backbones import INTERNVL


@pytest.fixture
def model(tmp_path, tiny_published):
    """The tiny model with positions that vLLM knows."""
    folder = shutil.copytree(tiny_published, tmp_path / "qtsplus-other")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def started(tmp_path, monkeypatch):
    """What vLLM's server was started with, each time (command line, environment); a package is in the place of vLLM."""
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    calls = []
    monkeypatch.setattr(os, "execve", lambda _, line, environment: calls.append((line, environment)))
    return calls


def serve(model, *words):
    return CliRunner().invoke(app, ["serve", str(model), *words])


def own_options(model):
    """What vLLM's server gets in any case."""
    return f"""{sys.executable} -m vllm.entrypoints.launchers.api_server.entry --trust-request-mm-kwargs {model}
        --enable-prompt-tokens-details --worker-extension-cls qtsplus.vllm.worker.Worker
        --model {model} --host 127.0.0.1 --port 8000 --allowed-origins [] --served-model-name {model.name}
        --dtype float32""".split()


GUARD = ["--middleware", "qtsplus.vllm.server.Connection"]  # the last, so that no other one is in front of it


def test_vllm_is_started_with_nothing_open(model, tiny_published, started):
    refused = serve(tiny_published)
    assert refused.exit_code == 2
    assert "longrope" in refused.output
    assert not started
    assert serve(model).exit_code == 0
    ((line, environment),) = started
    assert line == own_options(model) + GUARD
    assert environment["VLLM_MEDIA_CONNECTOR"] == "qtsplus"
    assert "VLLM_API_KEY" not in environment
    assert json.loads(environment["QTSPLUS_HOSTS"]) == ["127.0.0.1"], "the guard adds the names of every machine"


def run_serve(model, packages):
    """What a process of `qtsplus serve` leaves, with more Python packages in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "qtsplus.cli", "serve", model],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), *sys.path])},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_process_without_vllm_says_what_to_install(model, tmp_path):
    run = run_serve(model, tmp_path)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert "vLLM is not installed: pip install vllm" in line


def test_a_process_turns_into_vllms_server(model, tmp_path):
    """Into a module in its place, which prints what it gets."""
    entry = tmp_path / "vllm" / "entrypoints" / "launchers" / "api_server" / "entry.py"
    entry.parent.mkdir(parents=True)
    entry.write_text("import os, sys; print(*sys.argv[1:], os.environ['VLLM_MEDIA_CONNECTOR']); sys.exit(7)")
    run = run_serve(model, tmp_path)
    assert run.returncode == 7
    assert run.stdout.split() == own_options(model)[3:] + GUARD + ["qtsplus"]


def test_vllm_is_started_with_what_is_allowed(model, tmp_path, started):
    words = [
        "--allow-media-domain",
        "a.org",
        "--allow-media-domain",
        "b.org:8443",
        "--retention",
        "0.1",
        "--api-key",
        "KEY",
        "--allow-host",
        "ask.org",
        "--allow-media-root",
    ]
    more = ["--enforce-eager", "--middleware", "mine.Log", "--middleware", "mine.Count"]
    result = serve(model, *words, str(tmp_path), "--", *more)
    assert result.exit_code == 0
    allowed = ["--allowed-media-domains", "a.org", "b.org:8443", "--allowed-local-media-path", str(tmp_path)]
    ((line, environment),) = started
    assert line == own_options(model) + allowed + ["--mm-processor-kwargs", '{"retention": 0.1}'] + more + GUARD
    assert environment["VLLM_API_KEY"] == "KEY"
    assert json.loads(environment["QTSPLUS_HOSTS"]) == ["127.0.0.1", "ask.org"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--port", "1"], "expected --port in front of --"),
        (["--allowed_local-media_path=/"], "expected --allow-media-root"),
        (["--no_trust-request-mm-kwargs"], "qtsplus serve decides it"),
        (["--allowed-origins", '["*"]'], "expected a proxy in front"),
        (["--video-pruning-rate", "0.9"], "expected --retention in front of --"),
        (["--enable-tower-connector-lora"], "expected an adapter of the language model"),
        (["--mm_processor-kw={}"], "expected the budget in it"),
        (["--mm-processor_kwargs.selection", "uniform"], "expected the budget in it"),
    ],
)
def test_an_option_that_serve_sets_is_refused_behind_the_dashes(model, started, line, message):
    result = serve(model, "--retention", "0.1", "--", *line)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def write_adapter(folder, *names):
    folder.mkdir()
    save_file({name: torch.zeros(1) for name in names}, folder / "adapter_model.safetensors")
    return folder


LANGUAGE = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize("form", ["mine={}", '{{"name": "mine", "path": "{}"}}'])
@pytest.mark.parametrize("part", ["qtsplus.budget.net.0.weight", "qtsplus.scoring.0.q_proj.lora_A.weight"])
def test_an_adapter_that_holds_a_selector_is_refused_before_vllm_starts(model, tmp_path, started, form, part):
    adapter = write_adapter(tmp_path / "adapter", LANGUAGE, f"base_model.model.model.{part}")
    result = serve(model, "--", "--enable-lora", "--lora-modules", form.format(adapter))
    assert result.exit_code == 2
    assert part in result.stderr
    assert "merge_lora" in result.stderr


def test_an_adapter_on_the_hub_is_looked_at_too(tmp_path, monkeypatch):
    wrong = write_adapter(tmp_path / "wrong", "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight")
    right = write_adapter(tmp_path / "right", LANGUAGE)
    downloaded = {"org/wrong": wrong, "org/right": right, "org/empty": tmp_path}
    monkeypatch.setattr(loading, "cached_file", lambda name, file: downloaded[name] / file)
    loading.check_served_adapter("org/right")
    with pytest.raises(ValueError, match="org/wrong.*visual.*merge_lora"):
        loading.check_served_adapter("org/wrong")
    with pytest.raises(ValueError, match="is no adapter"):
        loading.check_served_adapter("org/empty")


LM_ATTENTION = {"selection": "lm_attention"}


@pytest.mark.parametrize(
    ("stored", "words", "message"),
    [
        (LM_ATTENTION, ["--enable-lora"], "LoRA adapters"),
        (LM_ATTENTION, ["-tp", "2"], "tensor_parallel_size above 1"),
        ({}, ["--enable_lora", "--mm_processor-kwargs", json.dumps(LM_ATTENTION)], "LoRA adapters"),
        ({}, ["--enable-lora", "--mm-processor_kwargs.selection=lm_attention"], "LoRA adapters"),
        ({**LM_ATTENTION, "attention_layer": 99}, [], "attention_layer=99; expected a layer of the language model"),
        ({**LM_ATTENTION, "attention_heads": [99]}, [], "expected heads from 0"),
        ({}, ["--mm-processor-kwargs.selection", "best"], "selection='best'; expected one of"),
        ({}, ["--mm-processor-kwargs", '{"selection": 3}'], "selection=3; expected one of"),
        ({}, ["--mm-processor-kwargs", "[1]"], "argument --mm-processor-kwargs: invalid"),
        ({}, ["--mm-processor-kwargs", '{"retenton": 1}'], "has retenton; the nearest that it takes are retention,"),
        ({}, ["--mm-processor_kwargs.retenton=1"], "--mm-processor-kwargs has retenton; the nearest"),
        ({}, ["--mm-processor-kwargs", '{"videos_kwargs": {"max_pixel": 9}}'], "has videos_kwargs.max_pixel; the near"),
        ({}, ["--mm-processor-kwargs.images_kwargs.fps", "1"], "has images_kwargs.fps; the nearest"),
        ({}, ["--mm-processor-kwargs", '{"videos_kwargs": {"size": {"longest_edge": 9}}}'], None),
        ({}, ["--media-io-kwargs", '{"video": {"nframes": 9}}'], "has video.nframes; the nearest that it takes"),
        ({}, ["--media-io-kwargs.video", '{"fps": 0}'], "fps=0"),
        ({}, ["--media-io-kwargs.video.num_frames", "9", "--media-io-kwargs.image.image_mode=RGB"], None),
        ({}, ["--additional-config", '{"qtsplus_cache": 1}'], "has qtsplus_cache; the nearest that it takes are qtsp"),
        ({}, ["--mm-processor-kwargs", '{"max_pixels": 9}', "--additional-config", '{"a plugin\'s": 1}'], None),
        ({}, ["--max-model-len", "9", "--max_model-len=99"], "--max-model-len is given twice"),
        ({}, ["--lora-modules", '{"name": "x"}'], "argument --lora-modules: invalid"),
        ({}, ["--mm-processor-kwargs", '{"selection": "no_such:method"}'], "cannot be imported"),
        (LM_ATTENTION, ["--enable-lora", "--mm-processor-kwargs", '{"selection": "diversity"}'], None),
        (LM_ATTENTION, [], None),
    ],
)
def test_options_that_vllm_cannot_work_with_are_refused_before_it_starts(model, started, stored, words, message):
    path = model / "config.json"
    config = json.loads(path.read_text())
    config["qtsplus_config"].update(stored)
    path.write_text(json.dumps(config))
    result = serve(model, "--", *words)
    assert bool(started) == (message is None)
    assert result.exit_code == (2 if message else 0)
    if message:
        (line,) = result.stderr.splitlines()
        assert message in line


def test_a_backbone_that_vllm_does_not_take_is_refused_before_it_starts(model, started):
    INTERNVL.config(INTERNVL.processor(), {}).save_pretrained(model)
    result = serve(model)
    assert result.exit_code == 2
    assert "vLLM does not take InternVLQTSplus; expected Qwen2_5_VLQTSplus" in result.stderr
