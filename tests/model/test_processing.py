"""The processor: the question's mask, and videos with their true times."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, floats, integers, lists, none, sampled_from, text, tuples
from PIL import Image

from clips import write_mp4
from qtsplus.hub.files import hub_configs
from qtsplus.model.configuration_qtsplus import Qwen2_5_VLQTSplusConfig
from qtsplus.model.frames_qtsplus import image_paths, load_frames
from qtsplus.model.processing_qtsplus import Qwen2_5_VLQTSplusProcessor
from qtsplus.model.question_qtsplus import find_query_mask, question_token_ids
from qtsplus.model.sampling_qtsplus import choose_frames
from tiny import assert_same, chat_inputs

VISION = "<|vision_start|><|video_pad|><|vision_end|>"
PROMPT = f"<|im_start|>user\n{VISION}Where is it?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def processor(tiny_processor):
    return tiny_processor


def shaded_frames(count, height=56, width=56):
    """Frame `i` is plain, of shade `8 * i`, so that a decoded frame tells its index."""
    shades = 8 * np.arange(count, dtype=np.uint8)
    frames = np.empty((count, height, width, 3), np.uint8)
    frames[:] = shades[:, None, None, None]
    return frames


def read_shades(frames):
    return [round(float(frame.mean()) / 8) for frame in frames]


def as_files(folder, names):
    """Shaded frames as pictures of these names, in this order."""
    paths = [str(folder / name) for name in names]
    for path, frame in zip(paths, shaded_frames(len(names)), strict=True):
        Image.fromarray(frame).save(path)
    return paths


@pytest.fixture
def ramp(tmp_path):
    """24 shaded frames at 8 frames a second: 3 seconds."""
    path = tmp_path / "ramp.mp4"
    write_mp4(path, shaded_frames(24), 8)
    return str(path)


def ask(video):
    content = [
        {"type": "video", "video": video},
        {"type": "text", "text": "Where is it?"},
    ]
    return [{"role": "user", "content": content}]


def prepare(processor, video, **processor_kwargs):
    """The inputs of a question about a video, by the chat template."""
    part = {"type": "video", "video": video}
    return chat_inputs(processor, part, "Where is it?", **processor_kwargs)


def steps_and_seconds(inputs):
    """The temporal patches of a call's only video, and the seconds of each."""
    ((steps, _, _),) = inputs["video_grid_thw"].tolist()
    (seconds,) = inputs["second_per_grid_ts"]
    return steps, float(seconds)


# The question ---------------------------------------------------------------------------------------------------------

WORDS = text(alphabet="abc ?.\nWhereist", min_size=1, max_size=20).map(str.strip).filter(bool)
TURN = tuples(WORDS, integers(0, 2), integers(0, 2), WORDS)
CONVERSATION = tuples(lists(TURN, min_size=1, max_size=3), booleans())


def render(turns, answered):
    prompt = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    last = len(turns) - 1
    for number, (question, images, videos, answer) in enumerate(turns):
        vision = "<|vision_start|><|image_pad|><|vision_end|>" * images + VISION * videos
        prompt += f"<|im_start|>user\n{vision}{question}<|im_end|>\n<|im_start|>assistant\n"
        if answered or number < last:
            prompt += f"{answer}<|im_end|>\n"
    return prompt


@settings(max_examples=40, deadline=None)
@given(
    rows=lists(CONVERSATION, min_size=1, max_size=3),
    side=sampled_from(["left", "right"]),
)
def test_the_mask_covers_the_last_users_text_and_nothing_else(processor, rows, side):
    texts = []
    questions = []
    images = []
    videos = []
    for turns, answered in rows:
        texts.append(render(turns, answered))
        for _, num_images, num_videos, _ in turns:
            images += [Image.new("RGB", (56, 56))] * num_images
            videos += [shaded_frames(2)] * num_videos
        last_question, *_ = turns[-1]
        questions.append(last_question)
    vision = {"images": images or None}
    if videos:
        vision |= {"videos": videos, "fps": 2.0}
    inputs = processor(
        text=texts,
        padding=True,
        padding_side=side,
        return_tensors="pt",
        **vision,
    )
    query_mask = inputs["query_mask"]
    for ids, mask, question in zip(inputs["input_ids"], query_mask, questions, strict=True):
        words = ids[mask.bool()]
        assert processor.decode(words) == question

    by_model = find_query_mask(
        inputs["input_ids"],
        inputs["attention_mask"],
        **question_token_ids(Qwen2_5_VLQTSplusConfig(**processor.query_token_ids)),
    )
    assert_same(query_mask, by_model)

    unpadded = processor(text=texts, **vision)
    for row, mask in enumerate(unpadded["query_mask"]):
        assert sum(mask) == query_mask[row].sum()
        assert len(mask) == len(unpadded["input_ids"][row])


