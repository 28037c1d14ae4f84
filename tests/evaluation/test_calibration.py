"""Needle recall of layers and heads, and what `qtsplus calibrate` makes of it."""

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from clips import write_mp4, write_records
from qtsplus.cli import app
from qtsplus.evaluation import calibration
from qtsplus.evaluation.calibration import (
    Calibration,
    Finds,
    attention_fields,
    best_heads,
    calibrate,
)
from qtsplus.evaluation.labelled import LabelledQuestion, Sighting, labelled_questions
from qtsplus.training.attention import AttentionChoice
from qtsplus.training.dataset import VideoQADataset
from qtsplus.training.models import make_model

NEEDLES = np.array([3, 4, 7])
ELSEWHERE = np.array([9, 10, 15])
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
    asked = labelled_questions(records)
    return [question for question in asked if question.record.kind not in others]


@pytest.fixture(scope="module")
def tiny(tiny_published):
    return make_model(None, str(tiny_published)).eval()


def planted(finders, generator, tokens):
    """Attention in which the heads of `finders` look at some tokens and all others at nothing in particular."""
    attention = torch.rand(LAYERS, HEADS, TOKENS, generator=generator) / 100
    for head in finders:
        attention[head][tokens] = 1.0
    return attention


@pytest.fixture
def calibrated(monkeypatch, tiny, tiny_processor, questions):
    """
    Calibrates on planted attention: by the heads that find the needles, perhaps others for a kind of positions, by the
    heads that look at everything that the video shows, and by how many answers each layer gives right.
    """

    def run(finders, most=2, asked=questions, salient=(), right=None, **of_positions):
        def attention_by_head(model, dataset, asked, positions):
            generator = torch.Generator().manual_seed(0)
            for _ in asked:
                attention = planted(of_positions.get(positions, finders), generator, [3, 7, 12])
                for head in salient:
                    attention[head][[*NEEDLES, *ELSEWHERE]] = 1.0
                yield attention, NEEDLES, ELSEWHERE

        def count_right(model, processor, asked, reading):
            return (right or {}).get(attention_fields(reading)["attention_layer"], 0)

        monkeypatch.setattr(calibration, "_attention_by_head", attention_by_head)
        monkeypatch.setattr(calibration, "count_right", count_right)
        monkeypatch.setattr(calibration, "MOST", most)
        return calibrate(tiny, tiny_processor, asked)

    monkeypatch.setattr(tiny.config, "qtsplus_config", deepcopy(tiny.config.qtsplus_config))  # the result goes there
    return run


def test_heads_that_find_little_are_not_summed_with_one_that_finds_all():
    found = {}
    for layer, own in enumerate([0.1, 1.0, 0.6, 0.4]):
        found[AttentionChoice(((layer, 0),))] = Finds(own)
    assert best_heads(found).heads == ((1, 0), (2, 0))


def test_heads_that_look_at_all_that_is_there_are_not_best():
    """What a head finds of other questions' evidence counts against it."""
    at_everything = AttentionChoice(((0, 0),))
    at_the_answer = AttentionChoice(((1, 0),))
    found = {at_everything: Finds(0.7, 0.9), at_the_answer: Finds(0.6, 0.7)}
    assert best_heads(found) == at_the_answer


def test_the_heads_that_find_the_needles_are_chosen(calibrated, questions):
    found = calibrated([(2, 1), (0, 3)], salient=[(1, 1)])
    assert found.best.heads == ((0, 3), (2, 1))
    finds = found.choices[found.best]
    assert finds.own == pytest.approx(2 / 3)
    assert finds.other == 0
    assert sum(found.questions) == len(questions)
    assert found.best.positions == "answer"


def test_the_question_s_words_teach_where_they_find_more(calibrated):
    found = calibrated([], most=1, question=[(1, 2)])
    assert found.best == AttentionChoice(((1, 2),), "question")


