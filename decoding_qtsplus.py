"""Decodes video files with PyAV: the chosen frames, each as it is shown at its time. Fetches those at an address."""

import base64
import http.client
import io
import itertools
import math
import os
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from transformers.utils import logging
from transformers.video_utils import VideoMetadata

try:  # optional: who gives frames needs no decoder
    import av
except ImportError:
    av = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)

# From (number of frames, frames per second) to the indices of the frames to read.
FrameChoice = Callable[[int, float], np.ndarray]
Frames = Callable[[], Iterator[np.ndarray]]
_ARBITRARY_CLOCK = 0x200  # AVFMT_TS_DISCONT: a format such as MPEG-TS, whose clock is not 0 where the video begins

ADDRESS_TIMEOUT = 30.0  # seconds in which a server sends nothing
ADDRESS_SECONDS = 1800.0  # in which all of a video has to arrive
ADDRESS_BYTES = 2**30  # of a video at an address, which is read into memory


@dataclass
class VideoFile:
    """A video file that was opened: what it is, and how to read it."""

    name: str  # what messages call it
    metadata: VideoMetadata  # of the whole video, with the `frames_indices` that were chosen
    shape: tuple[int, int, int]  # number of chosen frames, height and width
    decode: Frames  # begins to read the chosen frames, [H, W, 3] uint8 RGB each, upright
    start: float  # when a player shows the first frame, in seconds
    warnings: list[str]  # what is wrong with the file, one sentence each


@dataclass
class _Stream:
    """What is in a video file."""

    total: int  # frames
    fps: float  # their mean rate per second
    missing: str | None  # what of the file is not there
    times: bool = False  # whether the frames have timestamps
    first: float = 0.0  # the timestamp of the first frame, in seconds
    start: float = 0.0  # when a player shows it, in seconds


def open_video(path: str, choose: FrameChoice, within: tuple[float | None, float | None] = (None, None)) -> VideoFile:
    """
    Opens a video file, the one at an `http(s)` address, or the one in a `data:` address.

    A variable frame rate is read as its mean rate: frame `i` is what the video shows at `i / fps` seconds. Of a file
    that was cut off, what is there is read; the log and `warnings` say how much that is.

    Raises:
        ValueError: a file that is missing, cannot be decoded, or has no frame; an address that does not answer, holds
            no base64, or has a file of more than 1 GiB.
        ImportError: PyAV is not installed.
    """
    if av is None:
        raise ImportError("Reading a video needs PyAV (`pip install av`).")
    name, source = shown_name(path), _find(path)
    try:
        stream = _scan(source, name)
    except av.error.FFmpegError as error:
        raise _undecodable(name, error) from error
    origin, stop = _stretch(name, stream.total, stream.fps, stream.start, within)
    indices = origin + np.asarray(choose(stop - origin, stream.fps))
    # A quarter of a frame later, since containers round timestamps.
    instants = (np.asarray(indices) + 0.25) / stream.fps

    def decode() -> Iterator[np.ndarray]:
        try:
            yield from _decode(source, stream, instants)
        except av.error.FFmpegError as error:
            raise _undecodable(name, error) from error

    first = next(decode(), None)
    if first is None:
        raise _undecodable(name, "no frame could be decoded")
    metadata = VideoMetadata(
        total_num_frames=stop - origin,
        fps=stream.fps,
        duration=(stop - origin) / stream.fps,
        height=first.shape[0],
        width=first.shape[1],
        video_backend="pyav",
        frames_indices=[int(index) for index in indices],
    )
    warnings = [] if stream.missing is None else [f"The video {name!r} is incomplete: {stream.missing}."]
    for warning in warnings:
        logger.warning(warning)
    return VideoFile(
        name, metadata, (len(indices), *first.shape[:2]), decode, stream.start + origin / stream.fps, warnings
    )


def _stretch(
    name: str, total: int, fps: float, begin: float, within: tuple[float | None, float | None]
) -> tuple[int, int]:
    """The first frame, and the one behind the last, that a player, which begins at a time, shows between two others."""
    start, end = within
    first = 0 if start is None else max(math.ceil((start - begin) * fps - 1e-3), 0)
    stop = total if end is None else min(math.floor((end - begin) * fps + 1e-3) + 1, total)
    if first >= stop:
        bounds = f"from {0 if start is None else start:g} to {'its end' if end is None else f'{end:g} s'}"
        raise ValueError(
            f"The video {name!r} shows no frame {bounds}; it has {total / fps:.1f} s from {begin:.1f} s on."
        )
    return first, stop