def test_the_ids_are_those_of_the_configurations(processor):
    ids = processor.query_token_ids
    default = Qwen2_5_VLQTSplusConfig()
    shift = 151644 - ids["user_turn_token_ids"][0]
    assert default.user_turn_token_ids[0] == 151644
    assert default.turn_end_token_id == ids["turn_end_token_id"] + shift
    assert list(default.special_token_ids) == [index + shift for index in ids["special_token_ids"]]


@pytest.mark.parametrize("return_tensors", [None, "pt"])
@pytest.mark.parametrize("queries", [["Where?", "How many circles are there?"], "Where?"], ids=["each", "all"])
def test_a_query_comes_padded_in_the_form_of_the_ids(processor, return_tensors, queries):
    inputs = processor(
        text=["a a", "b b"],
        query=queries,
        return_tensors=return_tensors,
        padding=True,
    )
    form = type(inputs["input_ids"])
    assert type(inputs["query_input_ids"]) is form
    assert type(inputs["query_mask"]) is form
    ids = torch.as_tensor(inputs["query_input_ids"])
    mask = torch.as_tensor(inputs["query_attention_mask"]).bool()
    assert mask.shape == (2, mask.sum(1).max())
    assert ids.shape == mask.shape
    for row, query in enumerate(queries if len(queries) == 2 else [queries] * 2):
        words = ids[row][mask[row]]
        assert processor.decode(words) == query
    padding = ids[~mask]
    assert (padding == processor.tokenizer.pad_token_id).all()


@pytest.mark.parametrize(
    "query",
    [
        {"query": "Where?"},
        {"processor_kwargs": {"query": "Where?"}},
    ],
    ids=["plain", "processor_kwargs"],
)
def test_a_query_goes_through_the_chat_template(processor, ramp, query):
    # Below 5.23 a plain keyword makes `apply_chat_template` drop `processor_kwargs`, so the latter is the one to use.
    inputs = processor.apply_chat_template(
        ask(ramp),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **query,
    )
    (ids,) = inputs["query_input_ids"]
    assert processor.decode(ids) == "Where?"
    names = {"query_mask", "query_input_ids", "query_attention_mask"}
    assert names <= set(inputs)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "expected a question, a str"),
        ("  \n", "expected a question, a str"),
        (["Where?", ""], "expected a question, a str"),
        (7, "expected a question"),
        (b"Why?", "expected a question"),
        ({"text": "Why?"}, "expected a question"),
        ([None, "Why?"], "expected a text"),
        (["Why?", 7], "expected a text"),
        ([], "expected a question"),
        (["a", "b", "c"], "3 queries for 2 rows"),
        ("\ud800", "half a character"),
    ],
)
def test_queries_that_say_nothing_or_to_nobody_are_refused(processor, query, message):
    with pytest.raises(ValueError, match=message):
        processor(text=["a", "b"], query=query)


def test_texts_that_are_not_unicode_are_refused(processor):
    text = "a\ud800"
    conversation = [{"role": "user", "content": text}]
    calls = (
        lambda: processor(text=["a", text]),
        lambda: processor.text_ids(text),
        lambda: processor.conversation_inputs([conversation]),
        lambda: processor.apply_chat_template(conversation, tokenize=True, return_dict=True),
    )
    for call in calls:
        with pytest.raises(ValueError, match="half a character"):
            call()


# Files ----------------------------------------------------------------------------------------------------------------


