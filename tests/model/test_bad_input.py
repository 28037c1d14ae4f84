"""Bad input is an error that says what was given and what is expected, and it breaks nothing."""

import re

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from qtsplus import (
    QTSplusConfig,
    Qwen2_5_VLQTSplusConfig,
    Qwen2_5_VLQTSplusForConditionalGeneration,
    Qwen2_5_VLQTSplusModel,
)
from qtsplus.model.methods_qtsplus import METHODS
from tiny import (
    IM_END,
    IM_START,
    PATCH_VALUES,
    USER,
    VIDEO_PAD,
    assert_same,
    batch,
    prompt,
    run,
    stock_twin,
    tiny_config,
    tiny_model,
    without,
)

GRID = (2, 4, 6)  # 48 patches, 12 tokens


def video_inputs(**changes):
    """One prompt with one video, with some inputs changed and those set to `None` left out."""
    inputs = {**batch(prompt(videos=[GRID])), **changes}
    return {name: value for name, value in inputs.items() if value is not None}


def one_pixel(value):
    pixels = video_inputs()["pixel_values_videos"]
    pixels[5, 7] = value
    return pixels


def without_user_turn(inputs):
    ids = inputs["input_ids"]
    return {**inputs, "input_ids": ids.masked_fill(ids == USER, 30)}


def with_placeholders(count):
    """The prompt of a video with so many placeholders."""
    ids = video_inputs()["input_ids"][0].tolist()
    first = ids.index(VIDEO_PAD)
    behind = [token for token in ids[first:] if token != VIDEO_PAD]
    ids = torch.tensor([ids[:first] + [VIDEO_PAD] * count + behind])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def only(inputs, *names):
    return {name: inputs[name] for name in names}


