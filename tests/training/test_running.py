"""A run loses nothing: what it skips, what it finds in its folder, and how stages follow each other."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.training.plan import Plan
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import run, run_stages

SCORES = ("model.qtsplus.scoring_layers.", "model.qtsplus.question_layers.")


@pytest.fixture
def recipe_file(tmp_path, tiny_mp4) -> Path:
    record = {"video": str(tiny_mp4), "question": "What?", "answer": "A circle.", "source": "vqa"}
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(record)] * 3))
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
model: {{variant: qtsplus-tiny, selector: {{gate: detached, reduction: mean}}}}
data: {{train_files: [{tmp_path}/train.jsonl], processor_kwargs: {{fps: 1}}}}
training:
  {{output_dir: {tmp_path}/run, max_steps: 1, per_device_train_batch_size: 3, learning_rate: 1e-2, use_cpu: true,
    save_strategy: "no", logging_steps: 1, report_to: none, retention_range: [0.1, 0.3]}}
""")
    return path


def train(recipe: Path, *more: str):
    return CliRunner().invoke(app, ["train", str(recipe), *more])


def settings(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def test_a_run_whose_records_are_all_skipped_is_an_error(recipe_file, tmp_path):
    record = {"video": "missing.mp4", "question": "What?", "answer": "A circle."}
    (tmp_path / "other.jsonl").write_text("\n".join([json.dumps(record)] * 3))
    missing = train(recipe_file, *settings(f"data.train_files=[{tmp_path}/other.jsonl]", f"data.media_root={tmp_path}"))
    assert missing.exit_code == 2 and not (tmp_path / "run").exists()
    assert "3 of 3 records cannot be used" in missing.stderr and f"{tmp_path}/missing.mp4" in missing.stderr

    (tmp_path / "broken.mp4").write_bytes(b"no video")
    (tmp_path / "other.jsonl").write_text(json.dumps({**record, "video": "broken.mp4"}))
    broken = train(recipe_file, *settings(f"data.train_files=[{tmp_path}/other.jsonl]", "training.max_skipped=1.0"))
    assert broken.exit_code == 2 and "1 of 1 records cannot be used" in broken.stderr
    assert list(json.loads((tmp_path / "run/skipped_files.json").read_text())) == [str(tmp_path / "broken.mp4")]
    assert not (tmp_path / "run/config.json").exists()
    mended = train(recipe_file)
    assert mended.exit_code == 0 and (tmp_path / "run/config.json").exists()
    assert json.loads((tmp_path / "run/skipped_files.json").read_text()) == {}


def test_metrics_are_no_result_and_pipes_have_no_bars(recipe_file, tmp_path):
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    lines.append(json.dumps({**json.loads(lines[0]), "video": str(tmp_path / "broken.mp4")}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    result = train(recipe_file, *settings("training.max_skipped=0.3", "training.per_device_train_batch_size=4"))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Wrote {tmp_path}/run\n" or "".join(result.stdout.split()) == f"Wrote{tmp_path}/run"
    assert "'loss_lm'" in result.stderr and "it/s" not in result.stderr
    assert "broken.mp4" in (tmp_path / "run/skipped_files.json").read_text()


def test_what_stands_in_the_folder_is_not_replaced(recipe_file, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds notes.txt, which is not replaced"):
        run(load_stages(recipe_file)[0])
    (folder / "notes.txt").unlink()
    with pytest.raises(ValueError, match="nothing to resume: .*a save_strategy other than 'no'"):
        run(load_stages(recipe_file)[0], resume=True)
    written = (run(load_stages(recipe_file)[0]) / "model.safetensors").read_bytes()
    for resume, message in ((False, "holds a finished model"), (True, "nothing to resume")):
        with pytest.raises(ValueError, match=message):
            run(load_stages(recipe_file, ["training.seed=1"])[0], resume=resume)
    assert (folder / "model.safetensors").read_bytes() == written


def test_a_full_disk_and_a_file_in_the_way_are_found_before_the_model(recipe_file, tmp_path, monkeypatch):
    monkeypatch.setattr("qtsplus.training.running.build_trainer", None)
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        run(load_stages(recipe_file)[0])
    (tmp_path / "run").unlink()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("qtsplus.common.files.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="1 kB free, but the model and its checkpoints take about 8.56 MB"):
        run(load_stages(recipe_file)[0])


def test_features_that_the_disk_does_not_hold_are_refused(recipe_file, tmp_path, monkeypatch):
    monkeypatch.setattr("qtsplus.training.running.make_plan", lambda recipe: Plan(0, []))
    usage = type("Usage", (), {"free": 1})
    monkeypatch.setattr("qtsplus.common.files.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="the features of 1 videos take about"):
        run(load_stages(recipe_file, [f"data.features={tmp_path}/features"])[0])


def test_stages_follow_each_other_and_a_finished_one_is_not_run_again(recipe_file, tmp_path, monkeypatch):
    staged = (
        recipe_file.read_text()
        + """
stages:
  relevance: {training: {relevance_weight: 1.0, retention_share: 1.0}}
  answers:
    training: {freeze_scores: true, retention_share: 0.0, save_strategy: steps, save_steps: 1}
"""
    )
    recipe_file.write_text(staged.replace("reduction: mean}", "reduction: mean, query_states: layer}"))
    first, second = load_stages(recipe_file)
    run(first)
    with pytest.raises(ValueError, match="relevance holds a finished model"):
        run_stages([first, second])
    monkeypatch.setattr("qtsplus.training.trainer.answer_attention", None)  # nobody teaches any more
    folder = run_stages([first, second], resume=True)
    before, after = (load_file(path / "model.safetensors") for path in (folder / "relevance", folder))
    changed = {name for name in after if not after[name].equal(before[name])}
    assert any(name.startswith("model.qtsplus.reencode_layers.") for name in changed)
    assert any(name.startswith("model.qtsplus.budget.") for name in changed)
    assert not any(name.startswith(SCORES) for name in changed)
    assert json.loads((folder / "config.json").read_text())["qtsplus_config"]["query_states"] == "layer"
    run_stages(load_stages(recipe_file, ["training.max_steps=2"]), resume=True)
    assert (folder / "checkpoint-2").is_dir() and not (folder / "relevance/checkpoint-1").exists()


def test_settings_that_nobody_reads_are_refused(recipe_file):
    for setting, message in (
        ("data.processor_kwargs={nonsense: 1}", "processor_kwargs.nonsense is no setting of"),
        ("model.selector.reencode_layers=1000000", "reencode_layers is 1000000"),
        ("training.output_dir=", "training.output_dir is empty"),
    ):
        result = train(recipe_file, *settings(setting))
        assert result.exit_code == 2 and message in result.stderr, result.stderr
