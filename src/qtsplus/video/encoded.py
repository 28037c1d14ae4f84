"""Encodes videos of any length, chunk by chunk, for any number of questions."""

import os
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from transformers.image_utils import get_image_size
from typing_extensions import Unpack

from ..common.journals import State, file_state
from ..hub.loading import find_device
from ..model.addresses_qtsplus import shown_name
from ..model.video_qtsplus import flatten_videos
from .forecast import forecast, largest_gap
from .sampling import Sampling, SamplingOptions
from .subtitles import Subtitle, read_subtitles

T = TypeVar("T")

# Of one video or question, while the others go on.
FAILURES = (ValueError, OSError, MemoryError, torch.OutOfMemoryError)
IN_MEMORY = "(frames)"  # what a video is called that was given as frames


@dataclass(frozen=True)
class EncodedVideo:
    """A video that [`encode`] has read, for any number of questions."""

    video: str  # the path, [`IN_MEMORY`] for one that was given as frames
    features: torch.Tensor  # [M, d], all its visual tokens
    video_grid_thw: torch.Tensor  # [1, 3], its grid in patches
    second_per_grid_ts: list[float]  # [1], seconds per temporal patch
    metadata: Any  # `VideoMetadata`, with the indices of the frames that were looked at
    seconds: float  # what reading and encoding took
    start: float = 0.0  # when a player shows the first frame, in seconds
    warnings: list[str] = field(default_factory=list)  # what is wrong with the file, one sentence each
    sound: bool = False  # whether the file has some, which is not read
    subtitles: Sequence[Subtitle] = ()  # as [`read_subtitles`] gives them

    @property
    def length(self) -> float:
        """Seconds from the first frame to the end of the last."""
        return self.metadata.total_num_frames / self.metadata.fps

    @property
    def frames(self) -> int:
        """How many were looked at."""
        return len(self.metadata.frames_indices)

    @property
    def largest_gap(self) -> float:
        """The longest time between two frames that were looked at, in seconds; 0 where there is one."""
        return largest_gap(self.metadata)

    def span(self, first: int, last: int) -> tuple[float, float]:
        """When a player shows the steps of the grid from one on, up to another that is not part of it, in seconds."""
        edges = self.steps  # the last step is padded where the frames are odd in number
        return self.start + edges[first], self.start + edges[min(last, len(edges) - 1)]

    @property
    def count(self) -> int:
        """The steps of the grid."""
        return int(self.video_grid_thw[0, 0])

    def within(self, start: float, end: float) -> tuple[int, int]:
        """The first step of the grid that a player shows between two seconds, and the one behind the last."""
        edges = [self.start + edge for edge in self.steps]
        steps = [step for step, (own, last) in enumerate(pairwise(edges)) if own < end and last > start]
        return (steps[0], steps[-1] + 1) if steps else (0, 0)

    @cached_property
    def steps(self) -> list[float]:
        """When each step of the grid begins, and the last one ends, in seconds from the first frame."""
        count, step = self.count, float(self.second_per_grid_ts[0])
        edges = [number * step for number in range(count)]
        indices, fps = self.metadata.frames_indices or [], self.metadata.fps
        if len(indices) >= count:
            own = [(index - indices[0]) / fps for index in indices[:: ceil(len(indices) / count)]]
            if np.abs(np.subtract(own, edges[: len(own)])).max() * fps > 1:  # not evenly apart
                edges = own
        return [*edges, min(max(count * step, edges[-1]), self.length)]


