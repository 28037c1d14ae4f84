"""Two passes over a video: it is read small, and the question chooses the regions that are encoded at full size."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .encoding_qtsplus import Repeats
from .layout_qtsplus import lay_out, splice
from .methods_qtsplus import Method, check_budget, is_number
from .mixin_qtsplus import choose
from .prompt_qtsplus import IMAGE, VIDEO, CompactPrompt, take_inputs
from .selector_qtsplus import kept_count
from .settings import check_count
from .video_qtsplus import VideoChunks, resize_frame, stack_frames


@dataclass(frozen=True)
class TwoPasses:
    """How a video is read twice."""

    scale: float = 0.5  # of the sides of a frame in the first pass, in (0, 1)
    tokens: float = 0.25  # the most of the video's tokens that the second pass encodes, as a fraction in (0, 1]
    tile: int | None = None  # side of a region in full-size tokens; the tower's windows, or else whole frames, if None

    def __post_init__(self) -> None:
        if not (is_number(self.scale) and 0 < self.scale < 1):
            raise ValueError(f"scale={self.scale!r}: expected a fraction of a frame's sides in (0, 1).")
        if not (is_number(self.tokens) and 0 < self.tokens <= 1):
            raise ValueError(f"tokens={self.tokens!r}: expected a fraction of the video's tokens in (0, 1].")
        if self.tile is not None:
            check_count("tile", self.tile, "tokens")


@dataclass(frozen=True)
class Tiles:
    """The frames of a video, each cut into the same tiles. Those at the right and at the bottom may be smaller."""

    grid: tuple[int, int, int]  # (time, height, width) of the video in tokens
    side: tuple[int, int]  # (height, width) of a tile in tokens

    @property
    def bounds(self) -> tuple[list[int], list[int]]:
        """Where rows of tiles begin, and columns, and where the last ones end."""
        rows, columns = (
            [*range(0, length, side), length] for length, side in zip(self.grid[1:], self.side, strict=True)
        )
        return rows, columns

    @property
    def sizes(self) -> torch.Tensor:
        """`[R, C]`, tokens."""
        rows, columns = (torch.tensor(bounds).diff() for bounds in self.bounds)
        return rows[:, None] * columns

    def mass(self, weights: torch.Tensor) -> torch.Tensor:
        """`[T, R, C]`: what every tile has of the weights `[T, h, w]` of the same video's tokens at another size."""
        rows, columns = (_shares(bounds, length) for bounds, length in zip(self.bounds, weights.shape[1:], strict=True))
        return rows @ weights @ columns.T

    def best(self, mass: torch.Tensor, count: int) -> torch.Tensor:
        """
        Of the mass `[T, R, C]` the tiles with the most per token, `count` tokens together at most but one tile at
        least: `[n, 3]`, their step, row and column, a place's steps one after another.
        """
        sizes = self.sizes.expand_as(mass).flatten()
        density = mass.flatten() / sizes
        order = density.argsort(descending=True, stable=True)
        chosen = (sizes[order].cumsum(0) <= count) & (density[order] > 0)
        chosen[0] = True
        steps, rows, columns = torch.unravel_index(order[chosen], mass.shape)
        by_place = ((rows * mass.shape[2] + columns) * mass.shape[0] + steps).argsort()
        return torch.stack([steps, rows, columns], dim=1)[by_place]

    def cut(self, row: int, column: int) -> tuple[slice, slice]:
        """The rows and columns of tokens of a tile."""
        rows, columns = self.bounds
        return slice(rows[row], rows[row + 1]), slice(columns[column], columns[column + 1])


def _shares(bounds: Sequence[int], parts: int) -> torch.Tensor:
    """`[tiles, parts]`: the share of each of `parts` equal parts of an axis that lies between two bounds."""
    ends = torch.tensor(bounds) / bounds[-1] * parts
    first = torch.arange(parts)
    return (torch.minimum(ends[1:, None], first + 1) - torch.maximum(ends[:-1, None], first)).clamp(min=0)


