"""Training from features encoded once: the same losses, and each video is encoded a single time."""

import json
import os

import pytest
import torch

from clips import render_clip
from qtsplus.common.tensors import TensorKind
from qtsplus.training import features
from qtsplus.training.models import make_config, make_processor
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import build_trainer, run
from training_examples import steps

ATTENTION = {"attention": TensorKind(("M",))}


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
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
model: {{variant: qtsplus-tiny, selector: {{n_max: 20}}}}
data: {{train_files: [{tmp_path}/train.jsonl], eval_files: [{tmp_path}/train.jsonl]}}
training:
  {{output_dir: {tmp_path}/run, max_steps: 3, per_device_train_batch_size: 2, learning_rate: 1e-3, use_cpu: true,
    max_skipped: 0.5,
    freeze_language_model: false, save_strategy: "no", logging_steps: 1, report_to: none}}
""")
    return path


@pytest.mark.parametrize("bf16", [False, True])
def test_losses_are_those_of_training_from_pixels(recipe_file, tmp_path, bf16):
    settings = [f"training.bf16={str(bf16).lower()}"]
    from_pixels = build_trainer(load_stages(recipe_file, settings)[0])
    from_pixels.train()
    from_features = build_trainer(load_stages(recipe_file, [*settings, f"data.features={tmp_path}/features"])[0])
    from_features.model.model.visual.forward = None  # never entered again
    from_features.train()
    tolerance = 0.05 if bf16 else 1e-4
    for line, expected in zip(steps(from_features), steps(from_pixels), strict=True):
        assert line.keys() == expected.keys()
        for name in {"loss", "grad_norm", "rho", "n", "visual_tokens"} & line.keys():
            assert line[name] == pytest.approx(expected[name], rel=tolerance), name
    assert from_features.evaluate()["eval_loss"] == pytest.approx(from_pixels.evaluate()["eval_loss"], rel=tolerance)
    assert list(from_features.skipped) == [str(tmp_path / "missing.mp4")]


def test_a_video_is_encoded_once_for_a_vision_tower(recipe_file, tmp_path):
    folder = tmp_path / "features"

    def files(*settings):
        build_trainer(load_stages(recipe_file, [f"data.features={folder}", *settings])[0])
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}

    first = files()
    assert len(first) == 2
    assert files("training.learning_rate=1") == first
    render_clip(tmp_path / "other.mp4", seconds=4, fps=8, size=(112, 56), seed=2)
    assert len(files()) == 3
    assert len(files("data.processor_kwargs={fps: 1}")) == 5
    assert len(files("training.seed=1")) == 7  # other random weights


def test_no_process_encodes_before_all_have_seen_what_is_missing(recipe_file, tmp_path, tiny_mp4, monkeypatch):
    """Else one that comes late would share out a shorter list, and a video would be nobody's."""
    happened = []

    class Second:
        process_index, num_processes, is_main_process = 1, 2, False

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
    videos = [(str(tiny_mp4), None), (str(tmp_path / "other.mp4"), None)]
    found = features.encode_files(Model(), processor, videos, tmp_path / "features")
    assert happened == ["waited", "encoded", "waited"]
    assert [found.file(*video).exists() for video in sorted(videos, key=str)] == [False, True]


def test_frames_of_a_folder_that_were_changed_are_others(tmp_path):
    kept, frames = features.VideoFeatures(tmp_path), tmp_path / "frames"
    frames.mkdir()
    (frames / "0.png").write_bytes(b"one")
    before = kept.file(str(frames), 2.0)
    assert kept.file(str(frames), 2.0) == before != kept.file(str(frames), 1.0)
    (frames / "0.png").write_bytes(b"another")
    assert kept.file(str(frames), 2.0) != before


def test_a_video_replaced_with_the_same_size_and_time_is_another(tmp_path):
    video = tmp_path / "a.mp4"
    video.write_bytes(b"one")
    state = video.stat()
    before = features.VideoFeatures(tmp_path).file(str(video))
    video.write_bytes(b"two")
    os.utime(video, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert features.VideoFeatures(tmp_path).file(str(video)) != before


def test_a_video_that_is_swapped_while_it_is_read_leaves_no_features(tmp_path, tiny_mp4):
    video = tmp_path / "a.mp4"
    video.write_bytes(tiny_mp4.read_bytes())
    (tmp_path / "other.mp4").write_bytes(tiny_mp4.read_bytes())

    class Swapping:
        video_token = "<video>"

        def __call__(self, **inputs):
            (tmp_path / "other.mp4").replace(video)
            return {name: [0] for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")}

    kept = features.VideoFeatures(tmp_path)
    old = kept.file(str(video))
    assert features._decode(kept, Swapping(), {}, (str(video), None)) == (old, None)
    assert kept.file(str(video)) != old


def test_frozen_weights_of_16_bits_need_mixed_precision(recipe_file):
    (recipe,) = load_stages(recipe_file, ["model.dtype=bfloat16", "training.bf16=false"])
    with pytest.raises(ValueError, match=r"model\.dtype=bfloat16 .* expected training\.bf16"):
        run(recipe)


def test_features_of_a_vision_tower_that_trains_are_refused(recipe_file, tmp_path):
    overrides = [f"data.features={tmp_path}/features", "training.freeze_vision_model=false"]
    with pytest.raises(ValueError, match="set freeze_vision_model"):
        run(load_stages(recipe_file, overrides)[0])


def test_damaged_features_are_one_line_and_train_nothing(tmp_path):
    path = tmp_path / "features.safetensors"
    whole = {"attention": torch.ones(3)}
    refusal = f"stored features '{path}' cannot be used: .*; remove the file, and it is made again"
    assert features.read_tensors(path, ATTENTION) is None
    features.write_tensors(path, whole)
    assert torch.equal(features.read_tensors(path, ATTENTION)["attention"], whole["attention"])
    other_shape = torch.ones(3, 1)
    no_number = torch.tensor([torch.nan])
    for damaged in ({"attention": other_shape}, {"attention": no_number}, {"other": torch.ones(3)}):
        features.write_tensors(path, damaged)
        with pytest.raises(ValueError, match=refusal):
            features.read_tensors(path, ATTENTION)
    path.write_bytes(b"no features")
    with pytest.raises(ValueError, match=refusal):
        features.read_tensors(path, ATTENTION)


def test_changed_features_and_those_of_another_video_are_found(tmp_path):
    path = tmp_path / "one.safetensors"
    other = tmp_path / "other.safetensors"
    for place in (path, other):
        features.write_tensors(place, {"attention": torch.ones(3)})
    whole = path.read_bytes()
    damages = [other.read_bytes()]
    for place in range(-12, -1):
        damages.append(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    for damage in damages:
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=f"{path}' cannot be used: it was changed since it was written"):
            features.read_tensors(path, ATTENTION)
    path.unlink()
    path.symlink_to(other)
    with pytest.raises(ValueError, match="it is no file"):
        features.read_tensors(path, ATTENTION)
