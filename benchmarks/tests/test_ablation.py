"""Ablations: on the learned benchmark's policies, each against the model as it is, at the same number of tokens."""

import json

import numpy as np
import pytest

from benchmarks.learned import policies
from benchmarks.learned.ablation import Budget, ablate_checkpoint, ablate_recipe, ablation_rows
from benchmarks.learned.policies import Policy, changes_something
from benchmarks.learned.questions import QuestionSet, with_options
from benchmarks.learned.work import configured
from benchmarks.world.tinyworld import build_dataset
from qtsplus.data.records import VideoRecord
from qtsplus.training.models import make_model

RECIPE = """
model: {{weights: nothing, selector: {{gate: detached, reduction: mean}}}}
data: {{train_files: [{folder}/train.jsonl]}}
training:
  {{output_dir: nothing, max_steps: 1, per_device_train_batch_size: 2, learning_rate: 1e-3, logging_steps: 1,
   report_to: none, use_cpu: true, disable_tqdm: true, relevance_weight: 1.0, retention_range: [0.05, 0.3],
   retention_share: 1.0}}
"""


@pytest.fixture(scope="module")
def model():
    return make_model("qtsplus-tiny", None, seed=0).eval()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    for split in ("train", "test"):
        build_dataset(folder, split, 2, seconds=(2,), max_objects=20, progress=False, crowd=True)
    return folder


def test_every_axis_names_what_is_trained_or_asked():
    named = [name for names in policies.AXES.values() for name in names]
    assert set(named) == {*policies.VARIANTS, *policies.ASKED} - {policies.DEFAULT}
    assert len(named) == len(set(named)) and set(named) <= set(policies.TITLES)


def test_a_checkpoint_is_asked_with_each_part_left_out(model, tiny_processor, world, tmp_path):
    budgets = [Budget(None, 4), Budget(None, 25600), Budget(0.2)]
    call = {"name": "test", "budgets": budgets, "work": tmp_path / "work"}
    target = ablate_checkpoint(model, tiny_processor, world / "test.jsonl", tmp_path, **call)
    document = json.loads(target.read_text())
    rows = {(row["policy"], row["retention"], row["max_visual_tokens"]): row for row in document["rows"]}
    # The tiny model has a re-encoder with absolute time, the reduction sum and the prompt's positions.
    asked = {"uniform", "uniform_no_reencoding", "no_reencoding", "asked_max", "asked_mean"}
    asked |= {"asked_no_time", "asked_sequential", "with_options"}
    assert {name for name, *_ in rows} == {policies.DEFAULT, *asked} and len(rows) == 9 * 3
    for (name, retention, cap), row in rows.items():
        full = rows[policies.DEFAULT, retention, cap]
        assert (
            (cap == 4 and row["kept"] == 4)
            or row["kept"] == (15 if retention else full["kept"])
            or name == "with_options"
        )
        assert ("difference" in row) == ("recall_difference" in row) == (name != policies.DEFAULT)
        if name in ("no_reencoding", "asked_sequential"):  # read otherwise, not chosen otherwise
            assert row["recall_difference"]["mean"] == 0.0
        if name not in (policies.DEFAULT, "with_options"):
            assert row["difference"]["mean"] == pytest.approx(row["accuracy"] - full["accuracy"])
            assert 0 < row["difference"]["p"] <= 1 and row["questions"] == full["questions"]
    assert 0 < rows["with_options", 0.2, None]["questions"] < document["questions"]
    page = target.with_suffix(".md").read_text()
    assert "own budget, at most 25,600" in page and page.count("without re-encoding (nREENC)") == 3
    # Nothing is asked twice.
    model_generate, model.generate = model.generate, None
    try:
        again = ablate_checkpoint(model, tiny_processor, world / "test.jsonl", tmp_path / "again", **call)
    finally:
        model.generate = model_generate
    assert json.loads(again.read_text())["rows"] == document["rows"]


def test_every_policy_reaches_the_model(model, tiny_processor, world, tmp_path, monkeypatch):
    seen, config, generate = set(), model.config.qtsplus_config, model.generate

    def note(**call):
        how = (call["selection"], call["reencode"], call["max_visual_tokens"], call["retention"])
        seen.add((*how, config.reduction, config.reencode_rope, config.position_ids))
        return generate(**call)

    monkeypatch.setattr(model, "generate", note)
    call = {"name": "test", "budgets": [Budget(None, 4)], "work": tmp_path}
    ablate_checkpoint(model, tiny_processor, world / "test.jsonl", tmp_path, **call)
    as_it_is = ("sum", True, "original")
    assert seen == {
        ("qtsplus", True, 4, None, *as_it_is),
        ("qtsplus", False, 4, None, *as_it_is),
        ("uniform", True, 4, None, *as_it_is),
        ("uniform", False, 4, None, *as_it_is),
        ("qtsplus", True, 4, None, "max", True, "original"),
        ("qtsplus", True, 4, None, "mean", True, "original"),
        ("qtsplus", True, 4, None, "sum", False, "original"),
        ("qtsplus", True, 4, None, "sum", True, "sequential"),
    }


