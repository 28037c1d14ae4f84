"""A file is resized frame by frame as it is decoded; the pixel values are those of the whole video, to the bit."""

import numpy as np
import pytest
from torch.testing import assert_close

from clips import read_video, write_mp4
from tiny import assert_same, chat_inputs

SIZES = {
    "wide": (96, 200),
    "tall": (300, 90),
    "small": (16, 24),
    "narrow": (24, 1400),
    "even": (64, 64),
}


def write_noise(path, frames, height, width, fps):
    noise = np.random.default_rng(0).integers(0, 255, (frames, height, width, 3), np.uint8)
    write_mp4(path, noise, fps)
    return str(path)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    return {name: write_noise(folder / f"{name}.mp4", 8, *size, 4) for name, size in SIZES.items()}


def prompt(processor, videos=1):
    content = [{"type": "video"}] * videos
    content.append({"type": "text", "text": "Why?"})
    message = {"role": "user", "content": content}
    return processor.apply_chat_template([message], add_generation_prompt=True)


def given_frames(video):
    """All frames as large as they are, which the video processor resizes together."""
    return read_video(video, lambda total, fps: np.arange(total))


def check_file(processor, video, **options):
    """A file gives the pixels of its frames."""
    frames, metadata = given_frames(video)
    call = {
        "text": prompt(processor),
        "return_tensors": "pt",
        **options,
    }
    whole = processor(videos=frames, video_metadata=[metadata], **call)
    assert_same(dict(processor(videos=video, do_sample_frames=False, **call)), dict(whole))


@pytest.mark.parametrize("size", SIZES)
def test_a_file_gives_the_pixels_of_its_frames(processor, videos, size):
    check_file(processor, videos[size])


@pytest.mark.parametrize("asked", ["do_normalize", "resample", "size"])
def test_a_file_gives_the_pixels_that_a_call_asks_for(processor, videos, asked):
    size = {"shortest_edge": 16 * 16, "longest_edge": 24 * 24}
    if not processor.native_resolution:
        size = dict(processor.video_processor.size)
    options = {
        "do_normalize": False,
        "resample": 2,
        "size": size,
    }
    check_file(processor, videos["wide"], videos_kwargs={asked: options[asked]})


def test_a_file_beside_given_frames(processor, videos):
    tall = videos["tall"]
    frames, metadata = given_frames(tall)
    options = {
        "text": prompt(processor, 2),
        "return_tensors": "pt",
    }
    whole = processor(
        videos=[frames, frames],
        video_metadata=[metadata, metadata],
        **options,
    )
    mixed = processor(
        videos=[tall, frames],
        video_metadata=[None, metadata],
        num_frames=8,
        **options,
    )
    assert_same(dict(mixed), dict(whole))


@pytest.mark.parametrize("source", ["file", "frames", "chunks"])
def test_a_video_of_one_frame_is_answered_as_its_frame_shown_twice(model, processor, tmp_path, source):
    path = write_noise(tmp_path / "one.mp4", 1, 48, 64, 2)
    frames, _ = given_frames(path)
    step = processor.video_processor.temporal_patch_size
    expected = processor(videos=[frames.repeat(step, 0)], fps=2, return_tensors="pt")
    if source == "chunks":
        ((pixels, grid),) = processor.video_chunks(path)
    else:
        video = path if source == "file" else frames
        inputs = processor(videos=[video], fps=2, return_tensors="pt")
        pixels = inputs["pixel_values_videos"]
        grid = inputs["video_grid_thw"]
        asked = chat_inputs(processor, {"type": "video", "video": video}, "Where is the red ball?", fps=2)
        asked.pop("mm_token_type_ids", None)
        answer = model.generate(**asked, max_new_tokens=2)
        assert answer.shape[1] > asked["input_ids"].shape[1]
    assert_same(grid, expected["video_grid_thw"])
    assert_close(pixels, expected["pixel_values_videos"])
