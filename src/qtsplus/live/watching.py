"""Questions to video that is still coming: files, pipes, addresses and cameras."""

import errno
import heapq
import os
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import av
import numpy as np

from ..asking.session import Answer
from ..common.files import first_line
from ..model.addresses_qtsplus import local_path, shown_name
from ..model.clock_qtsplus import ARBITRARY_CLOCK, LEAP, Clock, with_next
from ..model.containers_qtsplus import (
    TAGS,
    UNDECODABLE,
    ends_early,
    open_container,
    read_packets,
    read_stated,
    video_stream,
)
from ..model.decoding_qtsplus import Upright
from ..model.numbers_qtsplus import require_positive
from ..model.sampling_qtsplus import ROUNDING
from .stream import Stream

Timed = Iterator[tuple[float, np.ndarray]]  # frames, each with the seconds at which it is shown
ROOM = 16  # frames of a source that wait to be encoded
DEVICES = ("v4l2:", "avfoundation:", "dshow:", "x11grab:", "lavfi:")  # devices of libavdevice are FORMAT:NAME
# Addresses of cameras begin with these. A camera does not wait until its frames are read.
CAMERAS = ("rtsp://", "rtsps://", "rtmp://", "udp://", "rtp://", "srt://") + DEVICES
_HTTP = "http,https,httpproxy,tcp,tls,crypto,data"
_RTSP = "rtsp,rtsps,rtp,srtp,udp,tcp,tls"
_RTMP = "rtmp,rtmps,tcp,tls"
# By the scheme of an address: the protocols that FFmpeg may use, for the address and for places that a playlist names.
_PROTOCOLS = {
    "http": _HTTP,
    "https": _HTTP,
    "rtsp": _RTSP,
    "rtsps": _RTSP,
    "rtmp": _RTMP,
    "rtmps": _RTMP,
    "udp": "udp",
    "rtp": "rtp,srtp,udp",
    "srt": "srt",
    "tcp": "tcp",
}
_UNREADABLE = (av.error.FFmpegError, OSError, ValueError)  # the errors that reading a bad stream raises
_UNTIMED = re.compile("mp?jpeg|obu|.*_pipe")  # formats without times, for which FFmpeg assumes 25 frames a second


