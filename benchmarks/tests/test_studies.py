"""The studies of the laboratory, as a user types them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.world.tinyworld import build_dataset
from qtsplus.asking import session

SPEED = Path(__file__).parents[2] / "benchmarks" / "results" / "speed-cpu.json"


@pytest.fixture(scope="module")
def typed(tmp_path_factory, crowd_published):
    """Runs a command on the tiny model, and gives what it wrote."""
    folder, loaded = tmp_path_factory.mktemp("studies"), session.load(crowd_published, "cpu")
    records = build_dataset(folder, "test", 2, seconds=(2,), max_objects=20, progress=False, crowd=True)

    def run(study: str, *options: str, results: str) -> dict:
        words = [option.format(records=records, folder=folder) for option in options]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "load", lambda *arguments, **more: loaded)
            result = CliRunner().invoke(app, [study, *words, "--out", str(folder), "--name", "typed"])
        assert result.exit_code == 0, result.output
        assert results in result.stdout.replace("\n", "")
        return json.loads((folder / results).read_text())

    return run


def test_ablations(typed):
    document = typed("ablation", "{records}", "--n-max", "5", "--work", "{folder}/work", results="ablation-typed.json")
    assert {row["max_visual_tokens"] for row in document["rows"]} == {5}
    assert {"qtsplus", "uniform", "no_reencoding"} <= {row["policy"] for row in document["rows"]}


def test_efficiency(typed):
    (curve,) = typed("efficiency", str(SPEED), results="efficiency-typed.json")["curves"]
    assert "CPU" in curve
