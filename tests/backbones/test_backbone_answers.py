"""Answers on every backbone: tokens are where the grid says, and `qtsplus ask` says what the session says."""

import json
import math

import numpy as np
from typer.testing import CliRunner

from qtsplus.asking import session
from qtsplus.cli import app
from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.exact_match import exact_match
from qtsplus.evaluation.labelled import Sighting, sighting_tokens

FRAME_SIZE = 168


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
    _, rows, columns = grid
    height = FRAME_SIZE / rows
    width = FRAME_SIZE / columns
    for frame, row, column in ((0, 0, columns - 1), (3, rows - 1, 1)):
        left = (column + 0.3) * width
        right = (column + 0.7) * width
        top = (row + 0.3) * height
        bottom = (row + 0.7) * height
        spotted = frames.copy()
        spotted[frame, round(top) : round(bottom), round(left) : round(right)] = 255
        box = (left, top, right, bottom)
        seen = [Sighting(frame / 2, (frame + 1) / 2, box, frame=(FRAME_SIZE, FRAME_SIZE))]
        (expected,) = sighting_tokens(seen, grid, float(inputs["second_per_grid_ts"][0]))
        features, _ = encode(spotted)
        change = (features - plain).abs().sum(1)
        assert change.argmax() == expected


def test_answers_say_what_was_kept(model, processor, clips):
    """Newlines and the text of frames are no visual tokens, nor is InternVL's placeholder the processor's."""
    video = str(clips / "long.mp4")
    records = [VideoRecord(question=f"What is {word}?", answer="A ball.", video=video) for word in ("red", "blue")]
    inputs = processor(text=[processor.video_token], videos=[video], return_tensors="pt")
    (features,) = model.encode_videos(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    for retention in (0.25, 1.0):
        for one in exact_match(model, processor, records, retention=retention):
            assert one.visual_tokens == len(features)
            assert one.kept_tokens == math.ceil(retention * len(features))


def test_the_command_answers(backbone, processor, clips, tmp_path):
    """`qtsplus ask`, from a folder with its code, says what the session says."""
    backbone.build(processor).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    video = str(clips / "long.mp4")
    call = f"ask --fps 2 --retention 0.3 --max-new-tokens 5 --json --model {tmp_path} --device cpu".split()
    result = CliRunner().invoke(app, [*call, video, "What moves?"])
    assert result.exit_code == 0, result.output
    got = json.loads(result.stdout)
    loaded = session.load(tmp_path, "cpu")
    encoded = session.encode(*loaded, video, fps=2)
    expected = session.ask(*loaded, encoded, "What moves?", retention=0.3, max_new_tokens=5).as_dict()
    del got["timings"]
    del expected["timings"]
    assert got == expected
    assert got["kept_tokens"] == math.ceil(0.3 * got["visual_tokens"])
    assert got["evidence"]
