"""The learned benchmark at toy size: what it writes, and that nothing is done twice."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.learned import policies
from benchmarks.learned.plan import make_plan
from benchmarks.world.tinyworld import build_dataset
from qtsplus.training.models import make_model
from qtsplus.training.recipe import load_stages

TRAINING = """
  {output_dir: nothing, max_steps: 1, per_device_train_batch_size: 2, learning_rate: 1e-3, logging_steps: 1,
   report_to: none, use_cpu: true, disable_tqdm: true"""
# The recipe's own: scores that the frozen model's attention teaches, and no budget.
TAUGHT = f"""
model: {{{{weights: nothing, selector: {{{{gate: detached, reduction: mean, reencode_layers: 0}}}}}}}}
data: {{{{train_files: [{{folder}}/crowd/train.jsonl]}}}}
training: {TRAINING.replace("{", "{{")},
   relevance_weight: 1.0, retention_range: [0.05, 0.3], retention_share: 1.0}}}}
"""
# A language model that adapts, with its own budget.
ADAPTED = f"""
model: {{{{weights: nothing, selector: {{{{selection: qtsplus, rho_min: 0.05, rho_max: 0.5, target_n: 9}}}}}}}}
data: {{{{train_files: [{{folder}}/sparse/train.jsonl]}}}}
training: {TRAINING.replace("{", "{{")}, freeze_language_model: false}}}}
"""


@pytest.fixture(scope="module")
def setting(tmp_path_factory, tiny_processor):
    """Two random bases, two recipes, and questions about both worlds."""
    folder = tmp_path_factory.mktemp("learned")
    for split in ("train", "test"):
        build_dataset(folder / "crowd", split, 2, seconds=(2,), max_objects=20, progress=False, crowd=True)
        build_dataset(folder / "sparse", split, 2, seconds=(3,), max_objects=2, progress=False)
    for seed in (0, 1):
        make_model("qtsplus-tiny", None, seed=seed).save_pretrained(folder / f"base{seed}")
        tiny_processor.save_pretrained(folder / f"base{seed}")
    for name, recipe in (("taught", TAUGHT), ("adapted", ADAPTED)):
        (folder / f"{name}.yaml").write_text(recipe.format(folder=folder))
    return folder


def run(folder, recipe, world, bases, seeds, *more):
    paths = {"test": f"{world}/test.jsonl", "recipe": f"{recipe}.yaml", "out": f"{recipe}-out", "work": recipe}
    options = [f"--{name}={folder / path}" for name, path in paths.items()]
    options += [f"--base={folder / f'base{number}'}" for number in bases] + [f"--seed={seed}" for seed in seeds]
    return CliRunner().invoke(app, ["learned", *options, *more])


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def results(folder, recipe):
    names = ("learned", "learned-details")
    rows, details = (json.loads((folder / f"{recipe}-out/{name}.json").read_text()) for name in names)
    return rows, {(row["policy"], row["retention"]): row for row in rows if row["seed"] is None}, details


@pytest.fixture(scope="module")
def crowded(setting):
    """A base for each of two seeds; then the same again, with one answer forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "RETENTIONS", (0.1,))
        call = (setting, "taught", "crowd", (0, 1), (3, 5), "--variant=gumbel", "--variant=mean")
        first = run(*call)
        assert first.exit_code == 0, first.output
        made = stamps(setting / "taught")
        (answers,) = (setting / "taught").glob("answers-*/seed5.jsonl")
        before = answers.read_text().splitlines()
        forgotten = [line for line in before if '"key": "needle_oracle-0.1"' in line]
        answers.write_text("".join(line + "\n" for line in before if line not in forgotten))
        second = run(*call)
        assert len(forgotten) == 1 and sorted(answers.read_text().splitlines()) == sorted(before)
    return first, made, second


@pytest.fixture(scope="module")
def sparse(setting):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "RETENTIONS", (0.1,))
        result = run(setting, "adapted", "sparse", (0,), (0,), "--variant=no_reencoder")
    assert result.exit_code == 0, result.output
    return result


