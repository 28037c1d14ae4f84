"""Runs side by side: ranks, gains at equal tokens, and the paper's figures."""

import json

import pytest
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.evaluation.harness.catalogue import published
from qtsplus.evaluation.harness.report import read_runs, tables, write_report


def write_run(folder, scores, kept=29, task="crowd", metric="exact_match", **options):
    """A finished run: `scores` of the questions, two about each video."""
    samples = [
        {
            "doc_id": index,
            "video": f"{index // 2}.mp4",
            "visual_tokens": 288,
            "kept_visual_tokens": kept,
            "failed": None,
            "scores": {metric: score},
        }
        for index, score in enumerate(scores)
    ]
    document = {
        "settings": {"model": "models/tiny", "tasks": task, "options": options},
        "versions": {"qtsplus": "0.1.0", "lmms-eval": "0.7.3"},
        "tasks": {task: {"metrics": {metric: 100 * sum(scores) / len(scores)}, "samples": samples}},
    }
    (folder / "harness" / "model").mkdir(parents=True)
    (folder / "harness" / "model" / f"1_samples_{task}.jsonl").write_text("{}\n")
    (folder / "run.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def runs(tmp_path):
    return read_runs(
        [
            write_run(tmp_path / "own", [1, 1, 1, 0, 1, 0], retention=0.1),
            write_run(tmp_path / "uniform", [1, 0, 0, 0, 1, 0], retention=0.1, selection="uniform"),
            write_run(tmp_path / "all", [1, 1, 0, 0, 1, 0], kept=288, selection="all"),
        ]
    )


def table_of(runs, title):
    return next(table for table in tables(runs) if table.title.startswith(title))


def test_the_best_is_bold_and_the_second_underlined(runs, tmp_path):
    page = write_report(runs, tmp_path / "report.md")[0].read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| crowd/exact_match | **")]
    own, uniform, everything = row.split(" | ")[1:]
    assert own.startswith("**66.67 (") and own.endswith(")**")
    assert everything.startswith("<u>50.00") and uniform.startswith("33.33")


def test_equal_figures_share_a_rank(tmp_path):
    runs = [write_run(tmp_path / name, [1, 0], selection=name) for name in ("uniform", "random", "diversity")]
    page = write_report(read_runs(runs), tmp_path / "report.md")[0].read_text()
    assert page.count("**50.00") == 3 and "<u>" not in page


def test_gains_are_over_runs_with_as_many_tokens_on_the_same_questions(runs):
    (row,) = table_of(runs, "Gains").rows
    task, own, other, gain, interval, p, *tokens = row
    assert (task, own, other) == ("crowd/exact_match", "tiny, 10%", "tiny, uniform 10%")
    assert (gain, p, tokens) == ("+33.3", "0.5000", ["29", "29"])
    assert interval == "+0.7 to +66.0"  # 1/3 +- 1.96 / 6: the three videos are off the mean by 1/3, 1/3 and -2/3 in sum


def test_whole_frames_may_be_a_few_tokens_more(tmp_path):
    own = write_run(tmp_path / "own", [1, 1, 0, 0])
    frames = [
        write_run(tmp_path / str(kept), [1, 0, 0, 0], kept=kept, selection="fewer_frames") for kept in (20, 36, 72)
    ]
    (row,) = table_of(read_runs([own, *frames]), "Gains").rows
    assert row[-2:] == ["29", "36"]


def test_other_questions_give_no_gain(tmp_path):
    own = write_run(tmp_path / "own", [1, 1, 0, 0])
    fewer = write_run(tmp_path / "fewer", [1, 0], selection="uniform")
    assert not [table for table in tables(read_runs([own, fewer])) if table.title.startswith("Gains")]


def test_published_figures_stand_beside_ours_and_say_so(tmp_path):
    metric = "videomme_perception_score"
    runs = read_runs([write_run(tmp_path / "own", [1, 0], task="videomme", metric=metric)])
    table = table_of(runs, "Beside the paper: Performance on Tasks")
    assert table.head[2:] == [f"{name} (published)" for name in published()[0].columns]
    assert table.rows == [[f"videomme/{metric}", "50.00", "57.81", "57.07", "55.78"]]
    assert "not measured here" in table.note
    assert not [t for t in tables(read_runs([write_run(tmp_path / "o", [1, 0])])) if "paper" in t.title]


def test_clue_recall_is_told_beside_what_chance_gives(tmp_path):
    folder = write_run(tmp_path / "own", [1, 0], task="cgbench")
    document = json.loads((folder / "run.json").read_text())
    for sample, kept in zip(document["tasks"]["cgbench"]["samples"], (10, 20), strict=True):
        sample.update(clue_tokens=40, kept_clue_tokens=kept, visual_tokens=290)
    (folder / "run.json").write_text(json.dumps(document))
    (row,) = table_of(read_runs([folder]), "Clues").rows
    assert row[2:] == ["2", "37.5%", "10.0%", "3.75"]


def test_the_pages_link_the_log_of_every_sample(runs, tmp_path):
    result = CliRunner().invoke(
        app, ["eval", "report", *(str(run.folder) for run in runs), "--out", str(tmp_path / "made" / "report.md")]
    )
    assert result.exit_code == 0, result.output
    page = (tmp_path / "made" / "report.html").read_text()
    link = "../own/harness/model/1_samples_crowd.jsonl"
    assert f'<a href="{link}">crowd</a>' in page and (tmp_path / "made" / link).exists()
    assert f"[crowd]({link})" in (tmp_path / "made" / "report.md").read_text()
    tables = json.loads((tmp_path / "made" / "report.json").read_text())
    assert [table["title"] for table in tables] == ["Accuracy", "Gains at equal tokens", "Tokens", "Settings"]
    assert "lmms-eval 0.7.3" in page and "retention 0.1" in page and "<b>66.67" in page


def test_two_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = read_runs([write_run(tmp_path / name, [1, 0]) for name in ("first", "second")])
    assert [run.label for run in runs] == ["tiny (first)", "tiny (second)"]
