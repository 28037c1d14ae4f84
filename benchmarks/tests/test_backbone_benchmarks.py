"""The learned benchmark and its baselines work with every backbone."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli import app as laboratory
from benchmarks.learned import policies
from benchmarks.learned.baselines import fewer_frames, full_video, lower_resolution
from benchmarks.learned.twice import ask_twice
from benchmarks.learned.work import Work
from benchmarks.world.clip import render_clip
from benchmarks.world.tinyworld import build_dataset
from qtsplus.asking import session
from qtsplus.data.records import VideoRecord
from tiny_backbones import BACKBONES, LLAVA_VIDEO


@pytest.fixture(scope="module", params=BACKBONES, ids=lambda backbone: backbone.name)
def backbone(request):
    return request.param


@pytest.fixture(scope="module")
def processor(backbone):
    return backbone.processor()


@pytest.fixture(scope="module")
def model(backbone, processor):
    return backbone.build(processor)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for name, seconds, size in (("long", 3, (112, 112)), ("short", 2, (128, 96))):
        render_clip(folder / f"{name}.mp4", seconds=seconds, fps=4, size=size)
    return folder


def grid_of(model, pixels):
    (grid,) = model.model.merged_grid(pixels["video_grid_thw"])
    return grid


def check_pixels(model, pixels):
    """They can be encoded, as their grid says."""
    (features,) = model.encode_videos(pixels["pixel_values_videos"], pixels["video_grid_thw"])
    assert len(features) == math.prod(grid_of(model, pixels))


@pytest.mark.parametrize(
    ("retention", "frames", "small"),
    [
        (0.05, (1, 4, 4), (6, 1, 1)),
        (0.1, (1, 4, 4), (6, 1, 2)),
        (0.25, (2, 4, 4), (6, 2, 2)),
        (1.0, (6, 4, 4), (6, 4, 4)),
    ],
)
def test_baselines_spend_as_many_tokens_as_asked(tiny_processor, tmp_path, retention, frames, small):
    render_clip(tmp_path / "clip.mp4", seconds=6, fps=8, size=(112, 112), seed=0)
    video = str(tmp_path / "clip.mp4")
    for method, expected in ((fewer_frames, frames), (lower_resolution, small)):
        pixels = method(tiny_processor, video, retention)
        t, h, w = pixels["video_grid_thw"][0].tolist()
        assert (t, h // 2, w // 2) == expected, method.__name__
        assert t * h * w // 4 >= retention * 6 * 16
        assert len(pixels["pixel_values_videos"]) == t * h * w
        assert t * float(pixels["second_per_grid_ts"][0]) == pytest.approx(6)


def test_a_shrunk_frame_shows_the_same(tiny_processor, tmp_path):
    render_clip(tmp_path / "clip.mp4", seconds=4, fps=8, size=(112, 112), seed=0)
    video = str(tmp_path / "clip.mp4")
    whole, small = full_video(tiny_processor, video), lower_resolution(tiny_processor, video, 0.25)
    assert torch.allclose(whole["pixel_values_videos"].mean(), small["pixel_values_videos"].mean(), atol=0.05)
    assert torch.equal(
        full_video(tiny_processor, video)["pixel_values_videos"],
        lower_resolution(tiny_processor, video, 1.0)["pixel_values_videos"],
    )


@pytest.mark.parametrize("retention", [0.1, 0.5, 1.0])
def test_fewer_frames_of_the_same_size(model, processor, clips, retention):
    video = str(clips / "long.mp4")
    whole, fewer = full_video(processor, video), fewer_frames(processor, video, retention)
    steps, *size = grid_of(model, whole)
    assert grid_of(model, fewer) == (math.ceil(retention * steps), *size)
    seconds = steps * whole["second_per_grid_ts"]
    torch.testing.assert_close(grid_of(model, fewer)[0] * fewer["second_per_grid_ts"], seconds)
    check_pixels(model, fewer)
    if retention == 1:
        torch.testing.assert_close(fewer["pixel_values_videos"], whole["pixel_values_videos"])


@pytest.mark.parametrize("retention", [0.1, 0.5, 1.0])
def test_a_lower_resolution_or_none(model, processor, clips, retention):
    video = str(clips / "long.mp4")
    if not processor.native_resolution:
        with pytest.raises(ValueError, match="no lower resolution"):
            lower_resolution(processor, video, retention)
        return
    whole, lower = full_video(processor, video), lower_resolution(processor, video, retention)
    (steps, *size), (same, *small) = grid_of(model, whole), grid_of(model, lower)
    assert steps == same
    assert math.prod(size) >= math.prod(small) >= retention * math.prod(size)
    assert retention == 1 or math.prod(small) < math.prod(size)
    check_pixels(model, lower)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    for split in ("train", "test"):
        build_dataset(folder, split, 2, seconds=(3,), max_objects=2, progress=False)
    return folder


def pixels_of(processor, video):
    pixels = full_video(processor, video)
    return {name: pixels[name] for name in ("pixel_values_videos", "video_grid_thw")}


def save(backbone, folder):
    processor = backbone.processor()
    backbone.build(processor).save_pretrained(folder)
    processor.save_pretrained(folder)
    return processor


# The one with the most that is its own, newlines behind rows and frames of one size, stays in the default suite.
@pytest.mark.parametrize(
    "backbone",
    [pytest.param(one, marks=() if one is LLAVA_VIDEO else pytest.mark.slow, id=one.name) for one in BACKBONES],
    scope="module",
)
def test_the_learned_benchmark(backbone, world, tmp_path, monkeypatch):
    monkeypatch.setattr(policies, "RETENTIONS", (0.1,))
    names = (policies.DEFAULT, "gumbel", "no_reencoder")
    processor = save(backbone, tmp_path / "base")
    (tmp_path / "recipe.yaml").write_text(f"""
