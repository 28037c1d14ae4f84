"""Decodes video files with PyAV: the chosen frames, each as it is shown at its time. Fetches those at an address."""

import base64
import functools
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
from contextlib import contextmanager
from fractions import Fraction
from typing import IO, Any

import numpy as np
from transformers.utils import logging

try:  # optional: who gives frames needs no decoder
    import av
except ImportError:
    av = None  # type: ignore[assignment]

from .clock_qtsplus import LEAP, NEAR, PAUSE, Clock, regular_clock
from .containers_qtsplus import Stated, choice_of, ends_early, film_stream, open_container, open_source, read_stated

logger = logging.get_logger(__name__)

_ORDER = 4  # packets within which the order of decoding is another than that of showing, about
_EARLY = 0.5  # seconds by which a video may end before its header says
_JOIN = 2  # packets before a key frame, of which FFmpeg calls one damaged where two recordings in MPEG-TS meet

ADDRESS_TIMEOUT, ADDRESS_SECONDS = 30.0, 1800.0  # in which a server sends nothing; in which all has to arrive
ADDRESS_BYTES = 2**30  # of a video at an address, which is read into memory


class Film:
    """
    A video file, the one at an `http(s)` address, or in a `data:` address: when a player shows its frames, and those.

    Attributes:
        total, fps: frames and their rate on a regular clock. At a constant rate these are the file's own frames; at a
            variable one frame `i` is what a player shows `i / fps` seconds after the first.
        start: when a player shows the first frame, in seconds.
        sound: whether the file has some, which is not read.
        warnings: what is wrong with the file, one sentence each; `show` adds what it cannot decode.

    Raises:
        ValueError: a file that is missing, cannot be decoded, has no frame, or is a list of others; an address that
            does not answer, holds no base64, or has a file of more than 1 GiB.
        ImportError: PyAV is not installed.
    """

    def __init__(self, path: str):
        if av is None:
            raise ImportError("Reading a video needs PyAV (`pip install av`).")
        self.name, self.source = shown_name(path), _find(path)
        with self._naming(), open_container(self.source) as container:
            stream = film_stream(container)
            dated, said = self._read_packets(container, stream)
            self.sound = bool(container.streams.audio)
            stated = read_stated(self.source, container, stream)
            if (stream.time_base or 1) >= 1 and (stream.codec_context.framerate or 0) > 1:
                raise ValueError("it has no time scale, so when its frames are shown is unknown")
        self.first, clock = 0.0, None  # when the first frame is shown by the file
        if dated:
            seconds = self._seconds(self.pts[self.order])
            self.first, self.times = float(seconds[0]), seconds - seconds[0]
            clock = regular_clock(self.times, self._seconds(self.end) - self.first)
        if clock is None:
            if not stated.fps:
                states = "states neither times nor a frame rate"
                raise ValueError(f"The video {self.name!r} {states}; pass its frames, with `fps=`.")
            clock = len(self.order), float(stated.fps)
        self.total, self.fps = clock
        if not self.timed and self.total == len(self.order):
            self.times = np.arange(self.total) / self.fps  # [N], when the frames are shown, in seconds from the first
        self.start = max(self.first - stated.begin, 0.0)
        self.warnings: list[str] = []
        missing = self._missing(stated, self.first + self.total / self.fps)
        self.follows = not (missing or self.joined)  # whether its key frames are where the file says
        for state in [*said, f"is incomplete: {missing}"] if missing else said:
            self._warn(state)
        pause = np.diff(self.times, append=self.times[-1])
        if pause.max() > PAUSE:
            self._warn(f"has no frame for {pause.max():.0f} s from {self.times[pause.argmax()]:.1f} s on")
        if self.joined:
            self._warn("is followed by another in the same file, which players pass over; split them")

    def _read_packets(self, container: Any, stream: Any) -> tuple[bool, list[str]]:
        """
        Goes through the file, whose header may be wrong, without decoding; whether it says when frames are shown, and
        what is to be said of its clock.
        """
        clock, pts, dts, flags, last = Clock(container, stream), [], [], [], None
        for packet in clock.over(container.demux(stream)):
            if packet.size:
                last = packet.pos
                pts.append(packet.pts)
                dts.append(packet.dts)
                flags.append((packet.is_keyframe, packet.is_corrupt, packet.is_discard))
        if clock.reorders and None not in (*pts, *dts):
            clock.mend(pts, dts)
        key, damaged, hidden = np.array(flags, bool).reshape(-1, 3).T
        lost: dict[int, float] = {}  # seconds without a frame beside what is damaged, by where they begin
        for place in np.flatnonzero(damaged).tolist():
            beside = sorted(time for time in pts[max(place - _ORDER, 0) : place + _ORDER] if time is not None)
            lost |= {time: gap for time, gap in zip(beside, np.diff(beside) * clock.step, strict=False) if gap > LEAP}
            damaged[place] = not key[place + 1 : place + 1 + _JOIN].any()
        self.lost = sum(lost.values())
        self.joined = container.format.name.startswith(("mov,mp4", "matroska", "flv")) and last is not None
        if self.joined:  # these cannot be: whether the file has its first bytes again
            with open_source(self.source) as file:
                file.seek(0)
                head = file.read(8)
                file.seek(last or 0)
                self.joined = head in file.read()
        # Of the packets, as the file has them: when each is shown, which need none before them, and which are there.
        self.time_base, self.end = stream.time_base or Fraction(1), clock.end
        dated = None not in pts
        self.pts = np.array(pts if dated else range(len(pts)), np.int64)
        self.key, self.whole = key & ~damaged, ~damaged
        # Whether a decoded frame has its packet's time; else frames have all the times in their order.
        shown = self.pts[~hidden]
        self.timed = dated and len(set(shown)) == len(shown) and not (clock.is_avi and clock.reorders)
        if clock.is_ps and pts:
            self.timed &= np.abs(np.sort(self.pts) - clock.waiting).max() * clock.step <= NEAR
            if not self.timed:
                dated, self.pts, self.end = True, np.array(clock.waiting), clock.due or 0
        # [N], the packets that are frames, in the order in which they are shown, without what an edit list cuts off.
        self.order = np.flatnonzero(~(hidden | damaged))
        if not len(self.order):
            raise ValueError("it has 0 frames")
        self.order = self.order[np.argsort(self.pts[self.order], kind="stable")]
        return dated, clock.states + choice_of(container, stream)

    def _warn(self, state: str) -> None:
        self.warnings.append(f"The video {self.name!r} {state}.")
        logger.warning_once(self.warnings[-1])

    def _seconds(self, times: Any) -> Any:
        """Seconds of times such as `pts`."""
        return times * self.time_base.numerator / self.time_base.denominator

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """The error about a file that is no video, or a broken one."""
        try:
            yield
        except (av.error.FFmpegError, OSError, ValueError) as error:
            expected = "Expected a complete file with a video stream."
            why = getattr(error, "strerror", None) or error  # without a number
            raise ValueError(f"Cannot decode {self.name!r} as a video: {why}. {expected}") from error

    def stretch(self, start: float | None, end: float | None) -> tuple[int, int]:
        """
        The first frame of the clock, and the one behind the last, that come up in a player between two times; the one
        that it shows all the while where none does.
        """
        first = 0 if start is None else max(math.ceil(min((start - self.start) * self.fps, self.total) - 1e-3), 0)
        stop = self.total if end is None else math.floor(min((end - self.start) * self.fps + 1e-3, self.total - 1)) + 1
        last = self.start + self.total / self.fps
        if start is not None and self.start <= start < last and first >= stop and (end is None or start <= end):
            first, stop = first - 1, first
        if first >= stop:
            bounds = f"from {0 if start is None else start:g} to {'its end' if end is None else f'{end:g} s'}"
            length = f"{self.total / self.fps:.1f} s from {self.start:.1f} s on"
            raise ValueError(f"The video {self.name!r} shows no frame {bounds}; it has {length}.")
        return first, stop

    def _missing(self, stated: Stated, end: float) -> str | None:
        """What of a video is not there, which ends after `end` seconds."""
        packets = len(self.whole)
        whole = int(self.whole.sum())
        # Of a trimmed video the header counts the frames that are not shown, but not their time.
        if stated.frames > whole and (stated.end is None or stated.end > end + 0.5 / self.fps):
            return f"its header states {stated.frames} frames, and {whole} can be read"
        states = []
        # The last frame may last a little longer.
        mean_gap = float(self.times[-1]) / max(len(self.times) - 1, 1)
        if not stated.frames and ends_early(self.source, stated, end, max(_EARLY, 3 * mean_gap)):
            states.append(f"its header states {stated.end:.1f} s, and {end:.1f} s can be read")
        if whole < packets:
            states.append(f"{packets - whole} of its {packets} frames are damaged and left out")
        if self.lost:
            states.append(f"about {self.lost:.1f} s are missing")
        return " and ".join(states) or None

    def show(self, instants: np.ndarray) -> Iterator[np.ndarray]:
        """
        The frames shown at `instants`, increasing seconds from the first frame: `[H, W, 3]` uint8 each. Of a film whose
        frames follow from its key frames only what they need is decoded. A frame that cannot be decoded whole is shown
        as far as it goes, or else the one before it, and `warnings` say how many.
        """
        given, lost, readable = 0, 0, int(self.whole.sum())
        broken = "" if self.follows else "it is not whole"
        reason = broken if self.timed else "it does not say when each is shown"
        with self._naming():
            if not reason:
                for frame, whole in self._show(instants, only=True):
                    yield frame
                    given, lost = given + 1, lost + (not whole)
                reason = "not all follow from its key frames"
            if given < len(instants):
                if len(np.unique(self._packets(instants))) < len(self.order):
                    logger.warning_once(f"Every frame of the video {self.name!r} is decoded, since {reason}.")
                for frame, whole in itertools.islice(self._show(instants), given, None):
                    yield frame
                    lost += not whole
        lost = lost or min(readable - int(self.whole.sum()), len(instants))
        if lost and not any("is damaged" in warning for warning in self.warnings):
            self._warn(f"is damaged: {lost} of the {len(instants)} frames that are looked at are, or follow from such")

    def _packets(self, instants: np.ndarray) -> np.ndarray:
        """`[T]`, the packets of the frames that are shown at `instants`."""
        return self.order[np.maximum(np.searchsorted(self.times, instants, side="right") - 1, 0)]

    def _show(self, instants: np.ndarray, only: bool = False) -> Iterator[tuple[np.ndarray, bool]]:
        """
        The frames, and whether each is its packet's and nothing since its key frame is damaged. With `only`, only what
        these need is decoded, and it ends where a frame does not come out of the decoder at its time.
        """
        chosen = self._packets(instants)
        shown, given, upright, self.hurt = None, 0, Upright(), False  # and whether something since a key frame is
        with open_container(self.source) as container:
            stream = film_stream(container)
            stream.thread_type = "AUTO"
            frames = self._decode(container, stream, self.needed(chosen) if only else None)
            for number, frame in enumerate(itertools.chain(frames, [None])):
                # Until this frame appears the one before it is shown.
                before = len(instants) if frame is None else int(np.searchsorted(instants, self._time(frame, number)))
                if shown is not None and before > given:
                    right = (self.pts[chosen[given:before]] == shown.pts) | (not self.timed)
                    if only and not right.all():
                        return
                    yield from zip(itertools.repeat(upright(shown, stream)), right & (not self.hurt))
                    given = before
                if given == len(instants):
                    return
                shown = frame
                self.hurt = frame is not None and (frame.is_corrupt or (self.hurt and not frame.key_frame))
        if not given and not only:
            raise ValueError("no frame could be decoded")

    def _time(self, frame: Any, number: int) -> float:
        """When a decoded frame, of a number, is shown, in seconds from the first."""
        if self.timed and frame.pts is not None:
            return self._seconds(frame.pts) - self.first
        return float(self.times[number]) if number < len(self.times) else math.inf

    def needed(self, chosen: np.ndarray) -> np.ndarray:
        """`[P]` int: 2 for the packets of frames by their numbers, 1 for others since their key frames, else 0."""
        keys, changes = np.append(0, np.flatnonzero(self.key)), np.zeros(len(self.key) + 1, np.int64)
        place = np.searchsorted(keys[1:], chosen, side="right")
        # Some frames stand behind a key frame in the file and are shown before it.
        place -= self.pts[keys[place]] > self.pts[chosen]
        np.add.at(changes, keys[np.maximum(place, 0)], 1)
        np.subtract.at(changes, chosen, 1)
        needed = np.minimum(changes.cumsum()[:-1], 1)
        needed[chosen] = 2
        return needed

    def _decode(self, container: Any, stream: Any, needed: np.ndarray | None) -> Iterator[Any]:
        """The frames in the order in which they are shown: all of them, or at least those that are [`needed`]."""
        decoder, number, holds = stream.codec_context, -1, False
        last = len(self.key) - 1 if needed is None else int(needed.nonzero()[0][-1])
        for packet in container.demux(stream):
            number += packet.size > 0
            if number > last:
                break
            if packet.size == 0 or not self.whole[number]:
                continue
            if needed is not None and not needed[number]:
                if holds:
                    yield from drain(decoder)
                    decoder.flush_buffers()
                    holds = False
                continue
            packet.pts = int(self.pts[number])
            if needed is not None and decoder.name in ("h264", "hevc"):  # passes over what nothing is made from
                decoder.skip_frame = "DEFAULT" if needed[number] == 2 else "NONREF"
            try:
                yield from packet.decode()
            except av.error.InvalidDataError:
                self.whole[number] = False
                self.hurt = True
            holds = True
        yield from drain(decoder)


