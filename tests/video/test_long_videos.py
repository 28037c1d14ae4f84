"""A video that is read chunk by chunk is the video that is read at once, and takes no more memory than a chunk."""

import copy
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from clips import noise, write_mp4
from qtsplus.asking import session
from qtsplus.model.video_qtsplus import AboutVideo
from qtsplus.video.encoded import EncodedVideo, encode, read_ahead
from tiny import chat_inputs

QUESTION = "What moves?"


@pytest.fixture(scope="module")
def wide_mp4(tmp_path_factory):
    """30 frames of noise, 96 x 200 pixels, 10 a second."""
    path = tmp_path_factory.mktemp("wide") / "wide.mp4"
    write_mp4(path, noise(30, 96, 200), 10)
    return path


def prepared(processor, video, **options):
    """What the processor makes of a whole video."""
    return chat_inputs(processor, Path(video), QUESTION, return_metadata=True, **options)


def assert_same(processor, video, frames_per_chunk, **options):
    """The chunks hold what one read of the whole video gives. Returns their number."""
    whole = prepared(processor, video, **options)
    chunks = processor.video_chunks(video, frames_per_chunk=frames_per_chunk, **options)
    pixels = []
    for chunk, grid in chunks:
        assert len(chunk) == grid.prod()
        pixels.append(chunk)
    assert len(pixels) == len(chunks)
    assert torch.equal(torch.cat(pixels), whole["pixel_values_videos"])
    assert torch.equal(chunks.video_grid_thw, whole["video_grid_thw"])
    (seconds,) = whole["second_per_grid_ts"]
    assert chunks.second_per_grid_ts == pytest.approx([float(seconds)])
    (metadata,) = whole["video_metadata"]
    metadata.height = chunks.about.metadata.height  # frames in memory state no size
    metadata.width = chunks.about.metadata.width
    assert chunks.about.metadata == metadata
    return len(chunks)


@pytest.mark.parametrize(("frames_per_chunk", "count"), [(1, 15), (7, 5), (30, 1), (None, 1)])
def test_chunks_are_the_whole(tiny_processor, wide_mp4, frames_per_chunk, count):
    assert assert_same(tiny_processor, wide_mp4, frames_per_chunk, fps=10) == count


@pytest.mark.parametrize("options", [{}, {"num_frames": 6}, {"fps": 10, "max_frames": 8}], ids=str)
def test_chunks_are_sampled_as_the_whole(tiny_processor, wide_mp4, options):
    assert_same(tiny_processor, wide_mp4, 4, **options)


def test_chunks_are_resized_as_the_whole(tiny_processor, wide_mp4):
    """Qwen's resizing looks at the number of frames, which would make a chunk's frames larger."""
    processor = copy.deepcopy(tiny_processor)
    processor.video_processor.max_video_tokens = 100
    few = prepared(processor, wide_mp4, num_frames=2)
    many = prepared(processor, wide_mp4, num_frames=30)
    patches_of_few = few["video_grid_thw"][0, 1:].prod()
    patches_of_many = many["video_grid_thw"][0, 1:].prod()
    assert patches_of_few > patches_of_many
    assert_same(processor, wide_mp4, 2, fps=10)


def test_a_folder_with_an_odd_number_of_frames(tiny_processor, tmp_path):
    for index in range(7):
        image = Image.new("RGB", (56, 84), (30 * index, 90, 200))
        image.save(tmp_path / f"frame{index}.png")
    assert assert_same(tiny_processor, tmp_path, 4, fps=2) == 2


@pytest.mark.parametrize(
    ("count", "most", "stretch", "edges", "gap"),
    [
        (9, 9, {}, [5, 6, 7, 8, 9, 9.5], 0.5),
        (9, 8, {}, [5, 6, 7, 8, 9], 1),  # the last frame is not looked at
        (8, 8, {"start": 6, "end": 7.2}, [6, 7, 7.2], 0.5),
    ],
)
def test_the_times_of_an_odd_number_of_frames(loaded, tmp_path, count, most, stretch, edges, gap):
    path = tmp_path / "late.mp4"
    write_mp4(path, noise(count, 56, 84), 2, first=10)
    video = encode(*loaded, path, max_frames=most, **stretch)
    assert video.edges.tolist() == edges
    assert video.about.largest_gap == gap
    assert_same(loaded[1], path, 4, max_frames=most)


def test_a_rate_with_noise_leaves_none_in_edges_and_windows():
    fps = 24.999999999999996
    metadata = VideoMetadata(total_num_frames=200, fps=fps, frames_indices=list(range(0, 200, 25)))
    video = EncodedVideo("", torch.empty(0), torch.tensor([[8, 1, 1]]), 25 / fps, AboutVideo(metadata), 0.0)
    assert video.span(1, 4) == (1, 4)
    assert video.within(0.99999, 4.00001) == (1, 4)


