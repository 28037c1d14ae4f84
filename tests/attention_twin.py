"""The readable twin of `answer_attention`: eager attention in full, from which the rows are picked."""

import torch
from torch import Tensor


def twin_targets(model, inputs, labels, heads=None) -> list[Tensor]:
    """
    As `answer_attention`, from `output_attentions=True`; a row of `labels` supervises one answer. With `heads`, (layer,
    head) pairs, nobody else looks.
    """
    output = _eager_output(model, inputs)
    attentions = _attention_of(model, output, heads)
    columns = output.qtsplus.columns
    is_padding = columns < 0
    places = columns.clamp(min=0)
    ids = inputs["input_ids"].gather(1, places)
    ids[is_padding] = -1
    answers = labels.gather(1, places)
    answers[is_padding] = -100
    answers[answers == model.config.turn_end_token_id] = -100
    is_answer = answers != -100
    looks = is_answer.roll(-1, 1)  # the column in front of a token predicts it
    targets = []
    for row, num_tokens in enumerate(output.qtsplus.num_tokens.tolist()):
        is_visual = ids[row] == model.config.video_token_id
        _leave_newlines_out(is_visual, num_tokens)
        if not is_answer[row].any() or num_tokens == 0:
            targets.append(torch.zeros(0))
            continue
        seen = [attention[row][looks[row]].mean(0) for attention in attentions]
        mean = torch.stack(seen).mean(0)
        targets.append(mean[is_visual])
    return targets


@torch.no_grad()
def _eager_output(model, inputs):
    """The output for the whole prompt, with the attention of every layer."""
    language_model = model.model.language_model
    before = language_model.config._attn_implementation
    language_model.set_attn_implementation("eager")
    output = model(
        **inputs,
        selection="all",
        reencode=False,
        use_cache=False,
        output_attentions=True,
    )
    language_model.set_attn_implementation(before)
    return output


def _attention_of(model, output, heads) -> list[Tensor]:
    """`[B, columns, columns]` of each head, or of each layer the mean of its heads."""
    layers = model.model.language_model.layers
    with_attention = [index for index, layer in enumerate(layers) if hasattr(layer, "self_attn")]
    recorded = [weights for weights in output.attentions if weights is not None]
    by_layer = dict(zip(with_attention, recorded, strict=True))
    if heads is None:
        return [weights.mean(1) for weights in by_layer.values()]
    return [by_layer[layer][:, head] for layer, head in heads]


def _leave_newlines_out(is_visual, num_tokens: int) -> None:
    """LLaVA ends every line of tokens with a newline."""
    places = is_visual.nonzero()[:, 0]
    newlines = len(places) - num_tokens
    if newlines > 0:
        line = num_tokens // newlines
        is_visual[places[line :: line + 1]] = False
    assert int(is_visual.sum()) == num_tokens