def drain(decoder: Any) -> list[Any]:
    """The frames that a decoder still holds; none where it finds only then that it cannot decode one."""
    try:
        return decoder.decode(None)
    except av.error.InvalidDataError:
        return []


class Upright:
    """
    Brings the frames of one video to `[H, W, 3]` uint8 as they are shown, all as large as the first: in square pixels,
    and upright, since phones store a portrait video lying down, and some front cameras a mirrored one.
    """

    def __init__(self) -> None:
        # One for this video: PyAV 19's own serves all, and a process forked later would wait for its threads forever.
        self.reformatter = av.video.reformatter.VideoReformatter()
        self.size: tuple[int, int] | None = None
        self.mirrored, self.turned = False, True

    def __call__(self, frame: Any, stream: Any) -> np.ndarray:
        if self.size is None:
            aspect = float(stream.sample_aspect_ratio or 1)
            self.size = round(frame.width * aspect) if 0.2 < aspect < 5 else frame.width, frame.height
            matrix = frame.side_data.get("DISPLAYMATRIX")  # asked once: who is asked lives until Python's collection
            if matrix is not None:
                (a, b, _, c, d), _ = np.split(np.frombuffer(matrix, np.int32) / 2**16, [5])
                self.mirrored, self.turned = a * d < b * c, a * d != b * c  # some writers leave it empty
        pixels = self.reformatter.reformat(frame, *self.size, format="rgb24").to_ndarray()
        return np.rot90(pixels[::-1] if self.mirrored else pixels, k=self.turned and round(frame.rotation / 90))


