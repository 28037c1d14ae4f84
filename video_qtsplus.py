"""Videos: which of their frames are looked at, and how files, folders, addresses and given frames are read."""

import functools
import io
import itertools
import os
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers.image_utils import load_image
from transformers.utils import logging
from transformers.video_utils import VideoMetadata

try:  # optional, as torchcodec is: one of the two reads the videos
    import av
except ImportError:
    av = None

logger = logging.get_logger(__name__)

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")

# --------------------------------------------------------------------------------------------------------------------
# Which frames of a video are looked at
# --------------------------------------------------------------------------------------------------------------------


def choose_frames(
    total_num_frames: int,
    video_fps: float,
    fps: float | None = None,
    num_frames: int | None = None,
    min_frames: int = 4,
    max_frames: int = 768,
    temporal_patch_size: int = 2,
) -> np.ndarray:
    """
    Spreads the sampled frames evenly over a video.

    Args:
        total_num_frames: frames that the video has.
        video_fps: its frames per second.
        fps: frames to sample per second; the count is held between `min_frames` and `max_frames`.
        num_frames: frames to sample instead, as many as exist at most. With neither, all frames are taken.
        temporal_patch_size: the count is a multiple of it, unless the video is shorter.

    Returns:
        `[T]` int64, increasing frame indices.
    """
    if num_frames is not None:
        wanted = float(round(num_frames / temporal_patch_size) * temporal_patch_size)
    elif fps is not None:
        wanted = min(max(total_num_frames / video_fps * fps, min_frames), max_frames)
    else:
        return np.arange(total_num_frames)
    count = int(min(wanted, total_num_frames))
    count = count // temporal_patch_size * temporal_patch_size or min(temporal_patch_size, total_num_frames)
    return np.arange(count) * total_num_frames // count


# --------------------------------------------------------------------------------------------------------------------
# Reading video files
# --------------------------------------------------------------------------------------------------------------------


def read_video(path: str, choose: Callable[[int, float], np.ndarray]) -> tuple[np.ndarray, VideoMetadata]:
    """
    Reads the chosen frames of a video file or `http(s)` address.

    A variable frame rate is read as its mean rate: frame `i` is what the video shows at `i / fps` seconds, so times
    computed from the metadata hold for every file.

    Args:
        path: the file.
        choose: from (number of frames, frames per second) to the indices of the frames to read.

    Returns:
        `[T, H, W, 3]` uint8 RGB frames, upright, and the metadata of the whole video with `frames_indices`.

    Raises:
        ValueError: the file is missing, cannot be decoded, has no video stream or no frame.
        ImportError: neither torchcodec (with FFmpeg) nor PyAV is installed.
    """
    metadata, decode = open_video(path, choose)
    return np.stack(list(decode())), metadata


def open_video(
    path: str, choose: Callable[[int, float], np.ndarray]
) -> tuple[VideoMetadata, Callable[[], Iterator[np.ndarray]]]:
    """[`read_video`] frame by frame: the metadata, and a function that begins to decode, `[H, W, 3]` each."""
    source: str | io.BytesIO
    if path.startswith(("http://", "https://")):
        with urllib.request.urlopen(path) as response:
            source = io.BytesIO(response.read())
    else:
        source = path.removeprefix("file://")
        if not os.path.isfile(source):
            raise ValueError(
                f"There is no video at {path!r}; expected a video file, a folder of frames or an http(s) address."
            )
    backend = video_backend()
    open_with = {"torchcodec": _open_with_torchcodec, "pyav": _open_with_pyav}[backend]
    total, fps, indices, decode = open_with(source, path, choose)
    first = next(decode(), None)
    if first is None:
        raise _undecodable(path, "no frame could be decoded")
    metadata = VideoMetadata(
        total_num_frames=int(total),
        fps=float(fps),
        duration=float(total / fps),
        height=first.shape[0],
        width=first.shape[1],
        video_backend=backend,
        frames_indices=[int(index) for index in indices],
    )
    return metadata, decode


