"""
What strangers make: subtitle files, and videos with odd clocks and codecs. Each is read or refused in one line,
within bounds of memory, and leads to no other file.

`make fuzz SEED=7` tries more of them.
"""

import os
import random
import resource
import shutil
from collections import Counter
from contextlib import contextmanager

import av
import numpy as np
from test_stored_fuzz import cut, flip, garble, only_in

from qtsplus.video.subtitles import read_subtitles

SEED = int(os.environ.get("FUZZ_SEED", "45"))
CASES = int(os.environ.get("FUZZ_CASES", "400")) // 4
ROOM = 3 * 2**30  # bytes of addresses that a case may take beside what is there


@contextmanager
def within_bounds():
    """An allocation of gigabytes is a `MemoryError`."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(read, what):
    """Whether a case was read or refused; fails for anything else."""
    try:
        with within_bounds():
            read()
    except ValueError as error:
        assert "\n" not in str(error), f"{what}: {error}"
        return "refused"
    except Exception as error:
        raise AssertionError(what) from error
    return "read"


# --- Subtitles ---

CUES = [
    "1\n00:00:00,000 --> 00:00:02,000\nA {word}.\n\n",
    "99:59:59,999 --> 00:00:00,000\n{word}\n\n",
    "WEBVTT\n\n00:00.000 --> 00:02.000\n{word}\n\n",
    "ffconcat version 1.0\nfile '{word}'\n",
    "#EXTM3U\n#EXTINF:2.0,\n{word}\n",
    "[Script Info]\nScriptType: v4.00+\n\n[Events]\nDialogue: 0,0:00:00.00,0:00:02.00,Default,,0,0,0,,{word}\n",
    "<MPD><BaseURL>{word}</BaseURL></MPD>\n",
    "{word}",
]
WORDS = ["victim.srt", "../victim.srt", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:9/x", "<" * 3000, "\0"]
WORDS += ["{\\p1}m 0 0", "<b>" * 300, "\ud7ff", "<|im_end|>", "1" * 400, "concat:victim.srt"]


def write_subtitles(path, draw):
    parts = []
    for _ in range(draw.choice([1, 1, 2, 5])):
        word = draw.choice(draw.choice([WORDS[:2], WORDS]))
        parts.append(draw.choice(CUES).replace("{word}", word))
    data = "".join(parts).encode(draw.choice(["utf-8", "utf-16", "utf-8-sig"]))
    if draw.random() < 0.4:
        data = draw.choice([flip, cut, garble])(data, draw, False)
    path.write_bytes(data)


def test_subtitles_lead_to_no_other_file(tiny_mp4, tmp_path, monkeypatch):
    draw, outcomes = random.Random(SEED), Counter()
    (tmp_path / "videos").mkdir()
    monkeypatch.chdir(tmp_path / "videos")  # FFmpeg takes a name in a list as one in the folder where it runs
    video = tmp_path / "videos" / "video.mp4"
    shutil.copy(tiny_mp4, video)
    (tmp_path / "victim.srt").write_text("1\n00:00:00,000 --> 00:00:02,000\nSECRET\n")
    shutil.copy(tmp_path / "victim.srt", tmp_path / "videos" / "victim.srt")
    for case in range(CASES):
        path = video.with_suffix(draw.choice([".srt", ".vtt", ".ass"]))
        write_subtitles(path, draw)
        lines = []

        def read(lines=lines):
            with only_in(tmp_path):
                lines.extend(read_subtitles(str(video)))

        what = f"seed {SEED}, case {case}, {path.read_bytes()!r}"
        outcomes[outcome(read, what)] += 1
        assert not any("SECRET" in line.text for line in lines), what
        path.unlink()
    print(dict(outcomes))
    assert outcomes["read"]


# --- Videos ---

CONTAINERS = {"mkv": "mpeg4", "mp4": "mpeg4", "avi": "mpeg4", "ts": "mpeg2video", "nut": "mpeg4"}
TAGS = [b"mp4v", b"FMP4", b"V_MPEG4/ISO/ASP", b"avc1", b"xvid"]


def write_odd_video(path, draw):
    """A video of a few frames, one of them far away, whose codec may be one that nobody knows."""
    name = path.suffix[1:]
    times = sorted(draw.sample(range(100), 10))
    if draw.random() < 0.6:
        times[-1] = draw.choice([10**4, 10**6, 2 * 10**8])
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CONTAINERS[name], rate=10)
        stream.width = stream.height = 56
        stream.pix_fmt = "yuv420p"
        packets = []
        for number in range(len(times)):
            frame = av.VideoFrame.from_ndarray(np.full((56, 56, 3), number, np.uint8), "rgb24")
            packets += stream.encode(frame)
        packets += stream.encode(None)
        for packet, seconds in zip(packets, times, strict=True):
            packet.pts = packet.dts = int(seconds / packet.time_base)
            container.mux(packet)
    data = path.read_bytes()
    if draw.random() < 0.4:
        for tag in TAGS:
            data = data.replace(tag, b"zzzz" + tag[4:])
    if draw.random() < 0.4:
        data = draw.choice([flip, cut, garble])(data, draw, False)
    path.write_bytes(data)


def test_odd_videos_are_read_or_refused(loaded, tmp_path):
    draw, outcomes = random.Random(SEED), Counter()
    for case in range(CASES):
        path = tmp_path / f"video.{draw.choice(sorted(CONTAINERS))}"
        try:
            write_odd_video(path, draw)
        except (av.error.FFmpegError, OverflowError):  # no container takes every clock
            outcomes["not written"] += 1
            continue

        def read(path=path):
            with only_in(tmp_path):
                next(iter(loaded[1].video_chunks(str(path), max_frames=4)))

        outcomes[outcome(read, f"seed {SEED}, case {case}, {path.suffix}, kept at {path}")] += 1
        path.unlink()
    print(dict(outcomes))
    assert outcomes["read"] and outcomes["refused"]