model: {{weights: nothing, selector: {{selection: qtsplus, rho_min: 0.1, rho_max: 0.5}}}}
data: {{train_files: [{world}/train.jsonl]}}
training:
  {{output_dir: nothing, freeze_language_model: false, max_steps: 1, per_device_train_batch_size: 2,
    learning_rate: 1e-3, logging_steps: 1, report_to: none, use_cpu: true, disable_tqdm: true}}
""")
    paths = {"base": "base", "recipe": "recipe.yaml", "out": "out", "work": "work"}
    options = [f"--{name}={tmp_path / path}" for name, path in paths.items()]
    options += [f"--variant={name}" for name in names]
    result = CliRunner().invoke(laboratory, ["learned", *options, f"--test={world}/test.jsonl", "--seed=0"])
    assert result.exit_code == 0, result.output

    model = session.load(tmp_path / "base", "cpu")[0]
    tokens = len(model.encode_videos(**pixels_of(processor, str(world / "test/000000.mp4")))[0])
    rows = json.loads((tmp_path / "out/learned.json").read_text())
    pooled = {(row["policy"], row["retention"]): row for row in rows if row["seed"] is None}
    for policy in (*names, "uniform", "base_random", "untrained_selector", "needle_oracle", "gumbel_shuffled_question"):
        assert pooled[policy, 0.1]["kept"] == pooled[policy, 0.1]["asked"] == math.ceil(tokens / 10), policy
    for policy in ("all", "base_all"):
        assert pooled[policy, 1.0]["kept"] == tokens and pooled[policy, 1.0]["needle_recall"] == 1
    steps = json.loads((tmp_path / "out/learned-details.json").read_text())
    assert pooled["fewer_frames", 0.1]["kept"] == pooled["base_fewer_frames", 0.1]["kept"] < tokens
    has_lower = ("lower_resolution", 0.1) in pooled
    assert has_lower == processor.native_resolution == ("lower_resolution" not in steps["left_out"])
    assert result.stderr.count("lower_resolution is left out") == (0 if has_lower else 1)
    assert ("Lower resolution: left out" in (tmp_path / "out/learned.md").read_text()) == (not has_lower)


def test_two_passes_are_asked_where_there_are_two(model, processor, clips):
    """Asked where there are two passes, and left out with the reason where there are none."""
    left_out = Work.left_out.fget(SimpleNamespace(processor=processor))
    assert ("two_passes" in left_out) is not processor.native_resolution
    if not processor.native_resolution:
        return
    records = [
        VideoRecord(question=f"What is {word}?", answer="A ball.", kind="attribute", video=str(clips / f"{name}.mp4"))
        for word, name in (("red", "long"), ("green", "short"), ("blue", "long"))
    ]
    asked = ask_twice(model, processor, records, 0.1, batch_size=2)
    for record, twice in zip(records, asked, strict=True):
        (grid,) = model.model.merged_grid(processor.video_chunks(record.video).video_grid_thw)
        tokens = grid[0] * grid[1] * grid[2]
        assert twice.outcome.visual_tokens == tokens and twice.outcome.kept_tokens == -(-tokens // 10)
        assert twice.small < tokens and twice.outcome.kept_tokens <= twice.large < tokens
        assert max(twice.outcome.kept_indices) < tokens