@functools.lru_cache
def video_backend() -> str:
    """
    Names the decoder in use: `"torchcodec"` where it loads and has found FFmpeg, `"pyav"` (which brings its own)
    otherwise. Decided and logged once.

    Raises:
        ImportError: there is neither.
    """
    try:
        import torchcodec
        import torchcodec.decoders  # noqa: F401

        # From 0.16 on torchcodec imports without FFmpeg and says so here; before, the import fails.
        missing = "found no FFmpeg" if getattr(torchcodec, "ffmpeg_major_version", "") is None else None
    except (ImportError, RuntimeError, OSError) as error:
        missing = f"does not load: {str(error).strip().splitlines()[0]}"
    if missing is None:
        logger.warning("Decoding videos with torchcodec.")
        return "torchcodec"
    if av is None:
        raise ImportError(
            f"Reading a video needs PyAV (`pip install av`), or torchcodec with FFmpeg. torchcodec {missing}."
        )
    logger.warning(f"Decoding videos with PyAV: torchcodec {missing}.")
    return "pyav"


def _open_with_pyav(source, name, choose):
    try:
        start, total, fps = _scan_with_pyav(source, name)
    except av.error.FFmpegError as error:
        raise _undecodable(name, error) from error
    indices = choose(total, fps)

    def decode():
        try:
            yield from _decode_with_pyav(source, start, fps, _instants(indices, fps))
        except av.error.FFmpegError as error:
            raise _undecodable(name, error) from error

    return total, fps, indices, decode


def _scan_with_pyav(source, name):
    """Start in seconds (`None` where the file has no timestamps), number of frames and mean frames per second.

    Read from the packets, without decoding: containers may state no frame count, and a wrong mean rate.
    """
    with _pyav_container(source) as container:
        if not container.streams.video:
            raise _undecodable(name, "it has no video stream")
        stream = container.streams.video[0]
        times = [packet.pts for packet in container.demux(stream) if packet.size and not packet.is_discard]
        stated_fps = stream.average_rate or stream.guessed_rate
        if None in times:
            return None, len(times), _mean_fps(name, len(times), 0.0, stated_fps)
        first, last = (float(time * stream.time_base) for time in (min(times, default=0), max(times, default=0)))
        return first, len(times), _mean_fps(name, len(times), last - first, stated_fps)


def _decode_with_pyav(source, start, fps, instants):
    """The frames shown at `instants`, increasing seconds from the video's start."""
    shown, given = None, 0
    # One for this video: PyAV 19's own serves all, and a process forked later would wait for its threads forever.
    reformatter = av.video.reformatter.VideoReformatter()
    with _pyav_container(source) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for number, frame in enumerate(container.decode(stream)):
            time = number / fps if start is None or frame.pts is None else float(frame.pts * frame.time_base) - start
            # Until this frame appears the one before it is shown.
            before = int(np.searchsorted(instants, time))
            if shown is not None and before > given:
                yield from itertools.repeat(_upright(shown, reformatter), before - given)
                given = before
            shown = frame
            if given == len(instants):
                return
    if shown is not None:
        yield from itertools.repeat(_upright(shown, reformatter), len(instants) - given)


def _pyav_container(source):
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return av.open(source)


def _upright(frame, reformatter):
    """`[H, W, 3]` uint8: phones store a portrait video lying down, with an angle to turn it by, counterclockwise."""
    pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
    return np.rot90(pixels, k=round(frame.rotation / 90))


