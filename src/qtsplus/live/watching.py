"""Questions to video that is still coming: files, pipes, addresses and cameras."""

import errno
import heapq
import itertools
import math
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import av
import numpy as np
from transformers.utils import logging

from ..asking.session import Answer
from ..common.files import first_line
from ..common.validation import check_count
from ..model.clock_qtsplus import ARBITRARY_CLOCK, LEAP, Clock, with_next
from ..model.containers_qtsplus import TAGS, ends_early, film_stream, open_container, read_stated
from ..model.decoding_qtsplus import Upright, shown_name
from ..model.video_qtsplus import require_positive, resize_frame, shrink
from .stream import Stream

logger = logging.get_logger(__name__)

ROOM = 16  # frames of a source that wait to be encoded
DEVICES = ("v4l2:", "avfoundation:", "dshow:", "x11grab:", "lavfi:")  # of libavdevice, as FORMAT:NAME
CAMERAS = ("rtsp://", "rtsps://", "rtmp://", "udp://", "rtp://", "srt://", "/dev/", *DEVICES)  # what waits for nobody
# By what an address begins with, the protocols of FFmpeg to which what is sent may lead.
_PROTOCOLS = {
    **dict.fromkeys(("http", "https"), "http,https,httpproxy,tcp,tls,crypto,data"),
    **dict.fromkeys(("rtsp", "rtsps"), "rtsp,rtsps,rtp,srtp,udp,tcp,tls"),
    **dict.fromkeys(("rtmp", "rtmps"), "rtmp,rtmps,tcp,tls"),
    **{"udp": "udp", "rtp": "rtp,srtp,udp", "srt": "srt", "tcp": "tcp"},
}
_UNREADABLE = (av.error.FFmpegError, OSError, ValueError)  # what reading a bad stream raises
_UNTIMED = re.compile("mp?jpeg|obu|.*_pipe")  # formats without times, to whose frames FFmpeg gives 25 a second
_OPENED = {"fpsprobesize": "0", "rtsp_transport": "tcp"}  # else FFmpeg waits for 20 frames, to tell their rate