def test_rows_for_every_policy_in_the_crowd(setting, crowded):
    rows, pooled, details = results(setting, "taught")
    assert details["crowd"] is True and all(row["crowd"] for row in rows)
    models = {policies.DEFAULT, "gumbel"}  # the recipe's reduction is the mean already
    assert set(details["variants"]) == models and details["bases"] == 2
    plain = {*models, *policies.BASELINES, *policies.ORACLES, *policies.WRONG_QUESTIONS, "untrained_selector"}
    plain |= {policies.TWO_PASSES}
    controls = {f"gumbel_{name}" for name in policies.WRONG_QUESTIONS}
    # A frozen language model without a re-encoder reads all tokens as its base does, and knows no budget.
    untrained = {("base_lm_attention", 0.1), ("base_lm_attention", None)}
    untrained |= {(f"base_{name}", 0.1) for name in policies.WRONG_QUESTIONS}
    assert set(pooled) == {("base_all", 1.0), *untrained, *((name, 0.1) for name in plain | controls)}
    for name in plain | controls:
        assert {row["seed"] for row in rows if row["policy"] == name} == {None, 3, 5}
        row = pooled[name, 0.1]
        assert 0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1
        assert row["model"] == ("gumbel" if "gumbel" in name else "fresh" if "untrained" in name else "qtsplus")
        if name not in ("fewer_frames", "lower_resolution"):
            assert row["kept"] == row["asked"] == 8  # of 72
            assert all(0 <= row[f"{what}_recall"] <= 1 for what in ("needle", "token", "distractor"))
        questions = {part: sum(found["questions"] for found in row[part].values()) for part in ("kinds", "groups")}
        assert questions["kinds"] == row["questions"] == row["groups"]["all"]["questions"]
        assert set(row["groups"]) >= {"all", "point", "two_word", "relation"}
    assert pooled["base_all", 1.0]["needle_recall"] == pooled["base_all", 1.0]["distractor_recall"] == 1.0


def test_two_passes_say_what_they_encode(setting, crowded):
    """72 tokens: 2 steps of 3 x 3 small ones, then 4 tiles of 2 x 2, of which 8 tokens are kept."""
    _, pooled, _ = results(setting, "taught")
    row = pooled[policies.TWO_PASSES, 0.1]
    assert row["first_pass_fraction"] == pytest.approx(18 / 72) and row["second_pass_fraction"] == pytest.approx(
        16 / 72
    )
    assert "first_pass_fraction" not in pooled[policies.DEFAULT, 0.1]
    report = (setting / "taught-out/learned.md").read_text()
    assert "## Two passes" in report and "| 10% | 25.0% | 22.2% |" in report


def test_oracles_keep_what_they_know(setting, crowded):
    _, pooled, _ = results(setting, "taught")
    needles, salience, random = (pooled[name, 0.1] for name in ("needle_oracle", "salience_oracle", "random"))
    # 8 tokens are enough for most needles, and a salience oracle wastes none on the background.
    assert needles["needle_recall"] == 1.0 and needles["token_recall"] > 0.9
    assert needles["distractor_recall"] < random["distractor_recall"] < salience["distractor_recall"]
    assert salience["token_recall"] < 0.5


def test_what_the_choice_owes_to_the_question(setting, crowded):
    _, _, details = results(setting, "taught")
    found = {(row["model"], row["wrong_question"], row["group"]): row for row in details["question_driven"]}
    for model in (policies.DEFAULT, "gumbel", "base_lm_attention"):
        for wrong in policies.WRONG_QUESTIONS:
            row = found[model, wrong, "all"]
            assert row["questions"] > 0 and 0 <= row["disagreement"] <= 1
            assert row["share"] == {}  # random models do not beat uniform tokens


def test_several_bases_each_have_their_seed(setting, crowded):
    bases = [json.loads((setting / f"taught/seed{seed}/setup.json").read_text())["base"] for seed in (3, 5)]
    assert bases[0] != bases[1]
    same_seed = run(setting, "taught", "crowd", (1,), (3,))
    assert same_seed.exit_code == 2 and "seed3 was made with another base" in same_seed.output
    too_many = run(setting, "taught", "crowd", (0, 1), (3,))
    assert too_many.exit_code == 2 and "2 bases for 1 seeds" in too_many.output


def test_nothing_is_done_twice(setting, crowded):
    _, made, second = crowded
    assert second.exit_code == 0, second.output
    changed = {path.name for path, stamp in stamps(setting / "taught").items() if made.get(path) != stamp}
    assert changed == {"seed5.jsonl"}
    assert "trained" not in second.output


def test_other_questions_are_asked_of_the_same_models(setting, crowded, monkeypatch):
    monkeypatch.setattr(policies, "RETENTIONS", (0.1,))
    before = stamps(setting / "taught/seed3")
    result = run(setting, "taught", "sparse", (0,), (3,), "--variant=qtsplus", f"--out={setting / 'other'}")
    assert result.exit_code == 0, result.output
    assert stamps(setting / "taught/seed3") == before
    assert json.loads((setting / "other/learned-details.json").read_text())["crowd"] is False


def test_another_recipe_does_not_mix_with_what_is_there(setting, crowded):
    result = run(setting, "taught", "crowd", (0, 1), (3, 5), "--set", "training.max_steps=2")
    assert result.exit_code == 2 and "another overrides" in result.output


