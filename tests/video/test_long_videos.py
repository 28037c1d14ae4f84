"""A video that is read chunk by chunk is the video that is read at once, and takes no more memory than a chunk."""

import copy
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from clips import write_mp4
from qtsplus.asking import session
from qtsplus.model import encoding_qtsplus
from qtsplus.video import encoded as videos
from tiny import chat_inputs

QUESTION = "What moves?"


@pytest.fixture(scope="module")
def wide_mp4(tmp_path_factory):
    """30 frames of noise, 96 x 200 pixels, 10 a second."""
    path = tmp_path_factory.mktemp("wide") / "wide.mp4"
    write_mp4(path, np.random.default_rng(0).integers(0, 255, (30, 96, 200, 3), np.uint8), 10)
    return path


def prepared(processor, video, **options):
    return chat_inputs(processor, Path(video), QUESTION, return_metadata=True, **options)


def assert_same(processor, video, frames_per_chunk, **options):
    """The chunks hold what one read of the whole video gives. Returns their number."""
    whole = prepared(processor, video, **options)
    chunks = processor.video_chunks(video, frames_per_chunk=frames_per_chunk, **options)
    pixels = []
    steps = 0
    for chunk, grid in chunks:
        assert len(chunk) == grid.prod()
        pixels.append(chunk)
        steps += grid[0, 0]
    assert len(pixels) == len(chunks)
    assert torch.equal(torch.cat(pixels), whole["pixel_values_videos"])
    assert torch.equal(chunks.video_grid_thw, whole["video_grid_thw"])
    assert steps == whole["video_grid_thw"][0, 0]
    assert chunks.second_per_grid_ts == pytest.approx([float(whole["second_per_grid_ts"][0])])
    (metadata,) = whole["video_metadata"]
    metadata.height = chunks.about.metadata.height  # frames in memory state no size
    metadata.width = chunks.about.metadata.width
    assert chunks.about.metadata == metadata
    return len(chunks)


@pytest.mark.parametrize(("frames_per_chunk", "count"), [(1, 15), (2, 15), (7, 5), (28, 2), (30, 1), (None, 1)])
def test_chunks_are_the_whole(loaded, wide_mp4, frames_per_chunk, count):
    assert assert_same(loaded[1], wide_mp4, frames_per_chunk, fps=10) == count


@pytest.mark.parametrize("options", [{}, {"num_frames": 6}, {"fps": 10, "max_frames": 8}], ids=str)
def test_chunks_are_sampled_as_the_whole(loaded, wide_mp4, options):
    assert_same(loaded[1], wide_mp4, 4, **options)


def test_chunks_are_resized_as_the_whole(loaded, wide_mp4):
    """Qwen's resizing looks at the number of frames, which would make a chunk's frames larger."""
    processor = copy.deepcopy(loaded[1])
    processor.video_processor.max_video_tokens = 100
    few = prepared(processor, wide_mp4, num_frames=2)["video_grid_thw"]
    many = prepared(processor, wide_mp4, num_frames=30)["video_grid_thw"]
    assert few[0, 1:].prod() > many[0, 1:].prod()
    assert_same(processor, wide_mp4, 2, fps=10)


def test_a_folder_with_an_odd_number_of_frames(loaded, tmp_path):
    for index in range(7):
        Image.new("RGB", (56, 84), (30 * index, 90, 200)).save(tmp_path / f"frame{index}.png")
    assert assert_same(loaded[1], tmp_path, 4, fps=2) == 2


def test_chunks_can_be_read_again(loaded, tiny_mp4):
    chunks = loaded[1].video_chunks(tiny_mp4, frames_per_chunk=2)
    for (first, _), (second, _) in zip(chunks, chunks, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("video", "options", "message"),
    [
        ("none.mp4", {}, "no video at"),
        (None, {"fps": 1, "num_frames": 4}, "expected one of them"),
        (None, {"fps": 0}, "fps=0"),
        (None, {"frames_per_chunk": 0}, "frames_per_chunk=0"),
    ],
)
def test_what_cannot_be_read_in_chunks(loaded, tiny_mp4, video, options, message):
    with pytest.raises(ValueError, match=message):
        loaded[1].video_chunks(tiny_mp4 if video is None else video, **options)


