"""The learned benchmark at toy size: what it writes, and that nothing is done twice."""

import json
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qtsplus.benchmark.learned import policies
from qtsplus.benchmark.learned.questions import QuestionSet, with_questions_of_others
from qtsplus.benchmark.learned.report import write_report
from qtsplus.benchmark.learned.statistics import differences
from qtsplus.cli import app
from qtsplus.data.tinyworld import build_dataset
from qtsplus.training.dataset import VideoRecord
from qtsplus.training.models import load_model


@pytest.fixture(scope="module")
def setting(tmp_path_factory, tiny_processor):
    """A random base, and the command that benchmarks it with one seed, one retention and two variants."""
    folder = tmp_path_factory.mktemp("learned")
    for split in ("train", "test"):
        build_dataset(folder / "data", split, 2, seconds=(3,), max_objects=2, progress=False)
    load_model("qtsplus-tiny", None).save_pretrained(folder / "base")
    tiny_processor.save_pretrained(folder / "base")
    (folder / "recipe.yaml").write_text(f"""
model: {{weights: nothing, selector: {{selection: qtsplus, rho_min: 0.05, rho_max: 0.5, target_n: 9}}}}
data: {{train_files: [{folder}/data/train.jsonl]}}
training:
  {{output_dir: nothing, freeze_language_model: false, max_steps: 1, per_device_train_batch_size: 2,
    learning_rate: 1e-3, logging_steps: 1, report_to: none, use_cpu: true, disable_tqdm: true}}
""")
    return folder


def run(folder, *more):
    arguments = [
        "--base",
        "base",
        "--test",
        "data/test.jsonl",
        "--recipe",
        "recipe.yaml",
        "--out",
        "out",
        "--work",
        "work",
    ]
    paths = [word if word.startswith("--") else str(folder / word) for word in arguments]
    return CliRunner().invoke(app, ["bench", "learned", *paths, "--seed", "0", *more])


@pytest.fixture(scope="module")
def finished(setting):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "RETENTIONS", (0.1,))
        names = (policies.DEFAULT, "reference_positions")
        patch.setattr(policies, "VARIANTS", {name: policies.VARIANTS[name] for name in names})
        first = run(setting)
        assert first.exit_code == 0, first.output
        made = stamps(setting)
        answers = setting / "work/seed0.jsonl"
        before = answers.read_text().splitlines()
        forgotten = [line for line in before if line.startswith('{"key": "uniform-0.1"')]
        answers.write_text("".join(line + "\n" for line in before if line not in forgotten))
        second = run(setting)
        assert len(forgotten) == 1 and sorted(answers.read_text().splitlines()) == sorted(before)
    return first, made, second


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in (folder / "work").rglob("*") if path.is_file()}


def test_rows_for_every_policy(setting, finished):
    assert finished[0].exit_code == 0, finished[0].output
    rows = json.loads((setting / "out/learned.json").read_text())
    questions = {row["questions"] for row in rows}
    assert len(questions) == 1
    pooled = {(row["policy"], row["retention"]): row for row in rows if row["seed"] is None}
    for policy in ("all", "base_all"):
        assert pooled[policy, 1.0]["needle_recall"] == 1.0
        assert pooled[policy, 1.0]["kept"] == pooled[policy, 1.0]["asked"] == 108
    asked = ("straight_through", "reference_positions", "untrained_selector", "shuffled_question", "base_random")
    query_free = ("temporal_redundancy", "base_temporal_redundancy", "diversity", "base_diversity")
    for policy in (*asked, *query_free):
        row = pooled[policy, 0.1]
        assert row["kept"] == row["asked"] == 11
        assert 0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1 and 0 < row["needle_recall"] <= 1
        assert sum(kind["questions"] for kind in row["kinds"].values()) == row["questions"]
    assert pooled["fewer_frames", 0.1]["kept"] == 36 and pooled["lower_resolution", 0.1]["kept"] == 12
    own = pooled["straight_through", None]
    assert own["kept"] == own["asked"]
    seeds = {(row["policy"], row["retention"]) for row in rows if row["seed"] == 0}
    assert seeds == {key for key in pooled if not key[0].startswith("base_")}


