"""Recipes: the paper's table, and a run from YAML to a Hub folder."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.cli import app
from qtsplus.training.recipe import last_checkpoint, load_recipe, run

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
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
    "qtsplus-3b": "129,557,249 trainable parameters (3.34% of 3,884,180,225)",
    "qtsplus-3b-ft": "3,215,495,937 trainable parameters (82.78% of 3,884,180,225)",
}


@pytest.mark.parametrize(("name", "column"), [("qtsplus-3b-ft", 1), ("qtsplus-3b", 2)])
def test_recipes_hold_the_papers_table(name, column):
    recipe = load_recipe(RECIPES / f"{name}.yaml", ["training.use_cpu=true"])
    selector, training = recipe.model.selector, recipe.training
    found = {
        **selector,
        "reencode": selector["reencode_layers"] > 0,
        "model_max_length": recipe.data.model_max_length,
        "batch_size": training.per_device_train_batch_size,
        "gradient_accumulation": training.gradient_accumulation_steps,
        "warmup_ratio": training.warmup_steps,
        "lr_scheduler_type": training.lr_scheduler_type.value,
    }
    for row in TABLE.split("\n")[1:-1]:
        hyperparameter, *values = row.split()
        value = found.get(hyperparameter, getattr(training, hyperparameter, None))
        expected = values[column - 1]
        if isinstance(value, (bool, str)):
            assert str(value) == expected, hyperparameter
        else:
            assert value == float(expected), hyperparameter
    assert selector["gate"] == "gumbel" and training.get_warmup_steps(1000) == 10


@pytest.mark.parametrize("name", COUNTS)
def test_dry_run_counts_as_the_paper_does(name):
    result = CliRunner().invoke(app, ["train", str(RECIPES / f"{name}.yaml"), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert COUNTS[name] in result.output and "a gradient reaches" in result.output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rat=1", "no field learning_rat"),
        ("optimizer.lr=1", "SECTION.FIELD=VALUE"),
        ("model.variant", "SECTION.FIELD=VALUE"),
    ],
)
def test_mistakes_in_a_recipe_are_named(override, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(RECIPES / "qtsplus-3b.yaml", ["training.use_cpu=true", override])


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory, tiny_mp4) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    record = {"video": str(tiny_mp4), "question": "What?", "answer": "A circle.", "query": None, "source": "vqa"}
    records = [record, {**record, "source": "mcq", "query": "Which?"}, {**record, "video": "missing.mp4"}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    path = folder / "tiny.yaml"
    path.write_text(f"""
model: {{variant: qtsplus-tiny, initialise: language_model, selector: {{n_max: 20}}}}
data: {{train_files: [{folder}/train.jsonl], processor_kwargs: {{fps: 1}}}}
training:
  {{output_dir: {folder}/run, max_steps: 2, per_device_train_batch_size: 3, learning_rate: 1e-3, use_cpu: true,
    save_steps: 1, logging_steps: 1, report_to: none, dataloader_num_workers: 1}}
""")
    return path


def test_a_run_ends_in_a_hub_folder_and_lists_what_it_skipped(recipe_file):
    folder = run(load_recipe(recipe_file))
    for saved in (folder, folder / "checkpoint-2"):
        config = json.loads((saved / "config.json").read_text())
        assert config["qtsplus_config"]["n_max"] == 20
        assert config["auto_map"]["AutoModelForImageTextToText"].startswith("modeling_qtsplus.")
        assert json.loads((saved / "processor_config.json").read_text())["auto_map"]
        names = {path.name for path in saved.iterdir()}
        assert {"modeling_qtsplus.py", "selector_qtsplus.py", "processing_qtsplus.py", "tokenizer.json"} <= names
    skipped = json.loads((folder / "skipped_files.json").read_text())
    assert [Path(name).name for name in skipped] == ["missing.mp4"]

    with pytest.raises(ValueError, match="checkpoint-2"):
        run(load_recipe(recipe_file))
    before = torch.load(folder / "checkpoint-2/optimizer.pt", weights_only=True)["state"]
    run(load_recipe(recipe_file, ["training.max_steps=3"]), resume=True)
    assert before and (folder / "checkpoint-3").is_dir()

    card = (folder / "README.md").read_text()
    assert "custom_code" in card and "| steps | 3 |" in card and "| learning_rate |" in card
    weights = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(folder).state_dict()
    assert torch.isfinite(weights["model.qtsplus.budget.mlp.0.weight"]).all()
    # Training goes on from the result of another run.
    again = load_recipe(
        recipe_file, [f"model.weights={folder}", "model.variant=null", f"training.output_dir={folder}2"]
    )
    assert (run(again) / "config.json").exists()


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path):
    for step, state in ((2, "{}"), (4, '{"glo'), (6, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert last_checkpoint(tmp_path / "nothing") is None
