"""Needle recall of layers and heads, and what `qtsplus calibrate` makes of it."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from attention_twin import twin_targets
from clips import write_records
from qtsplus.cli import app
from qtsplus.evaluation import calibration
from qtsplus.evaluation.calibration import Recall, calibrate, measure_recalls, read_labelled
from qtsplus.evaluation.labelled import Sighting
from qtsplus.training.attention import AttentionChoice
from qtsplus.training.dataset import VideoQACollator, VideoQADataset
from qtsplus.training.models import make_model

NEEDLES = np.array([3, 4, 7])
LAYERS, HEADS, TOKENS = 4, 4, 20


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Questions about two short videos."""
    return write_records(tmp_path_factory.mktemp("world"), 2, seconds=2, objects=6)


@pytest.fixture(scope="module")
def questions(records):
    return [one for one in read_labelled(records) if one.record.kind not in ("caption", "moment", "summary")]


@pytest.fixture(scope="module")
def tiny(tiny_published):
    return make_model(None, str(tiny_published)).eval()


def planted(finders):
    """Attention in which the heads of `finders` look at the needles and all others at nothing in particular."""

    def by_head(model, dataset, questions, positions):
        generator = torch.Generator().manual_seed(0)
        for _ in questions:
            attention = {layer: torch.rand(HEADS, TOKENS, generator=generator) / 100 for layer in range(LAYERS)}
            for layer, head in finders:
                attention[layer][head, [3, 7, 12]] = 1.0
            yield attention, NEEDLES

    return by_head


def test_evidence_outside_of_the_frame_is_refused(tiny, tiny_processor, questions):
    outside = [[Sighting(0, 1, (500, 500, 600, 600), frame=(168, 168))]]
    with pytest.raises(ValueError, match=r"The evidence of '.+' lies outside of .+\.mp4"):
        calibrate(tiny, tiny_processor, [replace(question, needles=outside) for question in questions])


def test_recall_counts_tokens():
    for places, recall in (
        ([3, 4, 9], Recall(pytest.approx(2 / 3), pytest.approx(2 / 3))),
        ([0, 1, 2], Recall(0.0, 0.0)),
    ):
        scores = torch.zeros(TOKENS)
        scores[places] = 1.0
        assert calibration._recall(scores, NEEDLES) == recall


def test_the_mass_is_the_share_of_the_needles_in_all_attention():
    scores = torch.full((TOKENS,), 0.5)
    scores[[3, 4]] = 2.0
    recall = calibration._recall(scores, NEEDLES)
    assert recall.mass == pytest.approx(4.5 / (4 + 0.5 * (TOKENS - 2)))


def test_layers_that_find_little_are_not_summed_with_one_that_finds_all():
    recalls = {0: Recall(0.1, 0.0), 1: Recall(1.0, 0.9), 2: Recall(0.6, 0.3), 3: Recall(0.4, 0.2)}
    layers = {AttentionChoice(layers=(layer,)): recall for layer, recall in recalls.items()}
    assert calibration.best_sum(layers, "layers").layers == (1, 2)


@pytest.fixture
def few(monkeypatch):
    """Two heads at most, of one layer."""
    monkeypatch.setattr(calibration, "MOST", {"layers": 1, "heads": 2})


def test_the_heads_that_find_the_needles_are_chosen(monkeypatch, few, tiny, tiny_processor, questions):
    monkeypatch.setattr(calibration, "_attention_by_head", planted([(2, 1), (0, 3)]))
    found = calibrate(tiny, tiny_processor, questions)
    assert found.best.heads == ((0, 3), (2, 1))
    recall = found.choices[found.best]
    assert recall.tokens == pytest.approx(2 / 3) and recall.mass == pytest.approx(2 / 3, abs=0.05)
    assert sum(found.questions) == len(questions)
    # All layers find as much, but look elsewhere too.
    assert next(iter(found.choices.values())).tokens == found.choices[found.best].tokens
    assert found.fields() == {"relevance_heads": [[0, 3], [2, 1]]}


def test_heads_are_chosen_where_the_sum_over_all_layers_is_led_astray(
    monkeypatch, few, tiny, tiny_processor, questions
):
    plant = planted([(2, 1)])

    def with_a_sink(*arguments):
        for attention, needles in plant(*arguments):
            attention[1][:, [0, 1, 2]] = 5.0
            attention[2][0, [0, 1, 2]] = 5.0
            yield attention, needles

    monkeypatch.setattr(calibration, "_attention_by_head", with_a_sink)
    monkeypatch.setitem(calibration.MOST, "heads", 1)
    found = calibrate(tiny, tiny_processor, questions)
    assert found.fields() == {"relevance_heads": [[2, 1]]}


def test_the_question_s_words_teach_where_they_find_more(monkeypatch, few, tiny, tiny_processor, questions):
    def by_head(model, dataset, questions, positions):
        return planted([(1, 2)] if positions == "question" else [])(model, dataset, questions, positions)

    monkeypatch.setattr(calibration, "_attention_by_head", by_head)
    monkeypatch.setitem(calibration.MOST, "heads", 1)
    fields = calibrate(tiny, tiny_processor, questions).fields()
    assert fields == {"relevance_heads": [[1, 2]], "relevance_positions": "question"}


