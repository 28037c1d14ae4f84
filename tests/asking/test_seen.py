"""An answer says `seen` only where a null token gives it and a calibration says what it means."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from qtsplus import QTSplusConfig, ask, encode
from qtsplus.cli import app
from qtsplus.hub.convert import convert
from qtsplus.training.trainer import QTSplusTrainer
from training_examples import make_trainer

QUESTION = "What is in the yellow ring?"
CALIBRATED = {"null_token": True, "reduction": "sum", "seen_threshold": 0.2, "seen_area": 0.9}


@pytest.fixture(scope="module")
def video(loaded, tiny_mp4):
    return encode(*loaded, tiny_mp4)


@pytest.fixture
def selector(loaded, monkeypatch):
    """Sets fields of the model's configuration, as long as a test runs."""

    def set_fields(**fields):
        for name, value in fields.items():
            monkeypatch.setattr(loaded[0].config.qtsplus_config, name, value)

    return set_fields


def test_a_calibrated_model_says_what_it_has_seen(loaded, video, selector):
    selector(**CALIBRATED)
    answer = ask(*loaded, video, QUESTION, max_new_tokens=2)
    assert 0 <= answer.seen <= 1 and answer.seen_threshold == 0.2
    assert {"seen", "seen_threshold"} <= answer.as_dict().keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"seen_threshold": None, "seen_area": None},
        {"seen_area": 0.64},  # it does not tell true mentions from invented ones
        {"null_token": False},
        {"reduction": "max"},
    ],
)
def test_a_model_without_a_calibration_that_tells_says_nothing(loaded, video, selector, changes):
    selector(**{**CALIBRATED, **changes})
    answer = ask(*loaded, video, QUESTION, max_new_tokens=2)
    assert answer.seen is None and answer.seen_threshold is None
    assert not {"seen", "seen_threshold"} & answer.as_dict().keys()


@pytest.mark.parametrize("selection", ["lm_attention", "uniform"])
def test_a_method_that_does_not_ask_the_selector_says_nothing(loaded, video, selector, selection):
    selector(**CALIBRATED)
    assert ask(*loaded, video, QUESTION, selection=selection, retention=0.1, max_new_tokens=2).seen is None


def with_selector(published, folder, **fields):
    shutil.copytree(published, folder)
    config = json.loads((folder / "config.json").read_text())
    config["qtsplus_config"].update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("threshold", "row"), [(0.0001, "shown probably (seen"), (1.0, "shown probably not (seen"), (None, "")]
)
def test_ask_prints_it_with_its_threshold(threshold, row, tiny_published, tiny_mp4, tmp_path):
    area = None if threshold is None else 0.9
    folder = with_selector(tiny_published, tmp_path / "model", seen_threshold=threshold, seen_area=area)
    result = CliRunner().invoke(app, ["ask", str(tiny_mp4), QUESTION, "--model", str(folder)])
    assert result.exit_code == 0, result.output
    printed = [" ".join(line.split()) for line in result.output.splitlines()]
    found = [line for line in printed if line.startswith(("shown", "sure"))]
    assert len(found) == (threshold is not None) and "".join(found).startswith(row)


def test_watch_refuses_to_wait_for_what_the_model_cannot_say(tiny_published, tiny_mp4, tmp_path):
    folder = with_selector(tiny_published, tmp_path / "model", seen_threshold=None, seen_area=None)
    line = ["watch", str(tiny_mp4), QUESTION, "--model", str(folder), "--when-seen", "--timeout", "0.2"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2 and "seen_threshold in its config.json" in " ".join(result.output.split())


@pytest.mark.parametrize("fields", [{"seen_threshold": 0.2}, {"seen_area": 0.9}, {"seen_threshold": 2, "seen_area": 1}])
def test_half_a_calibration_is_refused(fields):
    with pytest.raises(ValueError, match="seen_.*expected (both or neither|a number from 1e-12 to 1)"):
        QTSplusConfig(**fields)


@pytest.mark.parametrize(("frozen", "left"), [("freeze_scores", 0.2), ("freeze_selector", 0.2), (None, None)])
def test_training_the_scores_removes_the_calibration(frozen, left, tmp_path):
    settings = {"freeze_language_model": False, **({frozen: True} if frozen else {})}
    trainer: QTSplusTrainer = make_trainer(tmp_path, selector={"seen_threshold": 0.2, "seen_area": 0.9}, **settings)
    assert trainer.model.config.qtsplus_config.seen_threshold == left


def test_a_new_selector_does_not_have_the_calibration_of_its_variant(tiny_stock, tmp_path):
    convert(tiny_stock, tmp_path / "ours", variant="qtsplus-tiny")
    made = json.loads((tmp_path / "ours" / "config.json").read_text())["qtsplus_config"]
    assert made["null_token"] and made["seen_threshold"] is None and made["seen_area"] is None
