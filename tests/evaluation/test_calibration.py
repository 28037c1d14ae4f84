"""Needle recall of layers and heads, and what `qtsplus calibrate` makes of it."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from clips import write_records
from qtsplus.cli import app
from qtsplus.evaluation import calibration
from qtsplus.evaluation.calibration import best_heads, calibrate, read_labelled
from qtsplus.training.attention import AttentionChoice
from qtsplus.training.models import make_model

NEEDLES = np.array([3, 4, 7])
LAYERS = 4
HEADS = 4
TOKENS = 20


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Questions about two short videos."""
    return write_records(tmp_path_factory.mktemp("world"), 2, seconds=2, objects=6)


@pytest.fixture(scope="module")
def questions(records):
    others = ("caption", "moment", "summary")
    labelled = read_labelled(records)
    return [question for question in labelled if question.record.kind not in others]


@pytest.fixture(scope="module")
def tiny(tiny_published):
    return make_model(None, str(tiny_published)).eval()


def planted(finders, generator):
    """Attention in which the heads of `finders` look at the needles and all others at nothing in particular."""
    attention = {}
    for layer in range(LAYERS):
        attention[layer] = torch.rand(HEADS, TOKENS, generator=generator) / 100
    for layer, head in finders:
        attention[layer][head, [3, 7, 12]] = 1.0
    return attention


@pytest.fixture
def calibrated(monkeypatch, tiny, tiny_processor, questions):
    """
    Calibrates on planted attention: by the heads that find the needles, perhaps others for a kind of positions.
    """

    def run(
        finders,
        most=2,
        asked=questions,
        **of_positions,
    ):
        def attention_by_head(model, dataset, asked, positions):
            generator = torch.Generator().manual_seed(0)
            for _ in asked:
                attention = planted(of_positions.get(positions, finders), generator)
                yield attention, NEEDLES

        monkeypatch.setattr(calibration, "_attention_by_head", attention_by_head)
        monkeypatch.setattr(calibration, "MOST", most)
        return calibrate(tiny, tiny_processor, asked)

    return run


def test_heads_that_find_little_are_not_summed_with_one_that_finds_all():
    tokens_of_heads = [0.1, 1.0, 0.6, 0.4]
    recalls = {}
    for head, tokens in enumerate(tokens_of_heads):
        recalls[AttentionChoice(((head, 0),))] = tokens
    assert best_heads(recalls).heads == ((1, 0), (2, 0))
    assert best_heads(recalls, layer=3).heads == ((3, 0),)


def test_the_heads_that_find_the_needles_are_chosen(calibrated, questions):
    found = calibrated([(2, 1), (0, 3)])
    assert found.best.heads == ((0, 3), (2, 1))
    recall = found.choices[found.best]
    assert recall == pytest.approx(2 / 3)
    assert sum(found.questions) == len(questions)
    assert found.choices[AttentionChoice()] == recall  # all heads find as much
    assert found.fields() == {"relevance_heads": [[0, 3], [2, 1]]}


def test_the_question_s_words_teach_where_they_find_more(calibrated):
    found = calibrated([], most=1, question=[(1, 2)])
    assert found.fields() == {"relevance_heads": [[1, 2]], "relevance_positions": "question"}


def test_a_reading_is_the_shallowest_layer_that_finds_the_needles(calibrated):
    """From where the answer begins, which knows no answer; the heads that look elsewhere are left out."""
    of_prompt = [(1, 2), (3, 0), (3, 1)]
    found = calibrated([(0, 0)], most=20, prompt=of_prompt)
    assert found.attention_fields() == {"attention_layer": 1, "attention_heads": [2]}
    best = found.readings[found.best_reading]
    assert best == pytest.approx(2 / 3, abs=1e-4)
    default = next(iter(found.readings))
    assert default.heads == ((2, 0), (2, 1), (2, 2), (2, 3))
    assert found.readings[default] < 0.5
    assert found.fields()["relevance_heads"] == [[0, 0]]


# --- The command ---


def run_command(model, records):
    command = ["calibrate", str(model), str(records)]
    return CliRunner().invoke(app, command)


def test_the_command_prints_a_recipes_lines_and_writes_attention(records, tiny_published, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(tiny_published, folder)
    before = json.loads((folder / "config.json").read_text())
    fields = {"relevance_heads": [[0, 3], [2, 1]]}
    monkeypatch.setattr(calibration.Calibration, "fields", lambda self: fields)
    result = run_command(folder, records)
    assert result.exit_code == 0, result.output
    after = json.loads((folder / "config.json").read_text())
    written = {}
    for name in ("attention_layer", "attention_heads"):
        before["qtsplus_config"].pop(name, None)
        written[name] = after["qtsplus_config"].pop(name)
    assert after == before
    assert written["attention_layer"] in range(4)
    output = " ".join(result.stdout.split())
    assert f"selection=lm_attention: {json.dumps(written)} finds" in output
    for words in ("measured on", "needle tokens", "best: ", "relevance_heads: [[0, 3], [2, 1]]"):
        assert words in output


def test_questions_about_unreadable_videos_are_left_out(calibrated, questions, tmp_path, capsys):
    record = replace(questions[0].record, video=str(tmp_path / "gone.mp4"))
    missing = replace(questions[0], record=record)
    found = calibrated([(2, 1)], asked=[missing, *questions])
    assert sum(found.questions) == len(questions)
    assert "gone.mp4" in capsys.readouterr().err.replace("\n", "")


@pytest.fixture
def labelled(records) -> list[dict]:
    """The rows that have evidence."""
    rows = []
    for line in records.read_text().splitlines():
        row = json.loads(line)
        row["video"] = str(records.parent / row["video"])
        if row["evidence"]:
            rows.append(row)
    return rows


def without_evidence(rows):
    return [{**row, "evidence": []} for row in rows]


def about_one_video(rows):
    video = rows[0]["video"]
    return [row for row in rows if row["video"] == video]


def with_other_evidence(rows):
    evidence = [[{"start": 1}]]
    return [{**rows[0], "evidence": evidence}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_evidence, "no question about a video with evidence"),
        (about_one_video, "1 of the videos can be read"),
        (with_other_evidence, "is not a list of needles"),
    ],
)
def test_a_set_that_cannot_be_measured_is_refused(change, message, labelled, tiny_published, tmp_path):
    path = tmp_path / "set.jsonl"
    rows = change(labelled)
    path.write_text("\n".join(map(json.dumps, rows)))
    result = run_command(tiny_published, path)
    assert result.exit_code == 2, result.output
    last_line = result.stderr.splitlines()[-1]
    assert last_line.startswith("qtsplus: ")
    assert message in last_line


def test_a_missing_set_is_refused(tiny_published, tmp_path):
    result = run_command(tiny_published, tmp_path / "missing.jsonl")
    assert result.exit_code == 2
    assert "There is no file" in result.stderr
