"""Every backbone's language model can select by its own attention, without training."""

import pytest
import torch
from torch.testing import assert_close

from qtsplus.model.layout_qtsplus import lay_out
from qtsplus.model.lm_attention_qtsplus import attention_layer, frame_groups
from qtsplus.model.prompt_qtsplus import take_inputs
from tiny import assert_same, run
from tiny_backbones import each_unlike

NAMES = ("video", "image and video", "text", "two videos", "image", "earlier turns")
VIDEOS = ("video", "image and video", "two videos", "earlier turns")
CALL = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.fixture(scope="session")
def model(backbone, processor):
    """Reads everything at once."""
    return backbone.build(processor, selection="lm_attention", reencode_layers=0)


@pytest.fixture(scope="session")
def in_groups(backbone, processor):
    """Reads a few frames at a time."""
    return backbone.build(processor, selection="lm_attention", reencode_layers=0, attention_group=20)


@torch.no_grad()
def relevance(model, inputs, **call):
    return model(**inputs, **call).qtsplus.relevance[0]


def eager_attention(model, inputs, group=None, heads=None):
    """
    What the last token of a prompt with this group of its visual tokens (all if `None`) attends to each of them, in the
    layer that is read: `[heads, m]`, from stock's eager attention in full.
    """
    language_model = model.model.language_model
    layer = attention_layer(model.config.text_config, model.config.qtsplus_config.attention_layer)
    tokens = sum(t * h * w for t, h, w in model.model.merged_grid(inputs["video_grid_thw"]))
    group = torch.arange(tokens) if group is None else group
    own = language_model.config._attn_implementation
    language_model.set_attn_implementation("eager")
    with torch.no_grad():
        call = {"selection": lambda *_: group, "retention": 1.0, "max_visual_tokens": len(group)}
        output = model(**inputs, **call, use_cache=False, output_attentions=True)
    language_model.set_attn_implementation(own)
    with_attention = [index for index, part in enumerate(language_model.layers) if hasattr(part, "self_attn")]
    recorded = [weights for weights in output.attentions if weights is not None][with_attention.index(layer)]
    visual, _ = take_inputs(dict(inputs))
    found = lay_out(model.model, visual, inputs["input_ids"], inputs["attention_mask"]).rows[0].candidates
    place = torch.searchsorted(output.qtsplus.columns[0], inputs["attention_mask"][0].nonzero()[found[group], 0])
    return recorded[0, slice(None) if heads is None else heads, -1][:, place]


@pytest.mark.parametrize("heads", [None, [1, 2]])
def test_one_group_is_the_stock_attention_of_the_layer(model, prepare, heads):
    config = model.config.qtsplus_config
    for name in VIDEOS:
        inputs = prepare(name)
        expected = eager_attention(model, inputs, heads=heads).mean(0)
        config.attention_heads = heads
        found = relevance(model, inputs)
        config.attention_heads = None
        assert_close(found, expected, atol=1e-5, rtol=1e-4)


@each_unlike
def test_groups_share_the_attention_of_one_softmax(in_groups, prepare):
    """Each is the stock prompt of its frames; they are compared by how much they outweigh the same text."""
    for name in ("video", "two videos"):
        inputs = prepare(name)
        grids = in_groups.model.merged_grid(inputs["video_grid_thw"])
        groups = frame_groups(grids, 20)
        assert_same(torch.cat(groups).sort().values, torch.arange(sum(t * h * w for t, h, w in grids)))
        assert len(groups) > 1
        weights = [eager_attention(in_groups, inputs, group) for group in groups]
        odds = torch.stack([part.sum(-1) / (1 - part.sum(-1)) for part in weights])
        shares = (odds / (1 + odds.sum(0))).mean(1)
        found = relevance(in_groups, inputs)
        for group, part, share in zip(groups, weights, shares, strict=True):
            part = part.mean(0)
            assert_close(found[group], part / part.sum() * share, atol=1e-5, rtol=1e-4)


@each_unlike
def test_chunk_is_whole_where_one_group_holds_everything(model, backbone, processor, prepare):
    inputs = prepare("two videos")
    tokens = sum(t * h * w for t, h, w in model.model.merged_grid(inputs["video_grid_thw"]))
    exactly = backbone.build(processor, selection="lm_attention", reencode_layers=0, attention_group=tokens)
    assert_same(relevance(exactly, inputs), relevance(model, inputs))
    features = model.encode_videos(inputs["pixel_values_videos"], inputs["video_grid_thw"], frames_per_chunk=1)
    once = {**{name: value for name, value in inputs.items() if "pixel" not in name}, "video_features": features}
    assert_close(relevance(model, once), relevance(model, inputs), atol=1e-5, rtol=1e-5)


