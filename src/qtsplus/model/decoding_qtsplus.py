"""Decodes video files with PyAV: the chosen frames, each as a player shows it at its time.

A packet of a file holds one frame, and a key frame can be decoded alone. For each frame to show, decoding starts at the
key frame before it and ends at the frame (`needed`); all other packets are skipped:

    packets     K . . . K . . . K . . .      K: a key frame
    shown         ^                 ^
    needed      1 2             1 1 2        2: shown, 1: only decoded

A packet is damaged if FFmpeg says so or cannot decode it; otherwise it is whole. A frame is whole if its packet is, and
all packets since its key frame are.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
from transformers.utils import logging

try:  # optional: a caller who passes frames needs no decoder
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

_EARLY = 0.5  # A video may end this many seconds before its header says.
# Where recordings in MPEG-TS were joined, FFmpeg may wrongly report damage in one of these packets before a key frame.
_JOIN = 2
_JOINABLE = ("mov,mp4", "matroska", "flv")  # formats in which a player ignores a second file behind the first one
_SKIPPING_CODECS = ("h264", "hevc")  # codecs whose decoders can skip frames that no other frame needs

ShownFrame = tuple[np.ndarray, bool]  # [H, W, 3] uint8, and whether the frame is whole


class VideoDecoder:
    """
    The frames of a video, and the times at which a player shows them. The video is a file, or the content of an
    `http(s)` or `data:` address.

    Attributes:
        total, fps: the number of frames and their rate on a regular clock, by which all frames last equally long. At a
            constant rate these are the file's own frames; at a variable rate frame `i` is the one that a player shows
            `i / fps` seconds after the first.
        start: when a player shows the first frame, in seconds.
        sound: whether the file has sound, which is not read.
        warnings: what is wrong with the file, one sentence each; `show` adds a sentence if it cannot decode all.
        pts: of each packet, in the order of the file, the time at which its frame is shown, in ticks.
        key: of each packet, whether it needs no other packet.
        whole: of each packet, whether it is not damaged.
        order: the packets whose frames are shown, in the order of showing.
        times: `[N]`, when the frames of `order` are shown, in seconds from the first.
        frames_carry_times: whether a decoded frame has the time of its packet. Otherwise the decoded frames get `times`
            in turn.

    Raises:
        ValueError: a file that is missing, cannot be decoded, has no frame, or is a playlist; an address that does not
            answer, holds no base64, or has a file of more than 1 GiB.
        ImportError: PyAV is not installed.
    """

    def __init__(self, path: str):
        if av is None:
            raise ImportError("Reading a video needs PyAV (`pip install av`).")
        self.name = shown_name(path)
        self.source = find_video(path)
        self.warnings: list[str] = []
        self.breaks_off = False  # whether FFmpeg cannot read on behind the last packet
        with self._naming(), open_container(self.source) as container:
            stream = video_stream(container)
            faults = self._read_packets(container, stream)
            is_joined = self._is_joined(container)
            self.sound = bool(container.streams.audio)
            stated = read_stated(self.source, container, stream)
        self._set_clock(stated)
        missing = self._missing(stated)
        # Packets can be skipped if frames can be told apart by their times, and if key frames are where the file says.
        # A file that is incomplete or joined may be wrong about them.
        self.can_skip = self.frames_carry_times and not missing and not is_joined
        if missing:
            faults.append(f"is incomplete: {missing}")
        gaps = np.diff(self.times, append=self.times[-1])
        longest_gap = gaps.max()
        usual_gap, long_gap = np.quantile(gaps, (0.5, 0.8))
        is_constant_rate = long_gap < 2 * usual_gap
        # At a constant rate a long gap shows that frames were lost; at a variable rate it may be a still. If the header
        # states the video's own length, only an early end is a loss; `_missing` looks for it.
        if is_constant_rate and not stated.is_of_video and longest_gap > LEAP + 3 * usual_gap:
            begin = self.times[gaps.argmax()]
            faults.append(f"has no frame for {longest_gap:.0f} s from {begin:.1f} s on")
        if is_joined:
            faults.append("is followed by another in the same file, which players pass over; split them")
        for fault in faults:
            self._warn(fault)

    def _read_packets(self, container: "av.container.InputContainer", stream: "av.VideoStream") -> list[str]:
        """
        Reads the times and flags of all packets, without decoding them, since the header may be wrong. Returns what is
        wrong with the file's clock.
        """
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
            clock.mend(pts, dts)  # replaces damaged times in `pts`
        key, is_damaged, is_hidden = np.array(flags, bool).reshape(-1, 3).T
        # Damage that FFmpeg reports just before a key frame is ignored: recordings may have been joined there.
        for number in np.flatnonzero(is_damaged):
            behind = number + 1
            next_are_key = key[behind : behind + _JOIN]
            is_damaged[number] = not next_are_key.any()

        self.packets_have_times = None not in pts
        self.time_base = stream.time_base or Fraction(1)
        self.end = clock.end  # when the last frame is over, in ticks
        if not self.packets_have_times:
            pts = list(range(len(pts)))
        self.pts = np.array(pts, np.int64)
        self.key = key & ~is_damaged
        self.whole = ~is_damaged
        shown = self.pts[~is_hidden]
        times_are_distinct = len(np.unique(shown)) == len(shown)
        # An AVI states only when packets are decoded. If frames are reordered, these are not their times of showing.
        is_guessed = clock.is_avi and clock.reorders
        self.frames_carry_times = self.packets_have_times and times_are_distinct and not is_guessed
        # MPEG-PS states few times. If FFmpeg's guesses for the others are off, the frames get the times that `clock`
        # computed: `clock.waiting` has them in ascending order.
        if clock.is_ps and pts:
            ticks_off = np.sort(self.pts) - clock.waiting
            seconds_off = np.abs(ticks_off) * clock.step
            if seconds_off.max() > NEAR:
                self.frames_carry_times = False
            if not self.frames_carry_times:
                self.packets_have_times = True
                self.pts = np.array(clock.waiting)
                self.end = clock.due or 0
        is_shown = self.whole & ~is_hidden  # an edit list hides frames
        frames = np.flatnonzero(is_shown)
        if not len(frames):
            raise ValueError(f"none of its {len(pts)} frames can be shown: they are damaged or hidden")
        self.order = frames[np.argsort(self.pts[frames], kind="stable")]
        return clock.states

    def _demux(self, container: "av.container.InputContainer", stream: "av.VideoStream") -> "Iterator[av.Packet]":
        """The packets of the video, as far as FFmpeg can read the file."""
        try:
            yield from read_packets(container, stream)
        except UNDECODABLE:
            self.breaks_off = True

    def _is_joined(self, container: "av.container.InputContainer") -> bool:
        """Whether a second file follows in the same file: the first bytes occur again behind the last packet."""
        if self.last_byte is None or not container.format.name.startswith(_JOINABLE):
            return False
        with open_source(self.source) as file:
            file.seek(0)
            head = file.read(8)
            file.seek(self.last_byte)
            return head in file.read()

    def _set_clock(self, stated: Stated) -> None:
        """Sets `times`, the regular clock (`total` and `fps`) and `start`, from the packets or else from the header."""
        clock = None
        self.first = 0.0  # seconds on the file's clock at which the first frame is shown
        if self.packets_have_times:
            seconds = self._seconds(self.pts[self.order])
            self.first = float(seconds[0])
            self.times = seconds - seconds[0]
            clock = regular_clock(self.times, self._seconds(self.end) - self.first)
        if clock is None:
            if not stated.fps:
                raise ValueError(f"The video {self.name!r} states no times and no rate; pass its frames, with `fps=`.")
            clock = (len(self.order), float(stated.fps))
        self.total, self.fps = clock
        # At a constant rate, evenly spaced times replace those that are missing or guessed.
        if not self.frames_carry_times and self.total == len(self.order):
            self.times = np.arange(self.total) / self.fps
        self.start = max(self.first - stated.begin, 0.0)

    def _missing(self, stated: Stated) -> str:
        """Says what is missing of the video; empty if nothing is."""
        packets = len(self.whole)
        whole = int(self.whole.sum())
        damaged = packets - whole
        end = self.first + self.total / self.fps
        # The header of a trimmed video counts its hidden frames too, but states the length without them. So if the
        # frames cover this length, none is missing.
        half_a_frame = 0.5 / self.fps
        is_trimmed = stated.end is not None and stated.end <= end + half_a_frame
        if stated.frames > whole and not is_trimmed:
            return f"its header states {stated.frames} frames, and {whole} can be read"
        faults = []
        # The last frame may last longer than the others.
        mean_gap = float(self.times[-1]) / max(len(self.times) - 1, 1)
        tolerance = max(_EARLY, 3 * mean_gap)
        if not stated.frames and ends_early(self.source, stated, end, tolerance):
            faults.append(f"its header states {stated.end:.1f} s, and {end:.1f} s can be read")
        elif self.breaks_off:
            faults.append(f"nothing after {end:.1f} s can be read")
        if damaged:
            faults.append(f"damaged frames are left out ({damaged} of {packets})")
        return "; ".join(faults)

    def _warn(self, fault: str) -> None:
        """Adds a warning and logs it, once each. The fault ends a sentence that begins with "The video ..."."""
        warning = f"The video {self.name!r} {fault}."
        if warning not in self.warnings:
            self.warnings.append(warning)
        logger.warning_once(warning)

    def _seconds(self, ticks):
        base = self.time_base
        return ticks * base.numerator / base.denominator

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Errors within are raised as a `ValueError` that names the video."""
        try:
            yield
        except (av.error.FFmpegError, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error  # `strerror` leaves out the error's number
            raise ValueError(
                f"Cannot decode {self.name!r} as a video: {reason}. Expected a complete file with a video stream."
            ) from error

    # --- Frames ---

    def show(self, instants: np.ndarray) -> Iterator[np.ndarray]:
        """
        The frames shown at `instants`, increasing seconds from the first frame: `[H, W, 3]` uint8 each.

        If packets can be skipped, only those that the frames need are decoded. A frame that cannot be decoded whole is
        shown as far as it goes, or else the frame before it is shown; `warnings` say how many frames this concerns.
        """
        damaged = 0
        whole_before = int(self.whole.sum())
        with self._naming():
            for frame, is_whole in self._show(instants):
                yield frame
                damaged += not is_whole
        # If packets turned out to be damaged, but no frame is known to suffer, one frame is reported for each packet.
        found_damaged = whole_before - int(self.whole.sum())
        damaged = damaged or min(found_damaged, len(instants))
        if damaged:
            self._warn(f"is damaged, and with it {damaged} of the {len(instants)} frames that are looked at")

    def _show(self, instants: np.ndarray) -> Iterator[ShownFrame]:
        """The frames of [`read`], with `skipping` if that is possible; where this stops, it goes on without."""
        num_shown = 0
        if self.can_skip:
            for shown in self.read(instants, skipping=True):
                yield shown
                num_shown += 1
        if num_shown < len(instants):
            yield from itertools.islice(self.read(instants), num_shown, None)

    def read(self, instants: np.ndarray, skipping: bool = False) -> Iterator[ShownFrame]:
        """
        The frames shown at `instants`, each with whether it is whole. A frame at a wrong time counts as not whole.

        Args:
            skipping: decode only the packets that the frames need, and stop at the first frame with a wrong time.
        """
        appeared = np.searchsorted(self.times, instants, side="right")
        chosen = self.order[np.maximum(appeared - 1, 0)]
        needed = np.full(len(self.key), 2)  # all packets, as if the frames of all were shown
        if skipping:
            needed = self.needed(chosen)
        upright = Upright()
        num_shown = 0
        with open_container(self.source) as container:
            stream = video_stream(container)
            stream.thread_type = "AUTO"
            frames = self._decode(container, stream, needed)
            for frame, stop in self._with_stops(frames, instants):
                if stop > num_shown:
                    expected_times = self.pts[chosen[num_shown:stop]]
                    has_right_time = (expected_times == frame.pts) | (not self.frames_carry_times)
                    if skipping and not has_right_time.all():
                        return
                    picture = upright(frame, stream)
                    for is_right in has_right_time:
                        yield picture, is_right and not self.damaged_since_key
                    num_shown = stop
                if num_shown == len(instants):
                    return
        if num_shown == 0 and not skipping:
            raise ValueError("no frame could be decoded")

    def _with_stops(
        self,
        frames: "Iterator[av.VideoFrame]",
        instants: np.ndarray,
    ) -> "Iterator[tuple[av.VideoFrame, int]]":
        """Each decoded frame, and how many instants come before the next: at these, it or an earlier one is shown."""
        shown = None
        self.damaged_since_key = False  # whether something is damaged since the key frame of the frame that is shown
        for number, following in enumerate(itertools.chain(frames, [None])):
            stop = len(instants)
            if following is not None:
                stop = int(np.searchsorted(instants, self._time(following, number)))
            if shown is not None:
                yield shown, stop
            shown = following
            if shown is not None:
                if shown.key_frame:
                    self.damaged_since_key = False
                self.damaged_since_key = self.damaged_since_key or shown.is_corrupt

    def _time(self, frame: "av.VideoFrame", number: int) -> float:
        """When the decoded frame with this number is shown, in seconds from the first."""
        if self.frames_carry_times and frame.pts is not None:
            return self._seconds(frame.pts) - self.first
        if number >= len(self.times):
            return math.inf
        return float(self.times[number])

    def needed(self, chosen: np.ndarray) -> np.ndarray:
        """
        Which packets to decode for the frames of the `chosen` packets.

        Returns:
            `[P]` int, for each packet: 2 if it is chosen; 1 if it is between a chosen one and its key frame, or is that
            key frame; otherwise 0.
        """
        key_packets = np.flatnonzero(self.key)
        keys = np.append(0, key_packets)  # `keys[0]` is for packets with no key frame before: they need all from 0 on
        last_key = np.searchsorted(key_packets, chosen, side="right")
        # A frame that follows a key frame in the file, but is shown before it, needs the key frame before that.
        key_times = self.pts[keys[last_key]]
        key_is_later = key_times > self.pts[chosen]
        last_key = np.maximum(last_key - key_is_later, 0)
        begins = keys[last_key]
        # +1 at each key frame and -1 at its chosen packet: from the one up to the other the sum is positive.
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
        """The frames in the order of showing, at least those with a 2 in [`needed`]."""
        decoder = stream.codec_context
        last = np.flatnonzero(needed)[-1]
        skips_frames = decoder.name in _SKIPPING_CODECS
        number = -1
        holds_frames = False
        for packet in self._demux(container, stream):
            if not packet.size:
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
            if skips_frames:
                is_shown = needed[number] == 2
                decoder.skip_frame = "DEFAULT" if is_shown else "NONREF"  # NONREF skips what no other frame needs
            try:
                yield from packet.decode()
            except UNDECODABLE:
                self.whole[number] = False
                self.damaged_since_key = True
            holds_frames = True
        yield from drain(decoder)


def drain(decoder: "av.VideoCodecContext") -> "list[av.VideoFrame]":
    """The frames that a decoder still holds; none if it cannot decode one of them."""
    try:
        return decoder.decode(None)
    except UNDECODABLE:
        return []


class Upright:
    """
    Brings the frames of one video to `[H, W, 3]` uint8 as a player shows them, all as large as the first frame.

    They get square pixels, and are turned upright: phones store a portrait video lying on its side, and some front
    cameras store a mirrored one.
    """

    def __init__(self) -> None:
        # PyAV 19 has one reformatter for all videos. A process that is forked later would wait forever for its threads,
        # so this video has its own.
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
        """
        The width and height of the first frame in square pixels. This also notes how the frame is turned and mirrored,
        which holds for all frames.
        """
        # Only one frame is asked: `side_data` keeps its frame in memory until Python's garbage collection runs.
        matrix = frame.side_data.get("DISPLAYMATRIX")
        if matrix is not None:
            numbers = np.frombuffer(matrix, np.int32)  # type: ignore[call-overload]
            a, b, _, c, d = numbers[:5] / 2**16
            determinant = a * d - b * c
            self.is_mirrored = determinant < 0  # mirroring is a vertical flip, followed by the rotation
            self.is_turned = determinant != 0  # some writers leave it empty
        aspect = float(stream.sample_aspect_ratio or 1)
        if not 0.2 < aspect < 5:
            aspect = 1.0
        return round(frame.width * aspect), frame.height