def test_a_trained_vision_tower_and_an_unknown_variant_are_refused(setting):
    result = run(setting, "taught", "crowd", (0,), (0,), "--set", "training.freeze_vision_model=false")
    assert result.exit_code == 2 and "vision tower" in result.output
    result = run(setting, "taught", "crowd", (0,), (0,), "--variant=best")
    assert result.exit_code == 2 and "no variant 'best'; expected one of qtsplus, gumbel" in result.output


def test_own_budgets_in_the_sparse_world(setting, sparse):
    _, pooled, details = results(setting, "adapted")
    assert details["crowd"] is False and details["bases"] == 1
    assert set(details["variants"]) == {policies.DEFAULT, "no_reencoder"}
    own = pooled[policies.DEFAULT, None]
    assert own["kept"] == own["asked"]
    assert {"all", "base_all"} == {name for name, share in pooled if share == 1.0}
    assert {f"base_{name}" for name in policies.BASELINES} < {name for name, _ in pooled}
    assert pooled["fewer_frames", 0.1]["kept"] == 36 and pooled["lower_resolution", 0.1]["kept"] == 12
    assert "two_word" not in own["groups"]
    assert set(details["adaptive"]["rho"]) >= {"summary", "existence", "caption"}
    assert set(details["adaptive"]["wide_minus_point"]) >= {"summary", "caption"}
    (landed,) = details["dual"]
    assert landed["target"] == 9 and landed["target_fraction"] == pytest.approx(9 / 108)
    assert landed["off"] == pytest.approx(landed["reached"] / 9 - 1)
    assert landed["test_fraction"] == pytest.approx(own["asked"] / 108)


def test_gates_in_training(setting, crowded):
    _, _, details = results(setting, "taught")
    gates = {row["policy"]: row for row in details["agreement"]}
    detached, gumbel = gates[policies.DEFAULT], gates["gumbel"]
    assert detached["jaccard"] == 1.0 and detached["kept_in_training"] == detached["asked"] == 8
    assert gumbel["asked"] == 8 and gumbel["jaccard"] < 0.9


def test_report(setting, crowded, sparse):
    _, _, details = results(setting, "taught")
    assert details["command"] and details["seeds"] == [3, 5]
    assert {"processor", "threads", "torch", "transformers", "qtsplus"} <= set(details["environment"])
    gains = {(row["policy"], row["default_retention"]): row["gain"] for row in details["differences"]}
    assert gains["uniform", 0.1]["all"]["mean"] == 0  # a random model is never right
    table = (setting / "taught-out/learned.md").read_text()
    for words in (
        "of the crowded world; training seeds [3, 5], a base for each seed.",
        "The recipe has gate detached, reduction mean, scoring_layers 1",
        "## Right answers by tokens kept",
        "Two-word names:",
        "Relations:",
        "Control: another question of the same video:",
        "| oracle: the needles |",
    ):
        assert words in table, words
    assert "control: another question of the same video; the paper's gate, no teacher" in table
    for name in ("taught-out/learned", "adapted-out/learned", "adapted-out/learned-adaptive"):
        assert (setting / f"{name}.png").stat().st_size > 1000
    assert not (setting / "taught-out/learned-adaptive.png").exists()
    assert details["adaptive"] is None and "own budget by kind" not in table


def test_variants_are_what_differs_from_the_recipe(setting):
    def variants(name, *overrides):
        return set(make_plan(setting / f"{name}.yaml", overrides, setting / "base0").variants)

    teacherless = {"gumbel", "soft"}
    taught = variants("taught")
    assert {policies.DEFAULT, *teacherless, "max", "sum", "two_layers", "embeddings"} <= taught
    assert not {"mean", "one_layer", "layer", "no_reencoder"} & taught
    assert "mean" in variants("taught", "model.selector.reduction=max")
    assert "no_reencoder" in variants("taught", "model.selector.reencode_layers=1")
    gumbel = variants("adapted", "model.selector.gate=gumbel")
    assert "gumbel" not in gumbel and "soft" in gumbel
    for name in teacherless:
        recipe = load_stages(setting / "taught.yaml", policies.VARIANTS[name])[0]
        assert recipe.training.relevance_weight == 0 and recipe.training.freeze_language_model
        assert recipe.model.selector["gate"] == name and recipe.training.max_steps == 1


def test_every_policy_has_a_title_and_each_model_its_own():
    models = (policies.BASE, policies.FRESH, *policies.VARIANTS)
    for adapted in (True, False):
        asked = [policy for model in models for policy in policies.policies_of(model, True, adapted)]
        labels = [policy.label for policy in asked]
        assert len(set(labels)) == len(labels)
        assert len({policies.title_of(policy.name) for policy in asked}) == len({policy.name for policy in asked})
        for policy in asked:
            model = policies.DEFAULT if policy.model == policies.FRESH else policy.model
            assert policies.parts_of(policy.name)[1] == model
        for name in policies.BASELINES:
            assert {policy.retention for policy in asked if policy.name == name} == set(policies.RETENTIONS)
