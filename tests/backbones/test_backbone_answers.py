"""Answers on every backbone: tokens are where the grid says, and `qtsplus ask` says what the session says."""

import json
import math

import numpy as np
from typer.testing import CliRunner

from qtsplus.asking import session
from qtsplus.cli import app
from qtsplus.evaluation.labelled import Sighting, sighting_tokens

FRAME_SIZE = 168


def test_a_token_sees_what_its_place_in_the_grid_shows(backbone, processor):
    """Without attention in the vision tower, a spot changes no features but those of the tokens that show it most."""
    model = backbone.build(processor)
    projections = (".attn.proj.", ".projection_layer.", ".self_attn.out_proj.")
    for name, parameter in model.named_parameters():
        if any(part in name for part in projections):
            parameter.data.zero_()

    def encode(frames):
        inputs = processor(
            text=[processor.video_token],
            videos=[frames],
            fps=2,
            return_tensors="pt",
        )
        pixels = inputs["pixel_values_videos"]
        (features,) = model.encode_videos(pixels, inputs["video_grid_thw"])
        return features, inputs

    frames = np.full((4, FRAME_SIZE, FRAME_SIZE, 3), 128, dtype=np.uint8)
    plain, inputs = encode(frames)
    (grid,) = model.model.merged_grid(inputs["video_grid_thw"])
    edges = np.linspace(0, 2, grid[0] + 1).tolist()
    assert len(plain) == math.prod(grid)
    _, rows, columns = grid
    height = FRAME_SIZE / rows
    width = FRAME_SIZE / columns
    for frame, row, column in ((0, 0, columns - 1), (3, rows - 1, 1)):
        left = round((column + 0.3) * width)
        right = round((column + 0.7) * width)
        top = round((row + 0.3) * height)
        bottom = round((row + 0.7) * height)
        spotted = frames.copy()
        spot = spotted[frame, top:bottom, left:right]
        spot[:] = 255
        sighting = Sighting(
            frame / 2,
            (frame + 1) / 2,
            (left / FRAME_SIZE, top / FRAME_SIZE, right / FRAME_SIZE, bottom / FRAME_SIZE),
        )
        (expected,) = sighting_tokens([sighting], grid, edges)
        features, _ = encode(spotted)
        change = (features - plain).abs().sum(1)
        assert change.argmax() == expected


def test_the_command_answers(backbone, processor, clips, tmp_path):
    """`qtsplus ask`, from a folder with its code, says what the session says."""
    backbone.build(processor).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    video = str(clips / "long.mp4")
    options = f"--fps 2 --retention 0.3 --max-new-tokens 5 --json --model {tmp_path} --device cpu"
    result = CliRunner().invoke(app, ["ask", *options.split(), video, "What moves?"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    loaded = session.load(tmp_path, "cpu")
    encoded = session.encode(*loaded, video, fps=2)
    answer = session.ask(*loaded, encoded, "What moves?", retention=0.3, max_new_tokens=5)
    expected = answer.as_dict()
    del printed["timings"]
    del expected["timings"]
    assert printed == expected
    assert printed["kept_tokens"] == math.ceil(0.3 * printed["visual_tokens"])
    assert printed["evidence"]
