"""How a video is read: from when to when, how many frames and pixels, frames of uneven times; and what it will take."""

import json
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from clips import noise, write_mp4
from qtsplus.asking import session
from qtsplus.cli import app
from qtsplus.cli.asking import print_answer
from qtsplus.hub.loading import load
from qtsplus.library.indexing import index
from qtsplus.library.library import Library
from qtsplus.video.encoded import encode
from qtsplus.video.forecast import forecast

FEW_PIXELS = 56 * 84


@pytest.fixture(scope="module")
def long_video(tmp_path_factory):
    """12 s of noise, 8 frames a second, 112 x 168 pixels."""
    path = tmp_path_factory.mktemp("noise") / "noise.mp4"
    write_mp4(path, noise(96, 112, 168), 8)
    return path


def test_a_stretch_has_the_features_of_its_frames_and_the_times_of_the_video(loaded, long_video):
    part = encode(*loaded, long_video, fps=2, start=4, end=7.9)
    assert part.about.start == pytest.approx(4)
    assert part.length == pytest.approx(3.9)
    whole = encode(*loaded, long_video, fps=2)
    features_of_steps = whole.features.unflatten(0, (whole.count, -1))
    assert torch.allclose(part.features, features_of_steps[4:8].flatten(0, 1), atol=1e-4)
    answer = session.ask(
        *loaded,
        part,
        "What is in the yellow ring?",
        selection="all",
        max_new_tokens=1,
    )
    (interval,) = answer.evidence
    assert interval.start == pytest.approx(4)
    assert interval.end == pytest.approx(7.9)


def test_frames_and_pixels_are_bounded(loaded, long_video):
    _, processor = loaded
    area_of_patch = processor.video_processor.patch_size**2

    def pixels_of(video):
        _, rows, columns = video.video_grid_thw[0].tolist()
        return rows * columns * area_of_patch

    assert encode(*loaded, long_video, max_frames=4).about.frames == 4
    assert pixels_of(encode(*loaded, long_video, fps=1)) > FEW_PIXELS
    small = encode(*loaded, long_video, fps=1, max_pixels=FEW_PIXELS)
    assert pixels_of(small) <= FEW_PIXELS
    metadata = small.about.metadata
    # Boxes are in pixels of the whole frame.
    assert metadata.height == 112
    assert metadata.width == 168


# --- Frames in memory ---


def test_frames_that_are_not_evenly_apart_keep_their_times(loaded):
    frames = noise(8, 56, 56)
    indices = [30, 60, 300, 330, 600, 660, 900, 1200]
    talk = session.VideoSession(*loaded)
    talk.add(frames, "shots", metadata={"fps": 30, "frames_indices": indices})
    assert talk.videos["shots"].steps == [0, 9, 19, 29, 47]  # the last lasts as long as most
    begins = {interval.start for interval in talk.ask("What?", max_new_tokens=1).evidence}
    assert begins <= {1, 10, 20, 30}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"metadata": {"fps": 30, "frames_indices": [3, 2, 1, 0]}},
            "expected as many, ascending",
        ),
        (
            {"metadata": {"fps": 30, "frames_indices": [0, 1, 2]}},
            "of 4 frames; expected as many",
        ),
        (
            {"metadata": {"fps": 30, "frames_indices": [0, 1, 2, 9], "total_num_frames": 9}},
            "=9: .* over 10 frames",
        ),
        (
            {"metadata": {"fps": 30}, "fps": 2},
            "expected `fps` alone, or metadata alone",
        ),
        (
            {"fps": 2, "start": 1},
            "start=1.* for frames; expected `fps` alone",
        ),
        (
            {"fps": 2, "max_pixels": 100},
            "max_pixels=100.* for frames",
        ),
    ],
)
def test_options_that_do_not_fit_frames_are_refused(loaded, options, message):
    frames = np.zeros((4, 56, 56, 3), np.uint8)
    with pytest.raises(ValueError, match=message):
        encode(*loaded, frames, **options)


@pytest.mark.parametrize("shape", [(4, 0, 56, 3), (4, 56, 0, 3), (4, 3, 56, 0)])
@pytest.mark.parametrize("zeros", [np.zeros, torch.zeros])
def test_frames_without_pixels_are_refused(loaded, shape, zeros):
    with pytest.raises(ValueError, match="expected some pixels"):
        encode(*loaded, zeros(shape), fps=2)


# --- What says nothing ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 13}, "shows no frame from 13 s to its end"),
        ({"start": 5, "end": 4}, "shows no frame from 5 s to 4 s"),
        ({"start": float("nan")}, "Got start=nan"),
        ({"fps": "two"}, "Got fps='two'"),
        ({"max_frames": 2.5}, "max_frames=2.5; expected a whole number"),
        ({"max_pixels": 0}, "max_pixels=0"),
        ({"metadata": {"fps": 30}}, "metadata is about frames"),
    ],
)
def test_options_that_do_not_fit_a_video_are_refused(loaded, long_video, options, message):
    with pytest.raises(ValueError, match=message):
        encode(*loaded, long_video, **options)