IDS = ("input_ids", "attention_mask")
VIDEO = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
TWO = batch(prompt(videos=[GRID, GRID]))
IMAGE = batch(prompt(images=[(1, 4, 4)]))
NOT_FINITE = "NaN or infinity in the features of video 0: expected finite pixel values"
NO_QUESTION = "12 visual tokens but no question"
LENGTH = video_inputs()["input_ids"].shape[1]
ONES = torch.ones(1, 3, dtype=torch.long)
SELECTED = BaseModelOutputWithPooling(pooler_output=(torch.zeros(12, 64),))
# What is wrong with the prompt of one video -> (what is changed, or left out with `None`; the message).
BAD_CHANGES = {
    "no user turn": (only(without_user_turn(video_inputs()), "input_ids"), f"Row 0 has {NO_QUESTION}"),
    "an all-zero query_mask": ({"query_mask": torch.zeros_like(video_inputs()["input_ids"])}, NO_QUESTION),
    "an empty query_input_ids": ({"query_input_ids": torch.zeros(1, 0, dtype=torch.long)}, NO_QUESTION),
    "an empty video": (
        {"video_grid_thw": torch.tensor([[0, 4, 6]]), "pixel_values_videos": torch.zeros(0, PATCH_VALUES)},
        r"video_grid_thw=\[\[0, 4, 6\]\]: expected whole numbers",
    ),
    "a placeholder too many": (
        with_placeholders(13),
        r"1 video placeholder\(s\) side by side in row 0, but no more videos",
    ),
    "a placeholder too few": (
        with_placeholders(11),
        r"11 video placeholder\(s\) side by side in row 0, but video 0 needs 12",
    ),
    "more videos than placeholders": (
        only(TWO, *VIDEO),
        "no more video placeholders in the prompts, but video 1 needs 12",
    ),
    "fewer videos than placeholders": (
        only(TWO, *IDS),
        r"12 video placeholder\(s\) side by side in row 0, but no more videos are given",
    ),
    "a video among image placeholders": (
        only(batch(prompt(images=[GRID])), *IDS),
        r"12 image placeholder\(s\) side by side in row 0, but no more images are given",
    ),
    "video pixels without a grid": ({"video_grid_thw": None}, "Got video pixels or features alone"),
    "a video grid without pixels": (
        {"pixel_values_videos": None},
        "Got video_grid_thw alone|video placeholders, but no video pixels",
    ),
    "a row of pixels too many": (
        {"pixel_values_videos": torch.zeros(49, PATCH_VALUES)},
        "49 rows of video pixels: expected 48",
    ),
    **{
        f"position_ids {shape}": (
            {"position_ids": torch.ones(shape)},
            r"position_ids \(.*: expected input_ids' \[B, S\]",
        )
        for shape in ((2, 1, LENGTH), (5, 1, LENGTH), (1, 3), (LENGTH,))
    },
    "a grid of fractions": ({"video_grid_thw": torch.tensor([[2.0, 4.0, 6.0]])}, "expected whole numbers of patches"),
    "a flat grid": ({"video_grid_thw": torch.tensor([2, 4, 6])}, r"\[2, 4, 6\]: expected whole .*\[N, 3\]"),
    "a pixel without end": ({"pixel_values_videos": one_pixel(float("inf"))}, NOT_FINITE),
    "retention 0": ({"retention": 0.0}, r"retention=0.0: expected a fraction .* in \(0, 1\]"),
    "retention above 1": ({"retention": 1.5}, r"retention=1.5: expected a fraction .* in \(0, 1\]"),
    "retentions of other rows": ({"retention": [0.5, 0.5]}, "2 retentions for 1 rows"),
    "max_visual_tokens 0": ({"max_visual_tokens": 0}, "max_visual_tokens=0; expected a finite number above 0"),
    "max_visual_tokens as a switch": ({"max_visual_tokens": True}, "max_visual_tokens=True; expected a finite number"),
    **{
        f"seconds {seconds}": (
            {VIDEO[2]: seconds},
            r"expected finite seconds above 0, one .* \(1\), each at most 1e\+09",
        )
        for seconds in ([1e30], [0.0], [-1.0], [float("nan")], [1.0, 1.0])
    },
    **{
        f"second_per_grid_ts {seconds}": ({VIDEO[2]: seconds}, "expected the seconds of each video")
        for seconds in (["2.0"], [None])
    },
    **{
        f"{name} as a list": ({name: video_inputs()[name].tolist()}, f"{name} is a list: expected a tensor")
        for name in (*IDS, *VIDEO[:2])
    },
    **{
        f"query_input_ids {ids.dtype} {tuple(ids.shape)}": ({"query_input_ids": ids}, message)
        for ids, message in (
            (torch.full((1, 4, 1), 30), r"query_input_ids \(1, 4, 1\) of torch.int64: expected \[B, L\]"),
            (torch.ones(1, 4), "of torch.float32: expected"),
            (ONES * 10**6, r"query_input_ids=\[1000000, .*: expected token ids of the model's vocabulary"),
        )
    },
    "a list of a question's ids": ({"query_input_ids": [[30]]}, "query_input_ids is a list: expected a tensor"),
    "a query_attention_mask of another shape": (
        {"query_input_ids": torch.full((1, 4), 30), "query_attention_mask": ONES},
        r"query_attention_mask \(1, 3\): expected query_input_ids' shape, \(1, 4\)",
    ),
    "a query_attention_mask alone": ({"query_attention_mask": ONES}, "has no effect without query_input_ids"),
    "a query_mask that is a list": ({"query_mask": [[1]]}, "query_mask is a list: expected a tensor"),
    "a query_mask that marks padding": (
        {"query_mask": torch.ones(1, LENGTH), "attention_mask": torch.ones(1, LENGTH).tril(LENGTH - 2)},
        "query_mask marks padding",
    ),
    "query_mask of another shape": ({"query_mask": ONES}, r"query_mask \(1, 3\): expected input_ids' shape"),
    "query_input_ids for another batch": (
        {"query_input_ids": torch.full((2, 4), 30)},
        r"query_input_ids \(2, 4\) of torch.int64: expected .* B=1",
    ),
    "attention_mask of another shape": (
        {"attention_mask": ONES},
        r"attention_mask \(1, 3\): expected input_ids' shape",
    ),
    "mm_encoder_outputs that nothing has selected": (
        {**dict.fromkeys(VIDEO), "mm_encoder_outputs": {"video": SELECTED}},
        "mm_encoder_outputs would bypass the selector",
    ),
}
# Every one is an error of forward and of generate.
BAD_INPUTS = {
    **{name: (video_inputs(**changes), message) for name, (changes, message) in BAD_CHANGES.items()},
    "an empty question": (batch(prompt(videos=[GRID], question=0)), NO_QUESTION),
    "an empty question in the second row": (
        batch(prompt(videos=[GRID]), prompt(videos=[GRID], question=0)),
        f"Row 1 has {NO_QUESTION}",
    ),
    "an empty image": ({**IMAGE, "image_grid_thw": torch.tensor([[1, 0, 4]])}, r"\[\[1, 0, 4\]\]: expected whole"),
    "image pixels without a grid": (only(IMAGE, *IDS, "pixel_values"), "Got image pixels or features alone"),
    "image placeholders without pixels or grid": (only(IMAGE, *IDS), "image placeholder"),
    "video placeholders alone": (only(TWO, *IDS), "video placeholder"),
    "video placeholders and positions alone": (
        {**only(video_inputs(), *IDS), "position_ids": torch.arange(LENGTH)[None]},
        "video placeholder",
    ),
}


