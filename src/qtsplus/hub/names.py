"""The names that one weight has in different checkpoints: ours, Qwen2.5-VL's old and new ones, the reference's."""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Naming:
    """
    A checkpoint's way to name weights.

    Args:
        to_ours, from_ours: regular expressions with their replacements, applied in turn.
    """

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
