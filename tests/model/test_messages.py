"""What a message says of a video, in the ways of Qwen, vLLM and OpenAI, takes effect or is refused in one line."""

import numpy as np
import pytest
from PIL import Image

from qtsplus.model.sampling_qtsplus import read_keys
from tiny import assert_same, chat_inputs, load_bundled

TEXT = {"type": "text", "text": "Why?"}


@pytest.fixture(scope="module")
def processor():
    _, processor = load_bundled()
    return processor


@pytest.fixture
def ask(processor):
    """The inputs of a message with some parts and a question."""

    def ask(*parts, **sampling):
        return chat_inputs(processor, *parts, "Why?", **sampling)

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
}
VIDEOS = {
    "Transformers, video": lambda path, keys: {
        "type": "video",
        "video": path,
        **keys,
    },
    "Transformers, url": lambda path, keys: {
        "type": "video",
        "url": path,
        **keys,
    },
    "Transformers, path": lambda path, keys: {
        "type": "video",
        "path": path,
        **keys,
    },
    "Qwen, without a type": lambda path, keys: {
        "video": path,
        **keys,
    },
    "vLLM": lambda path, keys: {
        "type": "video_url",
        "video_url": {"url": "file://" + path},
        **keys,
    },
    "vLLM, keys inside": lambda path, keys: {
        "type": "video_url",
        "video_url": {"url": path, **keys},
    },
    "a video with an address": lambda path, keys: {
        "type": "video",
        "video_url": {"url": path},
        **keys,
    },
    "an address itself": lambda path, keys: {
        "type": "video_url",
        "video_url": path,
        **keys,
    },
}


def video_of(source, **keys):
    return {"type": "video", "video": source, **keys}


def seen(inputs):
    """What the model sees of a video, to compare."""
    grid = inputs["video_grid_thw"].tolist()
    return grid, inputs["second_per_grid_ts"], inputs["pixel_values_videos"].sum().item()


@pytest.mark.parametrize("way", VIDEOS)
def test_a_key_has_an_effect_in_every_way(ask, clip, way):
    def seen_with(**keys):
        part = VIDEOS[way](clip, keys)
        return seen(ask(part))

    plain = seen_with()
    assert plain == seen(ask(video_of(clip)))
    for key, (low, high) in KEYS.items():
        with_low = seen_with(**{key: low})
        with_high = seen_with(**{key: high})
        assert plain != with_low, key
        assert plain != with_high, key
        assert with_low != with_high, key


def test_each_video_has_keys_of_its_own(ask, clip):
    slow = video_of(clip, fps=1)
    eight = video_of(clip, nframes=8)
    grids = ask(slow, eight, video_of(clip), fps=3)["video_grid_thw"]
    assert_same(grids[:1], ask(slow)["video_grid_thw"])
    assert_same(grids[1:2], ask(eight)["video_grid_thw"])
    assert grids[:, 0].tolist() == [2, 4, 6]


def test_what_is_seen_lies_between_two_times(processor, ask, clip):
    options = {
        "do_sample_frames": False,
        "return_metadata": True,
    }
    whole = processor(videos=[clip], **options)
    stretch = {
        "video": clip,
        "video_start": 1,
        "video_end": 2.9,
    }
    part = processor(videos=[stretch], **options)
    (metadata,) = part["video_metadata"]
    assert metadata.frames_indices == list(range(8, 24))
    steps, _, _ = whole["video_grid_thw"][0].tolist()
    pixels = whole["pixel_values_videos"].unflatten(0, (steps, -1))
    assert_same(part["pixel_values_videos"], pixels[4:12].flatten(0, 1))
    assert part["second_per_grid_ts"] == pytest.approx(whole["second_per_grid_ts"])
    later = ask(video_of(clip, video_start=2, fps=2))
    assert later["second_per_grid_ts"] == pytest.approx([1])


def test_frames_take_their_rate_from_the_message(ask):
    noise = np.random.default_rng(0).integers(0, 255, (6, 56, 56, 3), np.uint8)
    frames = [Image.fromarray(frame) for frame in noise]
    inputs = ask(video_of(frames, fps=4))
    assert inputs["second_per_grid_ts"] == pytest.approx([0.5])
    assert inputs["video_grid_thw"][0, 0] == 3


def test_pixels_of_frames_are_bounded(processor, ask, clip):
    inputs = ask(video_of(clip, fps=2, max_pixels=60 * 60))
    _, height, width = inputs["video_grid_thw"][0].tolist()
    assert 1 < height * width <= (60 / processor.video_processor.patch_size) ** 2


BAD_KEYS = (
    "start",
    "end",
    "resized_height",
    "min_pixels",
    "sample_fps",
    "nframe",
)
BAD_PARTS = [
    {"type": "audio", "audio": "a.wav"},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "file", "file": {"file_id": "x"}},
    {"type": "input_file", "file_id": "x"},
    {"type": "video_file", "video_file": "a.mp4"},
    {"words": "Why?"},
    {"type": "image", "image": "frame.png", "max_pixels": 400},
    {"type": "image", "image": "frame.png", "resized_height": 28},
    {"type": "image_url", "image_url": {"url": "frame.png", "detail": "low"}},
]


