"""A checkpoint's weights under the names of our model: exactly what its configuration needs, or an error."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..backbones import backbone_of
from .checkpoint import StoredTensor, read_checkpoint
from .folder import reading

SELECTOR, RHO_HISTORY = "model.qtsplus.", "model.qtsplus.rho_history"
HEAD, EMBEDDINGS = "lm_head.weight", "model.language_model.embed_tokens.weight"


@dataclass(frozen=True)
class Naming:
    """A checkpoint's way to name weights: regular expressions with their replacements, applied in turn."""

    to_ours: tuple[tuple[str, str], ...] = ()
    from_ours: tuple[tuple[str, str], ...] = ()

    def ours(self, name: str) -> str:
        """The name in our model of the weight that is called `name` there."""
        return _replace(name, self.to_ours)

    def theirs(self, name: str) -> str:
        """The name there of a weight of our model."""
        return _replace(name, self.from_ours)


# Ours are those of Qwen2.5-VL in Transformers since 4.52.
NEW = Naming()
# Those of Qwen2-VL and Qwen2.5-VL before.
OLD = Naming(
    to_ours=(
        (r"^visual\.", "model.visual."),
        (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
    ),
    from_ours=((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")),
)
# Those of a saved backbone, the model without a head.
HEADLESS = Naming(
    to_ours=((r"^(visual|language_model|qtsplus)\.", r"model.\1."),),
    from_ours=((r"^model\.", ""),),
)
REFERENCE = Naming(
    to_ours=(
        (r"^model\.qts_plus\.selector\.", "model.qtsplus."),
        (r"^(model\.qtsplus\.reencode_layers\.\d+)\.core\.", r"\1."),
        (r"^(model\.qtsplus\..+)\.ffn\.net\.", r"\1.ffn."),
        (r"^model\.vision_tower\.", "model.visual."),
        (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
    ),
    from_ours=(
        (r"^(model\.qtsplus\.reencode_layers\.\d+)\.", r"\1.core."),
        (r"^(model\.qtsplus\..+)\.ffn\.(\d)", r"\1.ffn.net.\2"),
        (r"^model\.qtsplus\.", "model.qts_plus.selector."),
        (r"^model\.visual\.", "model.vision_tower."),
        (r"^model\.language_model\.", "model."),
    ),
)


# Those of InternVL and LLaVA-OneVision before 4.52.
OUTER = Naming(
    to_ours=(
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^(vision_tower|multi_modal_projector|image_newline)", r"model.\1"),
    ),
    from_ours=(
        (r"^lm_head\.", "language_model.lm_head."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.(vision_tower|multi_modal_projector|image_newline)", r"\1"),
    ),
)


# By the stock `model_type`: the names of the published checkpoints, which a stock `save_pretrained` writes too.
PUBLISHED = {
    "qwen2_5_vl": OLD,
    "qwen2_vl": OLD,
    "qwen3_5": NEW,
    "qwen3_vl": NEW,
    "internvl": OUTER,
    "llava_onevision": OUTER,
}


def naming_of(names: Iterable[str]) -> Naming:
    """Which of the ways to name weights a checkpoint uses."""
    names = set(names)
    if any(name.startswith("language_model.model.") for name in names):
        return OUTER
    if any(name.startswith("language_model.") for name in names):
        return HEADLESS
    old = any(re.match(r"(visual|model\.(embed_tokens|layers|norm))\.", name) for name in names)
    return OLD if old else NEW


def _replace(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def on_meta(config: Any) -> Any:
    """The model of a configuration without weights: names, shapes and sizes."""
    with torch.device("meta"):
        return backbone_of(config.model_type).model(config)


def read_weights(folder: Path, config: Any) -> dict[str, StoredTensor]:
    """
    The tensors of a folder with one of our models, in the model's order and without a tied head.

    Raises:
        ValueError: weights are missing, unexpected or of another shape; each is listed.
    """
    stored = read_checkpoint(folder)
    return check_weights(stored, naming_of(stored), config, folder)


def check_weights(
    stored: Mapping[str, StoredTensor],
    naming: Naming,
    config: Any,
    folder: Path,
    without: str | None = None,
) -> dict[str, StoredTensor]:
    """
    What was stored, under our names and in the model's order, if it is exactly what the model needs.

    Args:
        stored: by the names of `naming`. A head beside tied embeddings is dropped where the two are equal.
        without: how the names begin, in our model, of weights that are not expected.

    Raises:
        ValueError: weights are missing, unexpected or of another shape; each is listed by its stored name.
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
        name = naming.ours(key)
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
        "missing": [naming.theirs(name) for name in expected if name not in found],
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
