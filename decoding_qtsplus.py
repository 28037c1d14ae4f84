"""Decodes video files with PyAV: the chosen frames, each as it is shown at its time. Fetches those at an address."""

import base64
import http.client
import io
import itertools
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

try:  # optional: who gives frames needs no decoder
    import av
except ImportError:
    av = None  # type: ignore[assignment]

# From (number of frames, frames per second) to the indices of the frames to read.
FrameChoice = Callable[[int, float], np.ndarray]
Frames = Callable[[], Iterator[np.ndarray]]
_ARBITRARY_CLOCK = 0x200  # AVFMT_TS_DISCONT: a format such as MPEG-TS, whose clock is not 0 where the video begins

ADDRESS_TIMEOUT = 30.0  # seconds in which a server sends nothing
ADDRESS_SECONDS = 1800.0  # in which all of a video has to arrive
ADDRESS_BYTES = 2**30  # of a video at an address, which is read into memory


@dataclass
class Stream:
    """
    What is in a video file.

    Args:
        total: number of frames.
        fps: mean frames per second.
        times: whether the frames have timestamps.
        first: the timestamp of the first frame, in seconds.
        start: when a player shows the first frame, in seconds.
        warnings: what is wrong with the file, each the end of a sentence about it.
    """

    total: int
    fps: float
    times: bool = False
    first: float = 0.0
    start: float = 0.0
    warnings: list[str] = field(default_factory=list)


def open_stream(source: str | io.BytesIO, name: str, choose: FrameChoice) -> tuple[Stream, np.ndarray, Frames]:
    """
    Opens a video file: what is in it, the chosen indices, and what begins to read those frames, `[H, W, 3]` uint8 RGB
    each, upright.

    Args:
        source: its path, or its bytes.
        name: what errors call it.
        choose: from (number of frames, frames per second) to the indices of the frames to read.

    Raises:
        ValueError: it cannot be decoded, has no video stream or no frame.
        ImportError: PyAV is not installed.
    """
    if av is None:
        raise ImportError("Reading a video needs PyAV (`pip install av`).")
    try:
        stream = _scan(source, name)
    except av.error.FFmpegError as error:
        raise undecodable(name, error) from error
    indices = choose(stream.total, stream.fps)

    def decode() -> Iterator[np.ndarray]:
        try:
            yield from _decode(source, stream, _instants(indices, stream.fps))
        except av.error.FFmpegError as error:
            raise undecodable(name, error) from error

    return stream, indices, decode


def undecodable(name: str, reason: object) -> ValueError:
    """The error about a file that is no video, or a broken one."""
    return ValueError(f"Cannot decode {name!r} as a video: {reason}. Expected a complete file with a video stream.")


def _scan(source: str | io.BytesIO, name: str) -> Stream:
    """Reads the packets, without decoding: containers may state no frame count, and a wrong mean rate."""
    with _container(source) as container:
        if not container.streams.video:
            raise undecodable(name, "it has no video stream")
        stream = container.streams.video[0]
        stated, stated_fps = stream.frames, stream.average_rate or stream.guessed_rate
        packets = [(p.pts, p.is_discard, p.is_corrupt) for p in container.demux(stream) if p.size]
        damaged = sum(corrupt for _, _, corrupt in packets)
        whole = len(packets) - damaged
        times = [time for time, discard, corrupt in packets if not (discard or corrupt)]
        if (stream.time_base or 1) >= 1 and (stream.codec_context.framerate or 0) > 1:
            raise undecodable(name, "it has no time scale, so when its frames are shown is unknown")
        if any(time is None for time in times):
            fps = _mean_fps(name, len(times), 0.0, stated_fps)
            return Stream(len(times), fps, warnings=_missing(stated, whole, damaged, None, len(times) / fps, fps))
        seconds = [float(time * stream.time_base) for time in times]
        first, last = min(seconds, default=0.0), max(seconds, default=0.0)
        fps = _mean_fps(name, len(times), last - first, stated_fps)
        end = None if container.duration is None else container.duration / av.time_base
        if stream.duration is not None:
            end = float(((stream.start_time or 0) + stream.duration) * stream.time_base)
        missing = _missing(stated, whole, damaged, end, last + 1 / fps, fps)
        begin = (container.start_time or 0) / av.time_base if container.format.flags & _ARBITRARY_CLOCK else 0.0
        return Stream(len(times), fps, True, first, max(first - begin, 0.0), missing)