class Source:
    """
    The frames of one source, at most `fps` a second, which a thread reads.

    At most [`ROOM`] of them wait. Then a file, a pipe or a server has to wait too. A camera does not: the oldest frame
    that waits is dropped for the newest, and counted in `dropped`.

    Args:
        address: a file or a named pipe, `-` for standard input, an address, or a device such as `/dev/video0` or
            `avfoundation:0`.
        timeout: seconds without a frame after which a source has failed that is no file.
        start: the second from which on there are frames.
        began: when the clock of the stream stood at 0, by `time.monotonic`. A camera's seconds are of that clock, as
            far apart as the camera says and never ahead: the first frame that was waited for was taken when it came,
            those held while the camera was opened between that and now. Multipart JPEG at an address has no times;
            each frame has that of its arrival. Other sources have a player's seconds.
        name: what messages call it, instead of by its address.

    Iterating gives (seconds, `[H, W, 3]` uint8) until the source ends, or raises `TimeoutError` where nothing came for
    too long, and `ValueError` for what cannot be opened or decoded, or breaks off.
    """

    def __init__(self, address: str, fps: float, timeout: float, began: float, start: float = 0.0, name: str = ""):
        address = re.sub("^[A-Za-z]+://", lambda scheme: scheme[0].lower(), address).removeprefix("file://")
        self.address, self.fps, self.timeout, self.began, self.start = address, fps, timeout, began, start
        self.name, self.scheme = name or shown_name(address), address.partition("://")[0]
        self.is_camera = address.startswith(CAMERAS)
        self.is_pipe = address == "-" or (os.path.exists(address) and stat.S_ISFIFO(os.stat(address).st_mode))
        self.is_file = not (self.is_camera or self.scheme in _PROTOCOLS or self.is_pipe)
        if self.is_file and not os.path.isfile(address):
            expected = f"a file, an address ({', '.join(_PROTOCOLS)}), a device such as /dev/video0, or -"
            raise ValueError(f"There is no stream {self.name!r}; expected {expected}.")
        self.dropped, self.newest = 0, 0.0  # seconds that were read so far
        self.clock: Clock | None = None
        self.sound = False  # whether it has some, which is not read
        self._states: list[str] = []
        self._waiting: queue.Queue[Any] = queue.Queue(ROOM)
        self._closed = False
        threading.Thread(target=self._read, daemon=True, name=f"qtsplus-watch {self.name}").start()

    def __iter__(self) -> Iterator[tuple[float, np.ndarray]]:
        while True:
            try:
                item = self._waiting.get(timeout=None if self.is_file else self.timeout)
            except queue.Empty as error:
                item = error
            if item is None:
                return
            if isinstance(item, (queue.Empty, av.error.ExitError)):  # our patience ended, or FFmpeg's
                state = "sent no frame for" if self.clock else "sends nothing, or too little to be opened within"
                raise TimeoutError(f"The stream {self.name!r} {state} {self.timeout:g} s.") from item
            if isinstance(item, BaseException) and not isinstance(item, (av.error.FFmpegError, OSError, ValueError)):
                raise RuntimeError(
                    f"Reading the stream {self.name!r} ended with {type(item).__name__}: {item}"
                ) from item
            if isinstance(item, Exception):
                expected = " Expected MPEG-TS, Matroska or fragmented mp4: another mp4 has to be a file."
                expected *= not (self.is_camera or self.is_file)
                why = getattr(item, "strerror", None) or item  # without the address
                raise ValueError(f"Cannot read the stream {self.name!r}: {first_line(why)}.{expected}") from item
            yield item

    @property
    def warnings(self) -> list[str]:
        """What is wrong with it so far, one sentence each."""
        states = ([] if self.clock is None else self.clock.states) + self._states
        dropped = [f"{self.dropped} frames of {self.name!r} came too fast to be encoded."] * bool(self.dropped)
        return [f"The stream {self.name!r} {state}." for state in states] + dropped

    def close(self) -> None:
        """Has the thread end with the frame that it is reading."""
        self._closed = True

    def _read(self) -> None:
        try:
            for item in self._decode():
                self._put(item)
                if self._closed:
                    return
            self._put(None)
        except BaseException as error:  # raised again where the frames are read, which would wait for ever
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._closed:
            try:
                return self._waiting.put(item, timeout=0.1)
            except queue.Full:
                if self.is_camera:
                    self._waiting.get_nowait()
                    self.dropped += 1

    def _open(self) -> Any:
        if self.is_pipe:  # what is sent may name other places
            options = {**_OPENED, "protocol_whitelist": "none"}
            is_standard_input = self.address == "-"
            place = 0 if is_standard_input else self.address
            # It is read for as long as the container is.
            pipe = open(place, "rb", buffering=0, closefd=not is_standard_input)  # noqa: SIM115
            return av.open(pipe, options=options, **TAGS)
        if self.is_file:
            return open_container(self.address)
        if self.address.startswith(("/dev/", *DEVICES)):
            kind, _, name = re.sub("^/dev/", "v4l2:/dev/", self.address).partition(":")
            return av.open(name, format=kind, timeout=self.timeout)
        options = {**_OPENED, "protocol_whitelist": _PROTOCOLS[self.scheme]}
        return av.open(self.address, options=options, timeout=self.timeout, **TAGS)

    def _decode(self) -> Iterator[tuple[float, np.ndarray]]:
        opened = time.monotonic() - self.began
        with self._open() as container:
            stream, upright = film_stream(container), Upright()
            self.sound = bool(container.streams.audio)
            stated = read_stated(self.address, container, stream) if self.is_file else None
            arbitrary = container.format.flags & ARBITRARY_CLOCK
            begin = (container.start_time or 0) / av.time_base if arbitrary else 0.0
            untimed = not self.is_file and bool(_UNTIMED.fullmatch(container.format.name))
            self.is_camera |= untimed and container.format.name == "mpjpeg" and not self.is_pipe
            step, synced, came, before = -1, -1, math.inf, 0.0
            for frame, after in with_next(self._frames(container, stream), self.is_camera):
                if frame.time is None or (untimed and not self.is_camera):
                    raise ValueError("its frames have no times")
                if after is not None and frame.time > (after.time or 0) + LEAP:
                    self.clock.strays += 1  # type: ignore[union-attr]  # of a frame that is shown before the next
                    continue
                now = math.inf
                if self.is_camera:
                    now, joins = time.monotonic() - self.began, len(self.clock.joins)  # type: ignore[union-attr]
                    if untimed or (synced < joins and now - came > (frame.time - before) / 2):  # it was waited for
                        begin, synced = frame.time - now, joins
                    elif came == math.inf:
                        begin = frame.time - opened
                    came, before = now, frame.time
                seconds = min(max(frame.time - begin, 0.0), now)
                self.newest = max(self.newest, seconds)
                if seconds >= self.start and int(seconds * self.fps + 1e-3) > step:
                    step = int(seconds * self.fps + 1e-3)
                    yield seconds, upright(frame, stream)
            # The last frame may last a while.
            if stated is not None and ends_early(self.address, stated, self.newest, 0.05 * self.newest + 1):
                read = f"and {self.newest:.1f} s can be read"
                self._states.append(f"is incomplete: its header states {stated.end:.1f} s, {read}")

    def _frames(self, container: Any, stream: Any) -> Iterator[Any]:
        self.clock = clock = Clock(container, stream)
        for packet in clock.over(self._packets(container, stream), self.is_camera):
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                self._states = ["is damaged, and what cannot be decoded is left out"]
                continue
            for frame in frames:
                if frame.is_corrupt:
                    self._states = ["is damaged, and some of its frames are shown as far as they go"]
                frame.pts = heapq.heappop(clock.waiting) if clock.waiting else frame.pts
                yield frame

    def _packets(self, container: Any, stream: Any) -> Iterator[Any]:
        try:
            yield from container.demux(stream)
        except OSError as error:
            # Where a server states no length, FFmpeg takes the end of what it sends for a fault.
            unstated = self.address.lower().startswith("http") and (container.size or 0) <= 0
            if error.errno != errno.EIO or not unstated:
                raise
            last = av.Packet()  # of no bytes, with which a decoder gives what it still holds
            last.stream, last.time_base = stream, stream.time_base
            yield last


