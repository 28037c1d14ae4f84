"""The readable twin of `answer_attention`: eager attention in full, from which the rows are picked."""

import torch


def twin_targets(model, inputs, labels, heads=None) -> list[torch.Tensor]:
    """
    As `answer_attention`, from `output_attentions=True`; a row of `labels` supervises one answer. With `heads`, (layer,
    head) pairs, nobody else looks.
    """
    language_model = model.model.language_model
    own = language_model.config._attn_implementation
    language_model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**inputs, selection="all", reencode=False, use_cache=False, output_attentions=True)
    language_model.set_attn_implementation(own)
    with_attention = [index for index, layer in enumerate(language_model.layers) if hasattr(layer, "self_attn")]
    recorded = [weights for weights in output.attentions if weights is not None]
    by_layer = dict(zip(with_attention, recorded, strict=True))
    attentions = [by_layer[layer].mean(1) for layer in with_attention]
    if heads is not None:
        attentions = [by_layer[layer][:, head] for layer, head in heads]
    columns = output.qtsplus.columns
    ids = inputs["input_ids"].gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -1)
    said = labels.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -100)
    answers = (said != -100) & (said != model.config.turn_end_token_id)
    looking = answers.roll(-1, 1)
    targets = []
    for b, (row, answer, look) in enumerate(zip(ids, answers, looking, strict=True)):
        is_visual = row == model.config.video_token_id
        places = is_visual.nonzero()[:, 0]
        num_tokens = int(output.qtsplus.num_tokens[b])
        if len(places) > num_tokens:  # LLaVA ends every line of tokens with a newline
            line = num_tokens // (len(places) - num_tokens)
            is_visual[places[line :: line + 1]] = False
        assert int(is_visual.sum()) == num_tokens
        if not answer.any() or not is_visual.any():
            targets.append(torch.zeros(0))
            continue
        attention = sum(layer[b][look].mean(0)[is_visual] for layer in attentions)
        targets.append(attention / len(attentions))
    return targets
