"""Recipes: the paper's table, and a run from YAML to a Hub folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_recipe import write_recipe, write_records
from typer.testing import CliRunner

from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.cli import app
from qtsplus.hub.card import card_data
from qtsplus.hub.files import variants
from qtsplus.training.models import make_config, make_model
from qtsplus.training.plan import make_plan
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import last_checkpoint, run

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
HEADS = "training.relevance_heads=[[3, 0], [3, 1]]"
# The paper's table: hyperparameter, QTSplus-3B-FT, QTSplus-3B
TABLE = """
model_max_length 384 288
num_train_epochs 2 2
batch_size 1 1
gradient_accumulation 1 8
learning_rate 1e-6 1e-6
weight_decay 0 0
warmup_ratio 0.01 0.01
lr_scheduler_type cosine cosine
max_grad_norm 1 1
freeze_vision_model True True
freeze_language_model False True
tau_s 0.5 0.5
n_max 512 256
rho_min 0.05 0.05
rho_max 0.5 0.5
dropout 0.0 0.0
reencode True True
scoring_layers 1 1
reencode_layers 2 2
lambda_t 0.2 0.1
lambda_m 0.3 0.17
lambda_s 0.05 0.05
"""
COUNTS = {
    "qtsplus-3b": "91,271,681 of 3,884,180,225 parameters are trained (2.35%)",
    "qtsplus-3b-ft": "3,177,210,369 of 3,884,180,225 parameters are trained (81.80%)",
}
REAL = [name for name in variants() if name != "qtsplus-tiny"]


def on_cpu(*overrides):
    return ["training.use_cpu=true", *overrides]


@pytest.mark.parametrize(("name", "column"), [("qtsplus-3b-ft", 1), ("qtsplus-3b", 2)])
def test_the_papers_recipe_holds_its_table(name, column):
    (recipe,) = load_stages(RECIPES / "paper.yaml", on_cpu(f"model.variant={name}"))
    training = recipe.training
    selector = make_config(recipe.model.variant, None, recipe.model.selector).qtsplus_config.to_dict()
    found = {
        **selector,
        "reencode": selector["reencode_layers"] > 0,
        "model_max_length": recipe.data.model_max_length,
        "batch_size": training.per_device_train_batch_size,
        "gradient_accumulation": training.gradient_accumulation_steps,
        "warmup_ratio": training.warmup_steps,
        "lr_scheduler_type": training.lr_scheduler_type.value,
    }
    for row in TABLE.strip().splitlines():
        cells = row.split()
        hyperparameter = cells[0]
        expected = cells[column]
        value = found.get(hyperparameter, getattr(training, hyperparameter, None))
        if isinstance(value, (bool, str)):
            assert str(value) == expected, hyperparameter
        else:
            assert value == float(expected), hyperparameter
    assert selector["gate"] == "gumbel"
    assert selector["reduction"] == "max"
    assert selector["query_states"] == "embeddings"
    assert training.get_warmup_steps(1000) == 10
    assert recipe.data.processor_kwargs == {}


@pytest.fixture
def dry_run(tmp_path):
    videos = [None, __file__, "http://127.0.0.1:1/a.mp4", "gone.mp4", "gone.mp4"]
    records = [{"video": video, "question": "Who knocks?", "answer": "Ann."} for video in videos]
    write_records(tmp_path / "records.jsonl", *records)

    def run(recipe: str, *overrides: str):
        command = ["train", str(RECIPES / recipe), "--dry-run"]
        places = [f"data.train_files=[{tmp_path}/records.jsonl]", f"training.output_dir={tmp_path}/out"]
        for override in (*places, *overrides):
            command += ["--set", override]
        return CliRunner().invoke(app, command)

    return run


@pytest.mark.parametrize("name", COUNTS)
def test_a_dry_run_counts_what_a_gradient_reaches_and_missing_videos(dry_run, tmp_path, name):
    result = dry_run("paper.yaml", f"model.variant={name}")
    assert result.exit_code == 0, result.output
    assert COUNTS[name] in result.output
    assert f"paper: videos that are missing: 1, such as {tmp_path}/gone.mp4." in result.stderr


def test_a_dry_run_of_two_stages_needs_no_variant(dry_run):
    folder = RECIPES.parent / "hub_configs" / "qtsplus-tiny"
    settings = ["model.variant=null", f"model.weights={folder}"]
    for override, heads in [
        ("model.dtype=bfloat16", "'what calibrate prints'"),
        ("training.relevance_heads=null", "null"),
    ]:
        without_heads = dry_run("qtsplus-3b.yaml", *settings, override)
        assert f", stage relevance: training.relevance_heads is {heads}; expected pairs" in without_heads.stderr
    result = dry_run("qtsplus-3b.yaml", *settings, HEADS)
    assert result.exit_code == 0, result.output
    assert "stage relevance: " in result.output
    assert "stage answers: " in result.output


def test_without_a_variant_folders_are_named_after_the_first_stages_weights():
    settings = ("model.variant=null", "model.weights=checkpoints/base", HEADS)
    relevance, answers = load_stages(RECIPES / "qtsplus-3b.yaml", on_cpu(*settings))
    assert str(relevance.output_dir.parent) == str(answers.output_dir) == "runs/base"


def test_weights_of_another_size_than_the_variant_are_refused(dry_run):
    folder = RECIPES.parent / "hub_configs" / "qtsplus-tiny"
    result = dry_run("qtsplus-3b.yaml", f"model.weights={folder}", HEADS)
    assert result.exit_code == 2
    assert "but the variant qtsplus-3b one of 2048: add --set model.variant=null" in result.stderr


def test_bfloat16_without_a_gpu_says_what_to_set(monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    message = r"paper.yaml: training: Your setup doesn't support bf16.* --set training.bf16=false"
    with pytest.raises(ValueError, match=message):
        load_stages(RECIPES / "paper.yaml", ["training.bf16=true"])


@pytest.mark.parametrize("name", REAL)
def test_two_stages_teach_the_scores_and_then_leave_them(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relevance, answers = load_stages(RECIPES / "qtsplus-3b.yaml", on_cpu(f"model.variant={name}", HEADS))
    base = card_data(name)["base_model"].rpartition("/")[2]
    weights = str(relevance.model.weights)
    assert base in weights or weights.startswith("checkpoints/")
    assert relevance.training.relevance_weight > 0
    assert relevance.training.freeze_language_model
    assert answers.model.weights == str(relevance.output_dir) == f"runs/{name}/relevance"
    assert answers.training.freeze_scores
    assert not answers.training.relevance_weight
    assert str(answers.output_dir) == f"runs/{name}"
    for stage in (relevance, answers):
        selector = make_config(name, None, stage.model.selector).qtsplus_config
        assert selector.gate == "detached"
        assert selector.reduction == "mean"
        assert selector.query_states == "layer"
    from_nothing = replace(relevance.model, weights=None)
    assert "parameters are trained" in make_plan(replace(relevance, model=from_nothing)).lines[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rat=1", "training.learning_rat is no field; the nearest are learning_rate, "),
        ("optimizer.lr=1", "SECTION.FIELD=VALUE"),
        ("data.train_files=[]", r"data.train_files is \[\]; expected .* at least 1 item"),
        ("training.max_steps=0", "max_steps is 0; expected at least 1"),
        ("training.bf16=yes", "training.bf16 is 'yes'; expected a valid boolean"),
        ("model.dtype=int8", "model.dtype is 'int8'; expected 'float32'"),
        ("training.deepspeed=none.json", "package that is not installed"),
        ("training.per_device_train_batch_size=0", "per_device_train_batch_size is 0; expected more than 0"),
        ("training.num_train_epochs=0", "num_train_epochs is 0.0; expected more than 0"),
        ("training.learning_rate=-1", "learning_rate is -1.0; expected more than 0"),
        ("training.weight_decay=-1", "weight_decay is -1.0; expected at least 0"),
        ("training.max_grad_norm=-1", "max_grad_norm is -1.0; expected at least 0"),
        ("training.label_smoothing_factor=2", "label_smoothing_factor is 2.0; expected at most 1"),
        ("training.seed=-1", "seed is -1; expected at least 0"),
        ("training.output_dir=", "training.output_dir is null; expected the folder"),
    ],
)
def test_mistakes_in_a_recipe_are_named(override, message):
    with pytest.raises(ValueError, match=message):
        load_stages(RECIPES / "paper.yaml", on_cpu(override))[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {", "line 1"),
        ("model: \xff", "broken.yaml is not YAML that can be read"),
        ("model: !!python/object/apply:os.system [true]", "python/object"),
        ("model: {variant: a}\nmodel: {variant: b}", 'found duplicate key "model"'),
        ("model: 5", "model is 5; expected a mapping"),
        ("stages: {one: {models: {}}}", "stages.one.models is no field; the nearest are model, "),
        ("model: {variant: qtsplus-tiny}\ntraining: {output_dir: out}", "data.train_files is missing"),
        (
            "model: {variant: qtsplus-tiny}\ndata: {train_files: [a]}\ntraining: {output_dir: out, use_cpu: true}\n"
            "stages: {first: {training: {lora_rank: 4}}, second: {}}",
            "the stage before second has a lora_rank",
        ),
        (
            "model: {variant: qtsplus-tiny}\ndata: {train_files: [a]}\ntraining: {output_dir: out, use_cpu: true}\n"
            "stages: {first: {}, second: {model: {weights: b}}}",
            "stages.second.model.weights is set; expected",
        ),
    ],
)
def test_what_is_no_recipe_is_said(tmp_path, text, message):
    (tmp_path / "broken.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        load_stages(tmp_path / "broken.yaml")[0]


def test_only_true_and_false_are_booleans(tmp_path):
    path = tmp_path / "plain.yaml"
    path.write_text(
        "model: {variant: qtsplus-tiny}\ndata: {train_files: [a]}\n"
        "training: {output_dir: out, save_strategy: no, use_cpu: true}"
    )
    (recipe,) = load_stages(path, ["training.bf16=false", "training.learning_rate=1e-6"])
    assert recipe.training.save_strategy == "no"
    assert recipe.training.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("changes", "weights_kept", "message"),
    [
        ({}, 0.9, "no whole safetensors file"),
        ({}, 0, "has no weights"),
        ({"model_type": "bert"}, 1, "of type 'bert'"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(tiny_published, tmp_path, changes, weights_kept, message):
    config = json.loads((tiny_published / "config.json").read_text())
    weights = (tiny_published / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    if weights_kept:
        length = int(weights_kept * len(weights))
        (tmp_path / "model.safetensors").write_bytes(weights[:length])
    with pytest.raises(ValueError, match=message):
        make_model("qtsplus-tiny", str(tmp_path))


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory, tiny_mp4) -> Path:
    record = {"video": str(tiny_mp4), "question": "What?", "answer": "A circle.", "query": None, "source": "vqa"}
    records = [record, {**record, "source": "mcq", "query": "Which?"}, {**record, "video": "missing.mp4"}]
    return write_recipe(
        tmp_path_factory.mktemp("recipe"),
        records,
        model={"selector": {"n_max": 20}},
        data={"processor_kwargs": {"fps": 1}},
        max_steps=2,
        per_device_train_batch_size=3,
        max_skipped=0.4,
        save_strategy="steps",
        save_steps=1,
        dataloader_num_workers=1,
    )


def assert_hub_folder(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    processor = json.loads((folder / "processor_config.json").read_text())
    assert config["qtsplus_config"]["n_max"] == 20
    assert config["auto_map"]["AutoModelForImageTextToText"].startswith("modeling_qtsplus.")
    assert processor["auto_map"]
    names = {path.name for path in folder.iterdir()}
    assert {"modeling_qtsplus.py", "selector_qtsplus.py", "processing_qtsplus.py", "tokenizer.json"} <= names


def test_a_run_ends_in_a_hub_folder_and_can_go_on(recipe_file):
    (recipe,) = load_stages(recipe_file)
    folder = run(recipe)
    assert_hub_folder(folder)
    assert_hub_folder(folder / "checkpoint-2")
    (folder / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="which is not replaced: .*go on with --resume"):
        run(recipe)
    run(load_stages(recipe_file, ["training.max_steps=3"])[0], resume=True)
    assert (folder / "checkpoint-3").is_dir()

    weights = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(folder).state_dict()
    assert torch.isfinite(weights["model.qtsplus.budget.mlp.0.weight"]).all()


def test_the_newest_whole_checkpoint_is_found_by_its_step(tmp_path):
    for name, state in {"2": '{"global_step": 2}', "best": '{"global_step": 10}', "11": "{}", "12": '{"glo'}.items():
        checkpoint = tmp_path / f"checkpoint-{name}"
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-best"
    assert last_checkpoint(tmp_path / "nothing") is None
