"""What a selection finds and does, as a user types them."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.world.haystack import write_background, write_needles
from benchmarks.world.tinyworld import build_dataset
from qtsplus.asking import session


@pytest.fixture(scope="module")
def typed(tmp_path_factory, crowd_published):
    """Runs a command on the tiny model, and gives what it wrote."""
    folder, loaded = tmp_path_factory.mktemp("studies"), session.load(crowd_published, "cpu")
    files = {
        "folder": folder,
        "records": build_dataset(folder, "test", 2, seconds=(2,), max_objects=20, progress=False, crowd=True),
        "needles": write_needles(folder / "needles", count=1, seconds=2),
        "background": write_background(folder / "background.mp4", 4),
    }

    def run(study: str, *options: str, results: str) -> dict:
        words = [option.format(**files) for option in options]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "load", lambda *arguments, **more: loaded)
            result = CliRunner().invoke(app, [study, *words, "--out", str(folder)])
        assert result.exit_code == 0, result.output
        assert results in result.stdout.replace("\n", "")
        return json.loads((folder / results).read_text())

    return run


def test_needles(typed):
    options = "--length 4 --depth 0.5 --selection uniform --max-visual-tokens 20"
    hidden = "--needles {needles} --background {background}"
    document = typed("needle", *options.split(), *hidden.split(), results="needle.json")
    (cell,) = document["cells"]
    assert (cell["selection"], cell["length"], cell["depth"], cell["kept"]) == ("uniform", 4, 0.5, 20)


def test_analysis(typed):
    document = typed("analysis", "{records}", "--work", "{folder}/work", results="analysis.json")
    assert document["videos"] == 2 and document["correlations"]["log_m"] == {}  # all are two seconds long


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("needle --needles n.jsonl --background b.mp4 --selection all --retention 0.1", "--max-visual-tokens have no"),
        ("needle --needles n.jsonl --background b.mp4 --selection all --max-visual-tokens 9", "have no effect"),
        (
            "needle --needles n.jsonl --background b.mp4 --selection uniform --selection uniform",
            "Got selections ['uniform', 'uniform']; expected at least one, and each once",
        ),
    ],
)
def test_what_would_be_ignored_or_leave_its_folder_is_refused_first(line, message):
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