def _find(path: str) -> str | io.BytesIO:
    if is_address(path):
        return download(path)
    if is_inline(path):
        return _decode_inline(path)
    path = path.removeprefix("file://")
    if os.path.isfile(path):
        return path
    raise ValueError(f"There is no video at {path!r}; expected a video file, a folder of frames or an http(s) address.")


def _undecodable(name: str, reason: object) -> ValueError:
    """The error about a file that is no video, or a broken one."""
    return ValueError(f"Cannot decode {name!r} as a video: {reason}. Expected a complete file with a video stream.")


def _scan(source: str | io.BytesIO, name: str) -> _Stream:
    """Reads the packets, without decoding: containers may state no frame count, and a wrong mean rate."""
    with _container(source) as container:
        if not container.streams.video:
            raise _undecodable(name, "it has no video stream")
        stream = container.streams.video[0]
        stated, stated_fps = stream.frames, stream.average_rate or stream.guessed_rate
        packets = [(p.pts, p.is_discard, p.is_corrupt) for p in container.demux(stream) if p.size]
        damaged = sum(corrupt for _, _, corrupt in packets)
        whole = len(packets) - damaged
        times = [time for time, discard, corrupt in packets if not (discard or corrupt)]
        if (stream.time_base or 1) >= 1 and (stream.codec_context.framerate or 0) > 1:
            raise _undecodable(name, "it has no time scale, so when its frames are shown is unknown")
        if any(time is None for time in times):
            fps = _mean_fps(name, len(times), 0.0, stated_fps)
            return _Stream(len(times), fps, _missing(stated, whole, damaged, None, len(times) / fps, fps))
        seconds = [float(time * stream.time_base) for time in times]
        first, last = min(seconds, default=0.0), max(seconds, default=0.0)
        fps = _mean_fps(name, len(times), last - first, stated_fps)
        end = None if container.duration is None else container.duration / av.time_base
        if stream.duration is not None:
            end = float(((stream.start_time or 0) + stream.duration) * stream.time_base)
        missing = _missing(stated, whole, damaged, end, last + 1 / fps, fps)
        begin = (container.start_time or 0) / av.time_base if container.format.flags & _ARBITRARY_CLOCK else 0.0
        return _Stream(len(times), fps, missing, True, first, max(first - begin, 0.0))


def _decode(source: str | io.BytesIO, video: _Stream, instants: np.ndarray) -> Iterator[np.ndarray]:
    """The frames shown at `instants`, increasing seconds from the first frame."""
    shown, given = None, 0
    # One for this video: PyAV 19's own serves all, and a process forked later would wait for its threads forever.
    reformatter = av.video.reformatter.VideoReformatter()
    with _container(source) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        packets = (packet for packet in container.demux(stream) if not packet.is_corrupt)
        for number, frame in enumerate(frame for packet in packets for frame in packet.decode()):
            timed = video.times and frame.pts is not None
            time = float(frame.pts * frame.time_base) - video.first if timed else number / video.fps
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


def _container(source: str | io.BytesIO) -> Any:
    if isinstance(source, io.BytesIO):
        source.seek(0)
        # What strangers sent may be a list of other places, which FFmpeg would go to.
        return av.open(source, options={"protocol_whitelist": "none"})
    return av.open(source)


def _upright(frame: Any, reformatter: Any) -> np.ndarray:
    """`[H, W, 3]` uint8 as shown: phones store a portrait video lying down, and some front cameras a mirrored one."""
    pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is not None:
        (a, b, _, c, d), _ = np.split(np.frombuffer(matrix, np.int32) / 2**16, [5])
        pixels = pixels[::-1] if a * d < b * c else pixels
    return np.rot90(pixels, k=round(frame.rotation / 90))


def _missing(stated: int, whole: int, damaged: int, stated_end: float | None, end: float, fps: float) -> str | None:
    """What of a video is not there: its header states frames (or 0), and an end in seconds."""
    # Of a trimmed video the header counts the frames that are not shown, but not their time.
    if stated > whole and (stated_end is None or stated_end > end + 0.5 / fps):
        return f"its header states {stated} frames, and {whole} can be read"
    if damaged:
        return f"{damaged} of its {whole + damaged} frames are damaged and left out"
    # Sound may last a little longer, and so may the last frame.
    if not stated and stated_end is not None and stated_end > 1.05 * end + 1:
        return f"its header states {stated_end:.1f} s, and {end:.1f} s can be read"
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