@pytest.mark.parametrize("options", [{"max_frames": 2}, {"start": 1}], ids=str)
def test_all_frames_of_a_folder_are_looked_at(loaded, tmp_path, options):
    Image.new("RGB", (56, 56)).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match="all frames are looked at"):
        encode(*loaded, tmp_path, fps=2, **options)


# --- What reading takes ---


def test_a_forecast_counts_what_is_then_read(loaded, long_video, monkeypatch):
    model, processor = loaded
    expected = forecast(model, processor.video_chunks(long_video, fps=4), retention=np.float16(0.25))
    video = encode(*loaded, long_video, fps=4)
    answer = session.ask(
        *loaded,
        video,
        "What?",
        retention=0.25,
        max_new_tokens=1,
    )
    assert expected.frames == answer.frames
    assert expected.visual_tokens == answer.visual_tokens
    assert expected.kept_tokens == answer.kept_tokens
    assert expected.seconds_of_video == pytest.approx(answer.seconds_of_video)
    assert expected.features == video.features.nbytes
    assert expected.features < expected.memory
    free = SimpleNamespace(available=expected.features - 1)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(ValueError, match="fewer frames"):
        encode(*loaded, long_video, fps=4)


@pytest.mark.parametrize(("trained", "said"), [(5.0, 5.0), (12.0, None), (None, None)])
def test_a_video_that_is_longer_than_those_of_the_training_is_said(
    loaded, long_video, trained, said, monkeypatch, capsys
):
    model, processor = loaded
    monkeypatch.setattr(model.config.qtsplus_config, "trained_seconds", trained)
    expected = forecast(model, processor.video_chunks(long_video, fps=2))
    answer = session.ask(*loaded, str(long_video), "What?", fps=2, max_new_tokens=1)
    print_answer(answer)
    printed = " ".join(capsys.readouterr().out.split())
    assert expected.trained_seconds == said
    assert answer.as_dict()["trained_seconds"] == said
    clause = ", at most 0.5 s apart, longer than the 5 s that the model was trained on"
    is_said = said is not None
    assert (clause in str(expected)) == is_said
    assert (clause in printed) == is_said


def ask_by_command(video, *options):
    return CliRunner().invoke(app, ["ask", str(video), "What?"] + list(options))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_forecast_needs_no_weights(tiny_published, long_video, tmp_path, dtype):
    folder = tmp_path / "model"
    shutil.copytree(tiny_published, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model, processor = load(tiny_published, "cpu", dtype)
    expected = forecast(model, processor.video_chunks(long_video))
    options = ["--model", str(folder), "--dtype", dtype]
    dry = ask_by_command(long_video, "--dry-run", "--json", *options)
    assert json.loads(dry.stdout) == asdict(expected)
    assert ask_by_command(long_video, *options).exit_code == 2, "the answer needs them"
    adapter = folder / "adapter_config.json"
    adapter.write_text("{}")
    dry = ask_by_command(long_video, "--dry-run", *options)
    assert dry.exit_code == 2, "an adapter would change what is answered"


def test_the_command_says_what_reading_takes_and_reads_a_stretch(tiny_published, long_video):
    model = ["--model", str(tiny_published)]
    dry = ask_by_command(long_video, "--dry-run", "--fps", "4", *model)
    assert dry.exit_code == 0
    assert "48 frames of 12.0 s, at most 0.25 s apart; " in dry.output
    assert "of memory beside" in dry.output
    stretch = "--start 4 --end 7.9 --max-frames 6 --max-pixels 4000"
    part = ask_by_command(long_video, *stretch.split(), *model)
    assert part.exit_code == 0
    assert "3.9 s, 6 frames looked at, at most 0." in part.output
    assert ask_by_command(long_video, "--start", "20", *model).exit_code == 2


# --- Elsewhere ---


def test_a_library_holds_the_same_stretch_and_is_not_mixed_with_another(loaded, long_video, tmp_path):
    reading = {
        "fps": 2,
        "start": 4,
        "end": 7.9,
        "max_pixels": FEW_PIXELS,
    }
    videos = long_video.parent
    folder = tmp_path / "library"
    index(videos, folder, *loaded, **reading)
    stored = Library(folder, *loaded).video(long_video.name)
    encoded = encode(*loaded, long_video, **reading)
    assert torch.equal(stored.features, encoded.features)
    assert stored.about.start == encoded.about.start == 4
    reading["start"] = 5
    with pytest.raises(ValueError, match=r"start=4.*and with.*|was begun with"):
        index(videos, folder, *loaded, **reading)