def _find(path: str) -> str | io.BytesIO:
    if is_address(path) or is_inline(path):
        return download(path) if is_address(path) else _decode_inline(path)
    path = path.removeprefix("file://")
    if os.path.isfile(path):
        return path
    if path == "-":
        raise ValueError("A video is read from a file; `qtsplus watch -` reads one from standard input.")
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"{path!r} is a pipe or a device; expected a plain file. `qtsplus watch` reads a pipe.")
    raise ValueError(
        f"There is no video at {shown_name(path)!r}; expected a video file, a folder of frames or an http(s) address."
    )


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
    place = re.search(r"[A-Za-z][\w+.-]*://", video)  # also behind white space, and of a stream
    if place is None:
        return video
    start = place.end()
    host = re.split(r"[/?#]", video[start:])[0]
    is_plain = "@" not in host and re.fullmatch(r"[^:]*(:\d*)?|\[.*", host)
    return video if is_plain else video[:start] + re.sub(r"^.*@", "***@", video[start:], flags=re.DOTALL)


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
        raise ValueError(f"Cannot load the video at {shown_name(address)!r}: expected http(s)://HOST/PATH.") from error
    if parts.username is not None:
        user = urllib.parse.unquote_to_bytes(f"{parts.username}:{parts.password or ''}")
        # Not sent on to wherever the server redirects to.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(user).decode()}")
    return request


