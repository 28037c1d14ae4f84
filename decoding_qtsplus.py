"""The two decoders, torchcodec and PyAV: the chosen frames of a video file, each as it is shown at its time."""

import functools
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.utils import logging

try:  # optional, as torchcodec is: one of the two reads the videos
    import av
except ImportError:
    av = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)

BYTES_AT_ONCE = 2**28  # of frames that torchcodec decodes at a time

# From (number of frames, frames per second) to the indices of the frames to read.
FrameChoice = Callable[[int, float], np.ndarray]
Frames = Callable[[], Iterator[np.ndarray]]


@dataclass
class Stream:
    """
    What a decoder has found in a video file.

    Args:
        total: number of frames.
        fps: mean frames per second.
        indices: `[T]`, the chosen frames.
        decode: begins to read them, `[H, W, 3]` uint8 RGB each, upright.
        missing: what of the file is not there; `None` for a whole one.
        backend: the decoder.
    """

    total: int
    fps: float
    indices: np.ndarray
    decode: Frames
    missing: str | None
    backend: str


def open_stream(source: str | io.BytesIO, name: str, choose: FrameChoice) -> Stream:
    """
    Opens a video file with the decoder in use.

    Args:
        source: its path, or its bytes.
        name: what errors call it.
        choose: from (number of frames, frames per second) to the indices of the frames to read.

    Raises:
        ValueError: it cannot be decoded, has no video stream or no frame.
        ImportError: there is no decoder.
    """
    open_with = {"torchcodec": _open_with_torchcodec, "pyav": _open_with_pyav}[video_backend()]
    return open_with(source, name, choose)


def undecodable(name: str, reason: object) -> ValueError:
    """The error about a file that is no video, or a broken one."""
    return ValueError(f"Cannot decode {name!r} as a video: {reason}. Expected a complete file with a video stream.")


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
        logger.info("Decoding videos with torchcodec.")
        return "torchcodec"
    if av is None:
        raise ImportError(
            f"Reading a video needs PyAV (`pip install av`), or torchcodec with FFmpeg. torchcodec {missing}."
        )
    logger.info(f"Decoding videos with PyAV: torchcodec {missing}.")
    return "pyav"


def _open_with_pyav(source: str | io.BytesIO, name: str, choose: FrameChoice) -> Stream:
    try:
        start, total, fps, missing = _scan_with_pyav(source, name)
    except av.error.FFmpegError as error:
        raise undecodable(name, error) from error
    indices = choose(total, fps)

    def decode() -> Iterator[np.ndarray]:
        try:
            yield from _decode_with_pyav(source, start, fps, _instants(indices, fps))
        except av.error.FFmpegError as error:
            raise undecodable(name, error) from error

    return Stream(total, fps, indices, decode, missing, "pyav")


def _scan_with_pyav(source: str | io.BytesIO, name: str) -> tuple[float | None, int, float, str | None]:
    """Start in seconds (`None` where the file has no timestamps), frames, mean frames per second, what is missing.

    Read from the packets, without decoding: containers may state no frame count, and a wrong mean rate.
    """
    with _pyav_container(source) as container:
        if not container.streams.video:
            raise undecodable(name, "it has no video stream")
        stream = container.streams.video[0]
        stated, stated_fps = stream.frames, stream.average_rate or stream.guessed_rate
        packets = [(p.pts, p.is_discard, p.is_corrupt) for p in container.demux(stream) if p.size]
        whole, times = 0, []
        for time, discard, corrupt in packets:
            whole += not corrupt
            if not (discard or corrupt):
                times.append(time)
        if any(time is None for time in times):
            fps = _mean_fps(name, len(times), 0.0, stated_fps)
            return None, len(times), fps, _missing(stated, whole, len(packets) - whole, None, len(times) / fps, fps)
        seconds = [float(time * stream.time_base) for time in times]
        first, last = min(seconds, default=0.0), max(seconds, default=0.0)
        fps = _mean_fps(name, len(times), last - first, stated_fps)
        length = None if container.duration is None else container.duration / av.time_base
        if stream.duration is not None:
            length = float(stream.duration * stream.time_base)
        missing = _missing(stated, whole, len(packets) - whole, length, last - first + 1 / fps, fps)
        return first, len(times), fps, missing


