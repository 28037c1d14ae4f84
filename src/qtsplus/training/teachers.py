"""Whether a teacher of attention sees the same visual tokens as its student."""

import math
from typing import Any

import torch

from .lora import base_model


def require_same_backbone(teacher: Any, student: Any) -> None:
    """Raises `ValueError` for configurations of a teacher of attention and a student that read other prompts."""
    for name in ("model_type", "image_token_id", "video_token_id"):
        other, own = getattr(teacher, name), getattr(student, name)
        if other != own:
            raise ValueError(
                f"relevance_teacher has {name}={other!r} and the model {own!r}: expected a teacher of the same "
                "backbone and tokenizer."
            )
    for name in ("patch_size", "temporal_patch_size"):
        other, own = (getattr(config.vision_config, name, None) for config in (teacher, student))
        if other != own:
            raise ValueError(
                f"relevance_teacher cuts videos with {name}={other} and the model with {own}: expected a teacher with "
                "the same visual tokens."
            )


def require_same_tokens(teacher: Any, student: Any, video_grid_thw: torch.Tensor | None) -> None:
    """
    Raises `ValueError` for a teacher of attention to which videos are other tokens than to the student.

    Args:
        video_grid_thw: `[videos, 3]`, as the student's processor gives it.
    """
    theirs, ours = base_model(teacher), base_model(student)
    require_same_backbone(theirs.config, ours.config)
    if video_grid_thw is None:
        return
    grids = zip(theirs.model.merged_grid(video_grid_thw), ours.model.merged_grid(video_grid_thw), strict=True)
    for video, (other, own) in enumerate(grids):
        if other != own:
            raise ValueError(
                f"Video {video} is {math.prod(other)} visual tokens {tuple(other)} to relevance_teacher and "
                f"{math.prod(own)} {tuple(own)} to the model: expected a teacher with the same visual tokens."
            )


__all__ = ["require_same_backbone", "require_same_tokens"]