def watch(
    model: Any,
    processor: Any,
    sources: Mapping[str, str],
    question: str,
    *,
    every: float = 10.0,
    fps: float = 2.0,
    start: float = 0.0,
    end: float | None = None,
    max_frames: int | None = None,
    max_pixels: int | None = None,
    memory_tokens: int = 4096,
    timeout: float = 10.0,
    stream: Stream | None = None,
    **choice: Any,
) -> Iterator[Answer]:
    """
    Answers one question again and again while videos come: every so many seconds of video, and once more at their end.

    Args:
        sources: by name a file, `-` for standard input, an address (http, rtsp, ...) or a device such as
            `/dev/video0`. All share one clock and one memory.
        every: seconds of video from answer to answer.
        start, end: seconds of the clock between which is looked at.
        max_frames: the most to look at, of all sources together.
        max_pixels: the most of one frame; a larger one is looked at smaller.
        fps, memory_tokens: as for [`Stream`].
        timeout: seconds without a frame after which a source has failed that is no file.
        stream: the memory, which can be asked meanwhile; made anew of the last options when absent.
        choice: as for [`Stream.ask`].

    Yields:
        answers of [`Stream.ask`]; their `warnings` count the frames that came faster than they were encoded.

    Raises:
        TimeoutError: a pipe, an address or a camera sent nothing for too long.
        ValueError: no source, one that cannot be read or breaks off, a question or a number out of its range.
    """
    require_positive("every", every)
    if not sources:
        raise ValueError("There is nothing to watch; name a file, an address or a device.")
    if not 0 < timeout <= 1e6:
        raise ValueError(f"timeout={timeout!r}: expected seconds above 0, at most a million.")
    for name, most in (("max_frames", max_frames), ("max_pixels", max_pixels)):
        if most is not None:
            check_count(name, most, name.removeprefix("max_"))
    last = math.inf if end is None else end
    if not 0 <= start < last:
        raise ValueError(f"start={start!r} and end={end!r}: expected seconds, the end behind the start.")
    stream = stream or Stream(model, processor, memory_tokens=memory_tokens, question=question, fps=fps)
    began, looked = time.monotonic(), 0
    opened = {name: Source(address, fps, timeout, began, start, name) for name, address in sources.items()}

    def answer() -> Answer:
        warnings = [warning for source in opened.values() for warning in source.warnings]
        if looked == max_frames:
            warnings.append(f"Looked at {looked} frames, the most that were asked for; nothing behind them.")
        unheard = any(source.sound for source in opened.values())
        return replace(stream.ask(question, **choice), warnings=warnings, unheard=unheard)

    try:
        due = every
        named = [zip(itertools.repeat(name), source) for name, source in opened.items()]
        coming = itertools.takewhile(lambda one: one[1][0] <= last, heapq.merge(*named, key=lambda one: one[1][0]))
        for name, (seconds, frame) in itertools.islice(coming, max_frames):
            looked += 1
            if seconds >= due:
                due = (seconds // every + 1) * every
                if stream.num_tokens:
                    yield answer()
            if max_pixels is not None:
                frame = resize_frame(processor.video_processor, shrink(frame.shape[:2], max_pixels, 1), frame)
            stream.append([frame], [seconds], name)
        stream.finish()
        if not stream.num_tokens:
            newest = max(source.newest for source in opened.values())
            end_of_it = "" if newest >= last else f"; what is watched ended at {newest:.1f} s"
            raise ValueError(f"There is no frame to look at from {start:g} s to {last:g} s{end_of_it}.")
        yield answer()
    finally:
        for source in opened.values():
            source.close()
