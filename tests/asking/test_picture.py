"""What an answer rests on, drawn: frames and videos with the kept tokens lit."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from clips import write_mp4
from qtsplus.asking import picture
from qtsplus.asking.evidence import Interval
from qtsplus.asking.picture import draw_evidence
from qtsplus.asking.session import Answer
from qtsplus.model.video_qtsplus import AboutVideo
from qtsplus.video.encoded import IN_MEMORY, EncodedVideo

LEFT_HALF = (0.0, 0.0, 0.5, 1.0)
WHOLE_FRAME = (0.0, 0.0, 1.0, 1.0)


def test_only_kept_tokens_are_lit():
    frame = np.full((8, 12, 3), 200, np.uint8)
    kept = np.array([[True, False, True], [False, False, True]])
    lit = picture.lit(frame, kept)
    assert (lit[:4, :4] == 200).all()
    assert (lit[4:, 8:] == 200).all()
    assert (lit[4:, :8] < 60).all()
    assert (lit[:4, 4:8] < 60).all()


def answer_about(*videos):
    """An answer that kept the left half of the first step of each video, and nothing else."""
    maps = {}
    spans = []
    for number, video in enumerate(videos):
        kept = torch.zeros(2, 2, 2, dtype=torch.bool)
        kept[0, :, 0] = True
        maps[video.video] = kept
        start = video.about.start
        spans.append(Interval(start, start + 1, 0.5, number, LEFT_HALF, video.video))
    return Answer("yes", "film", 4, 2.0, 8, 2, 0.25, spans, {}, maps)


def video_of(path, fps, total, start=0.0, seconds=1.0, steps=2):
    metadata = VideoMetadata(total_num_frames=total, fps=fps, frames_indices=list(range(total)))
    about = AboutVideo(metadata, start)
    grid = torch.tensor([[steps, 4, 4]])
    return EncodedVideo(str(path), torch.empty(8, 4), grid, seconds, about, 0.0)


def drawn_names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_several_videos_are_numbered_and_frames_in_memory_are_not_drawn(tmp_path):
    images = tmp_path / "$folder$"
    images.mkdir()
    for index in range(5):
        Image.new("RGB", (31, 33), (50 * index, 90, 200)).save(images / f"{index}.png")
    folder = video_of(images, 2.5, 5)
    frames = video_of(IN_MEMORY, 2.5, 5)
    drawn = tmp_path / "drawn"
    draw_evidence(answer_about(folder, frames), {folder.video: folder, frames.video: frames}, drawn)
    assert drawn_names(drawn) == ["answer.json", "frames-1.png"]
    about_folder, about_frames = json.loads((drawn / "answer.json").read_text())["videos"]
    assert about_folder["kept"] == [0, 2]
    assert about_folder["frames"] == "frames-1.png"
    assert about_frames["kept"] == [0, 2]
    assert "frames" not in about_frames


def test_an_answer_without_evidence_is_drawn(tmp_path):
    write_mp4(tmp_path / "film.mp4", np.zeros((4, 32, 32, 3), np.uint8), 2)
    video = video_of(tmp_path / "film.mp4", 2.0, 4)
    answer = replace(answer_about(video), evidence=[])
    draw_evidence(answer, {video.video: video}, tmp_path / "drawn")
    assert drawn_names(tmp_path / "drawn") == ["answer.json"]


def brightness_of_panes(path, count):
    """How bright the left and the right half of each frame in a picture are."""
    picture = np.asarray(Image.open(path).convert("L")).astype(float)
    height = picture.shape[0]
    rows = picture[height // 2 - 10 : height // 2 + 10]
    panes = np.array_split(rows, count, axis=1)
    halves = []
    for pane in panes:
        width = pane.shape[1]
        left = pane[:, width // 4 : width // 4 + 20].mean()
        right = pane[:, 3 * width // 4 - 20 : 3 * width // 4].mean()
        halves.append((left, right))
    return halves


@pytest.mark.parametrize("is_folder", [False, True])
def test_the_middle_of_each_stretch_is_drawn_and_dimmed_where_tokens_were_dropped(tmp_path, is_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bright = list(range(0, 240, 10))
    frames = [np.full((32, 32, 3), value, np.uint8) for value in bright]
    path = Path("frames" if is_folder else "frames.mp4")
    if is_folder:
        path.mkdir()
        for index, frame in enumerate(frames):
            Image.fromarray(frame).save(path / f"{index:02}.png")
    else:
        write_mp4(path, frames, 8)
    video = video_of(path, 8.0, 24, seconds=0.5, steps=6)
    spans = [Interval(start, start + 0.5, 0.5, 0, WHOLE_FRAME, video.video) for start in (2.0, 0.5)]
    kept = torch.zeros(6, 2, 2, dtype=torch.bool)
    kept[:, :, 0] = True
    answer = replace(answer_about(video), evidence=spans, keep_maps={video.video: kept})
    draw_evidence(answer, {video.video: video}, tmp_path / "drawn")
    first, second = brightness_of_panes(tmp_path / "drawn" / "frames.png", 2)
    assert first == pytest.approx((bright[6], bright[6] / 4), abs=4)
    assert second == pytest.approx((bright[18], bright[18] / 4), abs=4)