def _decode_with_pyav(
    source: str | io.BytesIO, start: float | None, fps: float, instants: np.ndarray
) -> Iterator[np.ndarray]:
    """The frames shown at `instants`, increasing seconds from the video's start."""
    shown, given = None, 0
    # One for this video: PyAV 19's own serves all, and a process forked later would wait for its threads forever.
    reformatter = av.video.reformatter.VideoReformatter()
    with _pyav_container(source) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        packets = (packet for packet in container.demux(stream) if not packet.is_corrupt)
        for number, frame in enumerate(frame for packet in packets for frame in packet.decode()):
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


def _pyav_container(source: str | io.BytesIO) -> Any:
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return av.open(source)


def _upright(frame: Any, reformatter: Any) -> np.ndarray:
    """`[H, W, 3]` uint8: phones store a portrait video lying down, with an angle to turn it by, counterclockwise."""
    pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
    return np.rot90(pixels, k=round(frame.rotation / 90))


def _open_with_torchcodec(source: str | io.BytesIO, name: str, choose: FrameChoice) -> Stream:
    try:
        from torchcodec.decoders import VideoDecoder
    except ImportError as error:
        raise ImportError("Reading a video with torchcodec needs `pip install torchcodec`.") from error

    try:
        decoder = VideoDecoder(source, dimension_order="NHWC", num_ffmpeg_threads=0)
    except (RuntimeError, ValueError) as error:
        raise undecodable(name, error) from error
    metadata = decoder.metadata
    try:
        total, start = metadata.num_frames or 0, metadata.begin_stream_seconds
        span = decoder.get_frame_at(total - 1).pts_seconds - start if total > 1 else 0.0
    except RuntimeError as error:
        raise undecodable(name, error) from error
    fps = _mean_fps(name, total, span, metadata.average_fps)
    indices = choose(total, fps)
    # An instant past the end of the last frame is an error here.
    seconds = np.minimum(start + _instants(indices, fps), metadata.end_stream_seconds - 1e-6).tolist()
    count = max(1, min(16, BYTES_AT_ONCE // (3 * metadata.height * metadata.width)))

    def decode() -> Iterator[np.ndarray]:
        try:
            for begin in range(0, len(seconds), count):
                yield from decoder.get_frames_played_at(seconds=seconds[begin : begin + count]).data.numpy()
        except RuntimeError as error:
            raise undecodable(name, error) from error

    stated, length = metadata.num_frames_from_header or 0, metadata.duration_seconds_from_header
    missing = _missing(stated, total, 0, length, span + 1 / fps, fps)
    return Stream(total, fps, indices, decode, missing, "torchcodec")


def _missing(
    stated: int, whole: int, damaged: int, stated_seconds: float | None, seconds: float, fps: float
) -> str | None:
    """
    What of a video is not there.

    Args:
        stated: frames that the header states; 0 where it does not.
        whole, damaged: frames that are there.
        stated_seconds: the length that the header states.
        seconds: the length of what is there.
    """
    # Of a trimmed video the header counts the frames that are not shown, but not their time.
    if stated > whole and (stated_seconds is None or stated_seconds > seconds + 0.5 / fps):
        return f"its header states {stated} frames, and {whole} can be read"
    if damaged:
        return f"{damaged} of its {whole + damaged} frames are damaged and left out"
    # Sound may last a little longer, and so may the last frame.
    if not stated and stated_seconds is not None and stated_seconds > 1.05 * seconds + 1:
        return f"its header states {stated_seconds:.1f} s, and {seconds:.1f} s can be read"
    return None


def _mean_fps(name: str, total: int, span: float, stated_fps: Any) -> float:
    """Frames per second from the seconds between the first and the last; the last lasts as long as the mean."""
    if total == 0:
        raise ValueError(f"The video {name!r} is empty: it has 0 frames.")
    if span > 0:
        return (total - 1) / span
    if not stated_fps:
        raise ValueError(f"The video {name!r} states neither times nor a frame rate; pass its frames, with `fps=`.")
    return float(stated_fps)


def _instants(indices: np.ndarray, fps: float) -> np.ndarray:
    # A quarter of a frame later, since containers round timestamps.
    return (np.asarray(indices) + 0.25) / fps