def test_a_reading_is_the_shallowest_layer_that_finds_the_needles(monkeypatch, tiny, tiny_processor, questions):
    """From where the answer begins, which knows no answer; the heads that look elsewhere are left out."""
    asked = []

    def by_head(model, dataset, questions, positions):
        asked.append(positions)
        finders = [(1, 2), (3, 0), (3, 1)] if positions == "prompt" else [(0, 0)]
        return planted(finders)(model, dataset, questions, positions)

    monkeypatch.setattr(calibration, "_attention_by_head", by_head)
    found = calibrate(tiny, tiny_processor, questions)
    assert asked[::2] == asked[1::2] == ["answer", "question", "both", "prompt"]
    fields = found.attention_fields()
    assert (fields["attention_layer"], fields["attention_heads"]) == (1, [2])
    assert found.readings[found.best_reading].tokens == pytest.approx(2 / 3, abs=1e-4)
    default, recall = next(iter(found.readings.items()))
    assert default.layers == (2,) and recall.tokens < 0.5
    assert found.fields()["relevance_heads"] == [[0, 0]]


def test_measured_heads_are_those_of_the_eager_twin(tiny, tiny_processor, questions):
    question = questions[0]
    dataset = VideoQADataset([question.record], tiny_processor)
    measured = measure_recalls(tiny, dataset, [question], "answer")
    batch = VideoQACollator(tiny_processor)([dataset[0]])
    labels = batch.pop("labels")
    inputs = {name: value for name, value in batch.items() if name not in ("skipped", "source_ids")}
    (grid,) = tiny.model.merged_grid(inputs["video_grid_thw"])
    needles = [calibration.sighting_tokens(needle, grid, 1.0) for needle in question.needles]
    for pair in ((1, 0), (3, 2)):
        (target,) = twin_targets(tiny, inputs, labels, heads=[pair])
        assert len(target) == 72
        wanted = set(np.concatenate(needles).tolist())
        kept = set(target.topk(len(wanted)).indices.tolist())
        assert measured[AttentionChoice(heads=(pair,))].tokens == pytest.approx(len(kept & wanted) / len(wanted))


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_recipes_lines_and_writes_attention(records, tiny_published, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(tiny_published, folder)
    before = json.loads((folder / "config.json").read_text())
    monkeypatch.setattr(calibration.Calibration, "fields", lambda self: {"relevance_heads": [[0, 3], [2, 1]]})
    result = CliRunner().invoke(app, ["calibrate", str(folder), str(records)])
    assert result.exit_code == 0, result.output
    config = json.loads((folder / "config.json").read_text())
    fields = {name: config["qtsplus_config"][name] for name in ("attention_layer", "attention_heads")}
    assert config == {**before, "qtsplus_config": {**before["qtsplus_config"], **fields}}
    assert make_model(None, str(folder)).config.qtsplus_config.attention_layer in range(4)
    assert f"selection=lm_attention: {json.dumps(fields)} finds" in result.stdout.replace("\n", " ")
    for words in ("measured on", "needle tokens", "all layers: ", "best: ", "relevance_heads: [[0, 3], [2, 1]]"):
        assert words in result.stdout


def test_questions_about_unreadable_videos_are_left_out(monkeypatch, tiny, tiny_processor, questions, tmp_path, capsys):
    monkeypatch.setattr(calibration, "_attention_by_head", planted([(2, 1)]))
    missing = replace(questions[0], record=replace(questions[0].record, video=str(tmp_path / "gone.mp4")))
    found = calibrate(tiny, tiny_processor, [missing, *questions])
    assert sum(found.questions) == len(questions)
    assert "gone.mp4" in capsys.readouterr().err.replace("\n", "")


def test_what_cannot_be_measured_is_refused(records, tiny_published, tmp_path):
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    labelled = [{**line, "video": str(records.parent / line["video"])} for line in lines if line["evidence"]]
    cases = {
        "none": ([{**line, "evidence": []} for line in labelled], "no question about a video with evidence"),
        "one": ([line for line in labelled if line["video"].endswith("/0.mp4")], "1 of the videos can be read"),
        "other": ([{**labelled[0], "evidence": [[{"start": 1}]]}], "is not a list of needles"),
        "unread": (
            [labelled[0], {**labelled[-1], "video": "gone.mp4"}],
            "1 of the videos can be read; expected two or more",
        ),
    }
    for name, (content, message) in cases.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
        result = CliRunner().invoke(app, ["calibrate", str(tiny_published), str(tmp_path / f"{name}.jsonl")])
        assert result.exit_code == 2, result.output
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("qtsplus: ")]
        assert message in line
    result = CliRunner().invoke(app, ["calibrate", str(tiny_published), str(tmp_path / "missing.jsonl")])
    assert result.exit_code == 2 and "There is no file" in result.stderr, result.stderr
