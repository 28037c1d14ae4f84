"""What one stage of a recipe leaves to the next: features on disk, and nothing in memory."""

import gc
import json
import weakref

import pytest

from qtsplus.training import running
from qtsplus.training.recipe import load_stages


@pytest.fixture
def recipe_file(tmp_path, tiny_mp4):
    record = {"video": str(tiny_mp4), "question": "What?", "answer": "A circle."}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
model: {{variant: qtsplus-tiny}}
data: {{train_files: [{tmp_path}/train.jsonl], features: {tmp_path}/features}}
training: {{output_dir: {tmp_path}/run, max_steps: 1, use_cpu: true, save_strategy: "no", report_to: none}}
stages: {{first: {{}}, second: {{}}}}
""")
    return path


def test_the_model_is_gone_when_the_next_one_is_loaded(recipe_file, monkeypatch):
    """Else two stages of a large model take twice the memory of one."""
    models, build = [], running.build_trainer

    def watched(recipe):
        assert [model for model in models if model() is not None] == []
        trainer = build(recipe)
        models.append(weakref.ref(trainer.model))
        return trainer

    monkeypatch.setattr(running, "build_trainer", watched)
    gc.disable()  # by itself it looks at large tensors no sooner than at small ones
    try:
        running.run_stages(load_stages(recipe_file))
    finally:
        gc.enable()
    assert len(models) == 2


def test_features_are_those_of_the_stage_before(recipe_file, tmp_path):
    running.run_stages(load_stages(recipe_file))
    assert len(list((tmp_path / "features").iterdir())) == 1
