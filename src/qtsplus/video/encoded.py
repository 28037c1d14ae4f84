"""
Encodes videos of any length, chunk by chunk, for any number of questions, and says when a player shows each step of an
encoded one. Which frames are taken is decided in model/sampling_qtsplus.py.
"""

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers.image_utils import get_image_size
from typing_extensions import Unpack

from ..hub.loading import find_device
from ..model.addresses_qtsplus import shown_name
from ..model.clock_qtsplus import NEAR
from ..model.messages_qtsplus import flatten_videos
from ..model.sampling_qtsplus import ROUNDING, Sampling, SamplingOptions, read_options
from ..model.video_qtsplus import AboutVideo, VideoChunks
from .forecast import forecast
from .subtitles import Subtitle, read_subtitles

T = TypeVar("T")

# What can go wrong with one video or question, while the others go on.
FAILURES = (ValueError, OSError, MemoryError, torch.OutOfMemoryError)
NO_FILE = "(frames)"  # in place of the path of a video that cannot be read again


@dataclass(frozen=True)
class EncodedVideo:
    """
    A video that [`encode`] has read, for any number of questions.

    Args:
        video: its path; [`NO_FILE`] if it was given as frames, or if its file is gone or was changed.
        features: `[M, d]`, all its visual tokens.
        video_grid_thw: `[1, 3]`, its grid in patches.
        seconds_per_step: how long one step of the grid lasts.
        about: its times and its size, and what is wrong with the file.
        seconds: that reading and encoding took.
        subtitles: as [`read_subtitles`] gives them.
    """

    video: str
    features: Tensor
    video_grid_thw: Tensor
    seconds_per_step: float
    about: AboutVideo
    seconds: float
    subtitles: Sequence[Subtitle] = ()

    @property
    def length(self) -> float:
        """Seconds from the first frame to the end of the last."""
        return self.about.length

    @property
    def frames(self) -> int:
        """How many frames were looked at."""
        return self.about.frames

    @property
    def count(self) -> int:
        """The number of steps of the grid."""
        return int(self.video_grid_thw[0, 0])

    def span(self, first: int, last: int) -> tuple[float, float]:
        """When a player shows the steps from `first` on, without `last`, in seconds."""
        return float(self.edges[first]), float(self.edges[last])

    def within(self, start: float, end: float) -> tuple[int, int]:
        """The first step of the grid that a player shows between two seconds, and the one behind the last."""
        rounding = ROUNDING / self.about.metadata.fps
        first = np.searchsorted(self.edges[1:], start + rounding, side="right")
        stop = np.searchsorted(self.edges[:-1], end - rounding)
        return int(first), int(max(first, stop))

    @cached_property
    def edges(self) -> np.ndarray:
        """`[steps + 1]`: when a player shows the first frame of each step, and when the last step ends."""
        return np.round(self.about.start + np.array(self.steps), 6)

    @cached_property
    def steps(self) -> list[float]:
        """When each step of the grid begins, and the last one ends, in seconds from the first frame."""
        numbers = np.arange(self.count)
        edges = numbers * self.seconds_per_step
        fps = self.about.metadata.fps
        indices = np.array(self.about.metadata.frames_indices)
        times = (indices - indices[0]) / fps
        frames_per_step = ceil(self.frames / self.count)
        begins = times.take(numbers * frames_per_step, mode="clip")
        if np.abs(begins - edges).max() > min(NEAR, 1 / fps):
            edges = begins
        # The last frame lasts no longer than others, since what follows it was not looked at.
        longest = max(np.diff(times).tolist(), default=0) or self.length
        end = min(self.length, times[-1] + longest)
        return np.append(edges, end).tolist()


