"""The grid of visual tokens of each video, and values of its tokens laid out on it."""

from collections.abc import Sequence

import torch


def token_grids(video_grid_thw: torch.Tensor, merge_size: int) -> list[tuple[int, int, int]]:
    """The grid (T, H, W) of visual tokens of each video, from `[N, 3]` patches before the spatial merge."""
    return [(t, h // merge_size, w // merge_size) for t, h, w in video_grid_thw.tolist()]


def token_maps(values: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Cuts one value per visual token of a sample, `[M]`, into one `[T, H, W]` per video."""
    sizes = [t * h * w for t, h, w in grids]
    if sum(sizes) != len(values):
        raise ValueError(f"The video grids {list(grids)} hold {sum(sizes)} tokens, but there are {len(values)} values.")
    return [part.reshape(grid) for part, grid in zip(values.split(sizes), grids, strict=True)]


def keep_maps(kept_indices: torch.Tensor, video_grid_thw: torch.Tensor, merge_size: int) -> list[torch.Tensor]:
    """One bool `[T, H, W]` per video: which tokens of each frame were kept, `[n]` indices among those of all videos."""
    grids = token_grids(video_grid_thw, merge_size)
    kept = torch.zeros(sum(t * h * w for t, h, w in grids), dtype=torch.bool)
    kept[kept_indices.cpu()] = True
    return token_maps(kept, grids)
