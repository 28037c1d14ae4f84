"""The comparison of ways to choose, and of the parts of a model, on a few rendered videos."""

import json
from pathlib import Path

import pytest

from benchmarks.open.asking import of_the_same_video, open_test
from benchmarks.open.choice import FULL, OWN, PARTS, SHARES, make_test_set, run_choice

MODEL = Path("hub_configs/qtsplus-tiny")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choice")
    target = run_choice(MODEL, folder, folder / "results", videos=4, questions=12)
    return folder, target


def test_the_question_decides(results):
    _, target = results
    document = json.loads(target.read_text(encoding="utf-8"))
    assert (document["videos"], document["questions"], document["tokens"]) == (4, 12, 288)
    assert set(document["parts"]) == set(PARTS)
    assert document["parts"][FULL]["difference"] == [0.0, 0.0, 0.0]
    for figures in document["ways"].values():
        assert list(figures) == [f"{share:g}" for share in SHARES]
    at_a_tenth = {name: figures["0.1"] for name, figures in document["ways"].items()}
    assert at_a_tenth[OWN]["needle tokens"] > 2 * at_a_tenth["uniform"]["needle tokens"]
    assert at_a_tenth[OWN]["tokens"] == at_a_tenth["uniform"]["tokens"] == 29
    assert target.with_suffix(".png").stat().st_size > 10_000


def test_another_question_about_the_same_video_is_about_that_video(results):
    folder, _ = results
    test = open_test(MODEL, make_test_set(folder, 4))
    asked = {row["question"] for row in test.rows}
    for row, other in zip(test.rows, of_the_same_video(test), strict=True):
        assert other in asked
        assert other != row["question"]
        assert any(one["question"] == other and one["video"] == row["video"] for one in test.rows)
