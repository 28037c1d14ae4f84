"""Which frames of a video are looked at: what calls and messages may ask for, and the frames that follow from it."""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .methods_qtsplus import is_number

MOST_FRAMES = 2**20  # of one video that are looked at; a clock of a few bytes may state any number
DEFAULT_FPS = 2.0  # Qwen's own rate, for a saved processor that names none

# From (number of frames, frames per second) to the indices of the frames to read.
FrameChoice = Callable[[int, float], np.ndarray]


@dataclass(frozen=True)
class VideoRequest:
    """A video, and what is asked of it; what is `None` is left to the call, or else to the video processor."""

    video: Any  # a path or an address, or frames: an array or tensor, [T, H, W, C] or [T, C, H, W]
    fps: float | None = None  # frames to look at per second; of given frames the rate at which they were sampled
    num_frames: int | None = None  # frames to look at instead
    min_frames: int | None = None  # the fewest and the most frames by `fps`
    max_frames: int | None = None
    video_start: float | None = None  # seconds on a player's clock
    video_end: float | None = None
    max_pixels: float | None = None  # of one frame

    @property
    def within(self) -> tuple[float | None, float | None]:
        """The two times between which is looked at."""
        return self.video_start, self.video_end

    @property
    def asked(self) -> dict:
        """Those of the keys that have a value."""
        return {name: getattr(self, name) for name in VIDEO_KEYS if getattr(self, name) is not None}

    @property
    def samples(self) -> bool:
        """Whether it asks for a rate or a count."""
        return self.fps is not None or self.num_frames is not None

    def over(self, call: "VideoRequest") -> "VideoRequest":
        """With what the call asks for where a message asks for nothing; of rate and count a message replaces both."""
        if self.samples:
            call = replace(call, fps=None, num_frames=None)
        return replace(call, **self.asked)


# What a message may say of a video.
VIDEO_KEYS = tuple(field.name for field in fields(VideoRequest) if field.name != "video")
_COUNTS = ("num_frames", "min_frames", "max_frames")


def read_keys(keys: Mapping) -> dict:
    """Those that are given of `VIDEO_KEYS`; `ValueError` for others, and for values that say nothing."""
    given = {}
    for name, value in keys.items():
        if value is None:
            continue
        if name == "nframes":
            name = "num_frames"
        if name not in VIDEO_KEYS:
            raise ValueError(f"Got {name!r} of a video; expected any of {', '.join(VIDEO_KEYS)}.")
        check_key(name, value)
        given[name] = value
    return given


def check_key(name: str, value) -> None:
    """Raises a `ValueError` for a value that no video can have; `start` or `video_start` may be 0."""
    if name in _COUNTS:
        require_count(name, value)
    elif value != 0 or not name.endswith("start"):
        require_positive(name, value)


def require_positive(name: str, value) -> None:
    """Raises a `ValueError` unless the value is a number above 0 that a float can hold."""
    # As a Python number, since float32 cannot be compared with the largest float.
    number = value.item() if isinstance(value, np.generic) else value
    if not is_number(value) or not 0 < number <= sys.float_info.max:
        zero = "0 or " if name.endswith("start") else ""
        raise ValueError(f"Got {name}={value!r}; expected {zero}a finite number above 0.")


def require_count(name: str, value: float) -> None:
    """Raises a `ValueError` unless the value is a whole number above 0 that a float can hold."""
    require_positive(name, value)
    if value != int(value):
        raise ValueError(f"Got {name}={value!r}; expected a whole number above 0.")


def choose_frames(
    total_num_frames: int,
    video_fps: float,
    fps: float | None = None,
    num_frames: int | None = None,
    **bounds,
) -> np.ndarray:
    """
    Spreads the sampled frames evenly over a video: `[T]` int64, increasing frame indices.

    Args:
        total_num_frames, video_fps: of the video.
        fps: frames to sample per second, within the bounds.
        num_frames: frames to sample instead, as many as exist at most. With neither, all frames are taken.
        bounds: `min_frames`, `max_frames` and `temporal_patch_size`, as for [`count_frames`].
    """
    count = total_num_frames
    if fps is not None or num_frames is not None:
        count = count_frames(total_num_frames, video_fps, fps, num_frames, **bounds)
    if count > MOST_FRAMES:
        raise ValueError(
            f"{count:,} frames of a video were asked for; expected {MOST_FRAMES:,} at most. Choose fewer with `fps` or "
            "`num_frames`."
        )
    # The product of the two numbers may be more than 64 bits hold.
    return np.array([index * total_num_frames // count for index in range(count)], np.int64)


def count_frames(
    total_num_frames: int,
    video_fps: float,
    fps: float | None,
    num_frames: int | None = None,
    min_frames: float = 4,
    max_frames: float = 768,
    temporal_patch_size: int = 2,
) -> int:
    """
    How many frames [`choose_frames`] takes: a multiple of `temporal_patch_size`, unless the video or `max_frames` is
    less. The count by `fps` is held between `min_frames` and `max_frames`.
    """
    if num_frames is not None:
        wanted = float(round(num_frames / temporal_patch_size) * temporal_patch_size)
    else:
        wanted = total_num_frames / video_fps * (fps or 0)
        wanted = min(max(wanted, min_frames), max_frames)
    # A mean rate of 10.000000000000002 must not cost a frame.
    count = int(round(min(wanted, total_num_frames), 6))
    patches = count // temporal_patch_size
    if patches:
        return patches * temporal_patch_size
    return int(min(temporal_patch_size, total_num_frames, max_frames))


def frame_choice(video_processor, request: VideoRequest) -> FrameChoice:
    """[`choose_frames`] as a request asks for it, with the rest from the video processor."""
    num_frames = request.num_frames
    if request.fps is not None and num_frames is not None:
        raise ValueError(f"Got `fps={request.fps!r}` and `num_frames={num_frames!r}`; expected one of them.")
    if not request.samples:
        num_frames = getattr(video_processor, "num_frames", None)
    rate = request.fps or getattr(video_processor, "fps", None) or DEFAULT_FPS
    bounds = {"temporal_patch_size": video_processor.temporal_patch_size}
    for name in ("min_frames", "max_frames"):
        bound = getattr(request, name) or getattr(video_processor, name, None)
        if bound is not None:
            require_count(name, bound)
            bounds[name] = bound

    return functools.partial(choose_frames, fps=rate, num_frames=num_frames, **bounds)
