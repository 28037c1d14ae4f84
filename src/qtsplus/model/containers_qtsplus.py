"""Opens the containers of videos with PyAV: their bytes alone, the stream that is shown, and what the header states."""

import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import IO, Any

try:  # optional: who gives frames needs no decoder
    import av
except ImportError:
    av = None  # type: ignore[assignment]

from .clock_qtsplus import ARBITRARY_CLOCK

Source = str | io.BytesIO  # the path of a file, or one in memory

_NO_TIMESTAMPS = 0x80  # AVFMT_NOTIMESTAMPS: a bare stream, whose length FFmpeg guesses from its rate of bits
# In ASF the object with the length, which FFmpeg ignores where the file is not as long as its header says.
_ASF_FILE_PROPERTIES = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
_ASF_HEADER_BYTES = 2**16
_ASF_IS_LIVE = 1  # the flag of a header that was written before the length was known

# The tags of older files are no UTF-8; PyAV from 19 on keeps their bytes.
TAGS: dict[str, Any] = {"metadata_errors": "replace"} if av and int(av.__version__.split(".")[0]) < 19 else {}

# What FFmpeg would follow to other files and servers.
_LIST = re.compile(rb"\W{0,3}\s*(#EXTM3U|ffconcat|file\s|v=0\s|\[\w+\]|(<\?xml[^>]*>\s*)?<(MPD|smil))", re.IGNORECASE)


@contextmanager
def open_container(source: Source) -> Iterator[Any]:
    """A file, or one in memory. FFmpeg gets its bytes and no protocol: a file may name others, which it would go to."""
    with open_source(source) as file:
        file.seek(0)
        refuse_list(file.read(400))
        file.seek(0)
        with av.open(file, options={"protocol_whitelist": "none"}, **TAGS) as container:
            yield container


def open_source(source: Source) -> Any:
    return open_file(source) if isinstance(source, str) else nullcontext(source)


def open_file(path: str) -> IO[bytes]:
    """Opens a plain file; raises `ValueError` for a pipe or a device, which may have no end. No pipe is waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags), "rb", buffering=0)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError("it is a pipe or a device; expected a plain file")


def refuse_list(head: bytes) -> None:
    """Raises a `ValueError` for a file of which FFmpeg would read others, from its first 400 bytes."""
    if _LIST.match(head):
        raise ValueError("it is a list of other places, which is not followed; give the films themselves")


def film_stream(container: Any) -> Any:
    """The stream that a player shows; raises `ValueError` if there is none, only a cover, or no decoder for it."""
    films = _films(container)
    if not films:
        raise ValueError("it has a cover and no film" if container.streams.video else "it has no video stream")
    best = container.streams.best("video")
    stream = best if best in films else films[0]
    if stream.codec_context is None:
        raise ValueError("there is no decoder for its codec; convert it, such as to H.264")
    return stream


def _films(container: Any) -> list[Any]:
    return [one for one in container.streams.video if not one.disposition & av.stream.Disposition.attached_pic]


def choice_of(container: Any, stream: Any) -> list[str]:
    """Which of several video streams is read, where the file does not name one."""
    films = _films(container)
    if len(films) == 1 or sum(bool(one.disposition & av.stream.Disposition.default) for one in films) == 1:
        return []
    number, size = films.index(stream) + 1, f"{stream.width} x {stream.height}"
    return [f"has {len(films)} video streams, and names none; number {number}, of {size} pixels, is read"]


@dataclass(frozen=True)
class Stated:
    """What the header of a file states of its video."""

    frames: int  # 0 where it states none
    fps: Any  # of a constant rate, or the mean; a fraction or `None`
    begin: float  # seconds on the file's clock at which a player's begins
    end: float | None  # seconds on the file's clock
    is_of_video: bool  # whether the end is that of the video, which sound may outlast


def read_stated(source: Source, container: Any, stream: Any) -> Stated:
    """What the header states; an end only where FFmpeg does not make it from what is there of the file."""
    fps = stream.guessed_rate or stream.average_rate
    name = container.format.name
    if container.format.flags & ARBITRARY_CLOCK:
        return Stated(stream.frames, fps, (container.start_time or 0) / av.time_base, None, False)
    if container.format.flags & _NO_TIMESTAMPS:
        return Stated(stream.frames, fps, 0.0, None, False)
    if name == "avi":  # counts the frames that were left out too
        end = float(stream.frames * stream.time_base) if stream.frames else None
        return Stated(0, fps, 0.0, end, True)
    if name != "asf" and stream.duration is not None:
        end = float(((stream.start_time or 0) + stream.duration) * stream.time_base)
        return Stated(stream.frames, fps, 0.0, end, True)
    end = None if container.duration is None else container.duration / av.time_base
    if name == "asf" and end is None:
        end = _asf_end(source)
    return Stated(stream.frames, fps, 0.0, end, False)


def _asf_end(source: Source) -> float | None:
    """The seconds that the header of an ASF file states."""
    with open_source(source) as file:
        file.seek(0)
        head = file.read(_ASF_HEADER_BYTES)
    properties = head.partition(_ASF_FILE_PROPERTIES)[2]
    length = int.from_bytes(properties[48:56], "little") / 1e7
    preroll = int.from_bytes(properties[64:72], "little") / 1e3
    flags = int.from_bytes(properties[72:76], "little")
    return None if flags & _ASF_IS_LIVE or length <= preroll else length - preroll


def ends_early(source: Source, stated: Stated, end: float, tolerance: float) -> bool:
    """Whether a file ends some seconds before its header says, where its frames end: its sound may go on."""
    if stated.end is None or stated.end <= end + tolerance:
        return False
    if stated.is_of_video:
        return True
    with open_container(source) as container:
        last = end
        for packet in container.demux():
            if packet.pts is not None and packet.time_base is not None:
                last = max(last, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    return stated.end > last + tolerance
