"""A file is resized frame by frame as it is decoded; the pixel values are those of the whole video, to the bit."""

import numpy as np
import pytest
from torch.testing import assert_close

from clips import read_video, write_mp4
from tiny import assert_same, chat_inputs

SIZES = {"wide": (96, 200), "tall": (300, 90), "small": (16, 24), "narrow": (24, 1400), "even": (64, 64)}


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    for name, (height, width) in SIZES.items():
        noise = np.random.default_rng(0).integers(0, 255, (8, height, width, 3), np.uint8)
        write_mp4(folder / f"{name}.mp4", noise, 4)
    return {name: str(folder / f"{name}.mp4") for name in SIZES}


def prompt(processor, videos=1):
    content = [{"type": "video"}] * videos + [{"type": "text", "text": "Why?"}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def given_frames(video):
    """All frames as large as they are, which the video processor resizes together."""
    frames, metadata = read_video(video, lambda total, fps: np.arange(total))
    return frames, metadata


def other_size(processor):
    if processor.native_resolution:
        return {"shortest_edge": 16 * 16, "longest_edge": 24 * 24}
    return {"height": processor.video_processor.size["height"], "width": processor.video_processor.size["width"]}


def test_a_file_gives_the_pixels_of_its_frames(processor, films):
    """Of every size as it is; of one as a call asks for it, too."""
    calls = [({}, film) for film in films.values()]
    asked = ({"do_normalize": False}, {"resample": 2}, {"size": other_size(processor)})
    calls += [({"videos_kwargs": options}, films["wide"]) for options in asked]
    for options, film in calls:
        frames, metadata = given_frames(film)
        options = {"text": prompt(processor), "return_tensors": "pt", **options}
        whole = processor(videos=frames, video_metadata=[metadata], **options)
        assert_same(processor(videos=film, do_sample_frames=False, **options), whole)


def test_a_file_beside_given_frames(processor, films):
    frames, metadata = given_frames(films["tall"])
    options = {"text": prompt(processor, 2), "return_tensors": "pt"}
    whole = processor(videos=[frames, frames], video_metadata=[metadata, metadata], **options)
    mixed = processor(videos=[films["tall"], frames], video_metadata=[None, metadata], num_frames=8, **options)
    assert_same(mixed, whole)


@pytest.mark.parametrize("source", ["file", "frames", "chunks"])
def test_a_video_of_one_frame_is_answered_as_its_frame_shown_twice(model, processor, tmp_path, source):
    write_mp4(tmp_path / "one.mp4", np.random.default_rng(0).integers(0, 255, (1, 48, 64, 3), np.uint8), 2)
    frames, _ = read_video(str(tmp_path / "one.mp4"), lambda total, fps: np.arange(total))
    assert len(frames) == 1
    step = processor.video_processor.temporal_patch_size
    expected = processor(videos=[frames.repeat(step, 0)], fps=2, return_tensors="pt")
    if source == "chunks":
        ((pixels, grid),) = processor.video_chunks(tmp_path / "one.mp4")
    else:
        inputs = processor(
            videos=[str(tmp_path / "one.mp4") if source == "file" else frames], fps=2, return_tensors="pt"
        )
        pixels = inputs["pixel_values_videos"]
        grid = inputs["video_grid_thw"]
    assert_same(grid, expected["video_grid_thw"])
    assert_close(pixels, expected["pixel_values_videos"])
    video = {"video": str(tmp_path / "one.mp4")} if source == "file" else {"video": frames, "fps": 2}
    asked = chat_inputs(processor, {"type": "video", **video}, "Where is the red ball?")
    asked.pop("mm_token_type_ids", None)
    assert len(model.generate(**asked, max_new_tokens=2)[0]) > asked["input_ids"].shape[1]