@pytest.fixture(scope="module")
def works_as_before(model):
    """Checks that the model answers as it did when the tests began, bit for bit, with the weights that it had."""
    good = batch(prompt(videos=[GRID], images=[(1, 4, 4)]), prompt(question=3, seed=1))
    state = {key: value.clone() for key, value in model.state_dict().items()}

    def made():
        return run(model, good).logits, model.generate(**good, max_new_tokens=3)

    before = made()

    def check():
        assert_same(made(), before)
        assert_same(dict(model.state_dict()), state)

    return check


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_every_way_in_refuses_and_works_as_before(model, works_as_before, name):
    inputs, message = BAD_INPUTS[name]
    for call in (model, model.model, lambda **inputs: model.generate(**inputs, max_new_tokens=2)):
        with pytest.raises(ValueError, match=message):
            call(**inputs)
    works_as_before()


def test_a_refused_training_step_leaves_the_running_mean_of_rho():
    model = tiny_model().train()
    model(**video_inputs()).logits.sum().backward()
    history = model.model.qtsplus.rho_history.clone()
    assert history[1] == 1
    for inputs in (video_inputs(retention=1.5), without_user_turn(video_inputs())):
        with pytest.raises(ValueError):
            model(**inputs)
    assert_same(model.model.qtsplus.rho_history, history)


# The configuration

BAD_CONFIGS = {
    "n_max 0": ({"n_max": 0}, "n_max=0; expected a whole number from 1"),
    "an n_max that is no whole number": ({"n_max": 2.5}, "n_max=2.5; expected a whole number from 1"),
    "rho_min above rho_max": ({"rho_min": 0.6, "rho_max": 0.5}, "rho_min=0.6, rho_max=0.5; expected rho_min <= rho"),
    "rho_min 0": ({"rho_min": 0.0}, "rho_min=0.0; expected a number from 1e-12 to 1"),
    "a negative rho_prior": ({"rho_prior": -0.1}, "rho_prior=-0.1; expected a number from 0 to 1"),
    "an unknown gate": ({"gate": "softmax"}, "gate='softmax'; expected one of .*detached"),
    "an unknown selection": ({"selection": "unifrom"}, "selection='unifrom'; expected one of .*uniform"),
    "dropout 1": ({"dropout": 1.0}, "dropout=1.0; expected a number from 0 to 0.999"),
    "a null token that is a number": ({"null_token": 10**12}, "null_token=1000000000000; expected true or false"),
    "positions that are a text": ({"reencode_rope": "no"}, "reencode_rope='no'; expected true or false"),
    "a weight without end": ({"lambda_m": float("inf")}, "lambda_m=inf; expected a number from 0"),
    "a misspelt field": ({"rho_mim": 0.1}, "no field 'rho_mim'; the nearest are rho_min"),
    "an option of a call": ({"retention": 0.1}, "no field 'retention'; the nearest are"),
    "heads in a list": ({"attention_heads": [[0, 99]]}, r"attention_heads=\[\[0, 99\]\]; expected different whole"),
    "the same head twice": ({"attention_heads": [1, 1]}, "attention_heads=.*expected different whole numbers"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_the_configuration_refuses(name):
    values, message = BAD_CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        QTSplusConfig(**values)
    with pytest.raises(ValueError, match=message):
        tiny_config(**values)


@pytest.mark.parametrize("name", ["user_turn_token_ids", "special_token_ids"])
@pytest.mark.parametrize("ids", [["user"], 5, [-1]])
def test_a_configuration_refuses_token_ids_that_are_none(name, ids):
    settings = {**tiny_config().to_dict(), name: ids}
    with pytest.raises(ValueError, match=f"{name}=.*expected a list of token ids"):
        Qwen2_5_VLQTSplusConfig(**settings)


def test_the_fields_of_transformers_own_are_accepted():
    saved = QTSplusConfig(rho_min=0.06).to_dict()
    others = {"torch_dtype": "float32", "num_labels": 2, "_attn_implementation_autoset": True}
    config = QTSplusConfig.from_dict({**saved, **others}, attn_implementation="eager")
    assert config.rho_min == 0.06
    assert tiny_config(**saved, **others).qtsplus_config.rho_min == 0.06


@pytest.mark.parametrize("call", [{"retention": 0.5}, {"max_visual_tokens": 3}], ids=lambda call: next(iter(call)))
def test_selection_all_refuses_a_budget(call):
    model = tiny_model(selection="all")
    with pytest.raises(ValueError, match='selection="all" keeps every visual token'):
        model(**video_inputs(**call))
    with pytest.raises(ValueError, match='selection="all" keeps every visual token'):
        model.generate(**video_inputs(**call), max_new_tokens=2)
    assert model(**video_inputs()).qtsplus.n.tolist() == [12]


# Calls of generate


def test_a_cache_of_an_earlier_prompt_is_refused_and_left_alone(model):
    cache = DynamicCache(config=model.config.get_text_config())
    answer = model.generate(**video_inputs(), past_key_values=cache, max_new_tokens=2)
    length = cache.get_seq_length()
    conversation = torch.cat([answer, torch.tensor([[IM_END, 10, IM_START, USER, 10, 40, 41]])], dim=1)
    with pytest.raises(ValueError, match=f"The cache holds {length} columns of an earlier prompt: expected an empty"):
        model.generate(input_ids=conversation, past_key_values=cache, max_new_tokens=2)
    assert cache.get_seq_length() == length


def test_pixels_after_a_cache_are_refused_by_forward(model):
    cache = run(model, batch(prompt(question=3)), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="New images or videos after a cache: expected an empty one"):
        model(**video_inputs(), past_key_values=cache)


def test_a_max_length_shorter_than_the_prompt_is_refused(model):
    inputs = video_inputs()
    length = inputs["input_ids"].shape[1]
    for max_length in (length - 1, length):
        with pytest.raises(ValueError, match=f"max_length={max_length}, the prompt has {length} tokens"):
            model.generate(**inputs, max_length=max_length)
    assert model.generate(**inputs, max_length=length + 1).shape == (1, length + 1)


@pytest.mark.parametrize("rows", [video_inputs, lambda: batch(prompt())], ids=["a video", "text alone"])
def test_labels_of_another_shape_are_refused(model, rows):
    inputs = rows()
    with pytest.raises(ValueError, match=r"^labels \(1, \d+\): expected the shape of the prompt, \(1, \d+\)"):
        model(**inputs, labels=inputs["input_ids"][:, 1:])


@pytest.mark.parametrize(
    ("modality", "axes", "with_mask"), [("images", None, True), ("videos", 3, False), ("videos", 4, True)]
)
def test_packed_rows_are_refused_with_images_and_videos(model, modality, axes, with_mask):
    """Two sequences one behind the other, as padding-free training lays them: stock attends within each of them."""
    row = prompt(**{modality: [GRID]})
    other = prompt(seed=1)
    positions = torch.cat([torch.arange(len(row.ids)), torch.arange(len(other.ids))])[None]
    row.ids += other.ids
    inputs = batch(row)
    inputs["position_ids"] = positions if axes is None else positions.expand(axes, 1, -1)
    if not with_mask:
        inputs.pop("attention_mask")
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="position_ids that begin again within a row.*one in each row"):
            call(**inputs)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.arange(5),
        torch.arange(4).flip(0),
        torch.arange(4).float(),
        torch.arange(4) - 1,
        torch.tensor([0, 1, 2, 10**6]),
        [0, 1, 2, 3],
    ],
)
def test_a_method_that_keeps_something_else_than_n_indices_is_named(model, monkeypatch, wrong):
    call = {**video_inputs(), "max_visual_tokens": 4, "retention": 1.0}

    def broken(candidates, n):
        return wrong

    monkeypatch.setitem(METHODS, "broken", broken)
    for selection in ("broken", broken):
        with pytest.raises(
            ValueError, match="selection='broken' gave .*; expected a tensor of n ascending int64 indices"
        ):
            model(**call, selection=selection)