def encode(
    model: Any,
    processor: Any,
    video: Any,
    *,
    metadata: Mapping[str, Any] | None = None,
    frames_per_chunk: int | None = None,
    device: str | None = None,
    subtitles: bool = False,
    progress: bool = False,
    **options: Unpack[SamplingOptions],
) -> EncodedVideo:
    """
    Reads a video of any length and encodes it, chunk by chunk. Beside a GPU one is decoded while the one before it is
    encoded. Memory holds three chunks at most, and the features.

    Args:
        video: a video file, an `http(s)` address (as a `str`), or a folder of frames. Or frames as the processor takes
            them: `[T, H, W, C]` or `[T, C, H, W]` as an array or tensor, or a list of images.
        metadata: of frames, in place of `fps`, that of the video which they are from: its `fps`, their
            `frames_indices`, which need not be evenly apart, and how many frames they stand for, `total_num_frames`.
        frames_per_chunk: frames at a time; by default about 16,384 patches.
        device: where the features shall live, such as `"cpu"`; the model's when absent.
        subtitles: read those of a file too, from one beside it or within it, for questions with `subtitles=`.
        progress: show a bar on standard error while a video of several chunks is encoded.
        options: the fields of [`Sampling`], such as `fps`.

    Raises:
        ValueError: a video that cannot be read, or that was changed meanwhile; frames without `fps`.
    """
    said = read_subtitles(video) if subtitles else ()
    device = None if device is None else find_device(device)
    sampling = Sampling(**options)
    if not isinstance(video, (str, Path)):
        of_files = [name for name in sampling.stated() if name != "fps"]
        if of_files:
            raise ValueError(f"Got {', '.join(of_files)} for frames; expected those to look at, in their size.")
        return _encode_frames(model, processor, video, sampling.fps, metadata, device)
    if metadata is not None:
        raise ValueError("metadata is about frames that are given; the video says its own.")
    started = time.perf_counter()
    state_before = _state_of(video)
    chunks = open_chunks(processor, video, sampling, frames_per_chunk)
    forecast(model, chunks).require_memory(device or model.device)
    tokens = int(chunks.video_grid_thw.prod()) // processor.video_processor.merge_size**2
    features, filled = torch.empty(0), 0
    console = Console(stderr=True)
    bar: dict[str, Any] = {"console": console, "transient": True, "disable": not (progress and console.is_terminal)}
    # A reading thread has OpenMP threads of its own: on a CPU they cost the encoder more than reading ahead saves.
    with nullcontext(chunks) if model.device.type == "cpu" else closing(read_ahead(chunks)) as pieces:
        for pixels, grid in track(pieces, "Encoding the video", len(chunks), **bar):
            (encoded,) = model.encode_videos(pixels, grid, device=device)
            if not filled:
                features = encoded.new_empty(tokens, encoded.shape[-1])
            features[filled : filled + len(encoded)] = encoded
            filled += len(encoded)
    if _state_of(video) != state_before:
        raise ValueError(f"{shown_name(str(video))} was changed while it was read: encode it again.")
    return EncodedVideo(
        video=shown_name(str(video)),
        features=features,
        video_grid_thw=chunks.video_grid_thw,
        second_per_grid_ts=chunks.second_per_grid_ts,
        metadata=chunks.metadata,
        seconds=time.perf_counter() - started,
        start=chunks.start,
        warnings=chunks.warnings,
        sound=chunks.sound,
        subtitles=said,
    )


def _state_of(video: str | Path) -> State | None:
    """The state of a file; `None` for an address, a folder or what is not there."""
    if not os.path.isfile(video):
        return None
    return file_state(video)


def open_chunks(
    processor: Any,
    video: str | Path,
    sampling: Sampling,
    frames_per_chunk: int | None = None,
) -> Any:
    """The pieces of a video in which [`encode`] reads it, not decoded yet."""
    return processor.video_chunks(video, frames_per_chunk=frames_per_chunk, **sampling.video_keys())


def _encode_frames(model: Any, processor: Any, frames: Any, fps: float | None, about: Any, device: Any) -> EncodedVideo:
    """[`encode`] of frames that are in memory, which are one chunk."""
    started = time.perf_counter()
    if about is not None and fps is not None:
        raise ValueError(f"Got {fps=} and metadata, which says its own; expected one of them.")
    stated = {"fps": fps} if about is None else {"video_metadata": [dict(about)]}
    inputs = processor(videos=frames, return_metadata=True, return_tensors="pt", **stated)
    pixels, grid, (metadata, *others) = map(inputs.get, ("pixel_values_videos", "video_grid_thw", "video_metadata"))
    if others:
        raise ValueError(f"Got {1 + len(others)} videos; expected the frames of one.")
    metadata.height, metadata.width = get_image_size(np.asarray(flatten_videos(frames)[0]["video"][0]))
    (features,) = model.encode_videos(pixels, grid, device=device)
    seconds = [float(second) for second in inputs["second_per_grid_ts"]]
    begin = metadata.frames_indices[0] / metadata.fps
    return EncodedVideo(IN_MEMORY, features, grid, seconds, metadata, time.perf_counter() - started, begin)


def read_ahead(items: Iterable[T]) -> Generator[T, None, None]:
    """The same items; a thread gets the next one, and no more, while the caller works on one. Its errors are raised."""
    source = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="qtsplus-read-ahead") as reader:
        coming = reader.submit(next, source, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, source, None)
            yield item
