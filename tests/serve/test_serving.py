"""What `qtsplus serve` starts vLLM's server with; tests/engine has the server."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from qtsplus.cli import app

STAND_IN = """
import json, os, sys
print(json.dumps([*sys.argv, *map(os.environ.get, ("VLLM_MEDIA_CONNECTOR", "QTSPLUS_HOSTS", "VLLM_API_KEY"))]))
"""


@pytest.fixture
def model(tmp_path, tiny_published):
    """The tiny model with positions that vLLM knows."""
    folder = shutil.copytree(tiny_published, tmp_path / "qtsplus-other")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def pretend_vllm(tmp_path, monkeypatch):
    """A package in the place of vLLM's, which prints its arguments and settings."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)


def own_options(model):
    """The options that vLLM's server gets in any case."""
    options = ["--worker-extension-cls", "qtsplus.vllm.worker.Worker"]
    options += ["--middleware", "qtsplus.vllm.server.Connection"]
    options += ["--model", str(model), "--host", "127.0.0.1", "--port", "8000"]
    return options + ["--allowed-origins", "[]", "--served-model-name", model.name, "--dtype", "float32"]


DETAILS = ["--trust-request-mm-kwargs", "--enable-prompt-tokens-details"]


def test_vllm_is_started_with_nothing_open(model, tiny_published, pretend_vllm, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda _, line, environment: started.append((line[3:], environment)))
    refused = CliRunner().invoke(app, ["serve", str(tiny_published)])
    assert refused.exit_code == 2
    assert "longrope" in refused.output
    assert not started
    assert CliRunner().invoke(app, ["serve", str(model)]).exit_code == 0
    ((options, environment),) = started
    assert options == DETAILS + own_options(model)
    assert environment["VLLM_MEDIA_CONNECTOR"] == "qtsplus"
    assert "VLLM_API_KEY" not in environment
    assert json.loads(environment["QTSPLUS_HOSTS"]) == ["127.0.0.1"], "the guard adds the names of every machine"


def test_vllm_is_started_with_what_is_allowed(model, tmp_path, pretend_vllm):
    line = [sys.executable, "-m", "qtsplus.cli", "serve", model]
    line += ["--allow-media-root", tmp_path]
    line += ["--allow-media-domain", "a.org"]
    line += ["--allow-media-domain", "b.org:8443"]
    line += ["--retention", "0.1"]
    line += ["--api-key", "correct horse"]
    line += ["--allow-host", "ask.org"]
    line += ["--", "--enforce-eager", "--max-model-len", "4096"]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    expected = list(DETAILS)
    expected += ["--allowed-media-domains", "a.org", "b.org:8443"]
    expected += own_options(model)
    expected += ["--allowed-local-media-path", str(tmp_path)]
    expected += ["--mm-processor-kwargs", '{"retention": 0.1}']
    expected += ["--enforce-eager", "--max-model-len", "4096"]
    hosts = json.dumps(["127.0.0.1", "ask.org"])
    expected += ["qtsplus", hosts, "correct horse"]
    _, *started = json.loads(result.stdout)
    assert started == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--port", "1"], "expected --port in front of --"),
        (["--allowed_local_media_path=/"], "expected --allow-media-root"),
        (["--worker-extension-cls", "mine"], "is set by qtsplus serve"),
        (["--no-trust-request-mm-kwargs"], "is set by qtsplus serve"),
        (["--mm-processor-kwargs", '{"fps": 1}'], "expected the budget in it"),
        (["--mm_processor_kw={}"], "expected the budget in it"),
        (["--mm-processor-kwargs.selection", "uniform"], "expected the budget in it"),
    ],
)
def test_an_option_that_serve_sets_is_refused_behind_the_dashes(model, pretend_vllm, line, message):
    result = CliRunner().invoke(app, ["serve", str(model), "--retention", "0.1", "--"] + line)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("form", ["mine={}", '{{"name": "mine", "path": "{}"}}'])
def test_an_adapter_that_holds_a_selector_is_refused_before_vllm_starts(model, tmp_path, pretend_vllm, form):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"modules_to_save": ["qtsplus"]}')
    adapters = ["--enable-lora", "--lora-modules", form.format(adapter)]
    result = CliRunner().invoke(app, ["serve", str(model), "--"] + adapters)
    assert result.exit_code == 2
    assert "merge_lora" in result.stderr
