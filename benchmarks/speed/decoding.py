"""What it costs to see some frames of a long film, and to decode all before them: the command `decoding`."""

import hashlib
import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from time import process_time
from typing import Any

import av
import numpy as np

from qtsplus.model.decoding_qtsplus import Film

from ..files import begin, finish
from ..machine import environment, steps

COUNTS = (8, 256, 4096, 7200)  # of an hour these are one in 7.5 minutes, one in 14 s, one a second and two
RATE, KEY = 30, 250  # frames a second, and at most from key frame to key frame, as libx264 has it
MINUTE = 60 * RATE  # frames, of which the film is made again and again


def run_decoding(
    out: Path, *, minutes: int = 60, side: int = 720, counts: Sequence[int] = COUNTS, progress: bool = True
) -> Path:
    """
    Writes `decoding.json`: processor seconds to open a film and see so many frames, spread evenly, where only what they
    need is decoded and where every frame is, and whether they are equal to the byte. The film is H.264, `side` pixels
    high. An interrupted run goes on.

    Raises:
        ValueError: no count, or numbers below 1.
    """
    counts = sorted(set(counts))
    if not counts or min(counts[0], minutes, side) < 1:
        raise ValueError(f"counts={counts}, minutes={minutes}, side={side}: expected numbers, at least 1.")
    settings = {"minutes": minutes, "side": side, "rate": RATE, "key": KEY, "counts": counts}
    journal = begin(out / ".decoding.jsonl", settings)
    film = out / ".decoding.mp4"
    if not film.exists():
        make_film(film, minutes, side)
    ways = [f"{count} {way}" for count in counts for way in ("needed", "all")]
    with steps("decoding", len(ways), progress) as step:
        for name in ways:
            if name not in journal.done:
                count, way = name.split()
                journal.add(name, measure(film, int(count), every_frame=way == "all"))
            step(f"{name}: {journal.done[name]['seconds']:.1f} s of processor time")
    pairs = {count: (journal.done[f"{count} needed"], journal.done[f"{count} all"]) for count in counts}
    document = {
        "command": f"python -m benchmarks decoding --minutes {minutes} --side {side} "
        + " ".join(f"--count {count}" for count in counts),
        "environment": environment("cpu"),
        "settings": settings,
        "figures": {f"share_of_all_{count}": one["seconds"] / every["seconds"] for count, (one, every) in pairs.items()}
        | {"equal_to_the_byte": all(one["digest"] == every["digest"] for one, every in pairs.values())},
        "measured": dict(journal.done),
    }
    target = finish(journal, out / "decoding.json", document)
    film.unlink()
    return target


def measure(film: Path, count: int, every_frame: bool) -> dict[str, Any]:
    """Processor seconds of all threads, and the SHA-256 of the frames."""
    started, digest, hashing = process_time(), hashlib.sha256(), 0.0
    opened = Film(str(film))
    instants = (np.arange(count) * opened.total // count + 0.25) / opened.fps
    through = (frame for frame, _ in opened._show(instants))
    for frame in through if every_frame else opened.show(instants):
        decoded = process_time()
        digest.update(frame.tobytes())
        hashing += process_time() - decoded
    return {"frames": count, "seconds": process_time() - started - hashing, "digest": digest.hexdigest()}


def make_film(path: Path, minutes: int, side: int) -> None:
    """A minute in which a camera goes along a wall of stones, as often as it takes."""
    height, width = side, side * 16 // 9 // 2 * 2
    random, stone = np.random.default_rng(0), max(side // 24, 1)
    stones = random.integers(40, 200, (4 * height // stone + 1, 4 * width // stone + 1), np.uint8)
    wall = np.kron(stones, np.ones((stone, stone), np.uint8))
    wall += random.integers(0, 24, wall.shape, np.uint8)
    piece = io.BytesIO()
    with av.open(piece, "w", format="mp4") as container:
        options = {"g": f"{KEY}", "preset": "veryfast", "crf": "28"}
        stream = container.add_stream("libx264", rate=RATE, options=options)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for index in range(MINUTE):
            top, left = (int(far * (1 + np.sin(index / pace))) for far, pace in ((height, 97), (width, 181)))
            grey = np.ascontiguousarray(wall[top : top + height, left : left + width])
            picture = av.VideoFrame.from_ndarray(grey, format="gray").reformat(format="yuv420p")
            picture.pts, picture.time_base = index, Fraction(1, RATE)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    with av.open(str(path), "w", format="mp4") as container:
        copy = None
        for minute in range(minutes):
            with av.open(io.BytesIO(piece.getvalue())) as again:
                copy = copy or container.add_stream_from_template(again.streams.video[0])
                for packet in again.demux(video=0):
                    if packet.size:
                        later = round(60 * minute / packet.time_base)
                        packet.pts, packet.dts, packet.stream = packet.pts + later, packet.dts + later, copy
                        container.mux(packet)
