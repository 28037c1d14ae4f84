"""A checkpoint's weights under the names of our model: exactly what its configuration needs, or an error."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..backbones import backbone_of
from .checkpoint import StoredTensor, read_checkpoint
from .folder import reading

SELECTOR, RHO_HISTORY = "model.qtsplus.", "model.qtsplus.rho_history"
HEAD, EMBEDDINGS = "lm_head.weight", "model.language_model.embed_tokens.weight"


# From a checkpoint's names to ours, which are those of Transformers since 4.52: regular expressions with their
# replacements, applied in turn. Older checkpoints and saved backbones, which have no head, name weights otherwise.
STOCK = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^(?!model\.|lm_head\.)", "model."),
    (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
)
REFERENCE = (
    (r"^model\.qts_plus\.selector\.", "model.qtsplus."),
    (r"^(model\.qtsplus\.reencode_layers\.\d+)\.core\.", r"\1."),
    (r"^(model\.qtsplus\..+)\.ffn\.net\.", r"\1.ffn."),
    (r"^model\.vision_tower\.", "model.visual."),
    *STOCK,
)


def our_name(name: str, rules: tuple[tuple[str, str], ...] = STOCK) -> str:
    """The name in our model of the weight that is called `name` in a checkpoint."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def on_meta(config: Any) -> Any:
    """The model of a configuration without weights: names, shapes and sizes."""
    with torch.device("meta"):
        return backbone_of(config.model_type).model(config)


def read_weights(folder: Path, config: Any) -> dict[str, StoredTensor]:
    """The tensors of a folder with one of our models, as [`check_weights`] gives them."""
    return check_weights(read_checkpoint(folder), config, folder)


def check_weights(
    stored: Mapping[str, StoredTensor],
    config: Any,
    folder: Path,
    rules: tuple[tuple[str, str], ...] = STOCK,
    without: str | None = None,
) -> dict[str, StoredTensor]:
    """
    What was stored, under our names and in the model's order, if it is exactly what the model needs.

    Args:
        stored: a head beside tied embeddings is dropped where the two are equal.
        rules: from the stored names to ours.
        without: how the names begin, in our model, of weights that are not expected.

    Raises:
        ValueError: weights are missing, unexpected or of another shape; each is listed.
    """
    with reading(Path(folder, "config.json")):
        model = on_meta(config)
    needed = model.state_dict().items()
    expected = {name: tensor for name, tensor in needed if without is None or not name.startswith(without)}
    found: dict[str, StoredTensor] = {}
    sources: dict[str, str] = {}
    ignored = model._keys_to_ignore_on_load_unexpected or ()  # as Qwen3.5's heads for several tokens at a time
    for key, tensor in stored.items():
        if any(re.search(pattern, key) for pattern in ignored):
            continue
        name = our_name(key, rules)
        if name in found:
            raise ValueError(f"{folder} holds {name} twice, as {sources[name]} and as {key}.")
        found[name], sources[name] = tensor, key
    if config.tie_word_embeddings:
        expected.pop(HEAD)
        if HEAD in found and EMBEDDINGS in found and not found.pop(HEAD).same_as(found[EMBEDDINGS]):
            raise ValueError(
                f"{folder} has a {HEAD} that differs from its embeddings, but its configuration ties the two: set "
                "tie_word_embeddings to false in its config.json, or remove the head."
            )

    wrong = {
        "missing": [name for name in expected if name not in found],
        "unexpected": sorted(sources[name] for name in found if name not in expected),
        "misshapen": [
            f"{sources[name]} ({tensor.dtype} {list(tensor.shape)}, expected {list(expected[name].shape)})"
            for name, tensor in found.items()
            if name in expected and not _fits(tensor, expected[name])
        ],
    }
    problems = [f"{len(names)} {kind}: {', '.join(names)}" for kind, names in wrong.items() if names]
    if problems:
        raise ValueError(f"The weights in {folder} do not fit their configuration. {'; '.join(problems)}.")
    return {name: found[name] for name in expected}


def _fits(tensor: StoredTensor, expected: torch.Tensor) -> bool:
    return tensor.shape == expected.shape and tensor.dtype.is_floating_point == expected.is_floating_point()
