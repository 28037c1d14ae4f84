"""`--ray`: the same set as in one process, on a Ray cluster of this machine."""

import json
import os
import signal
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.synthesis.engine import run
from qtsplus.synthesis.ray_runner import RayRunner
from scripted_server import KEY, scripted_server
from synthesis_run import questions_job

FILES = ("vscq1.jsonl", "dropped.jsonl", "failed.jsonl", "summary.json")
TROUBLE = ("429", "malformed", "500", "truncated", "options", "elsewhere")
# Every time a request of its own, so that each run meets the same.
RULES = [
    *(
        {"contains": f"with number {number} ", "then": [how, "good"], "each": True}
        for number, how in enumerate(TROUBLE)
    ),
    {"contains": "with number 7 ", "then": ["prose"]},
    {"contains": "with number 8 ", "then": ["elsewhere"]},
    {"contains": "with number 9 ", "then": ["422"]},
]


@pytest.fixture
def ray_logs(monkeypatch):
    """A new Ray cluster's folder; its sockets need a short path."""
    pytest.importorskip("ray.data", reason="needs Ray Data: pip install -e '.[ray]'")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Else workers get what other work leaves over.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.setenv("PLANTED_KEY", KEY)
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def make(folder, count, concurrency=8, runner=None, limit=None, rules=RULES):
    (folder.parent / "server").mkdir(exist_ok=True)
    with scripted_server(folder.parent / "server", rules=rules) as (url, log):
        run(questions_job(url, count), folder, concurrency=concurrency, runner=runner, limit=limit)
    return len(log.read_text().splitlines())


@pytest.mark.slow
def test_ray_makes_what_the_engine_makes(tmp_path, ray_logs):
    # More than one block, the last of them not full.
    make(tmp_path / "here", 83)
    make(tmp_path / "ray", 83, runner=RayRunner("local"))
    for name in FILES:
        assert (tmp_path / "ray" / name).read_text() == (tmp_path / "here" / name).read_text()
    summary = json.loads((tmp_path / "ray" / "summary.json").read_text())
    assert (summary["finished"], summary["failed"]) == (83, 2)
    assert (tmp_path / "ray" / "dropped.jsonl").read_text()

    logs = [path for path in ray_logs.rglob("*") if path.is_file()]
    assert any(path.name.startswith("raylet") for path in logs)
    assert [path for path in (*logs, *(tmp_path / "ray").iterdir()) if KEY.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_a_run_changes_between_here_and_ray(tmp_path, ray_logs):
    make(tmp_path / "here", 40, rules=[])
    asked = make(tmp_path / "ray", 40, rules=[], limit=15)
    # What one process has finished, Ray does not ask again.
    assert make(tmp_path / "ray", 40, rules=[], runner=RayRunner("local")) - asked == 25
    for name in FILES:
        assert (tmp_path / "ray" / name).read_text() == (tmp_path / "here" / name).read_text()


class Mortal:
    """A step whose process dies of one item."""

    def __init__(self, step):
        self.step = step

    async def __call__(self, item, ledger):
        if item.position == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return await self.step(item, ledger)


@pytest.mark.slow
def test_an_item_that_kills_its_worker_fails_alone(tmp_path, ray_logs):
    (tmp_path / "server").mkdir()
    with scripted_server(tmp_path / "server", rules=[]) as (url, _):
        job = questions_job(url, 8)
        run(replace(job, step=Mortal(job.step)), tmp_path / "ray", concurrency=8, runner=RayRunner("local"))
    (failed,) = map(json.loads, (tmp_path / "ray" / "failed.jsonl").read_text().splitlines())
    assert failed == {"id": "caption-5", "reasons": ["The process that worked on it died 3 times."]}
    assert json.loads((tmp_path / "ray" / "summary.json").read_text())["finished"] == 8


@pytest.mark.slow
def test_a_wrong_key_ends_the_run_in_one_line(tmp_path, ray_logs):
    with pytest.raises(ValueError, match="Check the address, the model's name and the API key") as caught:
        make(tmp_path / "ray", 4, rules=[{"contains": "", "then": ["401"]}], runner=RayRunner("local"))
    assert len(str(caught.value).splitlines()) == 1
    assert KEY not in str(caught.value)


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED_KEY", KEY)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(data=None))
    monkeypatch.setitem(sys.modules, "ray.data", SimpleNamespace())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"  # nobody listens
        with pytest.raises(ValueError, match=f"--ray is '{address}', and no Ray cluster answers there"):
            make(tmp_path / "ray", 4, runner=RayRunner(address))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray", "local"], "the package ray is not installed: pip install -e '.[ray]' in a clone"),
        (["--ray", ""], "--ray"),
    ],
)
def test_refusals(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "ray", None)
    captions = tmp_path / "captions.jsonl"
    captions.write_text('{"vision_id": "v", "caption": "A dog runs."}\n')
    endpoint = ["--out", str(tmp_path / "out"), "--endpoint", "http://x/v1", "--teacher", "m"]
    result = CliRunner().invoke(app, ["data", "vscq1", str(captions), *endpoint, *arguments])
    assert result.exit_code == 2, result.exception
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
