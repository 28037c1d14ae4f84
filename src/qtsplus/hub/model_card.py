"""The model card (README.md) of a Hub repository."""

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import cached_file

_KEPT_FRONT_MATTER = ("license", "license_name", "license_link", "base_model", "base_model_relation", "language")
SECTIONS = ("weights", "training_data", "hyperparameters", "recipe", "results", "limits")

_BODY = """\
# {name}

{backbone} with **QTSplus**, a query-aware selector of visual tokens. It stands between the vision encoder and the
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

`trust_remote_code=True` runs the Python files of this repository; pin them with `revision=` and a commit's hash.

## The model

| | |
|---|---|
| parameters | {parameters:,}, of these {selector_parameters:,} in the selector |
| language model | {layers} layers, width {width} |
| fraction of tokens kept | {rho_min:g} to {rho_max:g}, decided per question |
| most tokens kept per sample | {n_max:,} |
| selector | {scoring_layers} scoring, {reencode_layers} re-encoding layers; gate `{gate}`; positions `{position_ids}` |
| words of the question | `{query_states}` |

## Training

{training}

## Results

{results}

## Limits

{limits}
"""

_NO_TRAINING = "Nothing is recorded about the training of these weights."
_NO_RESULTS = "None were measured for these weights."
_LIMITS = (
    "What the selector drops, the language model never sees: an answer can miss what the video shows, most of all "
    "where the question does not name what it is about. Only video tokens compete; images pass through whole. The base "
    "model's own limits and biases remain."
)


def model_card(model: Any, repository: str, about: Mapping[str, Any] | None = None) -> str:
    """
    The text of a repository's README.md, with its YAML front matter.

    Args:
        model: its configuration and size are written down; it may be on the meta device.
        repository: the repository's id, such as `"org/QTSplus-3B"`, for the usage that is shown.
        about: what is known of the weights. `weights`, `training_data`, `hyperparameters` (a mapping), `recipe`,
            `results` and `limits` go into the text; everything else (`license`, `base_model`, ...) is front matter.
    """
    about = dict(about or {})
    sections = {section: about.pop(section, None) for section in SECTIONS}
    if "base_model" in about:
        about.setdefault("base_model_relation", "finetune")
    tags = dict.fromkeys(["custom_code", "qtsplus", "video", "token-selection", *about.pop("tags", [])])
    front_matter = ModelCardData(
        library_name="transformers", pipeline_tag="video-text-to-text", tags=list(tags), **about
    ).to_yaml()
    config = model.config
    body = _BODY.format(
        name=repository.rpartition("/")[2],
        backbone=model.backbone_name,
        repository=repository,
        weights=sections["weights"] or _describe_weights(about.get("base_model")),
        parameters=_count_parameters(model),
        selector_parameters=_count_parameters(model.model.qtsplus),
        layers=config.text_config.num_hidden_layers,
        width=config.text_config.hidden_size,
        training=_describe_training(sections),
        results=sections["results"] or _NO_RESULTS,
        limits=sections["limits"] or _LIMITS,
        **config.qtsplus_config.to_dict(),
    )
    return f"---\n{front_matter.strip()}\n---\n\n{body}"


def known_front_matter(model: Any) -> dict[str, Any]:
    """Licence and base model of the card that a model was loaded with; its results may be of other weights."""
    path = cached_file(
        model.config._name_or_path,
        "README.md",
        revision=getattr(model.config, "_commit_hash", None),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    fields = {} if path is None else ModelCard.load(path).data.to_dict()
    return {name: fields[name] for name in _KEPT_FRONT_MATTER if name in fields}


def _count_parameters(module: Any) -> int:
    """Of a module, whole too where DeepSpeed has left this process a part of them."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def _describe_weights(base_model: str | None) -> str:
    if base_model is not None:
        return f"The weights derive from [{base_model}](https://huggingface.co/{base_model})."
    return "The weights carry the licence of the model that they derive from."


def _describe_training(sections: Mapping[str, Any]) -> str:
    parts = [sections["training_data"]] if sections["training_data"] else []
    if sections["recipe"]:
        parts.append(f"Recipe: `{sections['recipe']}`.")
    if sections["hyperparameters"]:
        rows = [f"| {name} | {value} |" for name, value in sections["hyperparameters"].items()]
        parts.append("\n".join(["| hyperparameter | |", "|---|---|", *rows]))
    return "\n\n".join(parts) or _NO_TRAINING
