"""When a player shows the frames of a video, whose own clock may be set anew, damaged or missing.

A packet holds one frame. It says when the frame is decoded (`dts`) and when it is shown (`pts`), in ticks of `step`
seconds. Frames that are predicted from later ones are decoded in another order than shown.
"""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np

try:  # optional: who gives frames needs no decoder
    import av
except ImportError:
    av = None  # type: ignore[assignment]

ARBITRARY_CLOCK = 0x200  # AVFMT_TS_DISCONT: a format such as MPEG-TS, whose clock is not 0 where the video begins
# Seconds by which a clock goes back or ahead where it was set anew; far ahead where a file gives its frames a clock.
_BACK = 0.1
_AHEAD = 60.0
_FAR_AHEAD = 86400.0
LEAP = 1.0  # seconds; so far from where it belongs a time alone is damaged, and so long a gap beside damage is said
PAUSE = 600.0  # seconds without a frame, which is said
NEAR = 0.05  # seconds by which a frame of a constant rate may be early or late
SLOWEST = 10.0  # frames per second of the clock of a variable rate
_LATE = 1.0  # seconds from decoding to showing; in AVI a longer delay is FFmpeg's guess for a video that begins late
_DAMAGED_SHARE = 20  # one in so many times may be damaged; if more look so, the file means them


class Clock:
    """
    One clock for the packets of a stream, in the order of the file.

    Where the file's clock goes back or jumps far ahead, as where recordings were joined, what follows is put behind
    what came before. A time alone that neither follows nor is followed is damaged, and becomes what its neighbours say.

    In two formats few times can be relied on. AVI knows only when a packet is decoded. MPEG-PS (`.mpg`) states few
    times, and FFmpeg guesses some of the others too early.

    Attributes:
        joins: after how many seconds it was set anew. strays: how many times were damaged.
        end: when the last frame so far is over, in ticks.
        waiting: times of the packets in AVI and MPEG-PS so far, whose frames have them in order.
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
        # Ticks from one packet to the next, outside of which the clock was set anew.
        self._fewest_ticks = -_BACK / self.step
        self._most_ticks = ahead / self.step
        self._leap = LEAP / self.step

        self.joins: list[float] = []
        self.strays = 0
        self.end = 0
        self.waiting: list[int] = []
        self.due: int | None = None
        self._last_dts: int | None = None  # of the packet before, by the file
        self._begin: int | None = None  # the first time on the one clock
        self._newest = 0  # the latest time so far on the one clock
        self._offset = 0  # from the file's clock to the one clock
        self._apart = 0  # from packet to packet
        self._delay = 0  # in MPEG-PS, from decoding to showing
        self._is_guessed = False  # whether FFmpeg guesses the times of an AVI, which then are right

    @property
    def states(self) -> list[str]:
        """What is to be said of it, as in "The video ... has a clock that ..."."""
        states = []
        if self.joins:
            first = self.joins[:3]
            times = ", ".join(f"{seconds:.1f}" for seconds in first)
            times += " s"
            others = len(self.joins) - len(first)
            if others:
                times += f" and {others} times more"
            states.append(f"has a clock that is set anew after {times}; what follows is put behind that")
        if self.strays:
            shown = "which are shown where their neighbours say"
            states.append(f"has {self.strays} damaged times among its frames, {shown}")
        return states

    def over(self, packets: Iterable["av.Packet"], live: bool = False) -> Iterator["av.Packet"]:
        """The packets, with their times on the one clock; of what is `live` without waiting for the next one."""
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
        """Whether the packet's time is far from those before and after, which follow each other."""
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
        if packet.is_discard:  # cut off by an edit list, which goes back to a key frame
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
        """Where the file's clock was set anew since the packet before, the one clock gets a new offset to it."""
        ticks = 0
        if self._last_dts is not None:
            ticks = dts - self._last_dts
        self._last_dts = dts
        if self._begin is None or self._continues(ticks):
            self._apart = ticks
            return
        self._offset = self.end - pts
        if not self.is_ps:  # there `_schedule` finds the joins
            self._join(self.end)

    def _continues(self, ticks: int) -> bool:
        """Whether a clock that moves by so many ticks was not set anew."""
        return self._fewest_ticks <= ticks <= self._most_ticks

    def _join(self, ticks: int) -> None:
        begin = self._begin or 0
        seconds = (ticks - begin) * self.step
        self.joins.append(seconds)

    def _take_decoding_time(self, packet: "av.Packet") -> None:
        """In AVI a frame has its time of decoding, unless FFmpeg guesses a long delay of a video that begins late."""
        if self._begin is None and packet.pts is not None and packet.dts is not None:
            delay = (packet.pts - packet.dts) * self.step
            self._is_guessed = self.reorders and delay > _LATE
        if not self._is_guessed:
            packet.pts = packet.dts

    def _schedule(self, packet: "av.Packet") -> None:
        """In MPEG-PS a frame is shown when the one before is over, or later where a packet that has a time says so."""
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
        Repairs, in `pts`, the times of showing that alone are damaged, where frames are decoded in another order.

        At each time at which a packet is decoded, except the first, a frame is shown. The time at which none is belongs
        to the damaged frame.
        """
        late = np.subtract(pts, dts)
        usual = np.median(late)
        off = np.abs(late - usual)
        is_far = off * self.step > LEAP
        decoding_times = set(dts)
        strays = []
        for place in np.flatnonzero(is_far):
            if pts[place] not in decoding_times:
                strays.append(place)
        if not strays or _DAMAGED_SHARE * len(strays) >= len(pts):
            return
        free = sorted(decoding_times.difference(pts))
        first = min(pts) + 1
        mended = 0
        for place in strays:
            decoded = dts[place]
            earliest = max(decoded, first)
            latest = decoded + self._leap
            index = bisect_left(free, earliest)
            if index < len(free) and free[index] <= latest:
                pts[place] = free.pop(index)
                mended += 1
        if mended:
            self.strays += mended
            self.end = max(pts) + self._apart


def with_next(items: Iterable, live: bool = False) -> Iterator[tuple]:
    """Each with the one behind it, or with `None`; with that alone where nobody waits for it, since it is `live`."""
    if live:
        return ((item, None) for item in items)
    return itertools.pairwise(itertools.chain(items, [None]))


def regular_clock(times: np.ndarray, length: float) -> tuple[int, float] | None:
    """
    The frames and the rate of a clock by which a video's own frames are shown at their times.

    Args:
        times: `[N]`, seconds from the first frame.
        length: the seconds after which the last frame is over.

    Returns:
        `None` where all frames have one time.
    """
    last = times[-1]
    if last <= 0:
        return None
    num_gaps = len(times) - 1
    fps = float(num_gaps / last)  # the last frame lasts as long as the mean
    constant = np.arange(len(times)) / fps
    early_or_late = np.abs(times - constant)
    if early_or_late.max() <= NEAR:
        return len(times), fps
    gaps = np.diff(times)
    longer_than_0 = gaps[gaps > 0]
    typical_gap = np.median(longer_than_0)
    typical_fps = float(1 / typical_gap)
    fps = max(round(typical_fps, 3), SLOWEST)
    through_last = int(last * fps) + 1
    stated = round(length * fps)
    return max(stated, through_last), fps
