"""What `qtsplus serve` starts vLLM's server with; tests/engine has the server."""

import json
import os
import subprocess
import sys

STAND_IN = """
import json, os, sys
print(json.dumps([*sys.argv, *map(os.environ.get, ("VLLM_MEDIA_CONNECTOR", "QTSPLUS_HOSTS", "VLLM_API_KEY"))]))
"""


def start_vllm(tmp_path, *options) -> list[str]:
    """What vLLM's server would be started with, what reads its media, what it may be called, and its key."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True, exist_ok=True)
    (package / "api_server.py").write_text(STAND_IN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    line = [sys.executable, "-m", "qtsplus.cli", "serve", *map(str, options)]
    result = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    _, *given = json.loads(result.stdout)
    return given


def test_vllm_is_started_with_nothing_open(tmp_path, tiny_published):
    ours = ["--trust-request-mm-kwargs", "--enable-prompt-tokens-details", "--allowed-origins", "[]"]
    ours += ["--worker-extension-cls", "qtsplus.vllm.worker.Worker", "--middleware", "qtsplus.vllm.server.Connection"]
    ours += ["--model", str(tiny_published), "--served-model-name", tiny_published.name]
    ours += ["--host", "127.0.0.1", "--port", "8000", "--dtype", "float32"]
    hosts = ["localhost", "127.0.0.1", "[::1]", "127.0.0.1"]
    assert start_vllm(tmp_path, tiny_published) == [*ours, "qtsplus", json.dumps(hosts), None]
    allowed = ["--allow-media-root", tmp_path, "--allow-media-domain", "a.org", "--allow-media-domain", "b.org:8443"]
    opened = ["--allowed-local-media-path", str(tmp_path), "--allowed-media-domains", "a.org", "b.org:8443"]
    opened += ["--mm-processor-kwargs", '{"retention": 0.1}', "--enforce-eager", "--max-model-len", "4096"]
    line = [tiny_published, *allowed, "--retention", "0.1", "--api-key", "correct horse", "--allow-host", "ask.org"]
    started = start_vllm(tmp_path, *line, "--", "--enforce-eager", "--max-model-len", "4096")
    assert started == [*ours, *opened, "qtsplus", json.dumps([*hosts, "ask.org"]), "correct horse"]
