"""
Opens videos: files, addresses and folders of images, whole or in chunks for the model. Which of their frames are taken
is decided in sampling_qtsplus.py, and when a player shows them in decoding_qtsplus.py and clock_qtsplus.py.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

from .addresses_qtsplus import shown_name
from .decoding_qtsplus import VideoDecoder
from .frames_qtsplus import decode_images, describe_frames, image_paths, load_frames, stack_frames
from .sampling_qtsplus import Between, FrameChoice, stretch

Frames = Callable[[], Iterator[np.ndarray]]
Chunk = tuple[Tensor, Tensor]  # pixel values [k, d], and their grid [1, 3]


@dataclass(frozen=True)
class AboutVideo:
    """
    What is known about a video besides its pixels. It is made where a video is opened, and passed whole from there on.

    Args:
        metadata: a `VideoMetadata` of the whole video, with its size and the `frames_indices` that were chosen.
        start: when a player shows the first frame, in seconds.
        warnings: what is wrong with the file, one sentence each; decoding adds to them.
        sound: whether the file has some, which is not read.
    """

    metadata: Any
    start: float = 0.0
    warnings: list[str] = field(default_factory=list)
    sound: bool = False

    @property
    def frames(self) -> int:
        """How many frames are looked at."""
        return len(self.metadata.frames_indices)

    @property
    def length(self) -> float:
        """Seconds from the first frame to the end of the last, or of what was to be looked at."""
        shown = self.metadata.total_num_frames / self.metadata.fps
        return round(min(shown, self.metadata.duration or shown), 6)

    @property
    def largest_gap(self) -> float:
        """The longest time from a frame that is looked at to the next one, or to the end, in seconds."""
        indices = self.metadata.frames_indices
        end = indices[0] + self.metadata.total_num_frames
        return float(np.diff(indices, append=end).max() / self.metadata.fps)


@dataclass
class VideoFile:
    """A video that was opened: what it is, and how to read it."""

    name: str  # what messages call it
    about: AboutVideo
    shape: tuple[int, int, int]  # number of chosen frames, height and width
    decode: Frames  # begins to read the chosen frames, [H, W, 3] uint8 RGB each, upright


def open_video(
    path: str,
    choose: FrameChoice,
    within: Between = (None, None),
) -> VideoFile:
    """
    Opens a [`VideoDecoder`] and chooses from its regular clock, between two times of a player. If a file was cut off,
    the rest is read; the log and `warnings` say how much that is.
    """
    decoder = VideoDecoder(path)
    first, stop = stretch(decoder, *within)
    total = stop - first
    indices = first + np.asarray(choose(total, decoder.fps))
    instants = (indices + 0.25) / decoder.fps  # a quarter of a frame later, since containers round timestamps
    decode = functools.partial(decoder.show, instants)
    height, width, _ = next(decode()).shape
    start = round(decoder.start + first / decoder.fps, 6)
    duration = total / decoder.fps
    _, end = within
    if end is not None and end > start:  # else one frame is on screen all the while
        duration = min(duration, end - start)
    metadata = VideoMetadata(
        total_num_frames=total,
        fps=decoder.fps,
        duration=duration,
        height=height,
        width=width,
        video_backend="pyav",
        frames_indices=indices.tolist(),
    )
    about = AboutVideo(metadata, start, decoder.warnings, decoder.sound)
    return VideoFile(decoder.name, about, (len(indices), height, width), decode)


def open_folder(folder: str, fps: float | None) -> VideoFile:
    """A video that is stored as images, taken `fps` times a second; of its frames the first is read."""
    paths = image_paths(folder)
    metadata = describe_frames(paths, None, fps)
    _, height, width, _ = load_frames(paths[:1]).shape
    metadata.height = height
    metadata.width = width
    decode = functools.partial(decode_images, paths, (height, width))
    return VideoFile(folder, AboutVideo(metadata), (len(paths), height, width), decode)


@contextmanager
def naming(video: str) -> Iterator[None]:
    """Says which video it is whose size a video processor refuses."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"The video {shown_name(video)!r} cannot be sized for the model: {error}") from error


def resize_frame(
    video_processor,
    size: tuple[int, int],
    frame: np.ndarray,
    resample: int | None = None,
) -> np.ndarray:
    """A frame `[H, W, 3]` uint8 at a size of (height, width), as the video processor resizes it in a video."""
    if frame.shape[:2] == size:
        return frame
    height, width = size
    # Not the backbone's own resizing: Qwen's looks at the number of frames.
    resized = BaseVideoProcessor.resize(
        video_processor,
        image=torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1),
        size=SizeDict(height=height, width=width),
        resample=video_processor.resample if resample is None else resample,
    )
    return resized.permute(1, 2, 0).numpy()


@dataclass(kw_only=True)
class VideoChunks(VideoFile):
    """
    A long video, decoded and preprocessed while one iterates over it: `pixel_values_videos` `[k, d]` and
    `video_grid_thw` `[1, 3]` of each chunk. Nothing is kept of a chunk that was given out.
    """

    video_grid_thw: Tensor  # [1, 3], of the whole video
    second_per_grid_ts: list[float]  # [1], seconds per temporal patch
    frames_per_chunk: int  # a multiple of the temporal patch size
    resize: Callable[[np.ndarray], np.ndarray]  # brings one frame to the size that it has for the model
    preprocess: Callable[[np.ndarray], Chunk]

    def __len__(self) -> int:
        num_frames, _, _ = self.shape
        return math.ceil(num_frames / self.frames_per_chunk)

    def __iter__(self) -> Iterator[Chunk]:
        frames = map(self.resize, self.decode())
        while chunk := list(itertools.islice(frames, self.frames_per_chunk)):
            yield self.preprocess(stack_frames(chunk))
