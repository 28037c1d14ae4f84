"""The times at which a player shows a video's frames. The file's own clock may restart, be damaged or be missing.

A packet holds one frame. It says when the frame is decoded (`dts`) and when it is shown (`pts`), in ticks of `step`
seconds. Some frames are predicted from later ones, so that frames are not decoded in the order in which they are shown.
"""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np

try:  # optional: a caller who passes frames needs no decoder
    import av
except ImportError:
    av = None  # type: ignore[assignment]

ARBITRARY_CLOCK = 0x200  # AVFMT_TS_DISCONT: a format such as MPEG-TS, whose clock need not begin at 0
# A clock that goes back or ahead by more than these seconds restarted. `_FAR_AHEAD` is for clocks that begin at 0.
_BACK = 0.1
_AHEAD = 60.0
_FAR_AHEAD = 86400.0
LEAP = 1.0  # seconds: a single time this far off is damaged, and a gap this long in a constant rate is reported
NEAR = 0.05  # seconds by which a frame of a constant rate may be early or late
SLOWEST = 10.0  # the lowest rate, in frames per second, of the regular clock for a video with a variable rate
_LATE = 1.0  # seconds from decoding to showing; if an AVI states more, it begins late and FFmpeg guessed its times
_DAMAGED_SHARE = 20  # If one time in this many, or more, looks damaged, the file means them.


