"""What an answer rests on, drawn: frames with the kept tokens lit."""

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
from qtsplus.video.encoded import NO_FILE, EncodedVideo

BRIGHT = range(0, 240, 10)  # how bright the frames of a video are that lasts three seconds


def test_only_kept_tokens_are_lit():
    frame = np.full((8, 12, 3), 200, np.uint8)
    kept = np.array([[True, False, True], [False, False, True]])
    of_tokens = np.asarray(picture.dimmed_where_dropped(frame, kept)).reshape(2, 4, 3, 4, 3)
    darkest = of_tokens.min((1, 3, 4))
    brightest = of_tokens.max((1, 3, 4))
    assert (darkest[kept] == 200).all()
    assert (brightest[~kept] < 60).all()


def video_of(path, steps=6):
    """What is known of a video of eight frames a second."""
    frames = len(BRIGHT)
    metadata = VideoMetadata(
        total_num_frames=frames,
        fps=8.0,
        frames_indices=list(range(frames)),
    )
    return EncodedVideo(
        video=str(path),
        features=torch.empty(4 * steps, 4),
        video_grid_thw=torch.tensor([[steps, 4, 4]]),
        seconds_per_step=3 / steps,
        about=AboutVideo(metadata),
        seconds=0.0,
    )


def answer_about(*videos):
    """An answer that kept the left half of each frame, and rests on two stretches of each video."""
    maps = {}
    spans = []
    for number, video in enumerate(videos):
        kept = torch.zeros(video.count, 2, 2, dtype=torch.bool)
        kept[:, :, 0] = True
        maps[video.video] = kept
        for start in (2.0, 0.5):
            interval = Interval(
                start=start,
                end=start + 0.5,
                weight=0.5,
                video=number,
                name=video.video,
            )
            spans.append(interval)
    return Answer(
        answer="yes",
        video="video",
        frames=24,
        seconds_of_video=3.0,
        visual_tokens=24,
        kept_tokens=12,
        rho=0.5,
        evidence=spans,
        timings={},
        keep_maps=maps,
    )


def write_folder(folder):
    folder.mkdir()
    for index, value in enumerate(BRIGHT):
        Image.new("RGB", (32, 32), (value, value, value)).save(folder / f"{index:02}.png")


def write_file(path):
    write_mp4(path, [np.full((32, 32, 3), value, np.uint8) for value in BRIGHT], 8)


def drawn_names(folder):
    names = {path.name for path in folder.iterdir()}
    return sorted(name for name in names if not name.startswith("."))


def test_several_videos_are_numbered_and_frames_in_memory_are_not_drawn(tmp_path):
    write_folder(tmp_path / "$folder$")
    folder = video_of(tmp_path / "$folder$")
    frames = video_of(NO_FILE)
    videos = {video.video: video for video in (folder, frames)}
    drawn = tmp_path / "drawn"
    draw_evidence(answer_about(folder, frames), videos, drawn)
    assert drawn_names(drawn) == ["answer.json", "frames-1.png"]
    content = json.loads((drawn / "answer.json").read_text())
    about_folder, about_frames = content["videos"]
    left_half = list(range(0, 24, 2))
    assert about_folder["kept"] == left_half
    assert about_folder["frames"] == "frames-1.png"
    assert about_frames["kept"] == left_half
    assert "frames" not in about_frames


def test_an_answer_about_other_videos_is_not_drawn(tmp_path):
    with pytest.raises(ValueError, match="about 'a.mp4', which is not among the videos"):
        draw_evidence(answer_about(video_of("a.mp4")), {}, tmp_path)


def test_an_answer_without_evidence_is_drawn(tmp_path):
    write_file(tmp_path / "video.mp4")
    video = video_of(tmp_path / "video.mp4")
    answer = replace(answer_about(video), evidence=[])
    draw_evidence(answer, {video.video: video}, tmp_path / "drawn")
    assert drawn_names(tmp_path / "drawn") == ["answer.json"]


def brightness_of_panes(path, count):
    """How bright the left and the right half of each frame in a picture are."""
    grey = Image.open(path).convert("L")
    pixels = np.asarray(grey).astype(float)
    middle = len(pixels) // 2
    rows = pixels[middle - 10 : middle + 10]
    halves = []
    for pane in np.array_split(rows, count, axis=1):
        quarter = pane.shape[1] // 4
        left = pane[:, quarter : quarter + 20]
        right = pane[:, -quarter - 20 : -quarter]
        halves.append((left.mean(), right.mean()))
    return halves


@pytest.mark.parametrize(("write", "name"), [(write_file, "video.mp4"), (write_folder, "frames")])
def test_the_middle_of_each_stretch_is_drawn_and_dimmed_where_tokens_were_dropped(tmp_path, write, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path(name))
    video = video_of(name)
    drawn = tmp_path / "drawn"
    draw_evidence(answer_about(video), {video.video: video}, drawn)
    panes = brightness_of_panes(drawn / "frames.png", 2)
    for (lit, dimmed), middle in zip(panes, (6, 18), strict=True):
        brightness = BRIGHT[middle]
        assert lit == pytest.approx(brightness, abs=4)
        assert dimmed == pytest.approx(brightness / 4, abs=4)