def test_chunks_can_be_read_again(tiny_processor, tiny_mp4):
    chunks = tiny_processor.video_chunks(tiny_mp4, frames_per_chunk=2)
    first_time = [pixels for pixels, _ in chunks]
    second_time = [pixels for pixels, _ in chunks]
    assert torch.equal(torch.cat(first_time), torch.cat(second_time))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 1, "num_frames": 4}, "expected one of them"),
        ({"frames_per_chunk": 0}, "frames_per_chunk=0"),
    ],
)
def test_options_without_sense_are_refused(tiny_processor, tiny_mp4, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_processor.video_chunks(tiny_mp4, **options)


def test_a_prompt_for_a_video_that_was_encoded_before(tiny_processor, tiny_mp4):
    whole = prepared(tiny_processor, tiny_mp4)
    known = {"video_grid_thw": whole["video_grid_thw"]}
    with pytest.raises(ValueError, match="without times"):
        tiny_processor(text="<|video_pad|>", **known)
    flat = known["video_grid_thw"][0]
    with pytest.raises(ValueError, match="expected whole numbers of patches"):
        tiny_processor(text="<|video_pad|>", video_grid_thw=flat)
    known["second_per_grid_ts"] = whole["second_per_grid_ts"]
    later = chat_inputs(tiny_processor, {"type": "video"}, QUESTION, **known)
    for name in ("input_ids", "attention_mask", "query_mask", "video_grid_thw"):
        assert torch.equal(later[name], whole[name])
    left_out = set(whole) - set(later)
    assert left_out == {"pixel_values_videos", "second_per_grid_ts", "video_metadata"}
    with pytest.raises(ValueError, match="in place of `videos`, with `text`"):
        tiny_processor(text="<|video_pad|>", videos=str(tiny_mp4), **known)
    with pytest.raises(ValueError, match="Got 1 videos and 0 placeholders"):
        tiny_processor(text="no video", **known)


def test_one_video_and_many_questions(loaded, tiny_mp4, monkeypatch):
    model, _ = loaded
    whole = session.ask(*loaded, tiny_mp4, QUESTION, max_new_tokens=8)
    assert set(whole.timings) == {"encode", "first_token", "generate"}
    video = encode(*loaded, tiny_mp4, device="cpu")
    monkeypatch.setattr(type(model), "encode_videos", None)
    again = session.ask(*loaded, video, QUESTION, max_new_tokens=8)
    assert again.answer == whole.answer
    assert again.evidence == whole.evidence
    assert again.video == whole.video
    assert set(again.timings) == {"first_token", "generate"}
    other = session.ask(*loaded, video, "Which colour?", max_new_tokens=8)
    assert other.visual_tokens == len(video.features)
    with pytest.raises(ValueError, match="fps=1 .*for a video that was encoded before"):
        session.ask(*loaded, video, QUESTION, fps=1)


# --- The next chunk is read while one is encoded ---


def readers():
    """The threads that read ahead."""
    return [thread for thread in threading.enumerate() if "qtsplus-read-ahead" in thread.name]


def test_the_next_chunk_is_read_meanwhile_and_only_the_next():
    begun = [threading.Event() for _ in range(4)]

    def chunks():
        for index in range(4):
            begun[index].set()
            yield index

    for index in read_ahead(chunks()):
        if index < 3:
            assert begun[index + 1].wait(timeout=30)
        for later in begun[index + 2 :]:
            assert not later.is_set()


def test_an_error_of_the_reader_reaches_the_caller():
    broken = (1 // (2 - index) for index in range(4))
    with pytest.raises(ZeroDivisionError):
        list(read_ahead(broken))
    assert not readers()


def test_whoever_stops_in_between_ends_the_reader():
    ahead = read_ahead(range(4))
    next(ahead)
    assert readers()
    ahead.close()
    assert not readers()


@pytest.mark.parametrize(("device", "expected"), [("cpu", {0}), ("meta", {1})])
def test_a_video_is_read_ahead_where_the_encoder_leaves_the_processor_free(loaded, wide_mp4, device, expected):
    model, processor = loaded
    readers_while_encoding = []

    def encode_videos(*arguments, **options):
        readers_while_encoding.append(len(readers()))
        return model.encode_videos(*arguments, **options)

    elsewhere = SimpleNamespace(
        device=torch.device(device),
        encode_videos=encode_videos,
        config=model.config,
        dtype=model.dtype,
        model=model.model,
        parameters=model.parameters,
    )
    video = encode(elsewhere, processor, wide_mp4, fps=10, frames_per_chunk=2)
    same_video = encode(model, processor, wide_mp4, fps=10, frames_per_chunk=2)
    assert torch.equal(video.features, same_video.features)
    assert len(readers_while_encoding) > 2
    assert set(readers_while_encoding) == expected
