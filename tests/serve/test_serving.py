"""What `qtsplus serve` starts vLLM's server with; tests/engine has the server."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.cli.serve import processor_kwargs, server_options

STAND_IN = """
import json, os, sys
print(json.dumps([*sys.argv, *map(os.environ.get, ("VLLM_MEDIA_CONNECTOR", "QTSPLUS_HOSTS", "VLLM_API_KEY"))]))
"""


def test_vllm_is_started_with_nothing_open(tmp_path, tiny_published, monkeypatch):
    """What it is started with, what reads its media, what it may be called, and its key."""
    tiny, tiny_published = tiny_published, shutil.copytree(tiny_published, tmp_path / "qtsplus-other")
    config = json.loads((tiny / "config.json").read_text())
    config["text_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    (tiny_published / "config.json").write_text(json.dumps(config))
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(STAND_IN)
    ours = ["--trust-request-mm-kwargs", "--enable-prompt-tokens-details"]
    ours += ["--worker-extension-cls", "qtsplus.vllm.worker.Worker", "--middleware", "qtsplus.vllm.server.Connection"]
    ours += ["--model", str(tiny_published), "--host", "127.0.0.1", "--port", "8000"]
    ours += ["--allowed-origins", "[]", "--served-model-name", tiny_published.name, "--dtype", "float32"]
    hosts = ["127.0.0.1"]  # the guard adds the names that every machine has

    seen = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "execve", lambda _, line, environment: seen.extend([line[3:], environment]))
    refused = CliRunner().invoke(app, ["serve", str(tiny)])
    assert refused.exit_code == 2 and "longrope" in refused.output and not seen
    assert CliRunner().invoke(app, ["serve", str(tiny_published)]).exit_code == 0
    assert seen[0] == ours and seen[1]["VLLM_MEDIA_CONNECTOR"] == "qtsplus" and "VLLM_API_KEY" not in seen[1]
    assert json.loads(seen[1]["QTSPLUS_HOSTS"]) == hosts

    allowed = ["--allow-media-root", tmp_path, "--allow-media-domain", "a.org", "--allow-media-domain", "b.org:8443"]
    opened = ["--allowed-local-media-path", str(tmp_path), "--allowed-media-domains", "a.org", "b.org:8443"]
    opened += ["--mm-processor-kwargs", '{"retention": 0.1}', "--enforce-eager", "--max-model-len", "4096"]
    line = [tiny_published, *allowed, "--retention", "0.1", "--api-key", "correct horse", "--allow-host", "ask.org"]
    line += ["--", "--enforce-eager", "--max-model-len", "4096"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "qtsplus.cli", "serve", *map(str, line)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    started = json.loads(result.stdout)[1:]
    assert started == [*ours, *opened, "qtsplus", json.dumps([*hosts, "ask.org"]), "correct horse"]


@pytest.mark.parametrize("kwargs", ["--mm-processor-kwargs={}", "--mm_processor_kwargs {}", "--mm-processor-kw {}"])
def test_defaults_behind_the_dashes_are_joined_with_the_budget(kwargs):
    options = server_options([*kwargs.format('{"selection":"diversity"}').split(), "--max-model-len", "4096"])
    assert options["max-model-len"] == ["--max-model-len", "4096"]
    assert processor_kwargs(options, {"retention": 0.1}) == {"selection": "diversity", "retention": 0.1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--port", "1"], "expected --port in front of --"),
        (["--allowed_local_media_path=/"], "expected --allow-media-root"),
        (["--worker-extension-cls", "mine"], "is set by qtsplus serve"),
        (["--mm-processor-kwargs", '{"retention": 0.2}'], "retention is given twice"),
        (["--mm-processor-kwargs", "[]"], "expected one JSON object"),
        (["--mm-processor-kwargs.selection", "uniform"], "expected one JSON object"),
    ],
)
def test_an_option_that_serve_sets_is_refused_behind_the_dashes(line, message, capsys):
    with pytest.raises(typer.Exit):
        processor_kwargs(server_options(line), {"retention": 0.1})
    assert message in " ".join(capsys.readouterr().err.split())