def _open_with_torchcodec(source, name, choose):
    try:
        from torchcodec.decoders import VideoDecoder
    except ImportError as error:
        raise ImportError("Reading a video with torchcodec needs `pip install torchcodec`.") from error

    try:
        decoder = VideoDecoder(source, dimension_order="NHWC", num_ffmpeg_threads=0)
    except (RuntimeError, ValueError) as error:
        raise _undecodable(name, error) from error
    try:
        total, start = decoder.metadata.num_frames or 0, decoder.metadata.begin_stream_seconds
        span = decoder.get_frame_at(total - 1).pts_seconds - start if total > 1 else 0.0
    except RuntimeError as error:
        raise _undecodable(name, error) from error
    fps = _mean_fps(name, total, span, decoder.metadata.average_fps)
    indices = choose(total, fps)
    # An instant past the end of the last frame is an error here.
    seconds = np.minimum(start + _instants(indices, fps), decoder.metadata.end_stream_seconds - 1e-6).tolist()

    def decode():
        try:
            for begin in range(0, len(seconds), 16):
                yield from decoder.get_frames_played_at(seconds=seconds[begin : begin + 16]).data.numpy()
        except RuntimeError as error:
            raise _undecodable(name, error) from error

    return total, fps, indices, decode


def _mean_fps(name, total, span, stated_fps):
    """Frames per second from the seconds between the first and the last; the last lasts as long as the mean."""
    if total == 0:
        raise ValueError(f"The video {name!r} is empty: it has 0 frames.")
    if span > 0:
        return (total - 1) / span
    if not stated_fps:
        raise ValueError(f"The video {name!r} states neither times nor a frame rate; pass its frames, with `fps=`.")
    return float(stated_fps)


def _instants(indices, fps):
    # A quarter of a frame later, since containers round timestamps.
    return (np.asarray(indices) + 0.25) / fps


def _undecodable(name, reason):
    return ValueError(f"Cannot decode {name!r} as a video: {reason}. Expected a complete file with a video stream.")


# --------------------------------------------------------------------------------------------------------------------
# Frames that are given
# --------------------------------------------------------------------------------------------------------------------


def load_frames(folder: str | list[str]) -> np.ndarray:
    """
    Loads a video that is stored as images.

    Args:
        folder: a folder of images, read in natural order (`frame2.jpg` before `frame10.jpg`), or a list of images, read
            as listed.

    Returns:
        `[T, H, W, 3]` uint8 RGB.

    Raises:
        ValueError: no image in the folder, one that cannot be read, or images of different sizes.
    """
    frames = []
    for path in image_paths(folder) if isinstance(folder, str) else folder:
        try:
            frames.append(load_image(path.removeprefix("file://")))
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot read the frame {path!r} as an image: {error}.") from error
    return _stack_frames(frames)


def image_paths(folder):
    names = [name for name in os.listdir(folder) if name.lower().endswith(IMAGE_SUFFIXES)]
    if not names:
        raise ValueError(f"The folder {folder!r} holds no frames; expected images ({', '.join(IMAGE_SUFFIXES)}).")
    return [os.path.join(folder, name) for name in sorted(names, key=_natural_order)]


def _natural_order(name):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _stack_frames(frames):
    """One video from a list of its frames: PIL images, arrays or tensors."""
    frames = [np.asarray(frame.convert("RGB")) if hasattr(frame, "convert") else frame for frame in frames]
    shapes = {tuple(frame.shape) for frame in frames}
    if len(shapes) > 1:
        raise ValueError(f"The frames of one video differ in shape: {sorted(shapes)}; expected one shape.")
    return torch.stack(frames) if torch.is_tensor(frames[0]) else np.stack(frames)


def _is_frame(item):
    return hasattr(item, "convert") or (_is_array(item) and item.ndim == 3)


def _is_array(item):
    return isinstance(item, (np.ndarray, torch.Tensor))


def _is_image_path(item):
    return isinstance(item, (str, os.PathLike)) and str(item).lower().endswith(IMAGE_SUFFIXES)


