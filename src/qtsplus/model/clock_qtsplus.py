"""When a player shows the frames of a film, whose own clock may be set anew, damaged or missing."""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

ARBITRARY_CLOCK = 0x200  # AVFMT_TS_DISCONT: a format such as MPEG-TS, whose clock is not 0 where the video begins
# Seconds by which a clock goes back or ahead where it was set anew; far ahead where a file gives its frames a clock.
_BACK, _AHEAD, _FAR_AHEAD = 0.1, 60.0, 86400.0
LEAP = 1.0  # seconds; so far from where it belongs a time alone is damaged, and so long a gap beside damage is said
PAUSE = 600.0  # seconds without a frame, which is said
NEAR = 0.05  # seconds by which a frame of a constant rate may be early or late
SLOWEST = 10.0  # frames per second of the clock of a variable rate


class Clock:
    """
    One clock for the packets of a stream, in the order of the file: where their own goes back or jumps far ahead, as
    where recordings were joined, what follows is put behind what came before. A time alone that neither follows nor is
    followed is damaged, and becomes what its neighbours say.

    Attributes:
        joins: after how many seconds it was set anew. strays: how many times were damaged.
    """

    def __init__(self, container: Any, stream: Any):
        ahead = _AHEAD if container.format.flags & ARBITRARY_CLOCK else _FAR_AHEAD
        self.step = float(stream.time_base or 1)  # seconds
        self.joins: list[float] = []
        self.strays = 0
        # AVI knows no times, but when a packet is decoded; FFmpeg guesses those of one that reorders late.
        self.is_avi, self.reorders = container.format.name == "avi", stream.codec_context.has_b_frames
        self.smallest, self.largest = -_BACK / self.step, ahead / self.step
        self.last: int | None = None  # when the packet before was to be decoded, by the file
        self.begin: int | None = None  # the first time
        self.newest: int | None = None  # of the times so far, on the one clock
        self.end = self.offset = self.apart = self.shift = 0  # `end` is when that is over
        self.guessed = False
        self.is_ps = container.format.name == "mpeg"  # which has few times, and FFmpeg guesses some of the others early
        self.waiting: list[int] = []  # times of packets in AVI and MPEG-PS, whose frames have them in order
        self.due: int | None = None  # in MPEG-PS, when the next frame is shown; `shift` later than it is decoded

    @property
    def states(self) -> list[str]:
        """What is to be said of it, as in "The video ... has a clock that ..."."""
        first = ", ".join(f"{seconds:.1f}" for seconds in self.joins[:3])
        more = f" and {len(self.joins) - 3} times more" if len(self.joins) > 3 else ""
        joins = f"has a clock that is set anew after {first} s{more}; what follows is put behind that"
        strays = f"has {self.strays} damaged times among its frames, which are shown where their neighbours say"
        return [joins] * bool(self.joins) + [strays] * bool(self.strays)

    def over(self, packets: Iterable[Any], live: bool = False) -> Iterator[Any]:
        """The packets, with their times on the one clock; of what is `live` without waiting for the next one."""
        for packet, after in with_next(packets, live):
            before, dts, behind = self.last, packet.dts, getattr(after, "dts", None)
            leaps = not (self.is_ps or packet.is_discard or None in (before, dts, behind) or self._follows(before, dts))
            if leaps and self._follows(before, behind) and not self._follows(dts, behind):
                packet.dts = (before or 0) + self.apart
                packet.pts = packet.dts if packet.pts == dts else packet.pts
                self.strays += 1
            self._set(packet)
            yield packet

    def _follows(self, dts: Any, after: Any) -> bool:
        return self.smallest <= after - dts <= LEAP / self.step

    def mend(self, pts: list[int], dts: list[int]) -> None:
        """
        Gives frames that are decoded in another order than shown, and of whose times that one alone is damaged, the
        time that is theirs: at each at which a packet is decoded, but the first, one is shown, and there none is.
        """
        late, known = np.subtract(pts, dts), set(dts)
        far = np.abs(late - np.median(late)) * self.step > LEAP
        strays = [place for place in np.flatnonzero(far) if pts[place] not in known]
        free, first, mended = sorted(known.difference(pts)), min(pts) + 1, False
        for place in strays if 20 * len(strays) < len(pts) else ():
            due = bisect_left(free, max(dts[place], first))
            if due < len(free) and free[due] <= dts[place] + LEAP / self.step:
                pts[place], self.strays, mended = free.pop(due), self.strays + 1, True
        if mended:
            self.end = max(pts) + self.apart

    def _set(self, packet: Any) -> None:
        """Brings the times of the next packet to the one clock."""
        if self.is_ps and packet.size:
            self._follow(packet)
        if self.newest is None and packet.pts is not None and packet.dts is not None:
            self.guessed = self.reorders and (packet.pts - packet.dts) * self.step > 1  # of a film that begins late
        if self.is_avi and not self.guessed:
            packet.pts = packet.dts
        if packet.pts is None:
            return
        if packet.is_discard and packet.dts is not None:  # cut off by an edit list: it goes back to a key frame
            packet.pts, packet.dts = packet.pts + self.offset, packet.dts + self.offset
            return
        if packet.dts is not None:
            since = 0 if self.last is None else packet.dts - self.last
            if self.newest is not None and not self.smallest <= since <= self.largest:
                self.offset = self.end - packet.pts
                if self.due is None:  # by which MPEG-PS goes
                    self.joins.append((self.end - (self.begin or 0)) * self.step)
            else:
                self.apart = since
            self.last = packet.dts
            packet.dts += self.offset
        packet.pts += self.offset
        self.begin = packet.pts if self.begin is None else self.begin
        if self.newest is None or packet.pts > self.newest:
            self.newest, self.end = packet.pts, packet.pts + (packet.duration or self.apart)
        if self.is_avi and packet.size:
            heapq.heappush(self.waiting, packet.pts)

    def _follow(self, packet: Any) -> None:
        """In MPEG-PS a frame is shown when the one before is over, or later where a packet that has a time says so."""
        if self.due is None:
            self.due, self.shift = packet.pts or 0, (packet.pts or 0) - (packet.dts or 0)
        elif packet.pos is not None and packet.dts is not None:
            gap = packet.dts + self.shift - self.due
            if 1.5 * packet.duration < gap <= self.largest:
                self.due += gap
            elif not self.smallest <= gap <= self.largest:
                self.shift -= gap
                self.joins.append((self.due - (self.begin or 0)) * self.step)
        self.waiting.append(self.due)
        self.due += packet.duration or self.apart


def with_next(items: Iterable[Any], live: bool = False) -> Iterator[tuple[Any, Any]]:
    """Each with the one behind it, or with `None`; with that alone where nobody waits for it, since it is `live`."""
    return ((item, None) for item in items) if live else itertools.pairwise(itertools.chain(items, [None]))


def regular_clock(times: np.ndarray, length: float) -> tuple[int, float] | None:
    """
    The frames and the rate of a clock by which a film's own, over after `length` seconds, are shown at their times;
    `None` where they have one time.
    """
    if times[-1] <= 0:
        return None
    fps = float((len(times) - 1) / times[-1])  # the last lasts as long as the mean
    if np.abs(times - np.arange(len(times)) / fps).max() <= NEAR:
        return len(times), fps
    apart = np.diff(times)
    fps = max(round(float(1 / np.median(apart[apart > 0])), 3), SLOWEST)
    return max(round(length * fps), int(times[-1] * fps) + 1), fps
