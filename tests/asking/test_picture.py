"""What an answer rests on, drawn: frames and videos with the kept tokens lit."""

import json
from dataclasses import replace
from pathlib import Path

import av
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
from qtsplus.model.video_qtsplus import AboutVideo, open_video
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


def decoded(path):
    """When a player shows each frame, and the frames."""
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        times = [float(frame.pts * frame.time_base) for frame in container.decode(video=0)]
    opened = open_video(str(path), lambda total, _: np.arange(total))
    assert times[0] == pytest.approx(opened.about.start)
    return times, np.stack(list(opened.decode())).astype(int)


@pytest.mark.parametrize(("late", "size"), [(0, (64, 64)), (5, (50, 66))])
def test_the_video_is_dimmed_where_tokens_were_dropped(tmp_path, late, size):
    bright = np.arange(120, 216, 6)
    frames = [np.full((*size, 3), value, np.uint8) for value in bright]
    write_mp4(tmp_path / "film.mp4", frames, 8, first=8 * late, crf="10")
    video = video_of(tmp_path / "film.mp4", 8.0, 16, late)
    answer = answer_about(video)
    both_steps = replace(answer.evidence[0], end=late + 2)
    draw_evidence(replace(answer, evidence=[both_steps]), {video.video: video}, tmp_path / "drawn")
    times, shown = decoded(tmp_path / "drawn" / "kept.mp4")
    assert times == pytest.approx(np.arange(16) / 8, abs=1e-3)
    assert shown.shape[1:3] == size
    middle = size[1] // 2
    left = shown[:, :, : middle - 8].mean((1, 2, 3))
    right = shown[:, :, middle + 8 :].mean((1, 2, 3))
    assert left[:8] == pytest.approx(bright[:8], abs=6), "what was kept is lit"
    assert left[8:] == pytest.approx(0.25 * bright[8:], abs=8)
    assert right == pytest.approx(0.25 * bright, abs=8)


def test_several_videos_are_numbered_and_frames_in_memory_are_not_drawn(tmp_path):
    images = tmp_path / "$folder$"
    images.mkdir()
    for index in range(5):
        Image.new("RGB", (31, 33), (50 * index, 90, 200)).save(images / f"{index}.png")
    folder = video_of(images, 2.5, 5)
    frames = video_of(IN_MEMORY, 2.5, 5)
    drawn = tmp_path / "drawn"
    draw_evidence(answer_about(folder, frames), {folder.video: folder, frames.video: frames}, drawn)
    assert drawn_names(drawn) == ["answer.json", "frames-1.png", "kept-1.mp4"]
    about_folder, about_frames = json.loads((drawn / "answer.json").read_text())["videos"]
    assert about_folder["kept"] == [0, 2]
    assert about_frames["kept"] == [0, 2]
    assert "kept_tokens" not in about_frames
    times, shown = decoded(drawn / "kept-1.mp4")
    assert times == pytest.approx([0, 0.4], abs=1e-3)
    assert shown.shape == (2, 32, 30, 3)


def test_an_answer_without_evidence_is_drawn(tmp_path):
    write_mp4(tmp_path / "film.mp4", np.zeros((4, 32, 32, 3), np.uint8), 2)
    video = video_of(tmp_path / "film.mp4", 2.0, 4)
    answer = replace(answer_about(video), evidence=[])
    draw_evidence(answer, {video.video: video}, tmp_path / "drawn")
    assert drawn_names(tmp_path / "drawn") == ["answer.json"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_only_the_stretches_that_answer_are_drawn(tmp_path, is_folder, monkeypatch):
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
    maps = {video.video: torch.ones(6, 2, 2, dtype=torch.bool)}
    answer = replace(answer_about(video), evidence=spans, keep_maps=maps)
    draw_evidence(answer, {video.video: video}, tmp_path / "drawn")
    times, shown = decoded(tmp_path / "drawn" / "kept.mp4")
    assert times == pytest.approx(np.arange(8) / 8, abs=1e-3)
    assert shown.mean((1, 2, 3)) == pytest.approx(bright[4:8] + bright[16:20], abs=4)
    assert (tmp_path / "drawn" / "frames.png").exists()
