"""Two passes over a video: it is read small, the question chooses frames, and these alone are encoded at full size."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .selector_qtsplus import kept_count
from .video_qtsplus import VideoChunks, resize_frame, stack_frames


@dataclass(frozen=True)
class TwoPasses:
    """
    How a video is read twice.

    Args:
        scale: of the sides of a frame in the first pass, in (0, 1).
        frames: the most of the frames that the second pass encodes, as a fraction in (0, 1].

    Raises:
        ValueError: a fraction out of its range.
    """

    scale: float = 0.5
    frames: float = 0.125

    def __post_init__(self) -> None:
        if not 0 < self.scale < 1:
            raise ValueError(f"scale={self.scale!r}: expected a fraction of a frame's sides in (0, 1).")
        if not 0 < self.frames <= 1:
            raise ValueError(f"frames={self.frames!r}: expected a fraction of the frames in (0, 1].")


@dataclass(frozen=True)
class Large:
    """
    A video at full size, of which nothing has been encoded.

    Args:
        chunks: the video as `processor.video_chunks` opens it.
        two_passes: how much of it may be encoded.
    """

    chunks: VideoChunks
    two_passes: TwoPasses


@dataclass(frozen=True)
class SecondPass:
    """
    What the second pass has encoded for a question.

    Args:
        features: `[k, d]`, the tokens of the steps in time.
        steps: these, ascending, of the full grid.
        retention: of the tokens that were encoded, so that as many are kept as of the whole video.
        rho: the fraction of the whole video's tokens that the first pass aimed at.
    """

    features: torch.Tensor
    steps: list[int]
    retention: float
    rho: float

    def of_the_whole(
        self, kept_indices: torch.Tensor, relevance: torch.Tensor | None, num_steps: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Kept indices `[n]` and relevance `[k]` of the encoded tokens, as those of all `num_steps` steps."""
        per_step = len(self.features) // len(self.steps)
        steps = torch.tensor(self.steps, device=kept_indices.device)
        kept_indices = steps[kept_indices // per_step] * per_step + kept_indices % per_step
        if relevance is not None and len(relevance):
            whole = relevance.new_zeros(num_steps, per_step)
            whole[steps.to(relevance.device)] = relevance.unflatten(0, (-1, per_step))
            relevance = whole.flatten()
        return kept_indices, relevance


def read_small(processor: Any, chunks: VideoChunks, scale: float) -> VideoChunks:
    """
    The same video with smaller frames: their sides times `scale`, in whole tokens.

    Raises:
        ValueError: a backbone that reads every frame at one size.
    """
    if not processor.native_resolution:
        raise ValueError(
            "Two passes need a model that reads frames of any size, as the Qwen-VL ones do; this one brings every "
            "frame to one size."
        )
    merge, patch = processor.video_processor.merge_size, processor.video_processor.patch_size
    time, *size = chunks.video_grid_thw[0].tolist()
    small = [max(round(side * scale / merge), 1) * merge for side in size]
    grid = torch.tensor([[time, *small]])
    return replace(
        chunks,
        video_grid_thw=grid,
        frames_per_chunk=chunks.frames_per_chunk * max(math.prod(size) // math.prod(small), 1),
        resize=functools.partial(resize_frame, processor.video_processor, (small[0] * patch, small[1] * patch)),
        preprocess=functools.partial(processor.preprocess_frames, grid=grid),
    )


def second_pass(
    model: Any,
    processor: Any,
    large: Large,
    small: Any,
    question: str,
    *,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: str | None = None,
) -> SecondPass:
    """
    Chooses frames by the tokens that the selection keeps of the small video, and encodes them at full size.

    Args:
        small: [`EncodedVideo`], the first pass.
        retention, max_visual_tokens, selection: as for a question about the whole video.
    """
    inputs = processor.question_inputs(question, small.video_grid_thw, [small.metadata]).to(model.device)
    with torch.no_grad():
        chosen = model.model.compress(
            inputs.pop("input_ids"),
            inputs.pop("attention_mask"),
            query_mask=inputs.pop("query_mask"),
            video_grid_thw=small.video_grid_thw.to(model.device),
            video_features=[small.features],
            second_per_grid_ts=small.second_per_grid_ts,
            retention=retention,
            selection=selection,
            reencode=False,
        ).qtsplus
    grid = large.chunks.video_grid_thw
    count = math.ceil(large.two_passes.frames * int(grid[0, 0]))
    relevance = None if chosen.relevance is None or not len(chosen.relevance[0]) else chosen.relevance[0]
    steps = best_steps(chosen.kept_indices[0], relevance, int(grid[0, 0]), len(small.features), count)
    features = torch.cat(
        [
            model.encode_videos(pixels, own, device=small.features.device)[0]
            for pixels, own in chunks_of_steps(large.chunks, steps, processor.video_processor.temporal_patch_size)
        ]
    )
    tokens = len(features) // len(steps) * int(grid[0, 0])
    rho = float(chosen.rho[0])
    wanted = kept_count(rho, tokens, model.config.qtsplus_config.n_max)
    wanted = wanted if max_visual_tokens is None else min(wanted, max_visual_tokens)
    return SecondPass(features, steps, min(wanted / len(features), 1.0), rho)


def best_steps(
    kept_indices: torch.Tensor, relevance: torch.Tensor | None, num_steps: int, num_tokens: int, count: int
) -> list[int]:
    """
    The steps in time whose kept tokens have the most relevance together, ascending; none that holds no kept token.

    Args:
        kept_indices: `[n]`, among the video's tokens.
        relevance: `[num_tokens]`; every kept token counts the same without.
        count: the most steps.
    """
    weights = torch.ones(num_tokens) if relevance is None else relevance.float().cpu()
    kept_indices = kept_indices.cpu()
    places = kept_indices // (num_tokens // num_steps)
    mass = torch.zeros(num_steps).index_add(0, places, weights[kept_indices])
    holding = len(places.unique())
    return sorted(mass.topk(min(count, holding)).indices.tolist())


def chunks_of_steps(
    chunks: VideoChunks, steps: Sequence[int], frames_per_step: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pixel values and grids of some steps in time of a video, chunk by chunk. Decoding ends with the last of them."""
    wanted = {step * frames_per_step + frame for step in steps for frame in range(frames_per_step)}
    up_to_last = itertools.islice(chunks.decode(), max(wanted) + 1)
    frames: Iterator[np.ndarray] = (chunks.resize(frame) for index, frame in enumerate(up_to_last) if index in wanted)
    while chunk := list(itertools.islice(frames, chunks.frames_per_chunk)):
        yield chunks.preprocess(stack_frames(chunk))


__all__ = ["Large", "SecondPass", "TwoPasses", "best_steps", "chunks_of_steps", "read_small", "second_pass"]
