"""A run loses nothing: what it skips, what it finds in its folder, and how stages follow each other."""

import gc
import json
import resource
import weakref
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_recipe import write_recipe, write_records
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.common.files import working_in
from qtsplus.hub.files import TINY, hub_configs
from qtsplus.training import running
from qtsplus.training.lora import load_lora, merge_lora
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import run, run_stages

SCORES = ("model.qtsplus.scoring_layers.", "model.qtsplus.question_layers.")


@pytest.fixture
def record(tiny_mp4) -> dict:
    return {"video": str(tiny_mp4), "question": "What?", "answer": "A circle."}


@pytest.fixture
def recipe_file(tmp_path, record) -> Path:
    return write_recipe(
        tmp_path,
        [record] * 3,
        model={"selector": {"gate": "detached", "reduction": "mean"}},
        data={"processor_kwargs": {"fps": 1}},
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        retention_range=[0.1, 0.3],
    )


def train(recipe: Path, *overrides: str, option: str | None = None):
    command = ["train", str(recipe)]
    if option is not None:
        command.append(option)
    for override in overrides:
        command += ["--set", override]
    return CliRunner().invoke(app, command)


def test_a_disk_that_is_full_at_a_checkpoint_is_one_line(recipe_file, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        result = train(recipe_file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 2, result.output
    assert f"{tmp_path}/run cannot be written: Error while serializing" in " ".join(result.stderr.split())


@pytest.fixture
def broken(tmp_path, record) -> dict:
    """A record whose video cannot be read."""
    video = tmp_path / "broken.mp4"
    video.write_bytes(b"no video")
    return {**record, "video": str(video)}


@pytest.mark.parametrize("files", ["train_files", "eval_files"])
def test_a_run_whose_videos_are_broken_is_an_error_and_may_be_run_again(recipe_file, broken, tmp_path, files):
    write_records(tmp_path / "other.jsonl", broken, broken)
    sets = [f"data.eval_files=[{tmp_path}/train.jsonl]", f"data.{files}=[{tmp_path}/other.jsonl]"]
    result = train(recipe_file, *sets, "training.eval_strategy=epoch")
    assert result.exit_code == 2
    assert "100.0% of the records cannot be used" in result.stderr
    assert not (tmp_path / "run/config.json").exists()
    assert train(recipe_file).exit_code == 0
    assert (tmp_path / "run/config.json").exists()


def test_a_short_run_over_a_large_set_is_judged_by_the_records_that_it_draws(recipe_file, record, broken, tmp_path):
    write_records(tmp_path / "train.jsonl", *[broken] * 4, *[record] * 60)
    sets = ["training.train_sampling_strategy=sequential", "training.per_device_train_batch_size=2"]
    result = train(recipe_file, *sets, "training.max_steps=2")
    assert result.exit_code == 2
    assert "of the records cannot be used" in result.stderr
    assert train(recipe_file, *sets, "training.max_steps=20").exit_code == 0, "4 of 40 are a tenth"


def test_metrics_are_no_result_and_pipes_have_no_bars(recipe_file, record, broken, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("qtsplus.training.dataset.logger.warning_once", warnings.append)
    write_records(tmp_path / "train.jsonl", record, record, record, broken)
    settings = ["training.per_device_train_batch_size=4", "training.dataloader_num_workers=1"]
    result = train(recipe_file, "training.max_skipped=0.3", *settings)
    assert result.exit_code == 0, result.output
    assert "".join(result.stdout.split()) == f"Wrote{tmp_path}/run"
    assert "'loss_lm'" in result.stderr
    assert "it/s" not in result.stderr
    (warning,) = warnings
    assert warning.startswith(f"Skipped {broken['video']}: ")


def test_an_interrupted_training_names_the_option_that_goes_on(recipe_file, monkeypatch):
    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_stages", interrupt)
    result = train(recipe_file)
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted; --resume goes on from the last complete checkpoint\n")


def test_files_that_are_in_the_folder_are_not_replaced(recipe_file, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (recipe,) = load_stages(recipe_file)
    with pytest.raises(ValueError, match="holds notes.txt, which is not replaced"):
        run(recipe)
    (folder / "notes.txt").unlink()
    weights = run(recipe, resume=True) / "model.safetensors"
    written = weights.read_bytes()
    (other,) = load_stages(recipe_file, ["training.seed=1"])
    for resume in (False, True):
        with pytest.raises(ValueError, match="holds .*, which is not replaced"):
            run(other, resume)
    assert weights.read_bytes() == written


def test_a_second_training_into_a_folder_is_refused(recipe_file, tmp_path):
    with working_in(tmp_path / "run"), pytest.raises(ValueError, match="Another process works in .*run"):
        run(load_stages(recipe_file)[0])


def test_a_full_disk_is_found_before_the_model(recipe_file, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("qtsplus.common.files.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="1.0 kB free, but the model and its checkpoints take about 40.3 MB"):
        run(load_stages(recipe_file, ["training.save_strategy=steps", "training.save_total_limit=2"])[0])


def test_an_adapter_has_the_configuration_of_its_training(recipe_file):
    base = str(hub_configs() / TINY)
    settings = ["model.variant=null", f"model.weights={base}", "model.selector.reduction=max", "training.lora_rank=2"]
    folder = run(load_stages(recipe_file, settings)[0])
    config = merge_lora(load_lora(base, folder)).config.qtsplus_config
    assert config.reduction == "max"
    assert config.seen_threshold is None
    assert config.trained_seconds > 0


def changed_weights(before: Path, after: Path) -> set[str]:
    old = load_file(before / "model.safetensors")
    new = load_file(after / "model.safetensors")
    return {name for name, weight in new.items() if not weight.equal(old[name])}


def test_stages_follow_each_other_and_a_finished_one_is_not_run_again(tmp_path, record, monkeypatch):
    answers = {"freeze_scores": True, "retention_share": 0.0, "save_strategy": "steps", "save_steps": 1}
    recipe_file = write_recipe(
        tmp_path,
        [record] * 3,
        model={"selector": {"gate": "detached", "reduction": "mean", "query_states": "layer"}},
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        retention_range=[0.1, 0.3],
        stages={
            "relevance": {"training": {"relevance_weight": 1.0, "retention_share": 1.0}},
            "answers": {"training": answers},
        },
    )
    first, second = load_stages(recipe_file)
    run(first)
    with pytest.raises(ValueError, match="relevance holds .*: .* or a finished model, go on with --resume"):
        run_stages([first, second])
    monkeypatch.setattr("qtsplus.training.trainer.answer_attention", None)  # nobody teaches any more
    folder = run_stages([first, second], resume=True)
    changed = changed_weights(folder / "relevance", folder)
    assert any(name.startswith("model.qtsplus.reencode_layers.") for name in changed)
    assert any(name.startswith("model.qtsplus.budget.") for name in changed)
    assert not any(name.startswith(SCORES) for name in changed)
    config = json.loads((folder / "config.json").read_text())
    assert config["qtsplus_config"]["query_states"] == "layer"
    longer = "training.max_steps=2"
    with pytest.raises(
        ValueError, match="checkpoint-1, by a recipe that has to train the same parameters, cannot be used"
    ):
        run_stages(load_stages(recipe_file, [longer, "training.freeze_language_model=false"]), resume=True)
    run_stages(load_stages(recipe_file, [longer]), resume=True)
    assert (folder / "checkpoint-2").is_dir()
    assert not (folder / "relevance/checkpoint-1").exists()


def test_a_stage_whose_first_checkpoint_was_interrupted_begins_again(tmp_path, record, caplog, monkeypatch):
    recipe_file = write_recipe(
        tmp_path,
        [record],
        save_strategy="steps",
        save_steps=1,
        stages={"first": {}, "second": {}},
    )
    folders = [tmp_path / "run/first", tmp_path / "run"]
    for folder in folders:
        (folder / "checkpoint-1").mkdir(parents=True)
        (folder / "checkpoint-1/model.safetensors").write_bytes(b"cut")
    stages = load_stages(recipe_file)
    with pytest.raises(ValueError, match="holds checkpoint-1, which is not replaced"):
        run_stages(stages)
    run_stages(stages, resume=True)
    assert "stage first goes on from its first step." in caplog.text
    for folder in folders:
        assert (folder / "checkpoint-1/model.safetensors").stat().st_size > len("cut")
        assert (folder / "checkpoint-1/trainer_state.json").exists()
    warnings = []
    monkeypatch.setattr("transformers.trainer.logger.warning", warnings.append)
    run_stages(load_stages(recipe_file, ["training.max_steps=2"]), resume=True)
    assert not warnings
    assert f"stage second goes on from {tmp_path}/run/checkpoint-1." in caplog.text


@pytest.mark.parametrize("ends", ["training.max_steps=2", "training.num_train_epochs=0.5"])
def test_a_finished_training_is_resumed_by_no_step(recipe_file, tmp_path, ends):
    """By itself a Trainer that resumes at its last step, in the middle of an epoch, does one more."""
    steps = ["training.per_device_train_batch_size=1", "training.save_strategy=steps", "training.save_steps=1"]
    stages = load_stages(recipe_file, [*steps, "training.max_steps=-1", ends])
    folder = run_stages(stages)
    weights = folder / "model.safetensors"
    written = weights.read_bytes()
    modified = weights.stat().st_mtime_ns
    run_stages(stages, resume=True)
    assert weights.stat().st_mtime_ns == modified
    with pytest.raises(ValueError, match="run was begun with model.weights=None, not /"):
        run_stages(load_stages(recipe_file, [*steps, f"model.weights={hub_configs() / TINY}"]), resume=True)
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()  # as if the run had ended while it wrote its model
    run_stages(stages, resume=True)
    assert weights.read_bytes() == written
    run_stages(load_stages(recipe_file, [*steps, "training.max_steps=3"]), resume=True)
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 3
    assert weights.read_bytes() != written
    (folder / "checkpoint-3/model.safetensors").write_bytes(b"")
    longer = load_stages(recipe_file, [*steps, "training.max_steps=4"])
    with pytest.raises(ValueError, match="checkpoint-3 cannot be used"):
        run_stages(longer, resume=True)
    (folder / "checkpoint-3/rng_state.pth").write_bytes(b"")
    with pytest.raises(ValueError, match="rng_state.pth is empty or was cut off: remove .*checkpoint-3, to go on"):
        run_stages(longer, resume=True)


def test_a_stage_uses_the_features_of_the_one_before_and_none_of_its_memory(tmp_path, record, monkeypatch):
    """Else two stages of a large model take twice the memory of one."""
    recipe_file = write_recipe(
        tmp_path,
        [record],
        data={"features": f"{tmp_path}/features"},
        stages={"first": {}, "second": {}},
    )
    models = []
    build_trainer = running.build_trainer

    def watched(recipe):
        assert all(model() is None for model in models)
        trainer = build_trainer(recipe)
        models.append(weakref.ref(trainer.model))
        return trainer

    monkeypatch.setattr(running, "build_trainer", watched)
    gc.disable()  # by itself it looks at large tensors no sooner than at small ones
    try:
        run_stages(load_stages(recipe_file))
    finally:
        gc.enable()
    assert len(models) == 2
    towers = list((tmp_path / "features").iterdir())
    assert len(towers) == 1


@pytest.mark.parametrize("option", [None, "--dry-run", "--resume"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_files=[none.jsonl]", "There is no file 'none.jsonl'"),
        ("data.media_root=none", "There is no folder 'none'"),
        ("data.processor_kwargs={max_frame: 1}", "processor_kwargs.max_frame is no field; the nearest are max_frames"),
        ("data.processor_kwargs={max_frames: -1}", "Got max_frames=-1; expected a finite number above 0"),
        ("data.processor_kwargs.num_frames=4", "data.processor_kwargs has both fps and num_frames; expected one of"),
        ("data.processor_kwargs.size=wide", "data.processor_kwargs cannot be used: Validation error for field 'size'"),
        ("data.processor_kwargs.size={longest: 9}", "data.processor_kwargs cannot be used: size must have one of"),
        ("data.processor_kwargs.videos_kwargs={fps: 1}", "processor_kwargs.videos_kwargs is no field; the nearest are"),
        ("data.features=FOLDER/tiny.yaml", "tiny.yaml is a file; expected a folder"),
        ("data.features=FOLDER/model", "model, which holds a model; choose another folder"),
        ("training.output_dir=FOLDER/tiny.yaml", "tiny.yaml is a file; expected a folder"),
        ("training.output_dir=FOLDER", "which is not replaced"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(recipe_file, tmp_path, option, override, message):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    result = train(recipe_file, override.replace("FOLDER", str(tmp_path)), option=option)
    assert result.exit_code == 2
    assert message in result.stderr