@pytest.mark.parametrize(
    ("right", "fields"),
    [
        ({2: 3, 3: 3, 1: 2}, {"attention_layer": 2, "attention_heads": [0, 3]}),
        ({2: 3, 3: 2, 1: 5}, {"attention_layer": 1, "attention_heads": [2]}),
    ],
    ids=["the present setting is kept", "another layer is better"],
)
def test_right_answers_decide_which_layer_is_read(right, fields, calibrated, tiny):
    """Layer 3 finds as much as layer 1; heads that look elsewhere are left out."""
    tiny.config.qtsplus_config.attention_heads = [0, 3]
    found = calibrated([(0, 0)], most=20, right=right, prompt=[(1, 2), (3, 0), (3, 1)])
    assert attention_fields(found.best_reading) == fields
    assert tiny.config.qtsplus_config.attention_layer == fields["attention_layer"]
    layers = [attention_fields(reading)["attention_layer"] for reading in found.readings]
    assert layers[0] == 2
    assert set(layers[1:3]) == {1, 3}


# --- The command ---


def run_command(model, records):
    return CliRunner().invoke(app, ["calibrate", str(model), str(records)])


def test_questions_about_unreadable_videos_are_left_out(calibrated, questions, monkeypatch):
    warnings = []
    monkeypatch.setattr("qtsplus.training.dataset.logger.warning_once", warnings.append)
    missing = replace(questions[0].record, video="gone.mp4")
    found = calibrated([(2, 1)], asked=[replace(questions[0], record=missing), *questions])
    assert sum(found.questions) == len(questions)
    (warning,) = warnings
    assert warning.startswith("Skipped gone.mp4: ")


def test_what_only_other_questions_ask_for_is_elsewhere(tiny, tiny_processor, questions):
    video = questions[0].video
    of_video = [question for question in questions if question.video == video]
    early = replace(of_video[0], needles=[[Sighting(0, 1)]], edges=(0, 1, 2))
    late = replace(early, needles=[[Sighting(0, 1), Sighting(1, 2)]])
    dataset = VideoQADataset([], tiny_processor)
    first, second = calibration._attention_by_head(tiny, dataset, [early, late], "question")
    _, shown, elsewhere = first
    _, all_shown, nothing = second
    assert sorted([*shown, *elsewhere]) == all_shown.tolist()
    assert len(shown) > 0
    assert len(elsewhere) > 0
    assert len(nothing) == 0


@pytest.mark.parametrize(
    ("fps", "sightings", "tokens"),
    [
        (2, [Sighting(3, 5.5), Sighting(7, 8)], [0, 1, 2, 3, 8, 9, 10, 11]),  # of the first and the third step
        (1.25, [Sighting(6.5, 8)], [4, 5, 6, 7]),  # of uneven steps, which begin at 5, 6.5, 8, 9.5 and 11 s
    ],
)
def test_evidence_is_where_a_player_shows_it(tiny, tiny_processor, questions, tmp_path, fps, sightings, tokens):
    """The video's first frame is shown at 5 s."""
    path = tmp_path / "late.mp4"
    write_mp4(path, np.zeros((16, 56, 56, 3), dtype=np.uint8), 2, first=10)
    record = replace(questions[0].record, video=str(path), fps=fps)
    asked = [calibration.with_edges(tiny_processor, LabelledQuestion(record, needles=[sightings]))]
    dataset = VideoQADataset([], tiny_processor)
    ((_, shown, _),) = calibration._attention_by_head(tiny, dataset, asked, "question")
    assert shown.tolist() == tokens


@pytest.mark.parametrize("times", [(2, 3), (0, 9)])
def test_evidence_outside_its_video_is_refused(times, calibrated, questions):
    with pytest.raises(ValueError, match="The evidence of '.*' in .*mp4 is from .*; expected times .* from 0 to 2 s"):
        calibrated([(2, 1)], asked=[replace(questions[0], needles=[[Sighting(*times)]])])


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


