"""Training from features encoded once: the same losses, and each video is encoded a single time."""

import pytest
import torch
from tiny_recipe import write_recipe

from clips import render_clip
from qtsplus.common.tensors import TensorFormat, TensorKind
from qtsplus.training import features
from qtsplus.training.models import make_config, make_processor
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import build_trainer, run
from training_examples import steps

ATTENTION = TensorFormat("stored attention", features.REMEDY, {"attention": TensorKind(("M",))})


@pytest.fixture
def recipe_file(tmp_path, tiny_mp4):
    render_clip(tmp_path / "other.mp4", seconds=3, fps=8, size=(112, 56), seed=1)
    record = {"video": str(tiny_mp4), "question": "What?", "answer": "A circle.", "query": "Which shape?"}
    records = [
        record,
        {**record, "video": "other.mp4", "query": None},
        {**record, "video": "missing.mp4"},
        {**record, "answer": "Two.", "earlier": [["How many?", "One."]]},
        {**record, "video": None, "query": None},
    ]
    return write_recipe(
        tmp_path,
        records,
        model={"selector": {"n_max": 20}},
        data={"eval_files": [f"{tmp_path}/train.jsonl"]},
        max_steps=3,
        per_device_train_batch_size=2,
        max_skipped=0.5,
        freeze_language_model=False,
    )


@pytest.mark.parametrize(("precision", "tolerance"), [("training.bf16=false", 1e-4), ("training.bf16=true", 0.05)])
def test_losses_are_those_of_training_from_pixels(recipe_file, tmp_path, precision, tolerance, monkeypatch):
    """Also those of an evaluation that fills the last batches of two processes, since then no record counts twice."""
    features = f"data.features={tmp_path}/features"
    (pixel_stage,) = load_stages(recipe_file, [precision])
    (feature_stage,) = load_stages(recipe_file, [precision, features])
    from_pixels = build_trainer(pixel_stage)
    from_pixels.train()
    from_features = build_trainer(feature_stage)
    from_features.model.model.visual.forward = None  # never entered again
    from_features.train()
    compared = {"loss", "grad_norm", "rho", "n", "visual_tokens"}
    for line, expected in zip(steps(from_features), steps(from_pixels), strict=True):
        assert line.keys() == expected.keys()
        for name in compared & line.keys():
            assert line[name] == pytest.approx(expected[name], rel=tolerance), name
    monkeypatch.setattr(type(from_features.args), "world_size", 2)
    assert len(from_features.get_eval_dataloader()) == 2  # a batch for each
    loss = from_features.evaluate()["eval_loss"]
    monkeypatch.undo()
    expected_loss = from_pixels.evaluate()["eval_loss"]
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert from_features.skipped == from_pixels.skipped > 0


def test_a_video_is_encoded_once_for_a_vision_tower(recipe_file, tmp_path):
    folder = tmp_path / "features"

    def files(*settings):
        (recipe,) = load_stages(recipe_file, [f"data.features={folder}", *settings])
        build_trainer(recipe)
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}

    first = files()
    assert len(first) == 2
    assert files("training.learning_rate=1") == first
    render_clip(tmp_path / "other.mp4", seconds=4, fps=8, size=(112, 56), seed=2)
    assert len(files()) == 3
    assert len(files("data.processor_kwargs={fps: 1}")) == 5
    assert len(files("training.seed=1")) == 7  # other random weights


def test_no_process_encodes_before_all_have_seen_what_is_missing(tmp_path, tiny_mp4, monkeypatch):
    """Else one that comes late would share out a shorter list, and a video would be nobody's."""
    happened = []

    class Second:
        process_index = 1
        num_processes = 2
        is_main_process = False

        def wait_for_everyone(self):
            happened.append("waited")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.visual = torch.nn.Linear(1, 1)

        def encode_videos(self, pixels, grid, device):
            happened.append("encoded")
            return [torch.zeros(1, 1)]

    monkeypatch.setattr(features, "PartialState", Second)
    monkeypatch.setattr(features, "vision_modules", lambda model: {"visual": model.visual})
    processor = make_processor("qtsplus-tiny", None, make_config("qtsplus-tiny", None))
    render_clip(tmp_path / "other.mp4", seconds=3, fps=8, size=(112, 56), seed=1)
    videos = sorted([(str(tiny_mp4), None), (str(tmp_path / "other.mp4"), None)])
    encoded = features.encode_files(Model(), processor, videos, tmp_path / "features")
    assert happened == ["waited", "encoded", "waited"]
    assert [encoded.file(*video).exists() for video in videos] == [False, True]


def test_frames_of_a_folder_that_were_changed_are_others(tmp_path):
    kept = features.VideoFeatures(tmp_path)
    frames = tmp_path / "frames"
    frames.mkdir()
    (frames / "0.png").write_bytes(b"one")
    before = kept.file(str(frames), 2.0)
    assert kept.file(str(frames), 2.0) == before
    assert kept.file(str(frames), 1.0) != before
    (frames / "0.png").write_bytes(b"another")
    assert kept.file(str(frames), 2.0) != before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.dtype=bfloat16", "training.bf16=false"], r"model\.dtype=bfloat16 needs training\.bf16 or fp16"),
        (["data.features=features", "training.freeze_vision_model=false"], "set training.freeze_vision_model"),
    ],
)
def test_a_precision_or_a_vision_tower_that_does_not_fit_is_refused(recipe_file, settings, message):
    (recipe,) = load_stages(recipe_file, settings)
    with pytest.raises(ValueError, match=message):
        run(recipe)


def test_damaged_features_are_an_error_that_says_what_to_do(tmp_path):
    path = tmp_path / "features.safetensors"
    assert features.read_tensors(path, ATTENTION) is None
    ATTENTION.write(path, {"attention": torch.ones(3)}, {})
    assert features.read_tensors(path, ATTENTION)["attention"].tolist() == [1, 1, 1]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(ValueError, match=f"'{path}' cannot be used: it was changed .*; remove the file"):
        features.read_tensors(path, ATTENTION)
