"""Values of the visual tokens of each video, laid out on its grid."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..model.layout_qtsplus import token_grids
from ..model.prompt_qtsplus import Grid


def token_maps(values: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """Cuts one value per visual token of a sample, `[M]`, into one `[T, H, W]` per video."""
    sizes = [prod(grid) for grid in grids]
    return [part.reshape(grid) for part, grid in zip(values.split(sizes), grids, strict=True)]


def keep_maps(kept_indices: Tensor, video_grid_thw: Tensor, merge_size: int) -> list[Tensor]:
    """One bool `[T, H, W]` per video: which tokens of each frame were kept, `[n]` indices among those of all videos."""
    grids = token_grids(video_grid_thw, merge_size)
    kept = torch.zeros(sum(map(prod, grids)), dtype=torch.bool, device="cpu")
    kept[kept_indices.cpu()] = True
    return token_maps(kept, grids)