# Checkpoints


@pytest.mark.parametrize("cls", [Qwen2_5_VLQTSplusForConditionalGeneration, Qwen2_5_VLQTSplusModel])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_base_checkpoint_is_refused_with_the_command_that_converts_it(tmp_path, cls, tied):
    stock_twin(tiny_model(tie_word_embeddings=tied)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"lacks \d+ of the weights of {cls.__name__} .*qtsplus convert"):
        cls.from_pretrained(tmp_path)


def test_without_any_checkpoint_a_model_begins_as_a_new_one(monkeypatch):
    initialize = PreTrainedModel._initialize_weights

    def seeded(*args, **kwargs):
        torch.manual_seed(0)  # for each module, since the order differs
        initialize(*args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "_initialize_weights", seeded)
    config = tiny_config(query_states="layer", null_token=True)
    new = Qwen2_5_VLQTSplusForConditionalGeneration(config)
    loaded = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(None, config=config, state_dict={})
    assert_same(dict(loaded.state_dict()), dict(new.state_dict()))


@pytest.mark.parametrize("lost", [r"\.qtsplus\.", r"scoring_layers\.0\.q_norm", r"budget\.mlp\.2\.bias"])
def test_a_checkpoint_without_all_of_its_selector_is_refused(tmp_path, model, lost):
    weights = {name: value for name, value in model.state_dict().items() if not re.search(lost, name)}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"lacks \d+ of the weights .*model\.qtsplus\..*would stay random"):
        Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tmp_path)


def test_an_untied_checkpoint_without_its_head_is_refused(tmp_path):
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path, state_dict=without(model.state_dict(), "lm_head.weight"))
    with pytest.raises(ValueError, match=r"lacks 1 of the weights .*lm_head\.weight"):
        Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tmp_path)
