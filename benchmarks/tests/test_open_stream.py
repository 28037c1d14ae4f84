"""What a stream of the world without a grid still knows, by what stays in its memory."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.open.stream import CELLS, NAMES, POLICIES, SECONDS, Camera, record, run_stream
from qtsplus.hub.loading import load

MODEL = Path("hub_configs/qtsplus-tiny")


@pytest.fixture(scope="module")
def camera():
    return Camera(*load(MODEL))


def test_a_recording_is_its_background_but_for_four_scenes(camera):
    background = camera.background(64)
    recording = record(background, camera, 0)
    assert len(background) == 64 * CELLS
    assert {scene.question.removeprefix("What is in the ").rstrip("?") for scene in recording.scenes} == set(NAMES)
    changed = (recording.features != background).any(1).reshape(-1, SECONDS * CELLS).any(1)
    assert changed.nonzero()[:, 0].tolist() == [begin // SECONDS for begin in recording.begins]
    for number, scene in enumerate(recording.scenes):
        assert recording.begins[number] < recording.last_seen(number) <= recording.begins[number] + SECONDS
        assert torch.isfinite(scene.features).all()


def test_all_policies_are_asked_and_timed(tmp_path):
    target = run_stream(MODEL, tmp_path, streams=1, seconds=64)
    document = json.loads(target.read_text(encoding="utf-8"))
    assert [row["policy"] for row in document["rows"][::2]] == list(POLICIES)
    assert [row["questions"] for row in document["rows"]] == [4, 0] * len(POLICIES)
    assert all(len(medians) == 1 and medians[0] > 0 for medians in document["milliseconds"].values())
