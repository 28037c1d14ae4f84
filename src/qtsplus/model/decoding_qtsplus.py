"""Decodes video files with PyAV: the chosen frames, each as a player shows it at its time.

A packet of a file holds one frame, and a key frame can be decoded alone. To show some frames of a video, the packets
from the key frame before each are decoded (`needed`), and the others are skipped:

    packets     K . . . K . . . K . . .      K: a key frame
    shown         ^                 ^
    needed      1 2             1 . 2        2: shown, 1: only decoded
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
from transformers.utils import logging

try:  # optional: who gives frames needs no decoder
    import av
except ImportError:
    av = None  # type: ignore[assignment]

from .addresses_qtsplus import find_video, shown_name
from .clock_qtsplus import LEAP, NEAR, Clock, regular_clock
from .containers_qtsplus import (
    UNDECODABLE,
    Stated,
    ends_early,
    open_container,
    open_source,
    read_packets,
    read_stated,
    video_stream,
)

logger = logging.get_logger(__name__)

_EARLY = 0.5  # seconds by which a video may end before its header says
_JOIN = 2  # packets before a key frame, of which FFmpeg calls one damaged where two recordings in MPEG-TS meet
_JOINABLE = ("mov,mp4", "matroska", "flv")  # formats of which a player shows the first of two files in one
_SKIPPING_CODECS = ("h264", "hevc")  # whose decoders pass over frames from which no other is made

ShownFrame = tuple[np.ndarray, bool]  # [H, W, 3] uint8, and whether it is whole


class VideoDecoder:
    """
    The video in a file, at an `http(s)` address, or in a `data:` address: when a player shows its frames, and those.

    Attributes:
        total, fps: frames and their rate on a regular clock. At a constant rate these are the file's own frames; at a
            variable rate frame `i` is what a player shows `i / fps` seconds after the first.
        start: when a player shows the first frame, in seconds.
        sound: whether the file has some, which is not read.
        warnings: what is wrong with the file, one sentence each; `show` adds what it cannot decode.
        pts, key, whole: of each packet in the order of the file: when its frame is shown, in ticks; whether it needs
            no other packet; whether it can be decoded.
        order: the packets that are frames, in the order in which they are shown.
        times: `[N]`, when these are shown, in seconds from the first.
        timed: whether a decoded frame has the time of its packet. Else the frames have all the times in their order.

    Raises:
        ValueError: a file that is missing, cannot be decoded, has no frame, or is a list of others; an address that
            does not answer, holds no base64, or has a file of more than 1 GiB.
        ImportError: PyAV is not installed.
    """

    def __init__(self, path: str):
        if av is None:
            raise ImportError("Reading a video needs PyAV (`pip install av`).")
        self.name = shown_name(path)
        self.source = find_video(path)
        self.warnings: list[str] = []
        self.is_cut = False  # whether FFmpeg fails on what follows the last packet
        with self._naming(), open_container(self.source) as container:
            stream = video_stream(container)
            states = self._read_packets(container, stream)
            self.joined = self._is_joined(container)
            self.sound = bool(container.streams.audio)
            stated = read_stated(self.source, container, stream)
        self._set_clock(stated)
        missing = self._missing(stated)
        self.is_complete = not missing and not self.joined  # its key frames are where the file says
        if missing:
            states.append(f"is incomplete: {missing}")
        pauses = np.diff(self.times, append=self.times[-1])
        longest = pauses.argmax()
        pause = pauses[longest]
        usual, long = np.quantile(pauses, (0.5, 0.8))
        # In a constant rate a gap is a loss, else it may be a still. A header that fits the video knows of no loss.
        shows_loss = long < 2 * usual and not stated.is_of_video
        if shows_loss and pause > LEAP + 3 * usual:
            begin = self.times[longest]
            states.append(f"has no frame for {pause:.0f} s from {begin:.1f} s on")
        if self.joined:
            states.append("is followed by another in the same file, which players pass over; split them")
        for state in states:
            self._warn(state)

    def _read_packets(self, container: "av.container.InputContainer", stream: "av.VideoStream") -> list[str]:
        """Goes through the file, whose header may be wrong, without decoding; what is to be said of its clock."""
        clock = Clock(container, stream)
        pts = []
        dts = []
        flags = []
        self.last_byte: int | None = None  # where the last packet begins
        for packet in clock.over(self._demux(container, stream)):
            if packet.size:
                self.last_byte = packet.pos
                pts.append(packet.pts)
                dts.append(packet.dts)
                flags.append((packet.is_keyframe, packet.is_corrupt, packet.is_discard))
        if clock.reorders and None not in pts and None not in dts:
            clock.mend(pts, dts)
        key, is_damaged, is_hidden = np.array(flags, bool).reshape(-1, 3).T
        for number in np.flatnonzero(is_damaged):
            behind = number + 1
            next_are_key = key[behind : behind + _JOIN]
            is_damaged[number] = not next_are_key.any()

        self.has_times = None not in pts
        self.time_base = stream.time_base or Fraction(1)
        self.end = clock.end  # when the last frame is over, in ticks
        if not self.has_times:
            pts = list(range(len(pts)))
        self.pts = np.array(pts, np.int64)
        self.key = key & ~is_damaged
        self.whole = ~is_damaged
        shown = self.pts[~is_hidden]
        has_own_times = len(np.unique(shown)) == len(shown)
        is_guessed = clock.is_avi and clock.reorders
        self.timed = self.has_times and has_own_times and not is_guessed
        if clock.is_ps and pts:
            ticks_off = np.sort(self.pts) - clock.waiting
            seconds_off = np.abs(ticks_off) * clock.step
            if seconds_off.max() > NEAR:
                self.timed = False
            if not self.timed:
                self.has_times = True
                self.pts = np.array(clock.waiting)
                self.end = clock.due or 0
        is_shown = self.whole & ~is_hidden  # without what an edit list cuts off
        frames = np.flatnonzero(is_shown)
        if not len(frames):
            raise ValueError(f"of its {len(pts)} frames none is whole")
        self.order = frames[np.argsort(self.pts[frames], kind="stable")]
        return clock.states

    def _demux(self, container: "av.container.InputContainer", stream: "av.VideoStream") -> "Iterator[av.Packet]":
        """The packets of the video as far as FFmpeg can read the file."""
        try:
            yield from read_packets(container, stream)
        except UNDECODABLE:
            self.is_cut = True

    def _is_joined(self, container: "av.container.InputContainer") -> bool:
        """Whether the file is two, one behind the other: it has its first bytes again behind the last packet."""
        if self.last_byte is None or not container.format.name.startswith(_JOINABLE):
            return False
        with open_source(self.source) as file:
            file.seek(0)
            head = file.read(8)
            file.seek(self.last_byte)
            return head in file.read()

    def _set_clock(self, stated: Stated) -> None:
        clock = None
        self.first = 0.0  # when the first frame is shown by the file, in seconds
        if self.has_times:
            seconds = self._seconds(self.pts[self.order])
            self.first = float(seconds[0])
            self.times = seconds - seconds[0]
            clock = regular_clock(self.times, self._seconds(self.end) - self.first)
        if clock is None:
            if not stated.fps:
                raise ValueError(f"The video {self.name!r} states no times and no rate; pass its frames, with `fps=`.")
            clock = len(self.order), float(stated.fps)
        self.total, self.fps = clock
        if not self.timed and self.total == len(self.order):
            self.times = np.arange(self.total) / self.fps
        self.start = max(self.first - stated.begin, 0.0)

    def _missing(self, stated: Stated) -> str:
        """What of the video is not there."""
        packets = len(self.whole)
        whole = int(self.whole.sum())
        damaged = packets - whole
        end = self.first + self.total / self.fps
        # Of a trimmed video the header counts the frames that are not shown, but not their time.
        half_a_frame = 0.5 / self.fps
        is_trimmed = stated.end is not None and stated.end <= end + half_a_frame
        if stated.frames > whole and not is_trimmed:
            return f"its header states {stated.frames} frames, and {whole} can be read"
        states = []
        # The last frame may last a little longer.
        gaps = len(self.times) - 1
        gaps = max(gaps, 1)
        mean_gap = float(self.times[-1]) / gaps
        tolerance = max(_EARLY, 3 * mean_gap)
        if not stated.frames and ends_early(self.source, stated, end, tolerance):
            states.append(f"its header states {stated.end:.1f} s, and {end:.1f} s can be read")
        elif self.is_cut:
            states.append(f"nothing after {end:.1f} s can be read")
        if damaged:
            states.append(f"{damaged} of its {packets} frames are damaged and left out")
        return "; ".join(states)

    def _warn(self, state: str) -> None:
        warning = f"The video {self.name!r} {state}."
        if warning not in self.warnings:
            self.warnings.append(warning)
        logger.warning_once(warning)

    def _seconds(self, ticks):
        base = self.time_base
        return ticks * base.numerator / base.denominator

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """The error about a file that is not a video, or a broken one."""
        try:
            yield
        except (av.error.FFmpegError, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error  # without a number
            raise ValueError(
                f"Cannot decode {self.name!r} as a video: {reason}. Expected a complete file with a video stream."
            ) from error

    # --- Frames ---

    def show(self, instants: np.ndarray) -> Iterator[np.ndarray]:
        """
        The frames shown at `instants`, increasing seconds from the first frame: `[H, W, 3]` uint8 each. Where the
        frames follow from its key frames only what they need is decoded. A frame that cannot be decoded whole is shown
        as far as it goes, or else the one before it, and `warnings` say how many.
        """
        damaged = 0
        readable = int(self.whole.sum())
        with self._naming():
            for frame, is_whole in self._show(instants):
                yield frame
                damaged += not is_whole
        found_broken = readable - int(self.whole.sum())
        damaged = damaged or min(found_broken, len(instants))
        if damaged:
            self._warn(f"is damaged, and with it {damaged} of the {len(instants)} frames that are looked at")

    def _show(self, instants: np.ndarray) -> Iterator[ShownFrame]:
        """The frames, from what they need alone where the file allows that, else from the whole video."""
        num_shown = 0
        if self.timed and self.is_complete:
            for shown in self.read(instants, skipping=True):
                yield shown
                num_shown += 1
        if num_shown < len(instants):
            yield from itertools.islice(self.read(instants), num_shown, None)

    def read(self, instants: np.ndarray, skipping: bool = False) -> Iterator[ShownFrame]:
        """
        The frames shown at `instants`; one is whole if it is its packet's and nothing since its key frame is damaged.

        Args:
            skipping: decode only what the frames need, and end where one does not come out of the decoder at its time.
        """
        appeared = np.searchsorted(self.times, instants, side="right")
        chosen = self.order[np.maximum(appeared - 1, 0)]
        needed = np.full(len(self.key), 2)
        if skipping:
            needed = self.needed(chosen)
        upright = Upright()
        num_shown = 0
        shown = None
        self.is_hurt = False  # whether something is damaged since the last key frame
        with open_container(self.source) as container:
            stream = video_stream(container)
            stream.thread_type = "AUTO"
            frames = self._decode(container, stream, needed)
            for number, frame in enumerate(itertools.chain(frames, [None])):
                # Until this frame appears the one before it is shown.
                stop = len(instants)
                if frame is not None:
                    stop = int(np.searchsorted(instants, self._time(frame, number)))
                if shown is not None and stop > num_shown:
                    times = self.pts[chosen[num_shown:stop]]
                    is_right = (times == shown.pts) | (not self.timed)
                    if skipping and not is_right.all():
                        return
                    picture = upright(shown, stream)
                    for is_own in is_right:
                        yield picture, is_own and not self.is_hurt
                    num_shown = stop
                if num_shown == len(instants):
                    return
                shown = frame
                if frame is not None:
                    if frame.key_frame:
                        self.is_hurt = False
                    self.is_hurt = self.is_hurt or frame.is_corrupt
        if num_shown == 0 and not skipping:
            raise ValueError("no frame could be decoded")

    def _time(self, frame: "av.VideoFrame", number: int) -> float:
        """When a decoded frame, of a number, is shown, in seconds from the first."""
        if self.timed and frame.pts is not None:
            return self._seconds(frame.pts) - self.first
        if number >= len(self.times):
            return math.inf
        return float(self.times[number])

    def needed(self, chosen: np.ndarray) -> np.ndarray:
        """`[P]` int: 2 for the packets that are `chosen` by number, 1 for others since their key frames, else 0."""
        key_packets = np.flatnonzero(self.key)
        keys = np.append(0, key_packets)
        last_key = np.searchsorted(key_packets, chosen, side="right")
        # Some frames are behind a key frame in the file and are shown before it.
        key_times = self.pts[keys[last_key]]
        key_is_later = key_times > self.pts[chosen]
        last_key = np.maximum(last_key - key_is_later, 0)
        begins = keys[last_key]
        changes = np.zeros(len(self.key) + 1, np.int64)
        np.add.at(changes, begins, 1)
        np.subtract.at(changes, chosen, 1)
        needed = np.minimum(changes.cumsum()[:-1], 1)
        needed[chosen] = 2
        return needed

    def _decode(
        self,
        container: "av.container.InputContainer",
        stream: "av.VideoStream",
        needed: np.ndarray,
    ) -> "Iterator[av.VideoFrame]":
        """The frames in the order in which they are shown, at least those that are [`needed`]."""
        decoder = stream.codec_context
        last = np.flatnonzero(needed)[-1]
        skips = decoder.name in _SKIPPING_CODECS
        number = -1
        holds_frames = False
        for packet in self._demux(container, stream):
            if packet.size == 0:
                continue
            number += 1
            if number > last:
                break
            if not self.whole[number]:
                continue
            if needed[number] == 0:
                if holds_frames:
                    yield from drain(decoder)
                    decoder.flush_buffers()
                    holds_frames = False
                continue
            packet.pts = int(self.pts[number])
            if skips:
                is_shown = needed[number] == 2
                decoder.skip_frame = "DEFAULT" if is_shown else "NONREF"
            try:
                yield from packet.decode()
            except UNDECODABLE:
                self.whole[number] = False
                self.is_hurt = True
            holds_frames = True
        yield from drain(decoder)


def drain(decoder: "av.VideoCodecContext") -> "list[av.VideoFrame]":
    """The frames that a decoder still holds; none where it finds only then that it cannot decode one."""
    try:
        return decoder.decode(None)
    except UNDECODABLE:
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
        self.is_mirrored = False
        self.is_turned = True

    def __call__(self, frame: "av.VideoFrame", stream: "av.VideoStream") -> np.ndarray:
        if self.size is None:
            self.size = self._look_at(frame, stream)
        width, height = self.size
        pixels = self.reformatter.reformat(frame, width, height, format="rgb24").to_ndarray()
        if self.is_mirrored:
            pixels = pixels[::-1]
        if self.is_turned:
            pixels = np.rot90(pixels, round(frame.rotation / 90))
        return pixels

    def _look_at(self, frame: "av.VideoFrame", stream: "av.VideoStream") -> tuple[int, int]:
        """Width and height in square pixels of the first frame, which also says how all are stored."""
        # This is read once: a frame that was asked for it lives until Python's collection.
        matrix = frame.side_data.get("DISPLAYMATRIX")
        if matrix is not None:
            numbers = np.frombuffer(matrix, np.int32)  # type: ignore[call-overload]
            a, b, _, c, d = numbers[:5] / 2**16
            determinant = a * d - b * c
            self.is_mirrored = determinant < 0
            self.is_turned = determinant != 0  # some writers leave it empty
        aspect = float(stream.sample_aspect_ratio or 1)
        if not 0.2 < aspect < 5:
            aspect = 1.0
        return round(frame.width * aspect), frame.height
