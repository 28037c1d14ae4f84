"""How a summary is scored by the events that it should tell."""

import json

import pytest
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.evaluation.events import mean_scores, score_events

EVENTS = "A red ball rolls in.\nThe dog takes the ball.\nA blue car leaves."


@pytest.mark.parametrize(
    ("said", "recall", "order", "invented"),
    [
        (EVENTS, 1, 1, 0),
        ("THE RED BALL IS ROLLING IN; THE DOG TAKES THE BALL! A BLUE CAR LEAVES", 1, 1, 0),
        ("A blue car leaves. A dog takes a ball. A red ball rolls.", 1, 0, 0),
        ("A dog takes a ball. A red ball rolls in. A blue car is leaving.", 1, 2 / 3, 0),
        ("A blue car leaves. A whale sings.", 1 / 3, None, 1 / 2),
        ("A whale sings.", 0, None, 1),
        ("", 0, None, None),
        ("Something red is seen.", 0, None, 1),
        ("A red ball rolls to a dog, who takes the ball, and a blue car leaves", 1, None, 0),
        ("It is the one that is there.", 0, None, 1),
    ],
)
def test_recall_order_and_what_was_invented(said, recall, order, invented):
    assert score_events(EVENTS, said) == {
        "recall": pytest.approx(recall),
        "order": order if order is None else pytest.approx(order),
        "invented": invented if invented is None else pytest.approx(invented),
    }


def test_events_may_be_lists_of_words_and_function_words_are_none():
    assert score_events("red ball\nblue car", "There was a car, and it was blue.")["recall"] == 1 / 2
    assert score_events("the and of", "the and of")["recall"] is None


def test_a_mean_is_of_those_that_have_it():
    scores = [score_events(EVENTS, ""), score_events(EVENTS, EVENTS)]
    assert mean_scores(scores) == {"recall": 0.5, "order": 1.0, "invented": 0.0}


def test_the_command_scores_records_of_events(tiny_mp4, tmp_path, tiny_published):
    rows = [{"video": str(tiny_mp4), "question": "What happens?", "answer": EVENTS, "kind": "events"}]
    rows.append({"video": str(tiny_mp4), "question": "What?", "answer": "red"})
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = ["eval", str(tmp_path / "set.jsonl"), "--model", str(tiny_published)]
    result = CliRunner().invoke(app, [*line, "--json"])
    kinds = json.loads(result.stdout)["kinds"]
    assert kinds["events"]["recall"] == 0.0 and "recall" not in kinds[""]
    assert "recall 0.0%, order none" in CliRunner().invoke(app, line).stdout