def is_address(video: str) -> bool:
    """Whether a video is fetched from a server."""
    return video.lower().startswith(("http://", "https://"))


def is_inline(video: str) -> bool:
    """Whether a video is a `data:` address, which holds the file itself."""
    return video[:5].lower() == "data:"


def _decode_inline(address: str) -> io.BytesIO:
    """The file that `data:video/mp4;base64,...` holds."""
    start = address.find(",", 0, 200) + 1
    if len(address) > ADDRESS_BYTES * 4 / 3:
        raise ValueError(f"The video in {shown_name(address)!r} is larger than {ADDRESS_BYTES / 2**20:.0f} MiB.")
    try:
        if not address[:start].lower().endswith(";base64,"):
            raise ValueError("it does not begin with data:video/...;base64,")
        return io.BytesIO(base64.b64decode(address[start:], validate=True))
    except ValueError as error:
        raise ValueError(f"Cannot read the video in {shown_name(address)!r}: {error}.") from error


def shown_name(video: str) -> str:
    """What messages and results call a video: its path, or its address without user and password, or without a file."""
    if is_inline(video):
        return f"{video[:30]}..."
    host = re.split(r"[/?#]", video.partition("//")[2])[0]
    secret = is_address(video) and ("@" in host or not re.fullmatch(r"[^:]*(:\d*)?|\[.*", host))
    return re.sub(r"(?<=//).*@", "***@", video, count=1) if secret else video


def parse_address(address: str) -> urllib.request.Request:
    """Raises `ValueError`, without a text that may hold a part of the password, for a host or a port that is none."""
    try:
        parts = urllib.parse.urlsplit(address)
        host = (parts.hostname or "").encode("idna").decode()
        host = f"[{host}]" if ":" in host else host
        if not re.fullmatch(r"[\w.-]+|\[[\da-f:.]+\]", host, re.ASCII):  # such as %40, which urllib would take for an @
            raise ValueError(host)
        netloc = host if parts.port is None else f"{host}:{parts.port}"
        path, query = (urllib.parse.quote(part, safe="%/:=&?~+!$,;'@()*[]") for part in (parts.path, parts.query))
        request = urllib.request.Request(urllib.parse.urlunsplit((parts.scheme, netloc, path, query, "")))
    except ValueError as error:
        name = shown_name(address)
        raise ValueError(f"Cannot load the video at {name!r}: expected http(s)://HOST:PORT/PATH.") from error
    if parts.username is not None:
        user = urllib.parse.unquote_to_bytes(f"{parts.username}:{parts.password or ''}")
        # Not sent on to wherever the server redirects to.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(user).decode()}")
    return request


def download(address: str) -> io.BytesIO:
    """The file at an `http(s)` address."""
    request, data = parse_address(address), io.BytesIO()
    receive(shown_name(address), lambda: urllib.request.urlopen(request, timeout=ADDRESS_TIMEOUT), data)
    return data


def receive(name: str, ask: Callable[[], http.client.HTTPResponse], data: IO[bytes]) -> None:
    """Writes the file that is the answer to `data`; a `ValueError` about the video `name` if it does not come whole."""
    stated, until = None, time.monotonic() + ADDRESS_SECONDS
    try:
        with ask() as response:
            stated = response.length
            while (stated or 0) <= ADDRESS_BYTES >= data.tell() and (block := response.read1(2**20)):
                data.write(block)
                if time.monotonic() > until:
                    raise TimeoutError(f"{data.tell()} bytes in {ADDRESS_SECONDS:g} s; download it, and give the file")
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = ": ".join(filter(None, (type(error).__name__, str(error))))
        raise ValueError(f"Cannot load the video at {name!r} ({reason}).") from error
    if max(stated or 0, data.tell()) > ADDRESS_BYTES:
        raise ValueError(
            f"The video at {name!r} is larger than {ADDRESS_BYTES / 2**20:.0f} MiB, the most that is read from an "
            "address; download it, and give the file."
        )
    if stated is not None and data.tell() < stated:
        raise ValueError(f"The connection to {name!r} ended after {data.tell()} of {stated} bytes; try again.")
    data.seek(0)