class Source:
    """
    The frames of one source, at most `fps` a second. A thread reads them ahead.

    At most [`ROOM`] frames wait to be taken. While so many wait, a file, a pipe or a server has to wait too. A camera
    does not wait: its newest frame takes the place of the oldest one that waits, and `dropped` counts this.

    Args:
        address: a file or a named pipe, `-` for standard input, an address, or a device such as `/dev/video0` or
            `avfoundation:0`.
        fps: the most frames per second.
        timeout: seconds without a frame after which a source that is not a file has failed.
        began: `time.monotonic()` at second 0 of the [`Stream`]. A camera's frames have seconds since then, see
            [`_CameraClock`]; frames of other sources have the seconds at which a player shows them.
        name: the source's name in messages; without it they show the address.

    Iterating gives (seconds, `[H, W, 3]` uint8) until the source ends. It raises `TimeoutError` if no frame came for
    too long, and `ValueError` for a source that cannot be opened or decoded, or that breaks off.
    """

    def __init__(
        self,
        address: str,
        fps: float,
        timeout: float,
        began: float,
        name: str = "",
    ):
        address = local_path(address)
        if address.startswith("/dev/"):
            address = f"v4l2:{address}"
        self.address = address
        self.fps = fps
        self.timeout = timeout
        self.began = began
        self.name = name or shown_name(address)
        self.scheme = address.partition("://")[0]
        self.is_camera = address.startswith(CAMERAS)
        is_address = self.scheme in _PROTOCOLS
        self.is_pipe = address == "-" or (not is_address and Path(address).is_fifo())
        self.is_file = not (self.is_camera or self.is_pipe or is_address)
        if self.is_file and not os.path.isfile(address):
            raise ValueError(
                f"There is no stream {shown_name(address)!r}; expected a file, an address ({', '.join(_PROTOCOLS)}), a "
                "device such as /dev/video0, or -."
            )
        self.dropped = 0
        self.newest = 0.0  # seconds: when the newest frame so far is shown
        self.end = 0.0  # seconds: when the newest frame so far is over
        self.clock: Clock | None = None
        self.sound = False  # whether the source has sound, which is not read
        self._faults: list[str] = []  # the ends of sentences that begin with "The stream ..."
        self._gap: list[str] = []  # the same about the newest gap, if there was one
        self._waiting: queue.Queue[Any] = queue.Queue(ROOM)
        self._closed = False
        reader = threading.Thread(target=self._read, daemon=True, name=f"qtsplus-watch {self.name}")
        reader.start()

    def __iter__(self) -> Timed:
        patience = None if self.is_file else self.timeout
        while True:
            try:
                item = self._waiting.get(timeout=patience)
            except queue.Empty as error:
                raise self._failure(error) from error
            if item is None:
                return
            if isinstance(item, _UNREADABLE):
                raise self._failure(item) from item
            if isinstance(item, BaseException):
                raise item
            yield item

    def _failure(self, error: Exception) -> Exception:
        """The exception to raise for a stream that cannot be read, or that sends nothing."""
        if isinstance(error, (queue.Empty, av.error.ExitError)):  # FFmpeg has the same timeout as the queue
            return TimeoutError(f"The stream {self.name!r} sent no frame for {self.timeout:g} s.")
        reason = getattr(error, "strerror", None) or error  # `strerror` does not contain the address
        message = f"Cannot read the stream {self.name!r}: {first_line(reason)}."
        # A `ValueError` is about the content; an `OSError` may be about a server that does not answer.
        if isinstance(error, ValueError) and not (self.is_camera or self.is_file):
            message += " Expected MPEG-TS, Matroska or fragmented mp4; an ordinary mp4 has to be a file."
        return ValueError(message)

    @property
    def warnings(self) -> list[str]:
        """What is wrong with the source so far, one sentence each."""
        faults = self._faults + self._gap
        if self.clock is not None:
            faults = self.clock.states + faults
        warnings = [f"The stream {self.name!r} {fault}." for fault in faults]
        if self.dropped:
            warnings.append(f"Frames of {self.name!r} came too fast to be encoded, and were left out: {self.dropped}.")
        return warnings

    def close(self) -> None:
        """Tells the thread to stop after the frame that it is reading."""
        self._closed = True

    def _read(self) -> None:
        """Runs in the thread: puts the frames into the queue, then `None`, or else the error that reading raised."""
        try:
            for item in self._decode():
                self._put(item)
                if self._closed:
                    return
            self._put(None)
        except BaseException as error:  # `__iter__` raises it again; it would wait for ever if the thread just ended
            self._put(error)

    def _put(self, item: object) -> None:
        while not self._closed:
            try:
                return self._waiting.put(item, timeout=0.1)
            except queue.Full:
                if self.is_camera:
                    self._waiting.get_nowait()
                    self.dropped += 1

    def _open(self):
        if self.is_file:
            return open_container(self.address)
        if self.address.startswith(DEVICES):
            kind, _, name = self.address.partition(":")
            return av.open(name, format=kind, timeout=self.timeout)
        options = {
            "fpsprobesize": "0",  # else FFmpeg waits for 20 frames to find their rate
            "rtsp_transport": "tcp",  # else RTSP uses UDP, which may lose packets
        }
        if not self.is_pipe:
            options["protocol_whitelist"] = _PROTOCOLS[self.scheme]
            return av.open(self.address, options=options, timeout=self.timeout, **TAGS)
        options["protocol_whitelist"] = "none"  # a playlist in the pipe must not open other places
        is_standard_input = self.address == "-"
        place = 0 if is_standard_input else self.address
        # It stays open without a `with`, since the container reads it from now on.
        pipe = open(place, "rb", buffering=0, closefd=not is_standard_input)  # noqa: SIM115
        return av.open(pipe, options=options, **TAGS)

    def _decode(self) -> Timed:
        opened = time.monotonic() - self.began
        with self._open() as container:
            stream = video_stream(container)
            if container.format.name == "mpjpeg" and not (self.is_file or self.is_pipe):
                self.is_camera = True  # MJPEG at an `http` address: the address does not say that it is a camera
            self.sound = bool(container.streams.audio)
            stated = read_stated(self.address, container, stream) if self.is_file else None
            upright = Upright()
            last_slot = -1
            for seconds, frame in self._timed(container, stream, opened):
                if 0 < self.end < seconds - LEAP and not (stated and stated.is_of_video):  # else it may be a still
                    self._gap = [f"has no frame for {seconds - self.end:.0f} s from {self.end:.1f} s on"]
                self.newest = max(self.newest, seconds)
                duration = float((frame.duration or 0) * (frame.time_base or 0))
                self.end = self.newest + (duration or 1 / self.fps)
                slot = int(seconds * self.fps + ROUNDING)  # at most one frame is taken in each slot of 1 / fps seconds
                if slot > last_slot:
                    last_slot = slot
                    yield seconds, upright(frame, stream)
            # The last frame begins at `newest`. The tolerance covers how long it lasts.
            tolerance = 0.05 * self.newest + 1
            if stated is not None and ends_early(self.address, stated, self.newest, tolerance):
                self._faults.append(
                    f"is incomplete: its header states {stated.end:.1f} s, and {self.newest:.1f} s can be read"
                )

    def _timed(self, container, stream, opened: float) -> Iterator[tuple[float, av.VideoFrame]]:
        """The frames with their seconds. `opened` is the second of the stream at which opening the source began."""
        clock = Clock(container, stream)
        self.clock = clock
        has_times = self.is_file or not _UNTIMED.fullmatch(container.format.name)
        begin = 0.0
        if container.format.flags & ARBITRARY_CLOCK:  # such as that of MPEG-TS, which need not begin at 0
            begin = (container.start_time or 0) / av.time_base
        camera_clock = _CameraClock(self.began, opened, has_times)
        for frame, after in with_next(self._frames(container, stream, clock), live=self.is_camera):
            if frame.time is None or not (has_times or self.is_camera):
                raise ValueError("its frames have no times")
            if after is not None and frame.time > (after.time or 0) + LEAP:
                clock.strays += 1  # a damaged time, long after that of the next frame: the frame is left out
            elif self.is_camera:
                yield camera_clock.seconds(frame.time, len(clock.joins)), frame
            else:
                yield max(frame.time - begin, 0.0), frame

    def _frames(self, container, stream, clock: Clock) -> Iterator[av.VideoFrame]:
        """The decoded frames. The newest sentence about damage replaces earlier ones."""
        for packet in clock.over(self._packets(container, stream), live=self.is_camera):
            try:
                frames = packet.decode()
            except UNDECODABLE:
                self._faults = ["is damaged, and what cannot be decoded is left out"]
                continue
            for frame in frames:
                if frame.is_corrupt:
                    self._faults = ["is damaged, and some of its frames are shown as far as they go"]
                if clock.waiting:  # AVI and MPEG-PS: each frame gets the smallest packet time that is not yet given
                    frame.pts = heapq.heappop(clock.waiting)
                yield frame

    def _packets(self, container, stream) -> Iterator[av.Packet]:
        try:
            yield from read_packets(container, stream)
        except OSError as error:
            # If a server states no length, FFmpeg takes the end of the video for an error.
            has_length = (container.size or 0) > 0
            if error.errno != errno.EIO or has_length or not self.scheme.startswith("http"):
                raise
            last = av.Packet()  # an empty packet makes the decoder return the frames that it still holds
            last.stream = stream
            last.time_base = stream.time_base
            yield last


