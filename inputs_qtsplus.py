"""What a call brings beside its text: images and videos, and how to select among their tokens.

Each of these arguments is named here and nowhere else. `forward`, `generate` and `compress` take them as keywords, and
hand them on as [`VisualInputs`] and [`SelectionInputs`].
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=Callable[..., Any])


@dataclass
class VisualInputs:
    """
    Images and videos, as the processor returns them.

    Args:
        pixel_values, image_grid_thw: pixels of all images, and `[images, 3]`.
        pixel_values_videos, video_grid_thw: pixels of all videos, and `[videos, 3]`.
        second_per_grid_ts: `[videos]`, seconds per temporal patch.
        video_features: per video `[k, d]`, as `encode_videos` returns them, in the place of its pixels. On another
            device than the prompt, one row's are moved at a time.
        video_places: per video `[k]`, ascending, which of the tokens of its grid `video_features` holds. What else the
            prompt has of the video is left out as if it had not been kept; what is there stays at its place.
    """

    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None
    pixel_values_videos: torch.Tensor | None = None
    video_grid_thw: torch.Tensor | None = None
    second_per_grid_ts: torch.Tensor | Sequence[float] | None = None
    video_features: Sequence[torch.Tensor] | None = None
    video_places: Sequence[torch.Tensor | Sequence[int]] | None = None

    @property
    def given(self) -> bool:
        """Whether there is anything to look at."""
        return any(values is not None for values in (self.pixel_values, self.pixel_values_videos, self.video_features))


@dataclass
class SelectionInputs:
    """
    How one call selects; what is left out is as the configuration has it.

    Args:
        query_mask: `[B, S]`, 1 on the question's tokens, as the processor makes it; found in `input_ids` if `None`.
        query_input_ids, query_attention_mask: `[B, L]`, a question that does not stand in the prompt.
        retention: keep this fraction of the visual tokens, in (0, 1]; one for all rows or one for each.
        max_visual_tokens: keep at most this many.
        selection: one of `selection_qtsplus.METHODS`, such as `"uniform"`.
        reencode: `False` hands the kept tokens on as they are (the paper's nREENC).
    """

    query_mask: torch.Tensor | None = None
    query_input_ids: torch.Tensor | None = None
    query_attention_mask: torch.Tensor | None = None
    retention: float | Sequence[float] | None = None
    max_visual_tokens: int | None = None
    selection: str | None = None
    reencode: bool = True


NAMES = tuple(field.name for kind in (VisualInputs, SelectionInputs) for field in fields(kind))


def take_inputs(kwargs: dict[str, Any]) -> tuple[VisualInputs, SelectionInputs]:
    """Takes the arguments that are named here out of a call's `kwargs`."""
    visual, selection = (
        {field.name: kwargs.pop(field.name) for field in fields(kind) if field.name in kwargs}
        for kind in (VisualInputs, SelectionInputs)
    )
    return VisualInputs(**visual), SelectionInputs(**selection)


def names_inputs(forward: T) -> T:
    """
    Puts the arguments that are named here into the signature of a `forward` that takes them as `**kwargs`.

    The Trainer drops a batch's columns, and `generate` refuses arguments, that the signature does not have.
    """
    signature = inspect.signature(forward)
    *own, rest = signature.parameters.values()
    named = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for kind in (VisualInputs, SelectionInputs)
        for field in fields(kind)
    ]
    forward.__signature__ = signature.replace(parameters=[*own, *named, rest])  # type: ignore[attr-defined]
    return forward


__all__ = ["NAMES", "SelectionInputs", "VisualInputs", "names_inputs", "take_inputs"]