@given(
    total=integers(1, 2000),
    video_fps=floats(0.5, 120),
    fps=none() | floats(0.1, 60),
    num_frames=none() | integers(1, 3000),
    most=integers(1, 64),
)
def test_chosen_frames_exist_and_increase(total, video_fps, fps, num_frames, most):
    indices = choose_frames(total, video_fps, fps, num_frames, max_frames=most)
    count = len(indices)
    assert 1 <= count <= total
    assert count % 2 == 0 or count in (total, most)
    assert indices[0] == 0
    assert indices[-1] < total
    assert (np.diff(indices) > 0).all()
    if num_frames is None and fps is not None:
        assert count <= most


@pytest.mark.parametrize(
    ("sampling", "frames", "seconds_per_grid"),
    [
        ({}, 6, 1.0),
        ({"fps": 100}, 24, 0.25),
        ({"num_frames": 4}, 4, 1.5),
        ({"do_sample_frames": False}, 24, 0.25),
        ({"max_frames": 8, "fps": 4}, 8, 0.75),
        ({"videos_kwargs": {"fps": 4}}, 12, 0.5),
    ],
)
def test_seconds_per_grid_are_true_to_the_sampling(processor, ramp, sampling, frames, seconds_per_grid):
    inputs = prepare(processor, ramp, return_metadata=True, **sampling)
    steps, seconds = steps_and_seconds(inputs)
    assert steps == frames // 2
    assert seconds == pytest.approx(seconds_per_grid)
    (metadata,) = inputs["video_metadata"]
    assert len(metadata.frames_indices) == frames
    first, _, third, *_ = metadata.timestamps
    assert third - first == pytest.approx(seconds_per_grid)


def test_rows_with_two_one_and_no_video(processor, ramp, tmp_path):
    short = str(tmp_path / "short.mp4")
    write_mp4(short, shaded_frames(8), 8)
    one = ask(ramp)
    greeting = {"type": "text", "text": "Hello"}
    none_at_all = [{"role": "user", "content": [greeting]}]
    two = ask(ramp)
    two[0]["content"].insert(0, {"type": "video", "path": short})
    inputs = processor.apply_chat_template(
        [two, none_at_all, one],
        tokenize=True,
        return_dict=True,
        processor_kwargs={
            "padding": True,
            "return_tensors": "pt",
            "fps": [4.0, 2.0, 1.0],
        },
    )
    steps = inputs["video_grid_thw"][:, 0]
    assert steps.tolist() == [2, 3, 2]
    is_placeholder = inputs["input_ids"] == processor.video_token_id
    assert is_placeholder.sum(1).tolist() == [4 * 2 + 4 * 3, 0, 4 * 2]


def test_a_missing_file_is_named(processor):
    with pytest.raises(ValueError, match="no video at '/nowhere/clip.mp4'; expected a video file"):
        processor(text=PROMPT, videos="/nowhere/clip.mp4")


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "noise"])
def test_an_undecodable_file_is_named(processor, ramp, tmp_path, damage):
    with open(ramp, "rb") as file:
        whole = file.read()
    middle = whole.index(b"mdat") + 8
    noise = bytes(range(256)) * 3
    broken = {
        "empty": b"",
        "text": b"this is not a video" * 50,
        "cut": whole[:middle],
        "noise": whole[:middle] + noise + whole[middle + len(noise) :],
    }
    path = tmp_path / "broken.mp4"
    path.write_bytes(broken[damage])
    with pytest.raises(ValueError, match=r"Cannot decode '.*broken.mp4' as a video: [^\[]*\. Expected"):
        processor(text=PROMPT, videos=str(path))


# Frames ---------------------------------------------------------------------------------------------------------------


def as_pil(frames):
    return [Image.fromarray(frame) for frame in frames]