def flatten_videos(videos) -> list:
    """
    Flattens every nesting that a processor is called with, a list of videos per row or a single video.

    A list of frames, or of paths of images, is one video; any other list is a list of videos.

    Returns:
        Per video a path, or `[T, H, W, C]` or `[T, C, H, W]` frames as an array or tensor.

    Raises:
        ValueError: an item is no video, or there is none.
    """
    flat = _flatten(videos)
    if not flat:
        raise ValueError("Got an empty video (0 frames); expected at least one frame.")
    return flat


def _flatten(videos):
    if isinstance(videos, (str, os.PathLike)):
        path = os.fspath(videos)
        return [load_frames(path)] if os.path.isdir(path) else [path]
    if _is_array(videos) and videos.ndim in (3, 4, 5):
        return list(videos) if videos.ndim == 5 else [videos if videos.ndim == 4 else videos[None]]
    if hasattr(videos, "convert"):
        return [_stack_frames([videos])]
    if not isinstance(videos, (list, tuple)):
        given = f"shape {tuple(videos.shape)}" if _is_array(videos) else f"type {type(videos).__name__}"
        raise ValueError(
            f"Got a video of {given}; expected a path, or frames as an array or tensor [T, H, W, C] or list of images."
        )
    if videos and all(map(_is_frame, videos)):
        return [_stack_frames(videos)]
    if videos and all(map(_is_image_path, videos)):
        return [load_frames([os.fspath(path) for path in videos])]
    return [flat for video in videos for flat in _flatten(video)]


def check_frames(frames):
    """The same frames, laid out as torch can read them: an array may be a view that runs backwards (BGR to RGB)."""
    if len(frames) == 0:
        raise ValueError("Got an empty video (0 frames); expected at least one frame.")
    frames = np.ascontiguousarray(frames) if isinstance(frames, np.ndarray) else frames
    values = torch.as_tensor(frames)
    if values.is_floating_point() and not torch.isfinite(values).all():
        raise ValueError("The frames of a video hold NaN or infinite pixels; expected finite values.")
    return frames


def describe_frames(frames, metadata, fps):
    """The metadata of frames that were sampled already, from what the caller says about them."""
    if metadata is None and fps is None:
        raise ValueError(
            f"Got {len(frames)} frames without their times. Pass the rate at which they were sampled as `fps=...`, or"
            ' `video_metadata=[{"fps": ..., "total_num_frames": ..., "frames_indices": [...]}]`, one per video.'
        )
    given = {"fps": fps} if metadata is None else dict(metadata)
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
        raise ValueError(
            f"Got {len(frames)} frames and {len(given['frames_indices'])} `frames_indices`; expected one per frame."
        )
    if given.get("total_num_frames") is None:
        given["total_num_frames"] = len(frames)
    return VideoMetadata(**given)


def require_positive(name, value):
    if not (value > 0 and np.isfinite(value)):
        raise ValueError(f"Got {name}={value!r}; expected a finite number above 0.")


# --------------------------------------------------------------------------------------------------------------------
# Long videos
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class VideoChunks:
    """
    A long video, decoded and preprocessed chunk by chunk while one iterates over it.

    Iterating gives `pixel_values_videos` `[k, d]` and `video_grid_thw` `[1, 3]` of each chunk. Joined, the pixel values
    are those of the whole video; nothing is kept of a chunk that was given out.

    Args:
        video_grid_thw: `[1, 3]`, of the whole video.
        second_per_grid_ts: `[1]`, seconds per temporal patch.
        metadata: of the whole video, with the indices of the frames that are looked at.
        frames_per_chunk: a multiple of the temporal patch size.
    """

    preprocess: Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]]
    decode: Callable[[], Iterator[np.ndarray]]
    video_grid_thw: torch.Tensor
    second_per_grid_ts: list[float]
    metadata: VideoMetadata
    frames_per_chunk: int

    def __len__(self) -> int:
        return -(-len(self.metadata.frames_indices) // self.frames_per_chunk)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        frames = self.decode()
        while chunk := list(itertools.islice(frames, self.frames_per_chunk)):
            yield self.preprocess(_stack_frames(chunk))
