"""The learned benchmark, its baselines and `qtsplus ask` work with every backbone."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli import app as laboratory
from benchmarks.learned import policies
from benchmarks.learned.baselines import fewer_frames, full_video, lower_resolution
from benchmarks.world.scene import FRAME_SIZE
from benchmarks.world.tinyworld import build_dataset
from qtsplus import session
from qtsplus.cli import app
from qtsplus.data.formats import read_records
from qtsplus.evaluation.exact_match import exact_match
from qtsplus.evaluation.labelled import Sighting, sighting_tokens
from tiny_backbones import BACKBONES, LLAVA_VIDEO


def grid_of(model, pixels):
    (grid,) = model.model.merged_grid(pixels["video_grid_thw"])
    return grid


def check_pixels(model, pixels):
    """They can be encoded, as their grid says."""
    (features,) = model.encode_videos(pixels["pixel_values_videos"], pixels["video_grid_thw"])
    assert len(features) == math.prod(grid_of(model, pixels))


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


def test_a_token_sees_what_its_place_in_the_grid_shows(backbone, processor):
    """Without attention in the vision tower, a spot changes no features but those of the tokens that show it most."""
    model = backbone.build(processor)
    for name, parameter in model.named_parameters():
        if any(part in name for part in (".attn.proj.", ".projection_layer.", ".self_attn.out_proj.")):
            parameter.data.zero_()

    def encode(frames):
        inputs = processor(text=[processor.video_token], videos=[frames], fps=2, return_tensors="pt")
        (features,) = model.encode_videos(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        return features, inputs

    frames = np.full((4, FRAME_SIZE, FRAME_SIZE, 3), 128, dtype=np.uint8)
    plain, inputs = encode(frames)
    (grid,) = model.model.merged_grid(inputs["video_grid_thw"])
    assert len(plain) == math.prod(grid)
    cell = [FRAME_SIZE / side for side in grid[1:]]
    for frame, row, column in ((0, 0, grid[2] - 1), (3, grid[1] - 1, 1)):
        top, left = row * cell[0], column * cell[1]
        box = (left + 0.3 * cell[1], top + 0.3 * cell[0], left + 0.7 * cell[1], top + 0.7 * cell[0])
        spotted = frames.copy()
        x0, y0, x1, y1 = map(round, box)
        spotted[frame, y0:y1, x0:x1] = 255
        seen = [Sighting(frame / 2, (frame + 1) / 2, box, frame=(FRAME_SIZE, FRAME_SIZE))]
        (expected,) = sighting_tokens(seen, grid, float(inputs["second_per_grid_ts"][0]))
        changed = (encode(spotted)[0] - plain).abs().sum(1)
        assert int(changed.argmax()) == expected


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    for split in ("train", "test"):
        build_dataset(folder, split, 2, seconds=(3,), max_objects=2, progress=False)
    return folder


def test_answers_say_what_was_kept(model, processor, world):
    """Newlines and the text of frames are no visual tokens, nor is InternVL's placeholder the processor's."""
    records = [record for record in read_records(world / "test.jsonl") if record.kind == "attribute"]
    tokens = len(model.encode_videos(**pixels_of(processor, records[0].video))[0])
    for retention in (0.25, 1.0):
        for one in exact_match(model, processor, records, retention=retention, progress=False):
            assert one.visual_tokens == tokens and one.kept_tokens == math.ceil(retention * tokens)


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


def test_the_command_answers(backbone, processor, clips, tmp_path):
    """`qtsplus ask`, from a folder with its code, says what the session says."""
    save(backbone, tmp_path)
    video = str(clips / "long.mp4")
    call = ["ask", video, "What moves?", "--fps", "2", "--retention", "0.3", "--max-new-tokens", "5", "--json"]
    result = CliRunner().invoke(app, [*call, "--model", str(tmp_path), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    got = json.loads(result.stdout)
    encoded = session.encode(*session.load(tmp_path, "cpu"), video, fps=2)
    expected = session.ask(
        *session.load(tmp_path, "cpu"), encoded, "What moves?", retention=0.3, max_new_tokens=5
    ).as_dict()
    del got["timings"], expected["timings"]
    assert got == expected
    assert got["kept_tokens"] == math.ceil(0.3 * got["visual_tokens"]) and got["evidence"]