FORMS = {
    "array": lambda frames: frames,
    "channels_first": lambda frames: torch.from_numpy(frames).permute(0, 3, 1, 2),
    "images": as_pil,
    "nested": lambda frames: [[as_pil(frames)]],
    "arrays": list,
    "backwards": lambda frames: frames[..., ::-1],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_rate_of_given_frames_gives_their_times(processor, form):
    videos = FORMS[form](shaded_frames(8))
    with pytest.raises(ValueError, match=r"frames \(8\) without their times.*fps=.*--fps.*encode.*video_metadata="):
        processor(text=PROMPT, videos=videos)
    inputs = processor(text=PROMPT, videos=videos, fps=4.0, return_tensors="pt")
    assert steps_and_seconds(inputs) == (4, 0.5)


@pytest.mark.parametrize(
    ("sampling", "steps", "seconds"),
    [
        ({}, 4, 2.0),
        ({"num_frames": 4}, 2, 4.0),
    ],
)
def test_metadata_gives_the_times_of_sampled_frames(processor, sampling, steps, seconds):
    """Asked for fewer, the processor samples among those given."""
    metadata = {
        "fps": 30.0,
        "total_num_frames": 240,
        "frames_indices": list(range(0, 240, 30)),
    }
    inputs = processor(
        text=PROMPT,
        videos=shaded_frames(8),
        video_metadata=[metadata],
        return_tensors="pt",
        **sampling,
    )
    assert steps_and_seconds(inputs) == (steps, seconds)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([{"total_num_frames": 8}], "`fps`"),
        ([{"fps": 30.0, "total_num_frames": 240}], "without `frames_indices`"),
        ([{"fps": 30.0, "total_num_frames": 240, "frames_indices": [1, 2]}], "8 frames"),
        ([{"fps": 0.0}], "finite number above 0"),
        ([{"rate": 30.0}], "unexpected keyword argument 'rate'"),
        (30.0, "video_metadata=30.0 is not a dictionary"),
        ([{"fps": 30.0}] * 2, "2 entries of `video_metadata` for 1 videos"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(processor, metadata, message):
    with pytest.raises(ValueError, match=message):
        processor(text=PROMPT, videos=shaded_frames(8), video_metadata=metadata)


def test_a_folder_of_frames_in_natural_order(processor, tmp_path):
    as_files(tmp_path, [f"frame{index}.png" for index in range(12)])
    (tmp_path / "notes.txt").write_text("not a frame")
    frames = load_frames(image_paths(str(tmp_path)))
    assert read_shades(frames) == list(range(12))
    inputs = processor(text=PROMPT, videos=tmp_path, fps=2, return_tensors="pt")
    assert steps_and_seconds(inputs) == (6, 1.0)
    frame = next(processor.video_chunks(tmp_path, fps=2).decode())
    assert frame.flags.writeable, "torch warns of others"
    with pytest.raises(ValueError, match="without their times"):
        processor(text=PROMPT, videos=str(tmp_path))


def test_a_list_of_images_is_a_video(processor, tmp_path):
    paths = as_files(tmp_path, ["0.png", "1.png", "2.png", "3.png"])
    assert steps_and_seconds(prepare(processor, paths, fps=2)) == (2, 1.0)


def test_a_folder_without_frames_or_with_a_broken_one_is_named(tmp_path):
    folder = str(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path.name}' holds no frames"):
        load_frames(image_paths(folder))
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"not an image")
    with pytest.raises(ValueError, match="Cannot read the frame '.*broken.jpg'"):
        load_frames(image_paths(folder))


def with_one(value):
    frames = torch.zeros(4, 3, 56, 56)
    frames[2, 1, 5, 5] = value
    return frames


EMPTY = np.zeros((0, 56, 56, 3), np.uint8)
NARROW = np.zeros((28, 28, 3))
WIDE = np.zeros((56, 28, 3))


@pytest.mark.parametrize(
    ("videos", "message"),
    [
        (with_one(float("nan")), "NaN or infinite"),
        (with_one(float("inf")), "NaN or infinite"),
        (with_one(0.9), "from 0 to 1; expected 0 to 255, or `do_rescale=False`"),
        (with_one(256.0), "numbers from 0 to 256; expected 0 to 255"),
        (np.full((4, 56, 56, 3), -300, np.int16), "numbers from -300 to -300; expected 0 to 255"),
        ([], r"empty video \(0 frames\)"),
        ([[]], r"empty video \(0 frames\)"),
        (EMPTY, r"frames of shape \(0, 56, 56, 3\); expected some pixels"),
        ([{"clip.mp4"}], "type set"),
        (np.zeros((4, 56, 56, 3), np.uint16), "type uint16; expected pixels from 0 to 255, such as uint8: scale and"),
        (torch.zeros(4, 3, 56, 56, dtype=torch.uint16), "type uint16; expected pixels"),
        (torch.zeros(4, 3, 56, 56, dtype=torch.complex64), "type complex64; expected pixels"),
        ([NARROW, WIDE], "differ in shape"),
    ],
)
def test_frames_that_are_none_are_refused(processor, videos, message):
    with pytest.raises(ValueError, match=message):
        processor(text=PROMPT, videos=videos, fps=2.0)


def test_frames_from_0_to_1_are_taken_as_the_caller_says(processor):
    whole = shaded_frames(4).astype(np.float32)
    rescaled = processor(text=PROMPT, videos=whole, fps=2.0)
    as_given = processor(
        text=PROMPT,
        videos=whole / 255,
        fps=2.0,
        do_rescale=False,
    )
    expected = rescaled["pixel_values_videos"]
    assert torch.allclose(as_given["pixel_values_videos"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"fps": 2, "num_frames": 4}, "expected one of them"),
        ({"fps": 0}, "fps=0"),
        ({"fps": float("nan")}, "fps=nan"),
        ({"num_frames": -2}, "num_frames=-2"),
        ({"fps": [1.0, 2.0]}, "2 entries of `fps` for 1 videos"),
    ],
)
def test_impossible_sampling_is_refused(processor, ramp, sampling, message):
    with pytest.raises(ValueError, match=message):
        processor(text=PROMPT, videos=ramp, **sampling)