@dataclass
class _CameraClock:
    """
    When the frames of a camera were taken, in seconds of the stream. The gaps between frames follow the camera's clock,
    and no frame is later than now.

    1. FFmpeg holds the frames that come while it opens the camera, and they arrive at once. The first of them counts as
       taken when opening began.
    2. The first frame that does not arrive at once counts as taken when it arrived: this sets the camera's clock.
    3. After the camera's clock restarts, the next frame that does not arrive at once sets it again.

    A camera without times, such as MJPEG at an address, has the time at which each frame arrives.
    """

    began: float  # `time.monotonic()` at second 0 of the stream
    opened: float  # the second of the stream at which opening the camera began
    has_times: bool
    begin: float | None = None  # the time of the camera's clock at second 0 of the stream
    joins_when_set: int = -1  # restarts of the camera's clock before an arrival set it; -1 before the first
    last_arrival: float = 0.0  # seconds of the stream
    last_time: float = 0.0  # seconds of the camera's clock

    def seconds(self, time_of_frame: float, joins: int) -> float:
        """
        When the next frame was taken, in seconds of the stream.

        Args:
            time_of_frame: seconds of the camera's clock.
            joins: how often the camera's clock has restarted so far.
        """
        now = time.monotonic() - self.began
        if not self.has_times:
            return now
        if self.begin is None:
            self.begin = time_of_frame - self.opened
        elif self.joins_when_set < joins:
            waited = now - self.last_arrival
            # Held frames arrive at once. Other frames arrive as far apart as they were taken.
            if waited > (time_of_frame - self.last_time) / 2:
                self.begin = time_of_frame - now
                self.joins_when_set = joins
        self.last_arrival = now
        self.last_time = time_of_frame
        return min(max(time_of_frame - self.begin, 0.0), now)


