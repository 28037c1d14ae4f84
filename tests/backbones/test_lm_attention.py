"""Every backbone's language model can select by its own attention, without training."""

import math

import pytest
import torch
from torch.testing import assert_close

from model_checks import assert_row_is_alone
from qtsplus.model.layout_qtsplus import lay_out
from qtsplus.model.lm_attention_qtsplus import attention_layer, frame_groups
from qtsplus.model.prompt_qtsplus import take_inputs
from tiny import assert_same, run
from tiny_backbones import each_unlike

NAMES = ("video", "image and video", "text", "two videos", "image", "earlier turns")
VIDEOS = ("video", "image and video", "two videos", "earlier turns")
GROUP = 20
ATTENDING = {
    "selection": "lm_attention",
    "reencode_layers": 0,
}


@pytest.fixture(scope="session")
def model(backbone, processor):
    """Reads everything at once."""
    return backbone.build(processor, **ATTENDING)


@pytest.fixture(scope="session")
def in_groups(backbone, processor):
    """Reads a few frames at a time."""
    return backbone.build(processor, **ATTENDING, attention_group=GROUP)


def relevance(model, inputs, **call):
    return run(model, inputs, **call).qtsplus.relevance[0]


def count_tokens(model, inputs):
    grids = model.model.merged_grid(inputs["video_grid_thw"])
    return sum(map(math.prod, grids))


def close(actual, expected, atol=1e-6, rtol=1e-4):
    assert_close(actual, expected, atol=atol, rtol=rtol)


def layers_with_attention(model):
    layers = model.model.language_model.layers
    return [index for index, layer in enumerate(layers) if hasattr(layer, "self_attn")]


def eager_attention(model, inputs, group):
    """
    What the last token of a prompt with this group of its visual tokens attends to each of them, in the layer that is
    read: `[heads, m]`, from stock's eager attention in full.
    """
    language_model = model.model.language_model
    before = language_model.config._attn_implementation
    language_model.set_attn_implementation("eager")
    output = run(
        model,
        inputs,
        selection=lambda *_: group,
        retention=1.0,
        max_visual_tokens=len(group),
        use_cache=False,
        output_attentions=True,
    )
    language_model.set_attn_implementation(before)
    config = model.config
    layer = attention_layer(config.text_config, config.qtsplus_config.attention_layer)
    recorded = [weights for weights in output.attentions if weights is not None]
    weights = recorded[layers_with_attention(model).index(layer)]
    visual, _ = take_inputs(dict(inputs))
    mask = inputs["attention_mask"]
    (row,) = lay_out(model.model, visual, inputs["input_ids"], mask).rows
    real_columns = mask[0].nonzero()[:, 0]
    columns = real_columns[row.candidates[group]]
    return weights[0, :, -1, torch.searchsorted(output.qtsplus.columns[0], columns)]


@pytest.mark.parametrize("heads", [None, [1, 2]])
def test_one_group_is_the_stock_attention_of_the_layer(model, prepare, heads):
    config = model.config.qtsplus_config
    for name in VIDEOS:
        inputs = prepare(name)
        everything = torch.arange(count_tokens(model, inputs))
        attention = eager_attention(model, inputs, everything)
        config.attention_heads = heads
        found = relevance(model, inputs)
        config.attention_heads = None
        if heads is not None:
            attention = attention[heads]
        close(found, attention.mean(0), atol=1e-5)


@each_unlike
def test_groups_share_the_attention_of_one_softmax(in_groups, prepare):
    """Each is the stock prompt of its frames; they are compared by how much they outweigh the same text."""
    for name in ("video", "two videos"):
        inputs = prepare(name)
        groups = frame_groups(in_groups.model.merged_grid(inputs["video_grid_thw"]), GROUP)
        everything = torch.arange(count_tokens(in_groups, inputs))
        assert_same(torch.cat(groups).sort().values, everything)
        assert len(groups) > 1
        attentions = [eager_attention(in_groups, inputs, group) for group in groups]
        masses = torch.stack([attention.sum(-1) for attention in attentions])
        odds = masses / (1 - masses)
        shares_of_heads = odds / (1 + odds.sum(0))
        shares = shares_of_heads.mean(1)
        found = relevance(in_groups, inputs)
        for group, attention, share in zip(groups, attentions, shares, strict=True):
            within = attention.mean(0)
            expected = within / within.sum() * share
            close(found[group], expected, atol=1e-5)


@each_unlike
def test_chunk_is_whole_where_one_group_holds_everything(model, backbone, processor, prepare):
    inputs = prepare("two videos")
    tokens = count_tokens(model, inputs)
    exactly = backbone.build(processor, **ATTENDING, attention_group=tokens)
    expected = relevance(model, inputs)
    assert_same(relevance(exactly, inputs), expected)
    pixels = inputs.pop("pixel_values_videos")
    features = model.encode_videos(pixels, inputs["video_grid_thw"], frames_per_chunk=1)
    close(relevance(model, inputs, video_features=features), expected, atol=1e-5)