def test_details_and_report(setting, finished):
    details = json.loads((setting / "out/learned-details.json").read_text())
    assert details["command"] and details["seeds"] == [0]
    assert {"processor", "threads", "torch", "transformers", "qtsplus"} <= set(details["environment"])
    default = details["agreement"][0]
    assert default["policy"] == "straight_through" and default["jaccard"] == 1.0
    assert default["kept_in_training"] == default["asked"]
    assert set(details["adaptive"]["rho"]) >= {"summary", "existence", "caption"}
    assert set(details["adaptive"]["wide_minus_point"]) >= {"summary", "caption"}
    (landed,) = details["dual"]
    assert landed["target"] == 9 and landed["target_fraction"] == pytest.approx(9 / 108)
    assert landed["off"] == pytest.approx(landed["reached"] / 9 - 1)
    gains = {(row["policy"], row["default_retention"]): row["gain"] for row in details["differences"]}
    assert {("uniform", 0.1), ("base_all", 0.1), ("reference_positions", None)} <= set(gains)
    assert gains["uniform", 0.1]["all"]["mean"] == 0  # a random model is never right
    table = (setting / "out/learned.md").read_text()
    assert "straight-through gate (default)" in table and "uniform (UNIF), base model" in table
    assert "diversity (as in DivPrune), base model" in table and "temporal redundancy (as in EVS)" in table
    for name in ("learned.png", "learned.svg", "learned-adaptive.png", "learned-adaptive.svg"):
        assert (setting / "out" / name).stat().st_size > 1000


def test_nothing_is_done_twice(setting, finished):
    _, made, second = finished
    assert second.exit_code == 0, second.output
    changed = {path.name for path, stamp in stamps(setting).items() if made.get(path) != stamp}
    assert changed == {"seed0.jsonl"}
    assert "trained" not in second.output


def test_another_recipe_does_not_mix_with_what_is_there(setting, finished):
    result = run(setting, "--set", "training.max_steps=2")
    assert result.exit_code == 2 and "another overrides" in result.output


def test_a_trained_vision_tower_and_training_videos_are_refused(setting, tmp_path):
    result = run(setting, "--set", "training.freeze_vision_model=false")
    assert result.exit_code == 2 and "vision tower" in result.output
    with pytest.raises(ValueError, match="training split"):
        QuestionSet.read(setting / "data/train.jsonl")


def test_gains_are_over_the_same_questions_and_their_interval_over_videos():
    def outcome(name, seed, correct):
        return {"policy": policies.Policy(name, name, 0.1), "seed": seed, "correct": correct}

    videos = ["a", "a", "b", "b", "c", "c"]
    records = [VideoRecord(video, "?", "!", kind="when") for video in videos]
    results = [
        outcome(policies.DEFAULT, 0, [1, 1, 1, 1, 0, 1]),
        outcome(policies.DEFAULT, 1, [1, 1, 0, 1, 0, 1]),
        outcome("random", 0, [0, 0, 1, 1, 0, 1]),
        outcome("random", 1, [0, 0, 0, 1, 0, 1]),
    ]
    (row,) = differences(results, records)
    gain = row["gain"]["when_and_order"]
    per_video = [1.0, 0.0, 0.0]  # with as many questions in each video, the interval is that of the videos' means
    half = 1.96 * statistics.stdev(per_video) / 3**0.5
    assert gain["mean"] == pytest.approx(1 / 3)
    assert gain["high"] - gain["mean"] == pytest.approx(half)


def test_a_shuffled_question_is_about_another_video(setting):
    records = QuestionSet.read(setting / "data/test.jsonl").records
    shuffled = with_questions_of_others(records, seed=0)
    asked = {(record.video, record.query or record.question) for record in records}
    for own, other in zip(records, shuffled, strict=True):
        assert (own.question, own.answer, own.video) == (other.question, other.answer, other.video)
        assert any(query == other.query and video != own.video for video, query in asked)


def test_every_policy_has_a_title_and_each_model_its_own():
    names = {model: [policy.name for policy in policies.policies_of(model)] for model in ("base", "fresh", "gumbel")}
    asked = policies.policies_of(policies.DEFAULT)
    labels = [policy.label for policy in asked]
    assert len(set(labels)) == len(labels)
    for name in (*sum(names.values(), []), *(policy.name for policy in asked)):
        assert policies.title_of(name)
    assert set(names["base"]) == {"base_all", *(f"base_{name}" for name in policies.BASELINES)}
    for name in policies.BASELINES:
        assert {policy.retention for policy in asked if policy.name == name} == set(policies.RETENTIONS)


def test_earlier_results_can_be_read(tmp_path):
    """The committed ones, of before some policies were added."""
    committed = Path(__file__).parents[2] / "benchmarks/results"
    rows, details = (json.loads((committed / f"{name}.json").read_text()) for name in ("learned", "learned-details"))
    write_report(rows, details, tmp_path)
    assert (tmp_path / "learned.md").read_text() == (committed / "learned.md").read_text()
