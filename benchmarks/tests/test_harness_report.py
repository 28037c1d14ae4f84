"""Runs side by side: gains at equal tokens, and what a report says of its runs."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.harness.report import read_runs, write_report


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
    (folder / "samples").mkdir(parents=True)
    (folder / "samples" / f"{task}.jsonl").write_text("{}\n")
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


def table_of(runs, title, out):
    """The cells of a table of the report, with its head first; nothing where there is none."""
    page = write_report(runs, out / "report.md").read_text().partition(f"## {title}\n\n")[2]
    lines = [line for line in page.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def test_gains_are_over_runs_with_as_many_tokens_on_the_same_questions(runs, tmp_path):
    _, row = table_of(runs, "Gains at equal tokens", tmp_path)
    task, own, other, gain, interval, p, *tokens = row
    assert (task, own, other) == ("crowd/exact_match", "tiny, 10%", "tiny, uniform 10%")
    assert (gain, p, tokens) == ("+33.3", "0.1835", ["29", "29", "6", "3"])
    # 1/3 +- 4.303 / 6, the t of two degrees of freedom: the three videos are off the mean by 1/3, 1/3 and -2/3 in sum.
    assert interval == "-38.4 to +100.0"


def test_whole_frames_may_be_a_few_tokens_more(tmp_path):
    own = write_run(tmp_path / "own", [1, 1, 0, 0])
    frames = [write_run(tmp_path / str(kept), [1, 0, 0, 0], kept=kept, selection="all") for kept in (20, 36, 72)]
    _, row = table_of(read_runs([own, *frames]), "Gains at equal tokens", tmp_path)
    assert row[-4:-2] == ["29", "36"]


def test_other_questions_give_no_gain(tmp_path):
    own = write_run(tmp_path / "own", [1, 1, 0, 0])
    fewer = write_run(tmp_path / "fewer", [1, 0], selection="uniform")
    assert not table_of(read_runs([own, fewer]), "Gains at equal tokens", tmp_path)


def test_every_table_says_how_many_questions_and_videos(runs, tmp_path):
    for title in ("Accuracy", "Gains at equal tokens", "Tokens"):
        head, *rows = table_of(runs, title, tmp_path)
        places = [head.index(name) for name in ("questions", "videos")]
        assert [[row[place] for place in places] for row in rows] == [["6", "3"]] * len(rows)
    document = json.loads((runs[0].folder / "run.json").read_text())
    for sample in document["tasks"]["crowd"]["samples"][:2]:
        sample["scores"] = {"speed": 1.0}
    document["tasks"]["crowd"]["metrics"] = {"speed": 100.0, "exact_match": 50.0, "unknown": 3.0}
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "run.json").write_text(json.dumps(document))
    _, *rows = table_of(read_runs([tmp_path / "speed"]), "Accuracy", tmp_path)
    assert [row[-2:] for row in rows] == [["2", "1"], ["4", "2"], ["", ""]]


def test_the_page_links_the_log_of_every_sample(runs, tmp_path):
    result = CliRunner().invoke(
        app, ["report", *(str(run.folder) for run in runs), "--out", str(tmp_path / "made" / "report.md")]
    )
    assert result.exit_code == 0, result.output
    page = (tmp_path / "made" / "report.md").read_text()
    link = "../own/samples/crowd.jsonl"
    assert f"[crowd]({link})" in page and (tmp_path / "made" / link).exists()
    assert "lmms-eval 0.7.3" in page and "retention 0.1" in page and "66.67 (" in page


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[]",
        "5",
        "{",
        "[" * 100_000,
        '{"settings": {}}',
        '{"settings": {}, "versions": {}, "tasks": {}}',
        '{"settings": {"model": "a", "options": {}}, "versions": {}, "tasks": {"a": {"metrics": {}, "samples": []}}}',
    ],
)
def test_what_is_no_run_is_refused(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "report.md")])
    assert result.exit_code == 2 and "run.json" in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_report_replaces_reports_alone(runs, tmp_path):
    for _ in range(2):
        write_report(runs, tmp_path / "report.md")
    for name, message in (("mine.md", "is there already"), ("mine.txt", "ends with .md"), ("mine", "ends with .md")):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=message):
            write_report(runs, tmp_path / name)
    assert (tmp_path / "mine.md").read_text() == "mine"


def test_two_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = read_runs([write_run(tmp_path / name, [1, 0]) for name in ("first", "second")])
    assert [run.label for run in runs] == ["tiny (first)", "tiny (second)"]
