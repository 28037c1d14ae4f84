"""How the visual tokens of a question are chosen: named once, and passed whole."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..model.methods_qtsplus import MethodOrName


@dataclass(frozen=True)
class Choice:
    """
    How visual tokens are chosen. What is `None` is as the model's configuration has it.

    Args:
        retention: the fraction to keep, in (0, 1]; without it the model decides.
        max_visual_tokens: the most tokens to keep.
        selection: the name of a method (`qtsplus.model.methods_qtsplus.METHODS`), or a function like those.
    """

    retention: float | None = None
    max_visual_tokens: int | None = None
    selection: "MethodOrName | None" = None