@dataclass(frozen=True)
class Large:
    """A video at full size, of which nothing has been encoded."""

    chunks: VideoChunks  # the video as `processor.video_chunks` opens it
    tiles: Tiles  # the regions of which it is made
    count: int  # the most tokens that may be encoded
    merge_size: int
    temporal_patch_size: int
    frame_tolerance: float | None  # as for [`Repeats`], from step to step of a tile


@dataclass(frozen=True)
class SecondPass:
    """What the second pass has encoded for a question."""

    features: torch.Tensor  # [k, d]
    places: torch.Tensor  # [k] ascending, which of the whole video's tokens these are
    num_tokens: int  # of the whole video
    retention: float  # of the tokens that were encoded, so that as many are kept as of the whole video
    rho: float  # of the whole video's tokens, what the first pass aimed at, as far as they were encoded


def open_twice(
    model: Any, processor: Any, chunks: VideoChunks, two_passes: TwoPasses, frame_tolerance: float | None = 0.0
) -> tuple[Large, VideoChunks]:
    """
    A video at full size, and the same with smaller frames: their sides times `scale`, in whole tokens.

    Raises:
        ValueError: a backbone that reads every frame at one size; tiles for a tower that has to see whole frames.
    """
    if not processor.native_resolution:
        raise ValueError(
            "Two passes need a model that reads frames of any size, as the Qwen-VL ones do; this one brings every "
            "frame to one size."
        )
    side = two_passes.tile or model.model.tile_side
    if model.model.tile_side is None and two_passes.tile is not None:
        raise ValueError(
            f"tile={two_passes.tile}: the vision tower of this model learns where a patch is in its frame, and has to "
            "see whole frames; leave tile out."
        )
    merge, patch = processor.video_processor.merge_size, processor.video_processor.patch_size
    time, *size = chunks.video_grid_thw[0].tolist()
    height, width = (length // merge for length in size)
    large = Large(
        chunks,
        Tiles((time, height, width), (height, width) if side is None else (side, side)),
        math.floor(two_passes.tokens * time * height * width),
        merge,
        processor.video_processor.temporal_patch_size,
        frame_tolerance,
    )
    small = [max(round(length * two_passes.scale / merge), 1) * merge for length in size]
    grid = torch.tensor([[time, *small]])
    return large, replace(
        chunks,
        video_grid_thw=grid,
        frames_per_chunk=chunks.frames_per_chunk * max(math.prod(size) // math.prod(small), 1),
        resize=functools.partial(resize_frame, processor.video_processor, (small[0] * patch, small[1] * patch)),
        preprocess=functools.partial(processor.preprocess_frames, grid=grid),
    )


def second_pass(
    model: Any,
    large: Large,
    small: Mapping[str, Any],
    *,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: str | Method | None = None,
) -> SecondPass:
    """
    Chooses tiles by the relevance of the small video's tokens, kept or not, and encodes them at full size. Where the
    selection looks at no relevance, the kept tokens count, each the same.

    Args:
        small: the prompt of a question about the small video, with its features: inputs of the model, one row.
        retention, max_visual_tokens, selection: as for a question about the whole video.

    Raises:
        ValueError: more tokens are asked for than the second pass may encode.
    """
    device, config, num_tokens = model.device, model.config.qtsplus_config, math.prod(large.tiles.grid)
    check_budget(selection or config.selection, [retention], 1, max_visual_tokens)
    most = min(config.n_max, max_visual_tokens or num_tokens)
    wanted = 0 if retention is None else kept_count(retention, num_tokens, most)
    if (selection or config.selection) == "all":
        wanted = num_tokens
    if wanted > large.count:
        raise ValueError(
            f"{wanted} of the video's {num_tokens} tokens are asked for, and the second pass encodes {large.count}: "
            "keep fewer, read the video in one pass, or raise TwoPasses(tokens=)."
        )
    prompt = {name: value.to(device) if torch.is_tensor(value) else value for name, value in small.items()}
    with torch.no_grad():
        chosen = model.model.compress(**prompt, retention=retention, selection=selection, reencode=False).qtsplus
    (grid,) = model.model.merged_grid(small["video_grid_thw"])
    if chosen.relevance is None:
        weights = torch.zeros(math.prod(grid)).index_fill(0, chosen.kept_indices[0].cpu(), 1.0)
    else:
        weights = chosen.relevance[0].float().cpu()
    best = large.tiles.best(large.tiles.mass(weights.reshape(grid)), large.count)
    features, places = encode_tiles(model, large, best, small["video_features"][0].device)

    # What the model predicts may be more than a second pass encodes.
    rho = min(float(chosen.rho[0]), max(large.count, 1) / num_tokens)
    wanted = kept_count(rho, num_tokens, most)
    return SecondPass(features, places, num_tokens, min(wanted / len(features), 1.0), rho)


def second_prompt(
    model: Any, inputs: Mapping[str, Any], passes: Sequence[SecondPass], **selection: Any
) -> CompactPrompt:
    """
    The shortened prompts of questions about whole videos, of which `passes` have encoded some tokens: the others are as
    if not kept, and what is there stays at its place. For `model.generate_from`.

    Args:
        inputs: the model's, `[B, S]`, with the grids of the whole videos.
        selection: the fields of [`SelectionInputs`]; `retention` is that of each pass if it is left out.
    """
    features = [one.features for one in passes]
    visual, choice = take_inputs(
        {"retention": [one.retention for one in passes], **inputs, **selection, "video_features": features}
    )
    layout = lay_out(model.model, visual, inputs["input_ids"], inputs.get("attention_mask"))
    layout = layout.narrow([one.places for one in passes])
    selected, qtsplus = choose(model.model, layout, {IMAGE: [], VIDEO: features}, choice, sample_gate=False)
    return splice(model.model, layout, {IMAGE: [], VIDEO: features}, selected, qtsplus, pad_left=True)


def encode_tiles(
    model: Any, large: Large, chosen: torch.Tensor, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Encodes tiles of a video, each as a little frame of its own, those of one size together. The tower's rotary
    positions are relative, so a tile loses only what attention over whole frames would have told it of others.

    Args:
        large: the video. It is decoded up to the last chosen frame.
        chosen: `[n, 3]` different tiles, as [`Tiles.best`] gives them.
        device: where the features shall live; the model's if `None`.

    Returns:
        `[k, d]` features of their tokens, and `[k]` which of the video's tokens these are, ascending.
    """
    merge = large.merge_size
    indices = torch.arange(math.prod(large.tiles.grid)).reshape(large.tiles.grid)
    features, places = [], []
    for steps, pixels, grid in _chunks_of_steps(large, chosen[:, 0].unique().tolist()):
        # Row by row of tokens, and the patches of a token one after another: a tile is some of these rows.
        height, width = (int(side) // merge for side in grid[0, 1:])
        frames = pixels.reshape(len(steps), height, width, merge**2, -1)
        by_size: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for step, row, column in chosen[torch.isin(chosen[:, 0], torch.tensor(steps))].tolist():
            cut = large.tiles.cut(row, column)
            own = indices[step][cut]
            by_size.setdefault(own.shape, []).append((frames[steps.index(step)][cut].flatten(0, 2), own.flatten()))
        grids = [[len(tiles), rows * merge, columns * merge] for (rows, columns), tiles in by_size.items()]
        tiles = [tile for group in by_size.values() for tile in group]
        features += model.encode_videos(
            torch.cat([patches for patches, _ in tiles]),
            torch.tensor(grids),
            device=device,
            repeats=Repeats(large.frame_tolerance),
        )
        places += [own for _, own in tiles]
    order = torch.cat(places).argsort()
    joined = torch.cat(features)
    return joined[order.to(joined.device)], torch.cat(places)[order]


def _chunks_of_steps(large: Large, steps: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Some steps in time of a video with their pixel values and grid, chunk by chunk. Decoding ends with the last."""
    chunks, per_step = large.chunks, large.temporal_patch_size
    wanted = {step * per_step + frame for step in steps for frame in range(per_step)}
    up_to_last = itertools.islice(chunks.decode(), max(wanted) + 1)
    frames: Iterator[np.ndarray] = (chunks.resize(frame) for index, frame in enumerate(up_to_last) if index in wanted)
    left = list(steps)
    while chunk := list(itertools.islice(frames, chunks.frames_per_chunk)):
        count = -(-len(chunk) // per_step)
        yield left[:count], *chunks.preprocess(stack_frames(chunk))
        left = left[count:]