@each_unlike
def test_batch_is_single(in_groups, prepare):
    together = run(in_groups, prepare(*NAMES, processor_kwargs={"padding_side": "right"}), retention=0.3)
    for row, name in enumerate(NAMES):
        alone = run(in_groups, prepare(name), retention=0.3)
        real = together.qtsplus.columns[row] >= 0
        # Whose recurrent state gathers rounding errors over the whole row.
        close = 5e-4 if in_groups.config.model_type == "qwen3_5_qtsplus" else 1e-4
        assert_close(together.logits[row][real], alone.logits[0], atol=close, rtol=close)
        if alone.qtsplus is not None:
            assert_same(together.qtsplus.kept_indices[row], alone.qtsplus.kept_indices[0])


@each_unlike
def test_everything_kept_is_everything_seen(in_groups, prepare):
    inputs = prepare("two videos", "text", "earlier turns")
    kept = run(in_groups, inputs, retention=1.0).logits
    seen = run(in_groups, inputs, selection="all").logits
    assert_same(kept, seen)


@each_unlike
def test_the_budget_is_the_mass_of_the_attention(in_groups, prepare):
    inputs = prepare("video", "two videos")
    config = in_groups.config.qtsplus_config
    found = run(in_groups, inputs).qtsplus
    capped = run(in_groups, inputs, max_visual_tokens=3).qtsplus
    for row, weights in enumerate(found.relevance):
        shares = (weights / weights.sum()).sort(descending=True).values.cumsum(0)
        needed = 1 + int((shares < config.attention_mass - 1e-6).sum())
        bounds = [round(bound * len(weights) + 0.5 - 1e-6) for bound in (config.rho_min, config.rho_max)]
        assert abs(int(found.n[row]) - min(max(needed, bounds[0]), bounds[1])) <= 1
        assert len(capped.kept_indices[row]) == 3


@each_unlike
def test_generates_from_what_was_kept(in_groups, prepare):
    inputs = prepare(*NAMES)
    steps = in_groups.generate(**inputs, **CALL, retention=0.3, return_dict_in_generate=True, output_logits=True)
    whole = run(in_groups, inputs, retention=0.3)
    assert_close(steps.logits[0], whole.logits[:, -1], atol=5e-4, rtol=5e-4)
    assert_same(steps.qtsplus.kept_indices, whole.qtsplus.kept_indices)


@each_unlike
def test_the_answer_is_never_read(in_groups, prepare):
    """In training and in scoring it stands in the prompt."""
    inputs = prepare("video")
    answer = inputs["input_ids"][inputs["query_mask"].bool()][None, :4]
    told = {**inputs, "input_ids": torch.cat([inputs["input_ids"], answer], 1)}
    told["attention_mask"] = torch.ones_like(told["input_ids"])
    told["query_mask"] = torch.nn.functional.pad(inputs["query_mask"], (0, 4))
    assert_close(relevance(in_groups, told), relevance(in_groups, inputs), atol=1e-6, rtol=1e-4)


@each_unlike
def test_a_question_given_apart_takes_the_place_of_the_prompts_own(in_groups, prepare):
    inputs = prepare("video")
    own = prepare("video")["query_mask"].bool()
    question = inputs["input_ids"][own][None]
    expected = relevance(in_groups, inputs)
    assert_close(relevance(in_groups, inputs, query_input_ids=question), expected, atol=1e-6, rtol=1e-4)
    other = question.flip(1)
    written = {**inputs, "input_ids": inputs["input_ids"].masked_scatter(own, other)}
    expected = relevance(in_groups, written)
    assert_close(relevance(in_groups, inputs, query_input_ids=other), expected, atol=1e-6, rtol=1e-4)
    assert (expected - relevance(in_groups, inputs)).abs().max() > 1e-6


@each_unlike
def test_scores_are_taught_nothing_and_the_model_is_left_alone(in_groups, prepare):
    layers = in_groups.model.language_model.layers
    before = [(layer, [(name, part) for name, part in layer.named_modules()]) for layer in layers]
    inputs = prepare("video")
    in_groups.train()
    output = in_groups(**inputs, labels=inputs["input_ids"], retention=0.3)
    in_groups.eval()
    assert not output.qtsplus.log_relevance[0].requires_grad
    assert output.loss.requires_grad
    assert [(layer, [(name, part) for name, part in layer.named_modules()]) for layer in layers] == before
    attention = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    assert len({id(part.config) for part in attention}) == 1
    assert "qtsplus" not in str(attention[0].config._attn_implementation)


def test_a_layer_or_head_that_is_not_there_is_refused(backbone, processor):
    with pytest.raises(ValueError, match=r"attention_layer=7, which is none of the \d layers; expected a layer"):
        backbone.build(processor, attention_layer=7)
    with pytest.raises(ValueError, match=r"attention_heads=\[0, 4\]; expected heads from 0 to 3"):
        backbone.build(processor, attention_heads=[0, 4])
    types = getattr(backbone.config(processor, {}).text_config, "layer_types", None) or []
    for layer in [index for index, kind in enumerate(types) if kind == "linear_attention"]:
        with pytest.raises(ValueError, match=rf"attention_layer={layer}, which is linear_attention; expected"):
            backbone.build(processor, attention_layer=layer)