def test_a_call_is_checked_beside_a_message_with_a_rate_of_its_own(processor, ramp):
    with pytest.raises(ValueError, match="fps=0"):
        processor(text=PROMPT, videos={"video": ramp, "fps": 2}, fps=0)


def test_placeholders_must_match_the_videos_and_images(processor, ramp):
    with pytest.raises(ValueError, match="Got 2 videos and 1 placeholders"):
        processor(text=PROMPT, videos=[ramp, ramp])
    with pytest.raises(ValueError, match="Got 1 images and 0 placeholders"):
        processor(text=PROMPT, images=Image.new("RGB", (56, 56)), videos=ramp)


# Qwen's own preprocessing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("return_video_metadata", [False, True])
def test_inputs_prepared_with_qwen_vl_utils_keep_their_times(processor, return_video_metadata, tmp_path):
    process_vision_info = pytest.importorskip("qwen_vl_utils").process_vision_info
    names = [f"{index}.png" for index in range(8)]
    messages = ask(as_files(tmp_path, names))
    video = messages[0]["content"][0]
    video.update(sample_fps=4.0, raw_fps=24.0)
    _, videos, video_kwargs = process_vision_info(
        messages,
        return_video_kwargs=True,
        return_video_metadata=return_video_metadata,
    )
    if return_video_metadata:
        ((frames, metadata),) = videos
        videos = [frames]
        video_kwargs["video_metadata"] = [metadata]
    assert video_kwargs["do_sample_frames"] is False
    inputs = processor(
        text=[processor.apply_chat_template(messages, add_generation_prompt=True)],
        videos=videos,
        do_resize=False,
        return_tensors="pt",
        **video_kwargs,
    )
    steps, seconds = steps_and_seconds(inputs)
    assert steps == 4
    assert seconds == pytest.approx(0.5)


# Saving ---------------------------------------------------------------------------------------------------------------


def test_a_saved_processor_brings_its_code_and_loads_the_same(ramp, tmp_path):
    source = hub_configs() / "qtsplus-tiny"
    processor = Qwen2_5_VLQTSplusProcessor.from_pretrained(source, trust_remote_code=False)
    processor.save_pretrained(tmp_path)
    config = tmp_path / "processor_config.json"
    saved = json.loads(config.read_text())
    assert saved["auto_map"]["AutoProcessor"] == "processing_qtsplus.Qwen2_5_VLQTSplusProcessor"
    expected = {
        "processing_qtsplus.py",
        "processor_mixin_qtsplus.py",
        "reading_qtsplus.py",
        "conversation_qtsplus.py",
        "clock_qtsplus.py",
        "chat_template.jinja",
    }
    names = {path.name for path in tmp_path.iterdir()}
    assert expected <= names
    loaded = Qwen2_5_VLQTSplusProcessor.from_pretrained(tmp_path, trust_remote_code=False)
    settings = loaded.video_processor
    assert settings.fps == 2
    assert settings.max_frames == 256
    assert settings.do_sample_frames
    assert settings.cap_pixels_per_frame
    before = prepare(processor, ramp)
    assert_same(dict(prepare(loaded, ramp)), dict(before))