@each_unlike
def test_batch_is_single(in_groups, prepare):
    inputs = prepare(*NAMES, processor_kwargs={"padding_side": "right"})
    together = run(in_groups, inputs, retention=0.3)
    # The recurrent state of Qwen3.5 gathers rounding errors over the whole row.
    is_recurrent = in_groups.config.model_type == "qwen3_5_qtsplus"
    tolerance = 5e-4 if is_recurrent else 1e-4
    for row, name in enumerate(NAMES):
        alone = run(in_groups, prepare(name), retention=0.3)
        assert_row_is_alone(together, row, alone, tolerance)


@each_unlike
def test_the_budget_is_the_mass_of_the_attention(in_groups, prepare):
    inputs = prepare("video", "two videos")
    config = in_groups.config.qtsplus_config
    found = run(in_groups, inputs).qtsplus
    for weights, count in zip(found.relevance, found.n.tolist(), strict=True):
        shares = weights.sort(descending=True).values / weights.sum()
        is_below = shares.cumsum(0) < config.attention_mass - 1e-6
        needed = 1 + is_below.sum().item()
        least = math.ceil(config.rho_min * len(weights))
        most = math.ceil(config.rho_max * len(weights))
        expected = min(max(needed, least), most)
        assert abs(count - expected) <= 1
    assert run(in_groups, inputs, max_visual_tokens=3).qtsplus.n.tolist() == [3, 3]


@each_unlike
def test_generates_from_what_was_kept(in_groups, prepare):
    inputs = prepare(*NAMES)
    steps = in_groups.generate(
        **inputs,
        retention=0.3,
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    whole = run(in_groups, inputs, retention=0.3)
    close(steps.logits[0], whole.logits[:, -1], 5e-4, 5e-4)
    assert_same(steps.qtsplus.kept_indices, whole.qtsplus.kept_indices)


@each_unlike
def test_the_answer_is_never_read(in_groups, prepare):
    """In training and in scoring it stands in the prompt."""
    inputs = prepare("video")
    expected = relevance(in_groups, inputs)
    ids = inputs["input_ids"]
    question = inputs["query_mask"]
    answer = ids[question.bool()][:4]
    answered_ids = torch.cat([ids, answer[None]], dim=1)
    answered = {
        **inputs,
        "input_ids": answered_ids,
        "attention_mask": torch.ones_like(answered_ids),
        "query_mask": torch.nn.functional.pad(question, (0, 4)),
    }
    close(relevance(in_groups, answered), expected)


@each_unlike
def test_a_question_given_apart_takes_the_place_of_the_prompts_own(in_groups, prepare):
    inputs = prepare("video")
    is_question = inputs["query_mask"].bool()
    question = inputs["input_ids"][is_question][None]
    by_prompt = relevance(in_groups, inputs)
    close(relevance(in_groups, inputs, query_input_ids=question), by_prompt)
    other = question.flip(1)
    apart = relevance(in_groups, inputs, query_input_ids=other)
    inputs["input_ids"] = inputs["input_ids"].masked_scatter(is_question, other)
    close(apart, relevance(in_groups, inputs))
    difference = apart - by_prompt
    assert difference.abs().max() > 1e-6


@each_unlike
def test_scores_are_taught_nothing_and_the_model_is_left_alone(in_groups, prepare):
    language_model = in_groups.model.language_model
    before = dict(language_model.named_modules())
    inputs = prepare("video")
    in_groups.train()
    output = in_groups(**inputs, labels=inputs["input_ids"], retention=0.3)
    in_groups.eval()
    assert not output.qtsplus.log_relevance[0].requires_grad
    assert output.loss.requires_grad
    assert dict(language_model.named_modules()) == before
    configs = [language_model.layers[index].self_attn.config for index in layers_with_attention(in_groups)]
    assert all(config is configs[0] for config in configs)
    assert "qtsplus" not in configs[0]._attn_implementation


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"attention_layer": 7},
            "attention_layer=7; expected a layer",
        ),
        (
            {"attention_heads": [0, 4]},
            r"attention_heads=\[0, 4\]; expected heads from 0 to 3",
        ),
    ],
)
def test_a_layer_or_head_that_is_not_there_is_refused(backbone, processor, setting, message):
    with pytest.raises(ValueError, match=message):
        backbone.build(processor, **setting)


def test_a_layer_of_linear_attention_is_refused(backbone, processor):
    if backbone.name != "qwen3_5":
        pytest.skip("all of its layers have attention")
    with pytest.raises(ValueError, match="attention_layer=0; expected a layer"):
        backbone.build(processor, attention_layer=0)
