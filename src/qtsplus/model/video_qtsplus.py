"""Videos: which of their frames are looked at, and how files, folders, addresses and given frames are read."""

import functools
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_utils import SizeDict, load_image
from transformers.utils import logging
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

from .addresses_qtsplus import download, is_address, shown_name
from .decoding_qtsplus import Film
from .methods_qtsplus import is_number

logger = logging.get_logger(__name__)

ARRAYS = (np.ndarray, torch.Tensor)
MOST_FRAMES = 2**20  # of one video that are looked at; a clock of a few bytes may state any number
DEFAULT_FPS = 2.0  # Qwen's own rate, for a saved processor that names none
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
FRAME_SUFFIXES = (*IMAGE_SUFFIXES, ".gif")  # in a folder; elsewhere a GIF is a video

# From (number of frames, frames per second) to the indices of the frames to read.
FrameChoice = Callable[[int, float], np.ndarray]
Frames = Callable[[], Iterator[np.ndarray]]

# --- Which frames of a video are looked at ---


def choose_frames(
    total_num_frames: int,
    video_fps: float,
    fps: float | None = None,
    num_frames: int | None = None,
    min_frames: int = 4,
    max_frames: float = 768,
    temporal_patch_size: int = 2,
) -> np.ndarray:
    """
    Spreads the sampled frames evenly over a video: `[T]` int64, increasing frame indices.

    Args:
        total_num_frames, video_fps: of the video.
        fps: frames to sample per second; the count is held between `min_frames` and `max_frames`.
        num_frames: frames to sample instead, as many as exist at most. With neither, all frames are taken.
        temporal_patch_size: the count is a multiple of it, unless the video or `max_frames` is less.
    """
    if num_frames is None and fps is None:
        if total_num_frames > MOST_FRAMES:
            raise ValueError(
                f"All {total_num_frames:,} frames of a video were asked for; expected {MOST_FRAMES:,} at most. Choose "
                "fewer with `fps` or `num_frames`."
            )
        return np.arange(total_num_frames)
    count = count_frames(total_num_frames, video_fps, fps, num_frames, min_frames, max_frames, temporal_patch_size)
    if count > MOST_FRAMES:
        raise ValueError(f"{count:,} frames of a video were asked for; expected {MOST_FRAMES:,} at most.")
    # The product of the two numbers may be more than 64 bits hold.
    return np.array([index * total_num_frames // count for index in range(count)], np.int64)


def count_frames(
    total_num_frames: int,
    video_fps: float,
    fps: float | None,
    num_frames: int | None,
    min_frames: int,
    max_frames: float,
    temporal_patch_size: int,
) -> int:
    """How many frames [`choose_frames`] takes where `fps` or `num_frames` is given."""
    if num_frames is not None:
        wanted = float(round(num_frames / temporal_patch_size) * temporal_patch_size)
    else:
        wanted = min(max(total_num_frames / video_fps * (fps or 0), min_frames), max_frames)
    # A mean rate of 10.000000000000002 must not cost a frame.
    count = int(round(min(wanted, total_num_frames), 6))
    fewest = int(min(temporal_patch_size, total_num_frames, max_frames))
    return count // temporal_patch_size * temporal_patch_size or fewest


def frame_choice(processor: Any, fps: float | None, num_frames: int | None, bounds: dict[str, Any]) -> FrameChoice:
    """
    [`choose_frames`] with what a call leaves open taken from the video processor. `bounds` are `min_frames`,
    `max_frames` and `temporal_patch_size`; where they are stronger than the `fps` asked for, it is logged once.
    """
    if fps is not None and num_frames is not None:
        raise ValueError(f"Got `fps={fps!r}` and `num_frames={num_frames!r}`; expected one of them.")
    if fps is None and num_frames is None:
        num_frames = getattr(processor, "num_frames", None)
    given: dict[str, Any] = {}
    for name, value in bounds.items():
        if value is not None:
            require_count(name, value)
        value = getattr(processor, name, None) if value is None else value
        if value is not None:
            given[name] = value
    rate = fps or getattr(processor, "fps", None) or DEFAULT_FPS
    temporal_patch_size = given.get("temporal_patch_size", 2)

    def choose(total_num_frames: int, video_fps: float) -> np.ndarray:
        indices = choose_frames(total_num_frames, video_fps, rate, num_frames, **given)
        if fps is None:
            return indices
        count = len(indices)
        unbounded = count_frames(total_num_frames, video_fps, fps, None, 1, math.inf, temporal_patch_size)
        if count != unbounded:
            bound = "max_frames" if count < unbounded else "min_frames"
            logger.warning_once(
                f"fps={fps:g} is {unbounded} frames of this video, but `{bound}` makes it {count}, "
                f"{count / total_num_frames * video_fps:.3g} frames per second. For the rate that was asked "
                f"for, change `{bound}`, here or as `processor.video_processor.{bound}`."
            )
        return indices

    return choose


def resize_frame(video_processor: Any, size: tuple[int, int], frame: np.ndarray, resample: Any = None) -> np.ndarray:
    """A frame `[H, W, 3]` uint8 at a size of (height, width), as the video processor resizes it in a video."""
    if frame.shape[:2] == size:
        return frame
    # Not the backbone's own resizing: Qwen's looks at the number of frames.
    resized = BaseVideoProcessor.resize(
        video_processor,
        image=torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1),
        size=SizeDict(height=size[0], width=size[1]),
        resample=video_processor.resample if resample is None else resample,
    )
    return resized.permute(1, 2, 0).numpy()


def shrink(size: tuple[int, int], most: float, side: int) -> tuple[int, int]:
    """A height and width, multiples of the `side` of a token, of a frame of that many pixels at most."""
    scale = min(math.sqrt(most / math.prod(size)), 1)
    height, width = (max(int(length * scale / side), 1) * side for length in size)
    return height, width


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
        """Seconds from the first frame to the end of the last."""
        return self.metadata.total_num_frames / self.metadata.fps

    @property
    def largest_gap(self) -> float:
        """The longest time between two frames that are looked at, in seconds; 0 where there is one."""
        gaps = np.diff(self.metadata.frames_indices)
        return max(gaps.tolist(), default=0) / self.metadata.fps


@dataclass
class VideoFile:
    """A video file that was opened: what it is, and how to read it."""

    name: str  # what messages call it
    about: AboutVideo
    shape: tuple[int, int, int]  # number of chosen frames, height and width
    decode: Frames  # begins to read the chosen frames, [H, W, 3] uint8 RGB each, upright


def open_video(path: str, choose: FrameChoice, within: tuple[float | None, float | None] = (None, None)) -> VideoFile:
    """
    Opens a [`Film`] and chooses from its regular clock, between two times of a player. Of a file that was cut off, what
    is there is read; the log and `warnings` say how much that is.
    """
    film = Film(path)
    origin, stop = film.stretch(*within)
    indices = origin + np.asarray(choose(stop - origin, film.fps))
    # A quarter of a frame later, since containers round timestamps.
    decode = functools.partial(film.show, (indices + 0.25) / film.fps)
    height, width, _ = next(decode()).shape
    metadata = VideoMetadata(
        total_num_frames=stop - origin,
        fps=film.fps,
        duration=(stop - origin) / film.fps,
        height=height,
        width=width,
        video_backend="pyav",
        frames_indices=[int(index) for index in indices],
    )
    start = film.start + origin / film.fps
    about = AboutVideo(metadata, start, film.warnings, film.sound)
    return VideoFile(film.name, about, (len(indices), height, width), decode)


@contextmanager
def naming(video: str) -> Iterator[None]:
    """Says which video it is whose size a video processor refuses."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"The video {shown_name(video)!r} cannot be sized for the model: {error}") from error


# --- Videos in messages ---

_SOURCES = ("video", "url", "path")
# What a message may say of a video: seconds on a player's clock, pixels of a frame, and of one per temporal patch.
VIDEO_KEYS = ("fps", "num_frames", "min_frames", "max_frames", "video_start", "video_end", "max_pixels", "total_pixels")
_FRAME_COUNTS = ("num_frames", "min_frames", "max_frames")
_KINDS = {"text": "text", "image": "image", "video": "video", "image_url": "image", "video_url": "video"}
_IMAGE_KEYS = {"type", "image", "url", "path", "base64"}


def read_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A `video`, and what its message says of it by `VIDEO_KEYS`; `ValueError` for what would have no effect."""
    sources = [_flatten(part[key]) for key in _SOURCES if part.get(key) is not None]
    if [len(videos) for videos in sources] != [1]:
        raise ValueError(f"A video of a message is {sum(map(len, sources))} videos; expected one.")
    keys = read_keys({key: value for key, value in part.items() if key not in ("type", *_SOURCES)})
    return {**_as_part(sources[0][0]), **keys}


def read_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are given of `VIDEO_KEYS`; `ValueError` for others, and for values that say nothing."""
    given = {"num_frames" if key == "nframes" else key: value for key, value in keys.items() if value is not None}
    for key, value in given.items():
        if key not in VIDEO_KEYS:
            raise ValueError(f"Got {key!r} of a video; expected any of {', '.join(VIDEO_KEYS)}.")
        if key in _FRAME_COUNTS:
            require_count(key, value)
        elif key != "video_start" or value != 0:
            require_positive(key, value)
    return given


def _as_part(video: Any) -> dict[str, Any]:
    return video if isinstance(video, dict) else {"video": video}


def read_messages(messages: Any, loads: bool) -> Any:
    """
    Messages as Transformers takes them, from those that name images and videos as Qwen, vLLM and OpenAI do; `loads` if
    they are not only written out. `ValueError` for what would be ignored.
    """
    if isinstance(messages, (list, tuple)):
        return [read_messages(one, loads) for one in messages]
    if not isinstance(messages, Mapping) or not isinstance(messages.get("content"), (list, tuple)):
        return messages
    return {**messages, "content": [_read_content(dict(part), loads) for part in messages["content"]]}


def _read_content(part: dict[str, Any], loads: bool) -> dict[str, Any]:
    name = part.pop("type", None) or next((kind for kind in _KINDS if kind in part), None)
    if name not in _KINDS:
        raise ValueError(f"A message has content of type {name!r}; expected one of {', '.join(_KINDS)}.")
    kind = _KINDS[name]
    if (key := f"{kind}_url") in part:  # {"video_url": {"url": ...}}, or the address itself
        source = part.pop(key)
        part |= source if isinstance(source, Mapping) else {"url": source}
    ignored = [repr(key) for key, value in part.items() if key not in _IMAGE_KEYS and value is not None]
    if loads and kind == "image" and ignored:
        raise ValueError(f"A message has {', '.join(ignored)} of an image, which no processor takes from there.")
    if loads and kind == "video" and any(part.get(key) is not None for key in _SOURCES):
        part = {"video": part}
    return {"type": kind, **part}


def per_video(name: str, value: Any, count: int) -> list[Any]:
    """One entry per video: a single number holds for all, nested lists are read in order."""
    if isinstance(value, Mapping):
        value = [value]
    elif not isinstance(value, (list, tuple)):
        value = [value] * count
    elif any(isinstance(entry, (list, tuple)) for entry in value):
        value = [entry for entries in value for entry in entries]
    if len(value) != count:
        raise ValueError(f"Got {len(value)} entries of `{name}` for {count} videos; expected one per video.")
    return list(value)


# --- Frames that are given ---


def load_frames(folder: str | list[str]) -> np.ndarray:
    """
    A video that is stored as images, `[T, H, W, 3]` uint8 RGB: in a folder, in natural order (`frame2.jpg` before
    `frame10.jpg`), or in a list. `ValueError` for images that are missing, cannot be read or differ in size.
    """
    paths = image_paths(folder) if isinstance(folder, str) else folder
    if isinstance(folder, str):
        find_gaps(paths)
    return stack_frames([_load_frame(path) for path in paths])


def _load_frame(path: str) -> Image.Image:
    path = path.removeprefix("file://")
    try:
        frame, pictures = load_image(Image.open(download(path)) if is_address(path) else path), 1
        if os.path.isfile(path):
            with Image.open(path) as image:  # a camera's JPEG may bring a preview of itself
                pictures = 1 if image.format in ("JPEG", "MPO") else getattr(image, "n_frames", 1)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"Cannot read the frame {path!r} as an image: {error}.") from error
    if pictures > 1:
        raise ValueError(f"The frame {path!r} is {pictures} pictures; expected one, each in a file of its own.")
    return frame


def open_folder(folder: str, fps: float | None) -> VideoFile:
    """A video that is stored as images, taken `fps` times a second; of its frames the first is read."""
    paths = image_paths(folder)
    warnings, metadata = find_gaps(paths), describe_frames(paths, None, fps)
    _, height, width, _ = load_frames(paths[:1]).shape
    metadata.height, metadata.width = height, width
    decode = functools.partial(_decode_images, paths, (height, width))
    about = AboutVideo(metadata, warnings=warnings)
    return VideoFile(folder, about, (len(paths), height, width), decode)


def _decode_images(paths: Sequence[str], size: tuple[int, int]) -> Iterator[np.ndarray]:
    """Raises `ValueError` for an image of another height and width, or one that cannot be read."""
    for path in paths:
        (frame,) = load_frames([path])
        if frame.shape[:2] != size:
            raise ValueError(
                f"The frame {path!r} has {frame.shape[0]} x {frame.shape[1]} pixels, the first one {size[0]} x "
                f"{size[1]}; expected one size for the frames of a video."
            )
        yield frame


def image_paths(folder: str) -> list[str]:
    """The images of a folder in natural order; raises `ValueError` if there is none."""
    names = [name for name in os.listdir(folder) if name.lower().endswith(FRAME_SUFFIXES) and name[0] != "."]
    if not names:
        expected = f"expected images ({', '.join(FRAME_SUFFIXES)}); `qtsplus index` makes a library of one with videos"
        raise ValueError(f"The folder {folder!r} holds no frames; {expected}.")
    return [os.path.join(folder, name) for name in sorted(names, key=_natural_order)]


def find_gaps(paths: Sequence[str]) -> list[str]:
    """A warning, where most images of a folder are numbered by one step and some are not there."""
    numbers = [[int(number) for number in re.findall(r"[0-9]+", os.path.basename(path))[-1:]] for path in paths]
    steps = np.diff(np.array(numbers, float).ravel()) if all(numbers) else np.array([])
    if len(steps) < 2 or steps.min() != np.median(steps) or steps.min() < 1 or steps.min() == steps.max():
        return []
    after, gaps = paths[int(np.argmax(steps))], int((steps > steps.min()).sum())
    warning = (
        f"The numbers of the frames in {os.path.dirname(paths[0])!r} have {gaps} gap{'s' * (gaps > 1)}, such as after "
        f"{os.path.basename(after)!r}; their times are those of frames without gaps."
    )
    logger.warning(warning)
    return [warning]


def _natural_order(name: str) -> tuple[list[int | str], str]:
    """Numbers by value; `²` and the like are letters. Names that differ in leading zeros only keep one order."""
    parts = re.split(r"(\d+)", name)  # every second one is a number
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name


def stack_frames(frames: Sequence[Any]) -> Any:
    """One video from a list of its frames: PIL images, arrays or tensors."""
    frames = [np.asarray(frame.convert("RGB")) if hasattr(frame, "convert") else frame for frame in frames]
    shapes = {tuple(frame.shape) for frame in frames}
    if len(shapes) > 1:
        raise ValueError(f"The frames of one video differ in shape: {sorted(shapes)}; expected one shape.")
    return torch.stack(frames) if torch.is_tensor(frames[0]) else np.stack(frames)


def flatten_videos(videos: Any) -> list[Any]:
    """
    Flattens every nesting that a processor is called with: per video a dictionary, as [`read_part`] gives it, with a
    path, or its frames, `[T, H, W, C]` or `[T, C, H, W]`, as an array or tensor. A list of frames, or of paths of
    images, is one video.

    Raises:
        ValueError: an item is no video, or there is none.
    """
    flat = _flatten(videos)
    if not flat:
        raise ValueError("Got an empty video (0 frames); expected at least one frame.")
    parts = [_as_part(video) for video in flat]
    for frames in (part["video"] for part in parts):
        if isinstance(frames, np.ndarray) and (frames.dtype.kind not in "uif" or frames.dtype == np.uint16):
            raise ValueError(f"Got frames of the type {frames.dtype}; expected numbers, such as uint8.")
    return parts


def _flatten(videos: Any) -> list[Any]:
    if isinstance(videos, (str, os.PathLike)):
        path = os.fspath(videos)
        return [load_frames(path)] if os.path.isdir(path) else [path]
    if isinstance(videos, Mapping):
        return [read_part(videos)]
    if isinstance(videos, ARRAYS) and videos.ndim in (3, 4, 5):
        return list(videos) if videos.ndim == 5 else [videos if videos.ndim == 4 else videos[None]]
    if hasattr(videos, "convert"):
        return [stack_frames([videos])]
    if not isinstance(videos, (list, tuple)):
        given = f"shape {tuple(videos.shape)}" if isinstance(videos, ARRAYS) else f"type {type(videos).__name__}"
        raise ValueError(f"Got a video of {given}; expected a path, or frames: an array, tensor [T, H, W, C], images.")
    if videos and all(hasattr(item, "convert") or (isinstance(item, ARRAYS) and item.ndim == 3) for item in videos):
        return [stack_frames(videos)]
    paths = [os.fspath(item) for item in videos if isinstance(item, (str, os.PathLike))]
    if videos and sum(path.lower().endswith(IMAGE_SUFFIXES) for path in paths) == len(videos):
        return [load_frames(paths)]
    return [flat for video in videos for flat in _flatten(video)]


def check_frames(frames: Any, rescaled: bool) -> Any:
    """The same frames, laid out as torch can read them: an array may be a view that runs backwards (BGR to RGB)."""
    if len(frames) == 0:
        raise ValueError("Got an empty video (0 frames); expected at least one frame.")
    if 0 in frames.shape:
        raise ValueError(f"Got frames of shape {tuple(frames.shape)}; expected some pixels.")
    frames = np.ascontiguousarray(frames) if isinstance(frames, np.ndarray) else frames
    values = torch.as_tensor(frames)
    if values.is_floating_point() and not torch.isfinite(values).all():
        raise ValueError("The frames of a video hold NaN or infinite pixels; expected finite values.")
    if rescaled and values.is_floating_point() and 0 < values.max() <= 1:
        raise ValueError("The frames of a video are numbers from 0 to 1; expected 0 to 255, or `do_rescale=False`.")
    return frames


def describe_frames(frames: Sequence[Any], metadata: Any, fps: float | None) -> VideoMetadata:
    """The metadata of frames that were sampled already, from what the caller says about them."""
    if metadata is None and fps is None:
        raise ValueError(
            f"Got {len(frames)} frames without their times. Pass the rate at which they were sampled as `fps=...`, or"
            ' `video_metadata=[{"fps": ..., "total_num_frames": ..., "frames_indices": [...]}]`, one per video.'
        )
    given: dict[str, Any] = {"fps": fps} if metadata is None else dict(metadata)
    if given.get("fps") is None:
        raise ValueError(f"The `video_metadata` of {len(frames)} frames has no `fps`; expected frames per second.")
    require_positive("the `fps` of `video_metadata`", given["fps"])
    if given.get("frames_indices") is None:
        if given.get("total_num_frames") not in (None, len(frames)):
            raise ValueError(
                f"Got {len(frames)} frames of a video of {given['total_num_frames']} without `frames_indices` in their"
                " `video_metadata`; expected the index of each frame."
            )
        given["frames_indices"] = range(len(frames))
    given["frames_indices"] = [int(index) for index in given["frames_indices"]]
    if len(given["frames_indices"]) != len(frames):
        raise ValueError(f"{len(frames)} frames and {len(given['frames_indices'])} `frames_indices`: expected as many.")
    apart = np.diff(given["frames_indices"])
    if (apart < 0).any() or given["frames_indices"][0] < 0:
        raise ValueError(f"Got frames_indices={given['frames_indices'][:8]}...; expected ascending ones from 0 on.")
    first, last = given["frames_indices"][0], given["frames_indices"][-1]
    if given.get("total_num_frames") is None:  # the last lasts as long as most
        given["total_num_frames"] = last - first + (max(int(np.median(apart)), 1) if len(apart) else 1)
    elif given["total_num_frames"] <= last - first:
        raise ValueError(f"total_num_frames={given['total_num_frames']}: more are from {first} to {last}.")
    return VideoMetadata(**given)


def require_positive(name: str, value: float) -> None:
    """Raises a `ValueError` unless the value is a number above 0 that a float can hold."""
    if not (is_number(value) and 0 < value <= sys.float_info.max):
        raise ValueError(f"Got {name}={_shortly(value)}; expected a finite number above 0.")


def require_count(name: str, value: float) -> None:
    """Raises a `ValueError` unless the value is a whole number above 0 that a float can hold."""
    require_positive(name, value)
    if value != int(value):
        raise ValueError(f"Got {name}={value!r}; expected a whole number above 0.")


def _shortly(value: Any) -> str:
    # Python refuses to write out integers of more than 4,300 digits.
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


@dataclass(kw_only=True)
class VideoChunks(VideoFile):
    """
    A long video, decoded and preprocessed while one iterates over it: `pixel_values_videos` `[k, d]` and
    `video_grid_thw` `[1, 3]` of each chunk. Nothing is kept of a chunk that was given out.
    """

    video_grid_thw: torch.Tensor  # [1, 3], of the whole video
    second_per_grid_ts: list[float]  # [1], seconds per temporal patch
    frames_per_chunk: int  # a multiple of the temporal patch size
    resize: Callable[[np.ndarray], np.ndarray]  # brings one frame to the size that it has for the model
    preprocess: Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]]  # from frames to their pixel values and grid

    def __len__(self) -> int:
        return -(-len(self.about.metadata.frames_indices or ()) // self.frames_per_chunk)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        frames = map(self.resize, self.decode())
        while chunk := list(itertools.islice(frames, self.frames_per_chunk)):
            yield self.preprocess(stack_frames(chunk))