class _OnTime(io.RawIOBase):
    """All that a host sends: headers, chunks and trailers as well, each of which a host may drip without end."""

    def __init__(self, source: Any, deadline: float):
        self.source, self.deadline, self.count = source, deadline, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """As that of a socket; `TimeoutError` once it is too late, and `OSError` for much more than a file may have."""
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"{self.count} bytes in {ADDRESS_SECONDS:g} s; download it, and give the file")
        received = self.source.readinto(buffer)
        self.count += received or 0
        if self.count > ADDRESS_BYTES * 9 / 8:
            raise OSError(f"it sends more than a file of {ADDRESS_BYTES / 2**20:.0f} MiB needs")
        return received

    def close(self) -> None:
        self.source.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer of which every byte has to come before a deadline."""

    def __init__(self, deadline: float, sock: Any, *arguments: Any, **options: Any):
        super().__init__(sock, *arguments, **options)
        self.fp: Any = io.BufferedReader(_OnTime(self.fp.detach(), deadline))


class _Fetching(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens the connections of one fetch, over which every answer, also one that redirects, has one deadline."""

    def __init__(self, connect: Callable[[http.client.HTTPConnection], Any] | None):
        super().__init__()
        self.connect, self.deadline = connect, time.monotonic() + ADDRESS_SECONDS

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> Any:
        def open_connection(*arguments: Any, **more: Any) -> http.client.HTTPConnection:
            connection = http_class(*arguments, **more)
            connection.response_class = functools.partial(_Response, self.deadline)
            if self.connect is not None:
                connection.sock = self.connect(connection)
            return connection

        return super().do_open(open_connection, req, **options)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def download(address: str) -> io.BytesIO:
    """The file at an `http(s)` address."""
    data = io.BytesIO()
    fetch(address, data)
    return data


def fetch(address: str, data: IO[bytes], connect: Callable[[http.client.HTTPConnection], Any] | None = None) -> None:
    """
    Writes the file at an `http(s)` address to `data`.

    Args:
        connect: opens the socket of a connection, to the very host that is named: redirects and proxies, which could
            lead elsewhere, are then not followed.

    Raises:
        ValueError: an address that is none, does not answer, or does not send the whole file, or sends more than 1 GiB
            or longer than half an hour.
    """
    request, name = parse_address(address), shown_name(address)
    direct = [] if connect is None else [urllib.request.ProxyHandler({}), _NoRedirects()]
    stated = None
    try:
        opener = urllib.request.build_opener(_Fetching(connect), *direct)
        with opener.open(request, timeout=ADDRESS_TIMEOUT) as response:
            stated = response.length
            while (stated or 0) <= ADDRESS_BYTES >= data.tell() and (block := response.read1(2**20)):
                data.write(block)
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