class Clock:
    """
    Puts the packets of a stream on one clock, in the order of the file.

    The file's clock may go back or jump far ahead, for example where recordings were joined. Later packets then
    continue where the earlier ones end. A single time that fits neither the one before nor the one after it is damaged:
    it is replaced by a time that fits between them.

    In two formats few times are reliable. AVI states only when a packet is decoded. MPEG-PS (`.mpg`) states few times,
    and some of FFmpeg's guesses for the others are too early.

    Attributes:
        joins: the seconds after which the file's clock restarted. strays: the number of damaged times.
        end: when the last frame so far is over, in ticks.
        waiting: in AVI and MPEG-PS, the packets' times so far. Frames, in the order of showing, get the smallest first.
        due: in MPEG-PS, when the next frame is shown.
    """

    def __init__(self, container: "av.container.InputContainer", stream: "av.VideoStream"):
        self.step = float(stream.time_base or 1)
        self.reorders = stream.codec_context.has_b_frames
        self.is_avi = container.format.name == "avi"
        self.is_ps = container.format.name == "mpeg"
        ahead = _FAR_AHEAD
        if container.format.flags & ARBITRARY_CLOCK:
            ahead = _AHEAD
        # The clock restarted if the ticks from one packet to the next are fewer or more than these.
        self._fewest_ticks = -_BACK / self.step
        self._most_ticks = ahead / self.step
        self._leap = LEAP / self.step

        self.joins: list[float] = []
        self.strays = 0
        self.end = 0
        self.waiting: list[int] = []
        self.due: int | None = None
        self._last_dts: int | None = None  # of the previous packet, on the file's clock
        self._begin: int | None = None  # the first time on the one clock
        self._newest = 0  # the latest time so far on the one clock
        self._offset = 0  # ticks from the file's clock to the one clock
        self._apart = 0  # ticks from the previous packet to the newest
        self._delay = 0  # in MPEG-PS, ticks from decoding to showing
        self._is_guessed = False  # whether FFmpeg guesses the times of an AVI; its guesses are right

    @property
    def states(self) -> list[str]:
        """What warnings say of the clock, to follow "The video ...": for example "has a clock that ..."."""
        states = []
        if self.joins:
            first = self.joins[0]
            restarts = len(self.joins)
            states.append(f"has a clock that restarts after {first:.1f} s (restarts: {restarts}); times continue there")
        if self.strays:
            states.append(f"has damaged times among its frames ({self.strays}), which are replaced or left out")
        return states

    def over(self, packets: Iterable["av.Packet"], live: bool = False) -> Iterator["av.Packet"]:
        """Yields the packets, with their times on the one clock. `live` packets do not wait for the next one."""
        for packet, following in with_next(packets, live):
            if following is not None and self._is_damaged(packet, following.dts):
                self._repair(packet)
            if self.is_ps and packet.size:
                self._schedule(packet)
            if self.is_avi:
                self._take_decoding_time(packet)
            self._place(packet)
            yield packet

    def _is_damaged(self, packet: "av.Packet", after: int | None) -> bool:
        """Whether the packet's time is far from those before and after it, which fit each other."""
        before = self._last_dts
        dts = packet.dts
        if self.is_ps or packet.is_discard:
            return False
        if before is None or dts is None or after is None:
            return False
        if self._follows(before, dts) or self._follows(dts, after):
            return False
        return self._follows(before, after)

    def _follows(self, dts: int, after: int) -> bool:
        ticks = after - dts
        return self._fewest_ticks <= ticks <= self._leap

    def _repair(self, packet: "av.Packet") -> None:
        is_shown_at_once = packet.pts == packet.dts
        before = self._last_dts or 0
        packet.dts = before + self._apart
        if is_shown_at_once:
            packet.pts = packet.dts
        self.strays += 1

    def _place(self, packet: "av.Packet") -> None:
        """Brings the times of a packet to the one clock."""
        if packet.pts is None:
            return
        if packet.dts is not None:
            if not packet.is_discard:
                self._compare(packet.pts, packet.dts)
            packet.dts += self._offset
        pts = packet.pts + self._offset
        packet.pts = pts
        if packet.is_discard:  # an edit list hides this frame; it is decoded because a later one needs it
            return
        if self._begin is None or pts > self._newest:
            self._newest = pts
            duration = packet.duration or self._apart
            self.end = pts + duration
        if self._begin is None:
            self._begin = pts
        if self.is_avi and packet.size:
            heapq.heappush(self.waiting, pts)

    def _compare(self, pts: int, dts: int) -> None:
        """Sets a new offset if the file's clock restarted since the previous packet."""
        ticks = 0
        if self._last_dts is not None:
            ticks = dts - self._last_dts
        self._last_dts = dts
        if self._begin is None or self._continues(ticks):
            self._apart = ticks
            return
        self._offset = self.end - pts
        if not self.is_ps:  # in MPEG-PS `_schedule` finds the joins
            self._join(self.end)

    def _continues(self, ticks: int) -> bool:
        """Whether a clock that moves by this many ticks has not restarted."""
        return self._fewest_ticks <= ticks <= self._most_ticks

    def _join(self, ticks: int) -> None:
        begin = self._begin or 0
        self.joins.append((ticks - begin) * self.step)

    def _take_decoding_time(self, packet: "av.Packet") -> None:
        """In AVI a packet is shown when it is decoded, unless the video begins late and FFmpeg guesses a long delay."""
        if self._begin is None and packet.pts is not None and packet.dts is not None:
            delay = (packet.pts - packet.dts) * self.step
            self._is_guessed = self.reorders and delay > _LATE
        if not self._is_guessed:
            packet.pts = packet.dts

    def _schedule(self, packet: "av.Packet") -> None:
        """In MPEG-PS a frame is shown when the previous one is over, or later if its packet states a later time."""
        duration = packet.duration or 0
        if self.due is None:
            self.due = packet.pts or 0
            decoded = packet.dts or 0
            self._delay = self.due - decoded
        elif packet.pos is not None and packet.dts is not None:
            stated = packet.dts + self._delay
            gap = stated - self.due
            if not self._continues(gap):
                self._delay -= gap
                self._join(self.due)
            elif gap > 1.5 * duration:
                self.due += gap
        self.waiting.append(self.due)
        self.due += duration or self._apart

    def mend(self, pts: list, dts: list) -> None:
        """
        Repairs damaged times of showing in `pts`, if frames are not decoded in the order in which they are shown.

        At every time of decoding except the first, some frame is shown. A time of decoding at which no frame is shown
        therefore belongs to a damaged frame.
        """
        late = np.subtract(pts, dts)
        off = np.abs(late - np.median(late))
        is_far = off * self.step > LEAP
        decoding_times = set(dts)
        strays = [place for place in np.flatnonzero(is_far) if pts[place] not in decoding_times]
        if not strays or _DAMAGED_SHARE * len(strays) >= len(pts):
            return
        free = sorted(decoding_times.difference(pts))
        first = min(pts) + 1
        mended = 0
        for place in strays:
            decoded = dts[place]
            latest = decoded + self._leap
            index = bisect_left(free, max(decoded, first))
            if index < len(free) and free[index] <= latest:
                pts[place] = free.pop(index)
                mended += 1
        if mended:
            self.strays += mended
            self.end = max(pts) + self._apart


def with_next(items: Iterable, live: bool) -> Iterator[tuple]:
    """Pairs of an item and the next one, which is `None` after the last, and always if `live`: nothing waits for it."""
    if live:
        return ((item, None) for item in items)
    return itertools.pairwise(itertools.chain(items, [None]))


def regular_clock(times: np.ndarray, length: float) -> tuple[int, float] | None:
    """
    The number of frames and the frame rate of a regular clock that shows a video's frames at their times.

    Args:
        times: `[N]`, seconds from the first frame.
        length: the seconds after which the last frame is over.

    Returns:
        `None` if all frames have the same time.
    """
    last = times[-1]
    if last <= 0:
        return None
    num_gaps = len(times) - 1
    fps = float(num_gaps / last)  # as if the last frame lasted as long as the others on average
    constant = np.arange(len(times)) / fps
    if np.abs(times - constant).max() <= NEAR:
        return len(times), fps
    gaps = np.diff(times)
    typical_gap = np.median(gaps[gaps > 0])
    fps = max(round(float(1 / typical_gap), 3), SLOWEST)
    through_last = int(last * fps) + 1
    return max(round(length * fps), through_last), fps
