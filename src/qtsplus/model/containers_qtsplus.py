"""Opens the containers of videos with PyAV: their bytes alone, the stream that is shown, and what the header states."""

import io
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import IO

try:  # optional: who gives frames needs no decoder
    import av
except ImportError:
    av = None  # type: ignore[assignment]

from .clock_qtsplus import ARBITRARY_CLOCK

Source = str | io.BytesIO  # the path of a file, or one in memory

_NO_TIMESTAMPS = 0x80  # AVFMT_NOTIMESTAMPS: a bare stream, whose length FFmpeg guesses from its rate of bits
_AVI_UNKNOWN = 2**30  # as many frames states an AVI that was written to a pipe
# In ASF (`.wmv`) the object with the length. Where a file is not as long as its header says FFmpeg makes another one.
_ASF_FILE_PROPERTIES = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
_ASF_HEADER_BYTES = 2**16

# The tags of older files are no UTF-8; PyAV from 19 on keeps their bytes.
TAGS: dict = {}
if av and int(av.__version__.split(".")[0]) < 19:
    TAGS = {"metadata_errors": "replace"}

# What FFmpeg's decoders and readers raise for bytes that they do not understand, such as damaged ones.
UNDECODABLE: tuple[type[Exception], ...] = ()
if av:
    UNDECODABLE = (
        av.error.ArgumentError,
        av.error.ExternalError,
        av.error.InvalidDataError,
        av.error.NotImplementedError,
        av.error.PatchWelcomeError,
    )

# What FFmpeg would follow to other files and servers.
_LIST = re.compile(rb"\W{0,3}\s*(#EXTM3U|ffconcat|file\s|v=0\s|\[\w+\]|(<\?xml[^>]*>\s*)?<(MPD|smil))", re.IGNORECASE)


@contextmanager
def open_container(source: Source) -> "Iterator[av.container.InputContainer]":
    """A file, or one in memory. FFmpeg gets its bytes and no protocol: a file may name others, which it would go to."""
    with open_source(source) as file:
        file.seek(0)
        if _LIST.match(file.read(400)):
            raise ValueError("it is a list of other places, which is not followed; give the videos themselves")
        file.seek(0)
        with av.open(file, options={"protocol_whitelist": "none"}, **TAGS) as container:
            yield container


def open_source(source: Source) -> AbstractContextManager[IO[bytes]]:
    if isinstance(source, str):
        return open_file(source)
    return nullcontext(source)


def open_file(path: str) -> IO[bytes]:
    """Opens a plain file; raises `ValueError` for a folder, and for a pipe, which is not waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb", buffering=0)
    os.close(descriptor)
    raise ValueError("it is a folder, a pipe or a device; expected a plain file")


def read_packets(container: "av.container.InputContainer", *streams: "av.stream.Stream") -> "Iterator[av.Packet]":
    """
    The packets of some streams, or of all if none is given. If a stream has appeared in the middle of the file, by
    damage or in a broadcast, PyAV raises an `IndexError` behind the last packet.
    """
    with suppress(IndexError):
        yield from container.demux(*streams)


def video_stream(container: "av.container.InputContainer") -> "av.VideoStream":
    """The stream that a player shows; raises `ValueError` if there is none, only a cover, or no decoder for it."""
    cover = av.stream.Disposition.attached_pic
    videos = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not videos:
        raise ValueError("it has no video stream, except perhaps a cover")
    stream = container.streams.best("video")
    if stream not in videos:
        stream = videos[0]
    if stream.codec_context is None:
        raise ValueError("there is no decoder for its codec; convert it, such as to H.264")
    return stream


@dataclass(frozen=True)
class Stated:
    """What the header of a file states of its video."""

    fps: Fraction | None  # of a constant rate, or the mean
    frames: int = 0  # 0 where it states none
    begin: float = 0.0  # seconds on the file's clock at which a player's begins
    end: float | None = None  # seconds on the file's clock
    is_of_video: bool = False  # whether the end is that of the video, which sound may outlast


def read_stated(
    source: Source,
    container: "av.container.InputContainer",
    stream: "av.VideoStream",
) -> Stated:
    """What the header states; an end only where FFmpeg does not make it from what is there of the file."""
    fps = stream.guessed_rate or stream.average_rate
    frames = stream.frames
    tick = stream.time_base or Fraction(1)
    flags = container.format.flags
    if flags & ARBITRARY_CLOCK:
        return Stated(fps, frames, begin=(container.start_time or 0) / av.time_base)
    if flags & _NO_TIMESTAMPS:
        return Stated(fps, frames)
    if container.format.name == "avi":  # counts the frames that were left out too
        end = float(frames * tick) if 0 < frames < _AVI_UNKNOWN else None
        return Stated(fps, end=end, is_of_video=True)
    if container.format.name == "asf":
        return Stated(fps, frames, end=_asf_end(source))
    if stream.duration is not None:
        over = (stream.start_time or 0) + stream.duration
        return Stated(fps, frames, end=float(over * tick), is_of_video=True)
    end = None
    if container.duration is not None:
        end = container.duration / av.time_base
    return Stated(fps, frames, end=end)


def _asf_end(source: Source) -> float | None:
    """The seconds that the header of an ASF file states."""
    with open_source(source) as file:
        file.seek(0)
        head = file.read(_ASF_HEADER_BYTES)
    _, _, properties = head.partition(_ASF_FILE_PROPERTIES)
    if not properties:
        return None
    length, _, preroll = struct.unpack("<QQQ", properties[48:72])  # ticks of 100 ns, and milliseconds
    return length / 1e7 - preroll / 1e3


def ends_early(
    source: Source,
    stated: Stated,
    end: float,
    tolerance: float,
) -> bool:
    """Whether a file ends some seconds before its header says, where its frames end: its sound may go on."""
    if stated.end is None or stated.end <= end + tolerance:
        return False
    if stated.is_of_video:
        return True
    last = end
    with open_container(source) as container:
        for packet in read_packets(container):
            if packet.pts is not None and packet.time_base is not None:
                over = packet.pts + (packet.duration or 0)
                last = max(last, float(over * packet.time_base))
    return stated.end > last + tolerance