def refuse(ask, part):
    with pytest.raises(ValueError) as error:
        ask(part)
    message = str(error.value)
    assert len(message) > 20, part
    assert "\n" not in message, part


@pytest.mark.parametrize("key", BAD_KEYS)
def test_an_unknown_key_is_refused(ask, clip, key):
    refuse(ask, video_of(clip, **{key: 1}))


@pytest.mark.parametrize("key", KEYS)
def test_a_value_that_says_nothing_is_refused(ask, clip, key):
    bad_values = ["2", -1, float("nan"), [2]]
    if key != "video_start":
        bad_values.append(0)
    for value in bad_values:
        refuse(ask, video_of(clip, **{key: value}))


@pytest.mark.parametrize("part", BAD_PARTS, ids=str)
def test_content_that_would_have_no_effect_is_refused(ask, part):
    refuse(ask, part)


def test_keys_that_do_not_go_together_are_refused(ask, clip, tmp_path):
    frame = str(tmp_path / "frame.png")
    Image.new("RGB", (56, 56), "red").save(frame)
    frames = [frame, frame]
    refuse(ask, video_of(clip, fps=2, nframes=4))
    refuse(ask, video_of(clip, video_start=9))
    refuse(ask, video_of(clip, video_start=3, video_end=2))
    refuse(ask, video_of(clip, path=clip))
    refuse(ask, video_of([clip, clip], fps=2))
    refuse(ask, video_of(frames, fps=2, nframes=2))
    refuse(ask, video_of(frames, fps=2, max_pixels=400))


def test_images_are_named_as_by_others(ask, tmp_path):
    picture = str(tmp_path / "picture.png")
    Image.effect_noise((56, 56), 60).convert("RGB").save(picture)
    by_type = ask({"type": "image", "image": picture})
    without_type = ask({"image": picture})
    by_address = ask({"type": "image_url", "image_url": {"url": picture}})
    expected = by_type["pixel_values"]
    assert_same(without_type["pixel_values"], expected)
    assert_same(by_address["pixel_values"], expected)


def test_a_template_that_is_only_written_out_leaves_keys_to_others(processor, clip):
    """As with `process_vision_info` of qwen-vl-utils, which reads the same messages."""

    def written(part):
        message = {"role": "user", "content": [part, TEXT]}
        return processor.apply_chat_template([message])

    prompt = written(video_of(clip, resized_height=28))
    assert prompt == written({"video_url": {"url": clip}, "fps": 9})
    assert processor.video_token in prompt


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ([], "a conversation without a message"),
        ([[]], "a conversation without a message"),
        ([{"role": "user", "content": ["What?"]}], "A message has 'What\\?' in a list; expected parts"),
        ([{"role": "user", "content": [TEXT, None]}], "A message has None in a list; expected parts"),
    ],
)
def test_a_conversation_without_messages_or_parts_is_refused(processor, conversation, message):
    for tokenizes in (False, True):
        with pytest.raises(ValueError, match=message):
            processor.apply_chat_template(conversation, tokenize=tokenizes, return_dict=tokenizes)


def test_a_message_without_a_role_is_no_question(processor):
    inputs = processor.apply_chat_template([{"content": "What?"}], tokenize=True, return_dict=True)
    assert not any(map(any, inputs["query_mask"]))


@pytest.mark.parametrize("content", [{"answer": "12:00"}, 12])
def test_a_message_whose_content_is_no_text_is_refused(processor, content):
    messages = [
        {"role": "user", "content": [TEXT]},
        {"role": "tool", "content": content},
    ]
    with pytest.raises(ValueError, match="A message has the content .*; expected a str, or a list of parts"):
        processor.apply_chat_template(messages, tokenize=True, return_dict=True)


def test_a_long_video_is_read_by_the_same_keys(processor, clip):
    keys = {
        "fps": 2,
        "video_start": 1,
        "video_end": 3,
        "max_pixels": 60 * 60,
    }
    chunks = processor.video_chunks(clip, **keys)
    video = {"video": clip, **keys}
    whole = processor(videos=[video], return_tensors="pt")
    ((pixels, _),) = chunks
    assert type(read_keys({"fps": np.float16(2)})["fps"]) is float, "products overflow in float16"
    assert_same(pixels, whole["pixel_values_videos"])
    assert_same(chunks.video_grid_thw, whole["video_grid_thw"])
    assert chunks.about.start == 1
    assert chunks.second_per_grid_ts == pytest.approx(whole["second_per_grid_ts"])
    with pytest.raises(ValueError, match="expected any of fps, num_frames"):
        processor.video_chunks(clip, start=1)
