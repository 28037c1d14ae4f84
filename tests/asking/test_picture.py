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


def test_only_kept_tokens_are_lit():
    frame = np.full((8, 12, 3), 200, np.uint8)
    kept = np.array([[True, False, True], [False, False, True]])
    lit = picture.lit(frame, kept)
    assert (lit[:4, :4] == 200).all() and (lit[4:, 8:] == 200).all()
    assert (lit[4:, :8] < 60).all() and (lit[:4, 4:8] < 60).all()


# What an answer rests on ----------------------------------------------------------------------------------------------


def answer_about(*videos):
    """An answer that kept the left half of the first step of each video, and nothing else."""
    maps = {}
    for video in videos:
        maps[video.video] = torch.zeros(2, 2, 2, dtype=torch.bool)
        maps[video.video][0, :, 0] = True
    spans = [
        Interval(one.about.start, one.about.start + 1, 0.5, number, (0.0, 0.0, 0.5, 1.0), one.video)
        for number, one in enumerate(videos)
    ]
    return Answer("yes", "film", 4, 2.0, 8, 2, 0.25, spans, {}, maps)


def video_of(path, fps, total, start=0.0, seconds=1.0):
    metadata = VideoMetadata(total_num_frames=total, fps=fps, frames_indices=list(range(total)))
    return EncodedVideo(
        str(path), torch.empty(8, 4), torch.tensor([[2, 4, 4]]), seconds, AboutVideo(metadata, start), 0.0
    )


def decoded(path):
    """When a player shows each frame, and the frames."""
    opened = open_video(str(path), lambda total, _: np.arange(total))
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        times = [float(frame.pts * frame.time_base) for frame in container.decode(video=0)]
    assert times[0] == pytest.approx(opened.about.start)
    return times, np.stack(list(opened.decode())).astype(int), opened.about.metadata


@pytest.mark.parametrize(("late", "size"), [(0, (64, 64)), (5, (50, 66))])
def test_the_video_is_dimmed_where_tokens_were_dropped(tmp_path, late, size):
    bright = np.array([120 + 6 * index for index in range(16)])
    frames = (np.full((*size, 3), value, np.uint8) for value in bright)
    write_mp4(tmp_path / "film.mp4", frames, 8, first=8 * late, crf="10")
    video = video_of(tmp_path / "film.mp4", 8.0, 16, late)
    answer = answer_about(video)
    answer = replace(answer, evidence=[replace(answer.evidence[0], end=late + 2)])
    draw_evidence(answer, {video.video: video}, tmp_path / "drawn")
    times, frames, metadata = decoded(tmp_path / "drawn" / "kept.mp4")
    assert times == pytest.approx([index / 8 for index in range(16)], abs=1e-3)
    assert metadata.duration == pytest.approx(2) and frames.shape[1:3] == size
    left, right = frames[:, :, : size[1] // 2 - 8].mean((1, 2, 3)), frames[:, :, size[1] // 2 + 8 :].mean((1, 2, 3))
    assert left[:8] == pytest.approx(bright[:8], abs=6), "what was kept is lit"
    assert right == pytest.approx(0.25 * bright, abs=8) and left[8:] == pytest.approx(0.25 * bright[8:], abs=8)


def test_several_videos_are_numbered_and_frames_in_memory_are_not_drawn(tmp_path):
    (tmp_path / "$folder$").mkdir()
    for index in range(5):
        Image.new("RGB", (31, 33), (50 * index, 90, 200)).save(tmp_path / "$folder$" / f"{index}.png")
    folder, frames = video_of(tmp_path / "$folder$", 2.5, 5), video_of(IN_MEMORY, 2.5, 5)
    draw_evidence(answer_about(folder, frames), {one.video: one for one in (folder, frames)}, tmp_path / "drawn")
    names = sorted(path.name for path in (tmp_path / "drawn").iterdir() if path.name[0] != ".")
    assert names == ["answer.json", "frames-1.png", "kept-1.mp4"]
    about = json.loads((tmp_path / "drawn" / "answer.json").read_text())["videos"]
    assert [one["kept"] for one in about] == [[0, 2], [0, 2]] and "kept_tokens" not in about[1]
    times, shown, _ = decoded(tmp_path / "drawn" / "kept-1.mp4")
    assert times == pytest.approx([0, 0.4], abs=1e-3) and shown.shape == (2, 32, 30, 3)


def test_an_answer_without_evidence_is_drawn(tmp_path):
    write_mp4(tmp_path / "film.mp4", np.zeros((4, 32, 32, 3), np.uint8), 2)
    video = video_of(tmp_path / "film.mp4", 2.0, 4)
    answer = replace(answer_about(video), evidence=[])
    draw_evidence(answer, {video.video: video}, tmp_path / "drawn")
    assert [path.name for path in (tmp_path / "drawn").iterdir() if path.name[0] != "."] == ["answer.json"]


@pytest.mark.parametrize("folder", [False, True])
def test_only_the_stretches_that_answer_are_drawn(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bright, path = [10 * index for index in range(24)], Path("frames")
    if folder:
        path.mkdir()
        for index, value in enumerate(bright):
            Image.new("RGB", (32, 32), (value,) * 3).save(path / f"{index:02}.png")
    else:
        path = path.with_suffix(".mp4")
        write_mp4(path, (np.full((32, 32, 3), value, np.uint8) for value in bright), 8)
    video = replace(video_of(path, 8.0, 24, seconds=0.5), video_grid_thw=torch.tensor([[6, 4, 4]]))
    spans = [Interval(at, at + 0.5, 0.5, 0, (0.0, 0.0, 1.0, 1.0), video.video) for at in (2.0, 0.5)]
    maps = {video.video: torch.ones(6, 2, 2, dtype=torch.bool)}
    answer = replace(answer_about(video), evidence=spans, keep_maps=maps)
    draw_evidence(answer, {video.video: video}, tmp_path / "drawn")
    times, frames, _ = decoded(tmp_path / "drawn" / "kept.mp4")
    assert times == pytest.approx([index / 8 for index in range(8)], abs=1e-3)
    assert frames.mean((1, 2, 3)) == pytest.approx(bright[4:8] + bright[16:20], abs=4)
    assert (tmp_path / "drawn" / "frames.png").exists()