@pytest.mark.parametrize(
    ("right", "verdict"),
    [
        (3, "The present setting stays: no calibrated layer gave more right answers."),
        (4, "A calibrated layer gave more right answers. A lead of fewer than 6 questions may be chance."),
    ],
)
def test_the_command_says_whether_a_calibrated_layer_is_better(right, verdict, records, tiny_stock, monkeypatch):
    default = AttentionChoice(((2, 0),), "prompt")
    other = AttentionChoice(((1, 2),), "prompt")
    found = Calibration({default: Finds()}, {default: Finds(), other: Finds()}, {default: 3, other: right}, (4, 4))
    monkeypatch.setattr(calibration, "calibrate", lambda *given: found)
    result = run_command(tiny_stock, records)
    output = result.stdout
    assert "  present: 3 right" in output
    assert f"  calibrated: {right} right" in output
    assert output.endswith(f"{verdict}\n")
    assert "Nothing was written" in result.stderr


@pytest.fixture
def choosing(monkeypatch):
    """Lets the command choose many heads, which find as much as is said."""
    measure = calibration.calibrate

    def choose(finds):
        best = AttentionChoice(((0, 3), (2, 1), *product(range(10, 30), range(2))), "both")
        chosen = {best: finds}
        monkeypatch.setattr(calibration, "calibrate", lambda *given: replace(measure(*given), choices=chosen))

    return choose


def test_heads_that_find_no_more_of_the_own_evidence_are_not_printed(labelled, tiny_published, tmp_path, choosing):
    choosing(Finds(0.2, 0.4))
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(map(json.dumps, [labelled[0], labelled[-1]])))
    folder = tmp_path / "model"
    shutil.copytree(tiny_published, folder)
    result = run_command(folder, few)
    assert result.exit_code == 0, result.output
    assert "relevance_" not in result.stdout
    assert "No head finds the question's own evidence better than that of other questions." in result.stderr


def test_the_command_prints_a_recipes_lines_and_writes_attention(labelled, tiny_published, tmp_path, choosing):
    folder = tmp_path / "model"
    shutil.copytree(tiny_published, folder)
    before = json.loads((folder / "config.json").read_text())
    choosing(Finds(0.4, 0.2))
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(map(json.dumps, [*labelled[:2], *labelled[-2:]])))
    result = run_command(folder, few)
    assert result.exit_code == 0, result.output
    after = json.loads((folder / "config.json").read_text())
    written = {}
    for name in ("attention_layer", "attention_heads"):
        before["qtsplus_config"].pop(name, None)
        written[name] = after["qtsplus_config"].pop(name)
    assert after == before
    assert written["attention_layer"] in range(4)
    output = " ".join(result.stdout.split())
    assert f": {json.dumps(written)}" in output
    for words in ("Measured on", "with right answers from 2.5%", "lines of a recipe"):
        assert words in output
    lines = result.stdout.splitlines()
    first = lines.index("training:") + 1
    assert lines[first].startswith("  relevance_heads: [[0, 3], [2, 1], ")
    assert lines[first + 1] == "  relevance_positions: both"


def without_evidence(rows):
    return [{**row, "evidence": []} for row in rows]


def about_one_video(rows):
    video = rows[0]["video"]
    return [row for row in rows if row["video"] == video]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_evidence, "Videos with evidence that can be read: 0"),
        (about_one_video, "Videos with evidence that can be read: 1"),
    ],
)
def test_a_set_that_cannot_be_measured_is_refused(change, message, labelled, tmp_path):
    path = tmp_path / "set.jsonl"
    rows = change(labelled)
    path.write_text("\n".join(map(json.dumps, rows)))
    result = run_command("model that is not looked for", path)
    assert result.exit_code == 2, result.output
    last_line = result.stderr.splitlines()[-1]
    assert last_line.startswith("qtsplus: ")
    assert message in last_line
