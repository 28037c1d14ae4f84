"""Two passes over a video: it is read small, and the question chooses the regions that are encoded at full size."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from qtsplus.common.validation import check_count
from qtsplus.model.layout_qtsplus import lay_out
from qtsplus.model.methods_qtsplus import Method, is_number
from qtsplus.model.mixin_qtsplus import choose
from qtsplus.model.prompt_qtsplus import IMAGE, VIDEO, CompactPrompt, splice, take_inputs
from qtsplus.model.selector_qtsplus import kept_count
from qtsplus.model.video_qtsplus import VideoChunks, resize_frame, stack_frames
from qtsplus.video.encoded import EncodedVideo, read_ahead

from .exact_match import compress


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
    def bounds(self) -> list[torch.Tensor]:
        """Where rows of tiles begin, and columns, and where the last ones end."""
        pairs = zip(self.grid[1:], self.side, strict=True)
        return [torch.tensor([*range(0, length, side), length]) for length, side in pairs]

    @property
    def sizes(self) -> torch.Tensor:
        """`[R, C]`, tokens."""
        rows, columns = (bounds.diff() for bounds in self.bounds)
        return rows[:, None] * columns

    def mass(self, weights: torch.Tensor) -> torch.Tensor:
        """`[T, R, C]`: what every tile has of the weights `[T, h, w]` of the same video's tokens at another size."""
        shares = []
        for bounds, parts in zip(self.bounds, weights.shape[1:], strict=True):
            ends, first = bounds / bounds[-1] * parts, torch.arange(parts)
            overlap = torch.minimum(ends[1:, None], first + 1) - torch.maximum(ends[:-1, None], first)
            shares.append(overlap.clamp(min=0))
        return shares[0] @ weights @ shares[1].T

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


@dataclass(frozen=True)
class Large:
    """A video at full size, of which nothing has been encoded."""

    chunks: VideoChunks  # the video as `processor.video_chunks` opens it
    tiles: Tiles  # the regions of which it is made
    count: int  # the most tokens that may be encoded
    merge_size: int
    temporal_patch_size: int


@dataclass(frozen=True)
class SecondPass:
    """What the second pass has encoded for a question."""

    features: torch.Tensor  # [k, d]
    places: torch.Tensor  # [k] ascending, which of the whole video's tokens these are
    num_tokens: int  # of the whole video
    retention: float  # of the tokens that were encoded, so that as many are kept as of the whole video
    rho: float  # of the whole video's tokens, what the first pass aimed at, as far as they were encoded


def read_small(
    model: Any,
    processor: Any,
    video: str | Path,
    two_passes: TwoPasses,
    fps: float | None = None,
) -> tuple[EncodedVideo, Large]:
    """The first pass: a video with smaller frames, encoded, and the same at full size; as [`open_twice`]."""
    started = time.perf_counter()
    large, small = open_twice(model, processor, processor.video_chunks(video, fps=fps), two_passes)
    pieces = small if model.device.type == "cpu" else read_ahead(small)
    features = [model.encode_videos(pixels, grid)[0] for pixels, grid in pieces]
    encoded = EncodedVideo(
        video=str(video),
        features=torch.cat(features),
        video_grid_thw=small.video_grid_thw,
        second_per_grid_ts=small.second_per_grid_ts,
        metadata=small.metadata,
        seconds=time.perf_counter() - started,
    )
    return encoded, large


def tile_side(model: Any) -> int | None:
    """
    Tokens a side of the part of a frame that the vision tower can be given by itself; `None` if that is all of it, for
    a tower that learns where a patch is in its frame.
    """
    if model.config.model_type not in ("qwen2_5_vl_qtsplus", "qwen2_vl_qtsplus"):
        return None
    vision = model.config.vision_config  # Qwen2-VL has no windows: a tile as large as one of Qwen2.5-VL
    side = getattr(vision, "window_size", 4 * vision.patch_size * vision.spatial_merge_size)
    return side // vision.patch_size // vision.spatial_merge_size


