"""An answer says `seen` only where a null token gives it and a calibration says what it means."""

import json
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from qtsplus import QTSplusConfig, ask, encode
from qtsplus.cli import app
from qtsplus.training.trainer import QTSplusTrainer
from training_examples import make_trainer

QUESTION = "What is in the yellow ring?"
CALIBRATION = {"seen_threshold": 0.2, "seen_area": 0.9}
CALIBRATED = {"null_token": True, "reduction": "sum", **CALIBRATION}


@pytest.fixture(scope="module")
def video(loaded, tiny_mp4):
    return encode(*loaded, tiny_mp4)


@pytest.fixture
def answer_of(loaded, video, monkeypatch):
    """Asks the model, whose configuration has these fields as long as a test runs."""

    def ask_with(fields, **options):
        config = loaded[0].config.qtsplus_config
        for name, value in fields.items():
            monkeypatch.setattr(config, name, value)
        return ask(*loaded, video, QUESTION, max_new_tokens=2, **options)

    return ask_with


def test_a_calibrated_model_says_what_it_has_seen(answer_of):
    answer = answer_of(CALIBRATED)
    assert 0 <= answer.seen <= 1
    assert answer.seen_threshold == 0.2
    printed = answer.as_dict()
    assert printed["seen"] == answer.seen
    assert printed["seen_threshold"] == 0.2


def test_what_is_seen_often_enough_is_shown(answer_of):
    answer = answer_of(CALIBRATED)
    assert replace(answer, seen_threshold=answer.seen).shown is True
    assert replace(answer, seen_threshold=answer.seen + 0.1).shown is False


SILENT = [
    {"seen_threshold": None, "seen_area": None},
    {"seen_area": 0.64},  # it does not tell true mentions from invented ones
    {"null_token": False},
    {"reduction": "max"},
]


@pytest.mark.parametrize("changes", SILENT, ids=str)
def test_a_model_without_a_calibration_that_tells_says_nothing(answer_of, changes):
    answer = answer_of(CALIBRATED | changes)
    assert answer.seen is None
    assert answer.seen_threshold is None
    assert answer.shown is None
    printed = answer.as_dict()
    assert "seen" not in printed
    assert "seen_threshold" not in printed


@pytest.mark.parametrize("selection", ["lm_attention", "uniform"])
def test_a_method_that_does_not_ask_the_selector_says_nothing(answer_of, selection):
    assert answer_of(CALIBRATED, selection=selection, retention=0.1).seen is None


@pytest.fixture
def with_selector(tiny_published, tmp_path):
    """A folder with the model, whose selector's configuration has these fields."""

    def copy(**fields):
        folder = shutil.copytree(tiny_published, tmp_path / "model")
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["qtsplus_config"].update(fields)
        path.write_text(json.dumps(config))
        return folder

    return copy


def run(*words):
    """What a command prints, with single spaces; and its exit code."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    return " ".join(result.output.split()), result.exit_code


@pytest.mark.parametrize(("threshold", "verdict"), [(0.0001, "probably"), (1.0, "probably not")])
def test_ask_prints_it_with_its_threshold(with_selector, tiny_mp4, threshold, verdict):
    folder = with_selector(seen_threshold=threshold, seen_area=0.9)
    printed, code = run("ask", tiny_mp4, QUESTION, "--model", folder)
    assert code == 0
    assert f"shown {verdict} (seen" in printed


@pytest.mark.parametrize(
    ("calibration", "selection"),
    [({"seen_threshold": None, "seen_area": None}, "qtsplus"), ({"seen_threshold": 0.1, "seen_area": 0.9}, "uniform")],
)
def test_watch_refuses_to_wait_for_what_cannot_be_said(with_selector, tiny_mp4, calibration, selection):
    folder = with_selector(**calibration)
    options = ["--when-seen", "--timeout", "0.2", "--selection", selection]
    printed, code = run("watch", tiny_mp4, QUESTION, "--model", folder, *options)
    assert code == 2
    assert "seen_threshold in its config.json" in printed


BAD = [
    {"seen_threshold": 0.2},
    {"seen_area": 0.9},
    {"seen_threshold": 2, "seen_area": 1},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_half_a_calibration_is_refused(fields):
    with pytest.raises(ValueError, match="seen_.*expected (both or neither|a number from 1e-12 to 1)"):
        QTSplusConfig(**fields)


FREEZING = [
    ({"freeze_scores": True}, 0.2),
    ({"freeze_selector": True}, 0.2),
    ({}, None),
]


@pytest.mark.parametrize(("freezing", "threshold"), FREEZING, ids=str)
def test_training_the_scores_removes_the_calibration(freezing, threshold, tmp_path):
    settings = {"freeze_language_model": False, **freezing}
    trainer: QTSplusTrainer = make_trainer(tmp_path, selector=CALIBRATION, **settings)
    assert trainer.model.config.qtsplus_config.seen_threshold == threshold
