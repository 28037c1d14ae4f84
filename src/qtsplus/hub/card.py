"""Writes the model card (README.md) of a Hub repository."""

import json
from typing import Any

from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from .files import hub_configs

_BODY = """\
# {name}

Qwen2.5-VL with **QTSplus**, a query-aware selector of visual tokens. It stands between the vision encoder and the
language model: it scores every visual token of a video against the question, decides how many to keep, keeps those in
order and hands a short prompt to the language model.

{weights}

## Use

The repository carries its own code; it needs `torch`, `torchvision`, `transformers>=5.17` and `av`.

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

repository = "{repository}"
model = AutoModelForImageTextToText.from_pretrained(repository, trust_remote_code=True, dtype="auto")
processor = AutoProcessor.from_pretrained(repository, trust_remote_code=True)

content = [{{"type": "video", "video": "video.mp4"}}, {{"type": "text", "text": "What happens in the end?"}}]
inputs = processor.apply_chat_template(
    [{{"role": "user", "content": content}}],
    tokenize=True,
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
    processor_kwargs={{"fps": 2}},
)
output = model.generate(**inputs.to(model.device), max_new_tokens=64)
print(processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])
```

`model.generate(..., retention=0.1)` keeps a tenth of the visual tokens, `max_visual_tokens=2000` at most 2,000; without
either the model decides from the question. With `return_dict_in_generate=True` the output's `qtsplus` says which tokens
were kept (`kept_indices`), how relevant each was (`relevance`) and which fraction was aimed at (`rho`).

## The model

| | |
|---|---|
| parameters | {parameters:,}, of these {selector_parameters:,} in the selector |
| language model | {layers} layers, width {width} |
| fraction of tokens kept | {rho_min:g} to {rho_max:g}, decided per question |
| most tokens kept per sample | {n_max:,} |
| selector | {scoring_layers} scoring, {reencode_layers} re-encoding layers; gate `{gate}`; positions `{position_ids}` |
"""


def model_card(model: PreTrainedModel, name: str, variant: str | None, random_seed: int | None) -> str:
    """
    The text of a repository's README.md, with its YAML front matter.

    Args:
        model: whose configuration and size are told.
        name: the repository's name, without its owner.
        variant: a folder of `hub_configs` whose `card.json` names licence and base model and, as `weights`, tells how
            bundled weights were made; none of it is told without.
        random_seed: the seed of random weights; `None` for weights that were trained or loaded.
    """
    data: dict[str, Any] = {}
    if variant is not None and (hub_configs() / variant / "card.json").exists():
        data = json.loads((hub_configs() / variant / "card.json").read_text(encoding="utf-8"))
    told = data.pop("weights", None)
    if random_seed is not None:
        data.pop("base_model", None)  # nothing of it is in random weights
    front_matter = ModelCardData(
        library_name="transformers",
        pipeline_tag="video-text-to-text",
        tags=["custom_code", "qtsplus", "video", "token-selection"],
        **data,
    ).to_yaml()
    config = model.config
    body = _BODY.format(
        name=name,
        repository=f"org/{name}",
        weights=_describe_weights(told, data.get("base_model"), random_seed),
        parameters=model.num_parameters(),
        selector_parameters=sum(parameter.numel() for parameter in model.model.qtsplus.parameters()),
        layers=config.text_config.num_hidden_layers,
        width=config.text_config.hidden_size,
        **config.qtsplus_config.to_dict(),
    )
    return f"---\n{front_matter.strip()}\n---\n\n{body}"


def _describe_weights(told: str | None, base_model: str | None, random_seed: int | None) -> str:
    if random_seed is not None:
        return (
            f"> **The weights are random** (seed {random_seed}): the repository shows that everything fits together, "
            "and its answers are noise."
        )
    if told is not None:
        return told
    if base_model is not None:
        return f"The weights derive from [{base_model}](https://huggingface.co/{base_model})."
    return "The weights carry the licence of the model that they derive from."