def test_a_model_without_a_part_is_not_asked_without_it(model):
    bare = make_model("qtsplus-tiny", None, {"reencode_layers": 0}).config.qtsplus_config
    asked = [name for name, changes in policies.ASKED.items() if changes_something(changes, bare)]
    assert not {"no_reencoding", "asked_no_time", "asked_time", "asked_sum", "asked_original"} & set(asked)
    assert {"uniform", "asked_max", "asked_sequential", "with_options"} <= set(asked)


def test_settings_hold_for_as_long_as_they_are_asked(model):
    config = model.config.qtsplus_config
    assert model.model.qtsplus.config is config
    with pytest.raises(KeyError), configured(model, (("reduction", "max"), ("position_ids", "sequential"))):
        assert (config.reduction, config.position_ids) == ("max", "sequential")
        raise KeyError
    assert (config.reduction, config.position_ids) == ("sum", "original")


def test_variants_are_trained_by_the_learned_benchmarks_machinery(world, tiny_processor, tmp_path):
    base = tmp_path / "base"
    make_model("qtsplus-tiny", None, seed=1).save_pretrained(base)
    tiny_processor.save_pretrained(base)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=world))
    call = {"recipe": recipe, "variants": ("no_time",), "seeds": (3,), "name": "test", "work": tmp_path / "work"}
    target = ablate_recipe(base, world / "test.jsonl", tmp_path, budgets=[Budget(0.2)], **call)
    document = json.loads(target.read_text())
    rows = {row["policy"]: row for row in document["rows"]}
    assert rows["no_time"]["trained"] and not rows["asked_no_time"]["trained"]
    assert rows["no_time"]["axis"] == rows["asked_no_time"]["axis"] == "absolute time"
    trained = make_model(None, str(tmp_path / "work" / "seed3" / "no_time")).config.qtsplus_config
    assert trained.reencode_rope is False
    assert document["variants"] == {"qtsplus": [], "no_time": ["model.selector.reencode_rope=false"]}
    with pytest.raises(ValueError, match="teaches no budget of the model's own"):
        ablate_recipe(base, world / "test.jsonl", tmp_path, budgets=[Budget(None, 256)], **call)


def test_the_query_with_options_is_asked_where_there_are_options():
    bare = VideoRecord("a", "What?", "!", query="What?")
    chosen = VideoRecord("a", "What? A. red B. blue", "A", query="What?")
    assert [one and one.query for one in with_options([bare, chosen, VideoRecord("a", "Why?", "!")])] == [
        None,
        "What? A. red B. blue",
        None,
    ]


def questions_about(videos):
    return QuestionSet(
        [VideoRecord(video, "?", "!", kind="x") for video in videos], [[] for _ in videos], {}, False, [], ""
    )


def test_differences_are_on_the_same_questions_and_tested_over_videos():
    questions = questions_about(list("aabbccdd"))
    full = Policy(policies.DEFAULT, policies.DEFAULT, 0.1)
    other = Policy("no_reencoding", policies.DEFAULT, 0.1, reencode=False)
    kept = [5] * 8
    results = [{"policy": full, "seed": seed, "correct": [1, 1, 1, 1, 1, 1, 0, 1], "kept": kept} for seed in (0, 1)] + [
        {"policy": other, "seed": 0, "correct": [0, 0, 0, 0, 1, 0, 0, None], "kept": kept},
        {"policy": other, "seed": 1, "correct": [0, 0, 0, 0, 1, 1, 0, None], "kept": kept},
    ]
    whole, row = ablation_rows(results, questions)
    assert whole["policy"] == policies.DEFAULT and whole["accuracy"] == 7 / 8 and whole["token_recall"] is None
    assert row["questions"] == 7 and row["difference"]["mean"] == pytest.approx(-4.5 / 7)
    assert (row["difference"]["gained"], row["difference"]["lost"]) == (0, 5)
    # Sums over videos of -2, -2, -0.5 and 0: t is -2.72, with three degrees of freedom.
    assert row["difference"]["p"] == pytest.approx(0.0725, abs=1e-4) and row["difference"]["high"] > 0
    assert "recall_difference" not in row
    assert np.isfinite([row["difference"]["low"], row["difference"]["high"]]).all()


def test_other_videos_than_tinyworlds_can_be_asked_about(world, tmp_path):
    video = next(world.glob("test/*.mp4"))
    line = {"video": str(video), "question": "What?", "answer": "red", "kind": "own"}
    (tmp_path / "own.jsonl").write_text(json.dumps(line) + "\n")
    found = QuestionSet.read_any(tmp_path / "own.jsonl")
    assert found.videos == [str(video)] and found.needles == [[]] and found.worlds == {}
    assert QuestionSet.read_any(world / "test.jsonl").needles == QuestionSet.read(world / "test.jsonl").needles
