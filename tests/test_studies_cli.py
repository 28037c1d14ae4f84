"""The studies of `qtsplus eval`, as a user types them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qtsplus import session
from qtsplus.cli import app
from qtsplus.data.tinyworld import build_dataset

SPEED = Path(__file__).parents[1] / "benchmarks" / "results" / "speed-cpu.json"


@pytest.fixture(scope="module")
def typed(tmp_path_factory, tiny_published):
    """Runs a command on the tiny model, and gives what it wrote."""
    folder, loaded = tmp_path_factory.mktemp("studies"), session.load(tiny_published, "cpu")
    records = build_dataset(folder, "test", 2, seconds=(2,), max_objects=20, progress=False, crowd=True)

    def run(study: str, *options: str, results: str) -> dict:
        words = [option.format(records=records, folder=folder) for option in options]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "load", lambda *arguments, **more: loaded)
            result = CliRunner().invoke(app, ["eval", study, *words, "--out", str(folder), "--name", "typed"])
        assert result.exit_code == 0, result.output
        assert results in result.stdout.replace("\n", "")
        return json.loads((folder / results).read_text())

    return run


def test_needles(typed):
    options = (
        "--length 4 --depth 0.5 --selection uniform --max-visual-tokens 20 --count 1 --seconds 2 --work {folder}/work"
    )
    document = typed("needle", *options.split(), results="needle-typed.json")
    (cell,) = document["cells"]
    assert (cell["selection"], cell["length"], cell["depth"], cell["kept"]) == ("uniform", 4, 0.5, 20)


def test_ablations(typed):
    document = typed("ablation", "{records}", "--n-max", "5", "--work", "{folder}/work", results="ablation-typed.json")
    assert {row["max_visual_tokens"] for row in document["rows"]} == {5}
    assert {"qtsplus", "uniform", "no_reencoding"} <= {row["policy"] for row in document["rows"]}


def test_analysis(typed):
    document = typed("analysis", "{records}", "--work", "{folder}/work", results="analysis-typed.json")
    assert document["videos"] == 2 and document["correlations"]["log_m"] == {}  # all are two seconds long


def test_efficiency(typed):
    (curve,) = typed("efficiency", str(SPEED), results="efficiency-typed.json")["curves"]
    assert "CPU" in curve