def _merged(sources: Mapping[str, Source]) -> Iterator[tuple[float, str, np.ndarray | None]]:
    """
    The frames of all sources in the order of their seconds, as (seconds, name of the source, `[H, W, 3]` uint8). When a
    source ends, `None` comes in place of a frame.
    """

    def of_source(name: str, source: Source):
        for seconds, frame in source:
            yield seconds, name, frame
        yield source.end, name, None

    return heapq.merge(*map(of_source, sources, sources.values()), key=itemgetter(0))


def watch(
    model,
    processor,
    sources: Mapping[str, str],
    question: str,
    *,
    every: float = 10.0,
    fps: float = 2.0,
    memory_tokens: int = 4096,
    timeout: float = 10.0,
    **choice,
) -> Iterator[Answer]:
    """
    Answers one question again and again while videos come: every so many seconds of video, and when all have ended.

    Args:
        sources: by name: a file, `-` for standard input, an address (http, rtsp, ...) or a device such as
            `/dev/video0`. All share one clock and one memory.
        every: seconds of video from one answer to the next.
        fps, memory_tokens: as for [`Stream`].
        timeout: seconds without a frame after which a source that is not a file has failed.
        choice: as for [`Stream.ask`].

    Yields:
        answers of [`Stream.ask`]. Their `warnings` say what is wrong with the sources, and count the frames that came
        faster than they were encoded.

    Raises:
        TimeoutError: a pipe, an address or a camera sent nothing for too long.
        ValueError: there is no source; a source cannot be read, breaks off, or has no frame; a question that cannot be
            asked; a number out of its range.
    """
    every = require_positive("every", every)
    if not sources:
        raise ValueError("There is nothing to watch; name a file, an address or a device.")
    if not 0 < timeout <= 1e6:
        raise ValueError(f"timeout={timeout!r}: expected seconds above 0, at most a million.")
    stream = Stream(model, processor, memory_tokens=memory_tokens, question=question, fps=fps)
    began = time.monotonic()
    opened = {name: Source(address, stream.fps, timeout, began, name) for name, address in sources.items()}

    def ask_now() -> Answer:
        warnings = []
        for source in opened.values():
            warnings += source.warnings
        unheard = any(source.sound for source in opened.values())
        return replace(stream.ask(question, **choice), warnings=warnings, unheard=unheard)

    try:
        due = every
        for seconds, name, frame in _merged(opened):
            if name in stream.cameras:
                stream.shown_until(name, seconds)
            if frame is None:
                continue
            if seconds >= due:
                due = (seconds // every + 1) * every
                if stream.num_tokens:
                    yield ask_now()
            stream.append([frame], [seconds], name)
        stream.finish()
        if not stream.num_tokens:
            raise ValueError(f"There was no frame in {list(sources)}; expected at least one.")
        yield ask_now()
    finally:
        for source in opened.values():
            source.close()