def test_a_prompt_for_a_video_that_was_encoded_before(loaded, tiny_mp4):
    processor = loaded[1]
    whole = prepared(processor, tiny_mp4)
    later = chat_inputs(processor, {"type": "video"}, QUESTION, video_grid_thw=whole["video_grid_thw"])
    for name in ("input_ids", "attention_mask", "query_mask", "video_grid_thw"):
        assert torch.equal(later[name], whole[name]), name
    assert set(whole) - set(later) == {"pixel_values_videos", "second_per_grid_ts", "video_metadata"}
    with pytest.raises(ValueError, match="in place of `videos`, with `text`"):
        processor(text="<|video_pad|>", videos=str(tiny_mp4), video_grid_thw=whole["video_grid_thw"])
    with pytest.raises(ValueError, match="Got 1 videos and 0 placeholders"):
        processor(text="no video", video_grid_thw=whole["video_grid_thw"])


def test_one_video_and_many_questions(loaded, tiny_mp4, monkeypatch):
    model, processor = loaded
    whole = session.ask(model, processor, tiny_mp4, QUESTION, max_new_tokens=8)
    assert set(whole.timings) == {"encode", "first_token", "generate"}
    video = session.encode(model, processor, tiny_mp4, device="cpu")
    monkeypatch.setattr(type(model), "encode_videos", None)
    again = session.ask(model, processor, video, QUESTION, max_new_tokens=8)
    assert again.answer == whole.answer
    assert again.evidence == whole.evidence
    assert again.video == whole.video
    assert set(again.timings) == {"first_token", "generate"}
    assert session.ask(model, processor, video, "Which colour?", max_new_tokens=8).visual_tokens == len(video.features)
    with pytest.raises(ValueError, match="fps=1 .*for a video that was encoded before"):
        session.ask(model, processor, video, QUESTION, fps=1)


def test_the_next_chunk_is_read_meanwhile_and_only_the_next():
    begun = [threading.Event() for _ in range(4)]

    def chunks():
        for index in range(4):
            begun[index].set()
            yield index

    for index in videos.read_ahead(chunks()):
        if index < 3:
            assert begun[index + 1].wait(timeout=30)
        assert not any(event.is_set() for event in begun[index + 2 :])


def readers():
    return [thread for thread in threading.enumerate() if "qtsplus-read-ahead" in thread.name]


def test_an_error_of_the_reader_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        list(videos.read_ahead(1 // (2 - index) for index in range(4)))
    assert not readers()


def test_whoever_stops_in_between_ends_the_reader():
    ahead = videos.read_ahead(range(4))
    next(ahead)
    assert readers()
    ahead.close()
    assert not readers()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_video_is_read_ahead_where_the_encoder_leaves_the_processor_free(loaded, wide_mp4, device):
    model, processor = loaded
    seen = []

    def encode_videos(*args, **kwargs):
        seen.append(len(readers()))
        return model.encode_videos(*args, **kwargs)

    parts = {"config": model.config, "dtype": model.dtype, "model": model.model, "parameters": model.parameters}
    somewhere = SimpleNamespace(device=torch.device(device), encode_videos=encode_videos, **parts)
    features = session.encode(somewhere, processor, wide_mp4, fps=10, frames_per_chunk=2).features
    assert torch.equal(features, session.encode(model, processor, wide_mp4, fps=10, frames_per_chunk=2).features)
    assert len(seen) > 2
    assert set(seen) == {0 if device == "cpu" else 1}


def test_what_stands_still_is_encoded_once_in_a_chunk(loaded, tmp_path, monkeypatch):
    model, processor = loaded
    for index in range(40):
        Image.new("RGB", (84, 56), (200, 20 * (index >= 20), 20)).save(tmp_path / f"{index:02d}.png")
    times = []
    encode_pixels = model.model.encode_pixels

    def noting(*arguments):
        grids = arguments[2]
        times.extend(grids[:, 0].tolist())
        return encode_pixels(*arguments)

    monkeypatch.setattr(model.model, "encode_pixels", noting)
    options = {"fps": 2, "frames_per_chunk": 16}
    once = session.encode(model, processor, tmp_path, **options)
    assert times == [1, 2, 1], "two pictures in three chunks"
    times.clear()
    monkeypatch.setattr(encoding_qtsplus, "new_steps", lambda steps: torch.ones(len(steps), dtype=torch.bool))
    every = session.encode(model, processor, tmp_path, **options)
    assert times == [8, 8, 4]
    torch.testing.assert_close(once.features, every.features, atol=5e-5, rtol=1e-4)
    answer = session.ask(model, processor, once, QUESTION, max_new_tokens=8)
    expected = session.ask(model, processor, every, QUESTION, max_new_tokens=8)
    assert answer.answer == expected.answer
    assert torch.equal(answer.keep_map, expected.keep_map)