def _decode(source: str | io.BytesIO, video: Stream, instants: np.ndarray) -> Iterator[np.ndarray]:
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
    return av.open(source)


def _upright(frame: Any, reformatter: Any) -> np.ndarray:
    """`[H, W, 3]` uint8: phones store a portrait video lying down, with an angle to turn it by, counterclockwise."""
    pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
    return np.rot90(pixels, k=round(frame.rotation / 90))


def _missing(stated: int, whole: int, damaged: int, stated_end: float | None, end: float, fps: float) -> list[str]:
    """
    What of a video is not there, if anything.

    Args:
        stated: frames that the header states; 0 where it does not.
        whole, damaged: frames that are there.
        stated_end: when the video ends by its header, in seconds on the clock of its timestamps.
        end: when what is there ends.
    """
    # Of a trimmed video the header counts the frames that are not shown, but not their time.
    if stated > whole and (stated_end is None or stated_end > end + 0.5 / fps):
        return [f"is incomplete: its header states {stated} frames, and {whole} can be read"]
    if damaged:
        return [f"is incomplete: {damaged} of its {whole + damaged} frames are damaged and left out"]
    # Sound may last a little longer, and so may the last frame.
    if not stated and stated_end is not None and stated_end > 1.05 * end + 1:
        return [f"is incomplete: its header states {stated_end:.1f} s, and {end:.1f} s can be read"]
    return []


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


# --------------------------------------------------------------------------------------------------------------------
# Videos at an address
# --------------------------------------------------------------------------------------------------------------------


def is_address(video: str) -> bool:
    """Whether a video is fetched from a server."""
    return video.lower().startswith(("http://", "https://"))


def shown_name(video: str) -> str:
    """What messages and results call a video: its path, or its address without user and password."""
    host = re.split(r"[/?#]", video.partition("//")[2])[0]
    secret = is_address(video) and ("@" in host or not re.fullmatch(r"[^:]*(:\d*)?|\[.*", host))
    return re.sub(r"(?<=//).*@", "***@", video, count=1) if secret else video


def _request(address: str) -> urllib.request.Request:
    """
    Raises:
        ValueError: a port that is none, or no host.
    """
    parts = urllib.parse.urlsplit(address)
    host = (parts.hostname or "").encode("idna").decode()
    where = f"[{host}]" if ":" in host else host
    netloc = where if parts.port is None else f"{where}:{parts.port}"
    path, query = (urllib.parse.quote(part, safe="%/:=&?~+!$,;'@()*[]") for part in (parts.path, parts.query))
    request = urllib.request.Request(urllib.parse.urlunsplit((parts.scheme, netloc, path, query, "")))
    if parts.username is not None:
        user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        # Not sent on to wherever the server redirects to.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
    return request


def download(address: str) -> io.BytesIO:
    """The file at an `http(s)` address."""
    name, data, started = shown_name(address), io.BytesIO(), time.monotonic()
    try:
        request = _request(address)
    except ValueError as error:  # without its text, which may hold a part of the password
        raise ValueError(
            f"Cannot load the video at {name!r}: expected http(s)://HOST:PORT/PATH, with a port from 0 to 65535."
        ) from error
    try:
        with urllib.request.urlopen(request, timeout=ADDRESS_TIMEOUT) as response:
            stated = response.length
            while (stated or 0) <= ADDRESS_BYTES >= data.tell() and (block := response.read1(2**20)):
                data.write(block)
                if time.monotonic() - started > ADDRESS_SECONDS:
                    raise TimeoutError(f"{data.tell()} bytes in {ADDRESS_SECONDS:g} s; download it, and give the file")
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = "" if str(error) == "" else f": {error}"
        raise ValueError(f"Cannot load the video at {name!r} ({type(error).__name__}{reason}).") from error
    if max(stated or 0, data.tell()) > ADDRESS_BYTES:
        raise ValueError(
            f"The video at {name!r} is larger than {ADDRESS_BYTES / 2**20:.0f} MiB, the most that is read from an "
            "address; download it, and give the file."
        )
    if stated is not None and data.tell() < stated:
        raise ValueError(f"The connection to {name!r} ended after {data.tell()} of {stated} bytes; try again.")
    data.seek(0)
    return data