def encode(
    model,
    processor,
    video,
    *,
    metadata: Mapping | None = None,
    frames_per_chunk: int | None = None,
    device: str | None = None,
    subtitles: bool = False,
    progress: bool = False,
    **options: Unpack[SamplingOptions],
) -> EncodedVideo:
    """
    Reads a video of any length and encodes it, chunk by chunk. Beside a GPU one chunk is decoded while the one before
    it is encoded. Memory holds three chunks at most, and the features.

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
        ValueError: a video that cannot be read; frames without `fps`.
    """
    sampling = read_options(encode, options)
    lines = read_subtitles(video) if subtitles else ()
    if device is not None:
        device = find_device(device)
    if not isinstance(video, (str, Path)):
        return _encode_frames(model, processor, video, sampling, metadata, device)
    if metadata is not None:
        raise ValueError("metadata is about frames that are given; the video says its own.")
    started = time.perf_counter()
    chunks = open_chunks(processor, video, sampling, frames_per_chunk)
    forecast(model, chunks).require_memory(device or model.device)
    return EncodedVideo(
        video=shown_name(str(video)),
        features=_encode_chunks(model, processor, chunks, device, progress),
        video_grid_thw=chunks.video_grid_thw,
        seconds_per_step=chunks.second_per_grid_ts[0],
        about=chunks.about,
        seconds=time.perf_counter() - started,
        subtitles=lines,
    )


def open_chunks(processor, video: str | Path, sampling: Sampling, frames_per_chunk: int | None = None) -> VideoChunks:
    """The pieces of a video in which [`encode`] reads it, not decoded yet."""
    return processor.video_chunks(
        video,
        frames_per_chunk=frames_per_chunk,
        fps=sampling.fps,
        video_start=sampling.start,
        video_end=sampling.end,
        max_frames=sampling.max_frames,
        max_pixels=sampling.max_pixels,
    )


def with_bar(items: Iterable[T], title: str, is_shown: bool = True):
    """The same items; on a terminal, a bar on standard error says how many of them are done."""
    console = Console(stderr=True)
    is_shown = is_shown and console.is_terminal
    return track(items, title, console=console, transient=True, disable=not is_shown)


def _encode_chunks(model, processor, chunks: VideoChunks, device: str | None, progress: bool) -> Tensor:
    """`[M, d]`, the features of all chunks."""
    pieces = with_bar(chunks, "Encoding the video", progress)
    # A reading thread has OpenMP threads of its own: on a CPU they cost the encoder more than reading ahead saves.
    if model.device.type != "cpu":
        pieces = read_ahead(pieces)
    tokens = int(chunks.video_grid_thw.prod()) // processor.video_processor.merge_size**2
    features = torch.empty(0)
    end = 0
    for pixels, grid in pieces:
        (encoded,) = model.encode_videos(pixels, grid, device=device)
        if end == 0:
            features = encoded.new_empty(tokens, encoded.shape[-1])
        start = end
        end += len(encoded)
        features[start:end] = encoded
    return features


def _encode_frames(
    model, processor, frames, sampling: Sampling, metadata: Mapping | None, device: str | None
) -> EncodedVideo:
    """[`encode`] of frames that are in memory, which are one chunk."""
    started = time.perf_counter()
    expected = Sampling(fps=sampling.fps)
    times: dict = {"fps": sampling.fps}
    if metadata is not None:
        expected = Sampling()
        times = {"video_metadata": [metadata]}
    if sampling != expected:
        raise ValueError(
            f"Got {sampling} for frames; expected `fps` alone, or metadata alone: all are looked at, in their size."
        )
    requests = flatten_videos(frames)
    video = requests[0].video
    if len(requests) > 1 or isinstance(video, str):
        raise ValueError(
            f"Got {type(frames).__name__} of videos ({len(requests)}); expected a path that is not in a list, or the "
            "frames of one video."
        )
    inputs = processor(videos=frames, return_metadata=True, return_tensors="pt", **times)
    (of_video,) = inputs["video_metadata"]
    of_video.height, of_video.width = get_image_size(video[0])
    of_video.duration = None  # the frames say how long they last
    grid = inputs["video_grid_thw"]
    (features,) = model.encode_videos(inputs["pixel_values_videos"], grid, device=device)
    return EncodedVideo(
        video=NO_FILE,
        features=features,
        video_grid_thw=grid,
        seconds_per_step=float(inputs["second_per_grid_ts"][0]),
        about=AboutVideo(of_video, start=of_video.frames_indices[0] / of_video.fps),
        seconds=time.perf_counter() - started,
    )


def read_ahead(items: Iterable[T]) -> Generator[T, None, None]:
    """The same items; a thread gets the next one, and no more, while the caller works on one. Its errors are raised."""
    source = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="qtsplus-read-ahead") as reader:
        item = reader.submit(next, source, None).result()
        while item is not None:
            coming = reader.submit(next, source, None)
            yield item
            item = coming.result()
