"""
Which frames of a video are looked at, and how much smaller `max_pixels` makes them.

Commands and Python calls say it as [`Sampling`], messages and calls of a processor as [`VideoRequest`].
reading_qtsplus.py gets the rule from [`frame_choice`] and the size under `max_pixels` from [`shrink`]. `open_video` in
video_qtsplus.py applies the rule to the frames between `start` and `end`, which [`stretch`] gives. A new rule is a new
[`FrameChoice`], returned by [`frame_choice`]. Streams take their frames elsewhere, in live/watching.py.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict  # PyTorch needs it too

from .numbers_qtsplus import require_count, require_positive

if TYPE_CHECKING:
    from .decoding_qtsplus import VideoDecoder

MOST_FRAMES = 2**20  # of one video that are looked at; a clock of a few bytes may state any number
DEFAULT_FPS = 2.0  # Qwen's own rate, for a saved processor that names none
ROUNDING = 1e-3  # of a frame, by which times that a caller gives may be off

# The rule: from the number of frames, and frames per second, to the increasing indices of the frames to look at.
FrameChoice = Callable[[int, float], list[int]]
Between = tuple[float | None, float | None]  # seconds from which on, and before which, a video is looked at

# --- What may be asked for ---


class SamplingOptions(TypedDict, total=False):
    """The fields of [`Sampling`], as keyword arguments of functions that encode a video."""

    fps: float | None
    start: float | None
    end: float | None
    max_frames: int | None
    max_pixels: int | None


@dataclass(frozen=True)
class Sampling:
    """
    How the frames of a video are sampled. What is `None` is as the processor has it.

    Args:
        fps: of a file, how many frames to look at per second; of a folder or of given frames, the rate at which they
            were taken.
        start, end: of a file, the seconds on a player's clock from which on and before which it is looked at.
        max_frames: of a file, the most that are looked at.
        max_pixels: the most pixels of a frame; a larger one is looked at smaller.

    Raises:
        ValueError: a rate, a time or a count that no video has, by the name that it has here.
    """

    fps: float | None = None
    start: float | None = None
    end: float | None = None
    max_frames: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_key(name, value)


def read_options(function: Callable, options: Mapping[str, Any]) -> Sampling:
    """What a function was given as [`SamplingOptions`]; a `ValueError` for another keyword, which names the nearest."""
    known = SamplingOptions.__annotations__
    for name in options.keys() - known.keys():
        parameters = inspect.signature(function).parameters.keys() - {"options"}
        (nearest,) = get_close_matches(name, {*known, *parameters}, n=1, cutoff=0)
        raise ValueError(f"{function.__name__}() has no keyword {name!r}; the nearest is {nearest!r}.")
    return Sampling(**options)


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
    def within(self) -> Between:
        """The two times between which is looked at; the second is not included."""
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
        given[name] = check_key(name, value)
    return given


def check_key(name: str, value) -> float:
    """The value as a number of Python's; `ValueError` for one that no video can have. Only `start` may be 0."""
    if name in _COUNTS:
        return require_count(name, value)
    if value == 0 and name.endswith("start"):
        return 0
    return require_positive(name, value)


# --- Which frames follow from it ---


def frame_choice(video_processor, request: VideoRequest) -> FrameChoice:
    """The rule for one video: [`choose_frames`] as its request asks, with the rest from the video processor."""
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
            bounds[name] = require_count(name, bound)
    return functools.partial(choose_frames, fps=rate, num_frames=num_frames, **bounds)


def choose_frames(
    total_num_frames: int,
    video_fps: float,
    fps: float | None = None,
    num_frames: int | None = None,
    min_frames: float = 4,
    max_frames: float = 768,
    temporal_patch_size: int = 2,
) -> list[int]:
    """
    Spreads the frames that are looked at evenly over a video: their indices, increasing.

    Args:
        total_num_frames, video_fps: of the video.
        fps: frames to look at per second; their number is held between `min_frames` and `max_frames`.
        num_frames: frames to look at instead, as many as exist at most. With neither, all frames are taken.
        temporal_patch_size: with either, the number is a multiple of this, unless all frames are taken or `max_frames`
            is less.
    """
    count = total_num_frames
    if fps is not None or num_frames is not None:
        if num_frames is not None:
            wanted = float(round(num_frames / temporal_patch_size) * temporal_patch_size)
        else:
            wanted = total_num_frames / video_fps * (fps or 0)
            wanted = min(max(wanted, min_frames), max_frames)
        # A mean rate of 10.000000000000002 must not cost a frame.
        count = int(round(min(wanted, total_num_frames), 6))
        if count < total_num_frames:
            count -= count % temporal_patch_size
        count = max(count, int(min(temporal_patch_size, total_num_frames, max_frames)))
    if count > MOST_FRAMES:
        raise ValueError(
            f"{count:,} frames of a video were asked for; expected {MOST_FRAMES:,} at most. Choose fewer with `fps` or "
            "`num_frames`."
        )
    return [index * total_num_frames // count for index in range(count)]


def stretch(video: "VideoDecoder", start: float | None, end: float | None) -> tuple[int, int]:
    """
    The first frame of a file's clock, and the one behind the last, that come up in a player from `start` on and before
    `end`. If none does, it is the frame that is on screen all the while.
    """
    begin = video.start if start is None else start
    until = math.inf if end is None else end
    first_number = (begin - video.start) * video.fps
    stop_number = (until - video.start) * video.fps
    first = math.ceil(min(max(first_number - ROUNDING, 0), video.total))
    stop = math.ceil(min(max(stop_number - ROUNDING, 0), video.total))
    if first < stop:
        return first, stop
    if 0 <= first_number < video.total and begin <= until:
        on_screen = math.floor(min(first_number + ROUNDING, video.total - 1))
        return on_screen, on_screen + 1
    bound = "its end" if end is None else f"{end:g} s"
    length = video.total / video.fps
    raise ValueError(
        f"The video {video.name!r} shows no frame from {begin:g} s to {bound}; it has {length:.1f} s from "
        f"{video.start:.1f} s on."
    )


def shrink(
    size: tuple[int, int],
    most: float,
    side: int,
) -> tuple[int, int]:
    """A height and width, multiples of the `side` of a token, of a frame of that many pixels at most."""
    height, width = size
    scale = min(math.sqrt(most / (height * width)), 1)
    rows = max(int(height * scale / side), 1)
    columns = max(int(width * scale / side), 1)
    return rows * side, columns * side