def open_twice(model: Any, processor: Any, chunks: VideoChunks, two_passes: TwoPasses) -> tuple[Large, VideoChunks]:
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
    side = two_passes.tile or tile_side(model)
    if tile_side(model) is None and two_passes.tile is not None:
        raise ValueError(
            f"tile={two_passes.tile}: the vision tower of this model learns where a patch is in its frame, and has to "
            "see whole frames; leave tile out."
        )
    sizes = processor.video_processor
    time, *size = chunks.video_grid_thw[0].tolist()
    height, width = (length // sizes.merge_size for length in size)
    tiles = Tiles((time, height, width), (height, width) if side is None else (side, side))
    count = math.floor(two_passes.tokens * time * height * width)
    large = Large(chunks, tiles, count, sizes.merge_size, sizes.temporal_patch_size)
    small = [max(round(length * two_passes.scale / sizes.merge_size), 1) * sizes.merge_size for length in size]
    grid = torch.tensor([[time, *small]])
    return large, replace(
        chunks,
        video_grid_thw=grid,
        frames_per_chunk=chunks.frames_per_chunk * max(math.prod(size) // math.prod(small), 1),
        resize=partial(resize_frame, sizes, (small[0] * sizes.patch_size, small[1] * sizes.patch_size)),
        preprocess=partial(processor.preprocess_frames, grid=grid),
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
        chosen = compress(model.model, **prompt, retention=retention, selection=selection, reencode=False).qtsplus
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
        selection: the fields of `SelectionInputs`; `retention` is that of each pass if it is left out.
    """
    retention, features = [one.retention for one in passes], [one.features for one in passes]
    visual, choice = take_inputs({"retention": retention, **inputs, **selection, "video_features": features})
    layout = lay_out(model.model, visual, inputs["input_ids"], inputs.get("attention_mask"))
    layout = layout.narrow([one.places for one in passes])
    some = {IMAGE: [], VIDEO: features}
    selected, qtsplus = choose(model.model, layout, some, choice, sample_gate=False)
    return splice(model.model, layout, some, selected, qtsplus, pad_left=True)


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
    chunks, merge, per_step = large.chunks, large.merge_size, large.temporal_patch_size
    indices = torch.arange(math.prod(large.tiles.grid)).reshape(large.tiles.grid)
    (rows, columns), steps = large.tiles.bounds, chosen[:, 0].unique().tolist()
    last, together = (steps[-1] + 1) * per_step, chunks.frames_per_chunk // per_step
    frames = (chunks.resize(one) for n, one in enumerate(islice(chunks.decode(), last)) if n // per_step in steps)
    features, places = [], []
    for first in range(0, len(steps), together):
        own_steps = steps[first : first + together]
        pixels, grid = chunks.preprocess(stack_frames(list(islice(frames, len(own_steps) * per_step))))
        # Row by row of tokens, and the patches of a token one after another: a tile is some of these rows.
        height, width = (int(side) // merge for side in grid[0, 1:])
        patches = pixels.reshape(len(own_steps), height, width, merge**2, -1)
        by_size: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for step, row, column in chosen[torch.isin(chosen[:, 0], torch.tensor(own_steps))].tolist():
            cut = slice(rows[row], rows[row + 1]), slice(columns[column], columns[column + 1])
            own, tile = indices[step][cut], patches[own_steps.index(step)][cut]
            by_size.setdefault(own.shape, []).append((tile.flatten(0, 2), own.flatten()))
        grids = torch.tensor([[len(some), *(side * merge for side in size)] for size, some in by_size.items()])
        tiles = [tile for some in by_size.values() for tile, _ in some]
        features += model.encode_videos(torch.cat(tiles), grids, device=device)
        places += [own for some in by_size.values() for _, own in some]
    order, joined = torch.cat(places).argsort(), torch.cat(features)
    return joined[order.to(joined.device)], torch.cat(places)[order]
