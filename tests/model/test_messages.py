"""What a message says of a video, in the ways of Qwen, vLLM and OpenAI, takes effect or is refused in one line."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import SizeDict

from clips import write_mp4
from tiny import load_bundled

TEXT = {"type": "text", "text": "Why?"}


@pytest.fixture(scope="module")
def processor():
    return load_bundled()[1]


@pytest.fixture
def ask(processor):
    def ask(*parts, **options):
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", **options}
        return processor.apply_chat_template([{"role": "user", "content": [*parts, TEXT]}], **options)

    return ask


@pytest.fixture(scope="module")
def clip(tiny_mp4):
    return str(tiny_mp4)  # 32 frames of 112 x 112 pixels in 4 s


KEYS = {
    "fps": (1, 4.0),
    "nframes": (4, 6),
    "num_frames": (4, 6),
    "min_frames": (10, 12),
    "max_frames": (4, 6),
    "video_start": (1, 2.5),
    "video_end": (1.5, 3),
    "max_pixels": (56 * 56, 84 * 84),
    "total_pixels": (56 * 56 * 4, 84 * 84 * 4),
}
VIDEOS = {
    "Transformers, video": lambda path, keys: {"type": "video", "video": path, **keys},
    "Transformers, url": lambda path, keys: {"type": "video", "url": path, **keys},
    "Transformers, path": lambda path, keys: {"type": "video", "path": path, **keys},
    "Qwen, without a type": lambda path, keys: {"video": path, **keys},
    "vLLM": lambda path, keys: {"type": "video_url", "video_url": {"url": "file://" + path}, **keys},
    "vLLM, keys inside": lambda path, keys: {"type": "video_url", "video_url": {"url": path, **keys}},
    "a video with an address": lambda path, keys: {"type": "video", "video_url": {"url": path}, **keys},
    "an address itself": lambda path, keys: {"type": "video_url", "video_url": path, **keys},
}


def seen(inputs):
    return (inputs["video_grid_thw"].tolist(), inputs["second_per_grid_ts"], inputs["pixel_values_videos"].sum().item())


@pytest.mark.parametrize("way", VIDEOS)
def test_a_key_has_an_effect_in_every_way(ask, clip, way):
    plain = seen(ask(VIDEOS[way](clip, {})))
    assert plain == seen(ask({"type": "video", "video": clip}))
    for key, values in KEYS.items():
        if key == "total_pixels":  # has none on frames as small as these
            continue
        several = [seen(ask(VIDEOS[way](clip, {key: value}))) for value in values]
        assert all(one != other for one, other in itertools.combinations([plain, *several], 2)), key


def test_a_key_does_what_the_call_does(ask, clip):
    for key, value in (("fps", 4), ("num_frames", 4), ("max_frames", 4)):
        by_call = ask(
            {"type": "video", "video": clip}, processor_kwargs={key: value, **({"fps": 2} if "max" in key else {})}
        )
        assert seen(ask({"type": "video", "video": clip, key: value})) == seen(by_call)


def test_each_video_has_keys_of_its_own(ask, clip):
    one, other, third = ({"type": "video", "video": clip, **keys} for keys in ({"fps": 1}, {"nframes": 8}, {}))
    together, alone = ask(one, other, third, processor_kwargs={"fps": 3}), [ask(part) for part in (one, other)]
    assert torch.equal(together["video_grid_thw"][:2], torch.cat([inputs["video_grid_thw"] for inputs in alone]))
    assert together["video_grid_thw"][:, 0].tolist() == [2, 4, 6]


def test_what_is_seen_lies_between_two_times(processor, ask, clip):
    every = processor(videos=[clip], do_sample_frames=False, return_metadata=True)
    part = processor(
        videos=[{"video": clip, "video_start": 1, "video_end": 2.9}], do_sample_frames=False, return_metadata=True
    )
    assert part["video_metadata"][0].frames_indices == list(range(8, 24))
    per_step = len(every["pixel_values_videos"]) // int(every["video_grid_thw"][0, 0])
    assert torch.equal(part["pixel_values_videos"], every["pixel_values_videos"][4 * per_step : 12 * per_step])
    assert part["second_per_grid_ts"] == pytest.approx(every["second_per_grid_ts"])
    assert ask({"type": "video", "video": clip, "video_start": 2, "fps": 2})["second_per_grid_ts"] == pytest.approx([1])


def test_frames_take_their_rate_from_the_message(ask):
    frames = [Image.fromarray(frame) for frame in np.random.default_rng(0).integers(0, 255, (6, 56, 56, 3), np.uint8)]
    inputs = ask({"type": "video", "video": frames, "fps": 4})
    assert inputs["second_per_grid_ts"] == pytest.approx([0.5]) and inputs["video_grid_thw"][0, 0] == 3


def test_pixels_of_frames_are_bounded(processor, ask, clip):
    side = processor.video_processor.patch_size
    ((_, h, w),) = ask({"type": "video", "video": clip, "fps": 2, "max_pixels": 60 * 60})["video_grid_thw"].tolist()
    assert h * w > 1
    assert h * w * side**2 <= 60 * 60


def test_total_pixels_leave_each_frame_what_qwen_vl_utils_leaves_it(processor, ask, tmp_path, monkeypatch):
    """128 tokens and a twentieth, however few pixels are asked for."""
    frames = np.random.default_rng(0).integers(0, 255, (8, 448, 448, 3), np.uint8)
    path = tmp_path / "large.mp4"
    write_mp4(path, frames, 2)
    side = processor.video_processor.patch_size * processor.video_processor.merge_size
    monkeypatch.setattr(processor.video_processor, "size", SizeDict(shortest_edge=56**2, longest_edge=8 * 448**2))

    def tokens(**keys):
        ((_, height, width),) = ask({"type": "video", "video": str(path), **keys})["video_grid_thw"].tolist()
        return height * width // processor.video_processor.merge_size**2

    floor = tokens(max_pixels=int(1.05 * 128 * side**2))
    assert tokens(total_pixels=1) == tokens(total_pixels=100) == floor
    assert floor < tokens(total_pixels=4 * 200 * side**2) < tokens()
    assert tokens(total_pixels=1, max_pixels=20 * side**2) <= 20


BAD_KEYS = {
    **{key: 1 for key in ("start", "end", "resized_height", "resized_width", "min_pixels", "sample_fps", "raw_fps")},
    **{key: 1 for key in ("nframe", "fp", "max_pixel", "uuid", "detail", "num_segments", "video_fps", "quality")},
}
BAD_VALUES = [
    *((key, value) for key in KEYS for value in ("2", -1, float("nan"), [2])),
    *((key, 0) for key in KEYS if key != "video_start"),
]
BAD_PARTS = [
    {"type": "audio", "audio": "a.wav"},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "file", "file": {"file_id": "x"}},
    {"type": "input_file", "file_id": "x"},
    {"type": "video_file", "video_file": "a.mp4"},
    {"words": "Why?"},
    {"type": "video", "video": "{clip}", "fps": 2, "nframes": 4},
    {"type": "video", "video": "{clip}", "video_start": 9},
    {"type": "video", "video": "{clip}", "video_start": 3, "video_end": 2},
    {"type": "video", "video": "{clip}", "path": "{clip}"},
    {"type": "video", "video": ["{clip}", "{clip}"], "fps": 2},
    {"type": "video", "video": ["{frame}", "{frame}"], "fps": 2, "nframes": 2},
    {"type": "video", "video": ["{frame}", "{frame}"], "fps": 2, "max_pixels": 400},
    {"type": "image", "image": "{frame}", "max_pixels": 400},
    {"type": "image", "image": "{frame}", "resized_height": 28},
    {"type": "image_url", "image_url": {"url": "{frame}", "detail": "low"}},
]


def filled(value, names):
    if isinstance(value, dict):
        return {key: filled(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, names) for one in value]
    return value.format(**names) if isinstance(value, str) and value.startswith("{") else value


def test_a_hundred_messages_have_an_effect_or_are_refused_in_one_line(ask, clip, tmp_path):
    frame = tmp_path / "frame.png"
    Image.new("RGB", (56, 56), "red").save(frame)
    refused = [{"type": "video", "video": clip, key: value} for key, value in [*BAD_KEYS.items(), *BAD_VALUES]]
    refused += filled(BAD_PARTS, {"clip": clip, "frame": str(frame)})
    taken = len(VIDEOS) * sum(len(values) for values in KEYS.values())
    assert len(refused) + taken > 100
    for part in refused:
        with pytest.raises(ValueError) as error:
            ask(part)
        assert len(str(error.value)) > 20 and "\n" not in str(error.value), part


def test_images_are_named_as_by_others(ask, tmp_path):
    picture = tmp_path / "picture.png"
    Image.effect_noise((56, 56), 60).convert("RGB").save(picture)
    expected = ask({"type": "image", "image": str(picture)})["pixel_values"]
    for part in ({"image": str(picture)}, {"type": "image_url", "image_url": {"url": str(picture)}}):
        assert torch.equal(ask(part)["pixel_values"], expected)


def test_a_template_that_is_only_written_out_leaves_keys_to_others(processor, clip):
    """As with `process_vision_info` of qwen-vl-utils, which reads the same messages."""
    written = [
        processor.apply_chat_template([{"role": "user", "content": [part, TEXT]}])
        for part in ({"type": "video", "video": clip, "resized_height": 28}, {"video_url": {"url": clip}, "fps": 9})
    ]
    assert written[0] == written[1] and processor.video_token in written[0]


@pytest.mark.parametrize("content", [{"answer": "12:00"}, 12])
def test_a_message_whose_content_is_no_text_is_refused(processor, content):
    messages = [{"role": "user", "content": [TEXT]}, {"role": "tool", "content": content}]
    with pytest.raises(ValueError, match="A message has the content .*; expected a str, or a list of parts"):
        processor.apply_chat_template(messages, tokenize=True, return_dict=True)


def test_the_messages_of_the_caller_stay_as_they_are(ask, clip):
    part = {"type": "video", "video": clip, "nframes": 4}
    ask(part)
    assert part == {"type": "video", "video": clip, "nframes": 4}


def test_a_long_video_is_read_by_the_same_keys(processor, clip):
    keys = {"video_start": 1, "video_end": 3, "max_pixels": 60 * 60}
    chunks = processor.video_chunks(clip, fps=2, **keys)
    whole = processor(videos=[{"video": clip, "fps": 2, **keys}], return_tensors="pt")
    (pixels, _), *more = chunks
    assert torch.equal(pixels, whole["pixel_values_videos"]) and not more
    assert torch.equal(chunks.video_grid_thw, whole["video_grid_thw"])
    assert (chunks.about.start, chunks.second_per_grid_ts) == (1, pytest.approx(whole["second_per_grid_ts"]))
    with pytest.raises(ValueError, match="expected any of fps, num_frames"):
        processor.video_chunks(clip, start=1)
