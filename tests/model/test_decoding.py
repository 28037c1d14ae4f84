"""When a player shows the frames of films: those of many containers, codecs and clocks, with painted times."""

import gc
import itertools
import struct
import time
import tracemalloc
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from films import CLOCKS, SIDE, paint, read_paint, write_film
from qtsplus.asking import session
from qtsplus.asking.answers import Answer, placed
from qtsplus.asking.evidence import Interval
from qtsplus.asking.picture import _frames_within, draw_evidence
from qtsplus.library.indexing import index
from qtsplus.library.library import Library
from qtsplus.live.watching import Source
from qtsplus.model.decoding_qtsplus import Film
from qtsplus.model.video_qtsplus import choose_frames, open_video
from qtsplus.video.encoded import EncodedVideo, encode

NEAR = 50  # milliseconds
H264, MPEG = {"g": "10", "preset": "veryfast"}, {"g": "10", "bf": "2"}
VPX, AV1 = {"g": "10", "deadline": "realtime", "cpu-used": "8"}, {"g": "10", "preset": "8", "crf": "10"}
CODECS = {
    "libx264": H264,
    "libx264 without B": {**H264, "bf": "0"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=error:keyint=12"},
    "libvpx": VPX,
    "libvpx-vp9": VPX,
    "libsvtav1": AV1,
    "mpeg4": MPEG,
    "mpeg4 without B": {"g": "10"},
    "mpeg2video": MPEG,
    "mpeg1video": MPEG,
    "mjpeg": {"pix_fmt": "yuvj420p"},
    "flv": {"g": "10"},
    "wmv2": {"g": "10"},
    "msmpeg4": {},
    "gif": {"pix_fmt": "rgb8"},
    "prores_ks": {"pix_fmt": "yuv422p10le"},
    "ffv1": {},
}
FILMS = [  # codec, containers, clocks
    ("libx264", "mp4 mov mkv ts m4v 3gp", "constant variable dropped"),
    ("libx264", "m2ts", "constant late"),
    ("libx264", "mp4 mkv mov ts", "late"),
    ("libx264", "avi", "constant late"),
    ("libx264 without B", "avi flv", "constant variable"),
    ("libx264 without B", "flv", "late"),
    ("libx265", "mp4 mkv ts", "constant variable"),
    ("libvpx", "webm", "constant variable"),
    ("libvpx-vp9", "webm mp4", "constant variable late"),
    ("libsvtav1", "mkv mp4", "constant variable"),
    ("mpeg4", "mp4 mkv avi", "constant"),
    ("mpeg4 without B", "avi mkv", "variable"),
    ("mpeg2video", "mpg vob ts mkv", "constant"),
    ("mpeg1video", "mpeg", "constant"),
    ("mjpeg", "avi mov", "constant dropped"),
    ("flv", "flv", "constant"),
    ("wmv2", "wmv", "constant variable late"),
    ("msmpeg4", "avi", "constant"),
    ("gif", "gif", "constant variable"),
    ("prores_ks", "mov", "constant"),
    ("ffv1", "mkv", "constant variable"),
]
CORPUS = [
    (codec, kind, clock)
    for codec, kinds, clocks in FILMS
    for kind, clock in itertools.product(kinds.split(), clocks.split())
]
BROADCASTS = ("ts", "m2ts", "mpg", "mpeg", "vob")  # whose clock is not 0 where a film begins


def make(folder, codec, kind, clock):
    """A film, and when its frames are shown, in milliseconds."""
    name, milliseconds = codec.split()[0], CLOCKS[clock]
    rate = None if clock == "variable" else 25
    return write_film(folder / f"film.{kind}", name, milliseconds, rate, **CODECS[codec]), list(milliseconds)


def shown_too_early_or_late(claimed, frames, shown, begin=0):
    """Of frames and the seconds that are said of them, those that a player shows at other times: both times."""
    wrong = []
    for seconds, frame in zip(claimed, frames, strict=True):
        at, paint = 1000 * seconds + begin, read_paint(frame)
        until = next((one for one in shown if one > paint), np.inf)
        if paint not in shown or not paint - NEAR <= at <= until + NEAR:
            wrong.append((at, paint))
    return wrong


def look(path, **sampling):
    """The seconds on a player's clock that are said of the frames of a film, and the frames."""
    video = open_video(str(path), lambda total, fps: choose_frames(total, fps, **sampling))
    return [video.about.start + one for one in video.about.metadata.timestamps], list(video.decode())


@pytest.mark.parametrize(("codec", "kind", "clock"), CORPUS, ids=lambda one: one.replace(" ", "-"))
def test_every_frame_says_when_it_is_shown(tmp_path, codec, kind, clock):
    """And is the same whether or not frames in front of it are skipped."""
    path, shown = make(tmp_path, codec, kind, clock)
    begin, film = shown[0] if kind in BROADCASTS else 0, Film(str(path))
    assert film.warnings == []
    for sampling in ({}, {"fps": 2.0}, {"num_frames": 6}):
        assert shown_too_early_or_late(*look(path, **sampling), shown, begin) == []
    watched = list(zip(*Source(str(path), 25.0, 0.01, time.monotonic()), strict=True))
    assert shown_too_early_or_late(*watched, shown, begin) == []
    # Nothing is skipped of these; FFmpeg writes others of MPEG-2 without good times where it has one processor alone.
    if clock == "late" or kind in ("vob", "avi") or not film.timed:
        return
    for count in (2, 3, 7, 25):
        instants = (np.arange(count) + 0.3) / count * film.times[-1]
        through, whole = zip(*film.read(instants), strict=True)
        skipping, _ = zip(*film.read(instants, skipping=True), strict=True)
        assert len(through) == count and np.array_equal(through, skipping) and all(whole)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_avi_shows_its_frames_in_order_and_from_its_start(tmp_path, codec):
    path = write_film(tmp_path / "film.avi", codec, range(0, 6000, 125), 8, bf="2")
    for looked in (Source(str(path), 8.0, 0.01, 0.0), zip(*look(path), strict=True)):
        assert {round(1000 * seconds) - read_paint(frame) for seconds, frame in looked} == {0}


def test_avi_with_frames_left_out_is_complete(tmp_path):
    """It counts them, and so slow a film has a clock of its own."""
    film = Film(str(write_film(tmp_path / "film.avi", "mpeg4", [0, *range(2000, 6000, 200)], 5)))
    assert (film.total / film.fps, film.warnings) == (6.0, [])


def test_what_is_encoded_and_stored_has_the_times_of_its_frames(tmp_path, tiny_published):
    """`ask` and `chat` encode a film, `index` stores it: what both say of its frames is what these show."""
    model, processor = session.load(tiny_published, "cpu")
    films = {}
    one_of_each = {kind: (codec, kind, clock) for codec, kind, clock in CORPUS}
    for number, (codec, kind, clock) in enumerate(one_of_each.values()):
        (tmp_path / "films" / str(number)).mkdir(parents=True)
        films[f"{number}/film.{kind}"] = (*make(tmp_path / "films" / str(number), codec, kind, clock), kind)
    index(tmp_path / "films", tmp_path / "library", model, processor, fps=2)
    library = Library(tmp_path / "library", model, processor)
    assert sorted(library.names) == sorted(films)
    for name, (path, shown, kind) in films.items():
        encoded, stored = session.encode(model, processor, path, fps=2), library.film(name)
        assert stored.about.start == encoded.about.start
        assert stored.about.metadata.timestamps == encoded.about.metadata.timestamps
        claimed = [encoded.about.start + one for one in encoded.about.metadata.timestamps]
        frames = list(processor.video_chunks(path, fps=2).decode())
        assert shown_too_early_or_late(claimed, frames, shown, shown[0] if kind in BROADCASTS else 0) == []
        answer = session.ask(model, processor, encoded, "What?", selection="all", max_new_tokens=1)
        start = encoded.about.start
        assert [(one.start, one.end) for one in answer.evidence] == [(start, start + encoded.length)]


def test_a_damaged_film_is_read_where_few_of_its_frames_are_looked_at(tmp_path):
    """A decoder with several threads may find a broken frame only when it is asked for the last."""
    path = write_film(tmp_path / "film.mp4", "libx264", range(0, 6000, 40), 25, g="12", bf="2")
    data, random = path.read_bytes(), np.random.default_rng(0)
    for place in range(600, data.find(b"moov") - 400, 700):
        path.write_bytes(data[:place] + random.bytes(300) + data[place + 300 :])
        _, frames = look(path, num_frames=12)
        assert len(frames) == 12


def test_a_frame_that_was_shown_is_let_go(tmp_path):
    """Not by Python's collection, which comes after hundreds of them."""
    path = write_film(tmp_path / "film.mp4", "libx264", range(0, 3000, 40), 25, g="12")
    gc.collect()
    gc.disable()
    try:
        for _ in Film(str(path)).show(np.arange(0, 3, 0.04)):
            pass
        assert sum(type(one) is av.VideoFrame for one in gc.get_objects()) < 5
    finally:
        gc.enable()


# --- Clocks ---


JOINED = [("libx264", "ts", 3), ("mpeg4", "ts", 2), ("mpeg2video", "mpg", 3), ("libx264", "mkv", 2)]
JOINED += [("mpeg2video", "vob", 3), ("mpeg1video", "mpeg", 2), ("libx264", "mpg", 2), ("mpeg4", "avi", 2)]


@pytest.mark.parametrize(("codec", "kind", "parts"), JOINED)
def test_recordings_joined_end_to_end_are_read_to_their_end(tmp_path, codec, kind, parts):
    """As `cat red.ts blue.ts`: their clocks are equal."""
    path = tmp_path / f"joined.{kind}"
    join(path, [write(tmp_path, codec, kind, later=4000 * part) for part in range(parts)])
    for sampling in ({}, {"fps": 2.0}, {"num_frames": 6}):
        claimed, frames = look(path, **sampling)
        assert shown_too_early_or_late(claimed, frames, range(0, 4000 * parts, 40)) == []
    video = open_video(str(path), choose_frames)
    assert video.about.metadata.duration == pytest.approx(4 * parts, abs=0.05)
    assert all("is set anew after 4." in warning for warning in video.about.warnings)
    watched = list(zip(*Source(str(path), 2.0, 0.01, time.monotonic()), strict=True))
    assert shown_too_early_or_late(*watched, range(0, 4000 * parts, 40)) == [] and len(watched[0]) == 8 * parts


@pytest.mark.parametrize(("kind", "parts"), [("mp4", 2), ("flv", 2), ("mkv", 3)])
def test_what_players_pass_over_of_a_joined_file_is_said(tmp_path, kind, parts):
    path = tmp_path / f"joined.{kind}"
    join(path, [write(tmp_path, "libx264", kind, later=4000 * part, bf="0") for part in range(parts)])
    (said,) = [warning for warning in Film(str(path)).warnings if "is followed by another" in warning]


def write(folder, codec, kind, later=0, offset=0, **options):
    """Four seconds; a player's clock begins at `offset` seconds."""
    path = folder / f"part-{later}.{kind}"
    more = {**CODECS[codec], **options}
    return write_film(path, codec.split()[0], range(0, 4000, 40), 25, later, offset=offset, **more)


def join(path, parts):
    path.write_bytes(b"".join(part.read_bytes() for part in parts))


@pytest.mark.parametrize("offsets", [(0, 5000), (5000, 0), (0, 90), (0, 95000, 20)], ids=str)
def test_what_comes_after_a_clock_that_jumps_is_put_behind(tmp_path, caplog, offsets):
    path = tmp_path / "jumps.ts"
    parts = [write(tmp_path, "libx264", "ts", 4000 * part, offset) for part, offset in enumerate(offsets)]
    join(path, parts)
    claimed, frames = look(path)
    shown = range(0, 4000 * len(parts), 40)
    assert shown_too_early_or_late(claimed, frames, shown) == [] and len(frames) == len(shown)
    assert ["is set anew after 4." in record.message for record in caplog.records] == [len(parts) > 1]
    watched = list(zip(*Source(str(path), 2.0, 0.01, time.monotonic()), strict=True))
    assert shown_too_early_or_late(*watched, shown) == []


def set_time(path, place, seconds):
    """Writes another time over that at which a packet of a .ts is shown."""
    data, since = bytearray(path.read_bytes()), -1
    for _ in range(place + 1):
        since = data.index(b"\0\0\1\xe0", since + 1)
    at, ticks = since + 9, round(90_000 * seconds)
    data[at] = data[at] & 0xF0 | ticks >> 29 & 0x0E | 1
    data[at + 1 : at + 3] = (ticks >> 14 & 0xFFFE | 1).to_bytes(2, "big")
    data[at + 3 : at + 5] = (ticks << 1 & 0xFFFE | 1).to_bytes(2, "big")
    path.write_bytes(data)


@pytest.mark.parametrize("seconds", [1.9, 7.0, 25.2, 3000.0])
@pytest.mark.parametrize("codec", ["libx264", "libx264 without B", "mpeg2video"])
def test_a_time_that_is_damaged_moves_no_other(tmp_path, codec, seconds):
    path = write(tmp_path, codec, "ts", offset=2)
    set_time(path, 61, seconds)
    claimed, frames = look(path)
    assert shown_too_early_or_late(claimed, frames, range(0, 4000, 40)) == [] and len(frames) == 100
    (warning,) = open_video(str(path), choose_frames).about.warnings
    assert " has 1 damaged times " in warning
    source = Source(str(path), 5.0, 0.01, 0.0)
    claimed, frames = zip(*source, strict=True)
    assert shown_too_early_or_late(claimed, frames, range(0, 4000, 40)) == [] and len(frames) >= 19
    assert " has 1 damaged times " in source.warnings[0]


def test_no_more_is_lost_than_is_looked_at(tmp_path):
    path = write(tmp_path, "mpeg4 without B", "mp4", g="50")
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    data = bytearray(path.read_bytes())
    for place, size in places[3:12]:
        data[place : place + size] = data[place : place + 1] + bytes(size - 1)
    path.write_bytes(data)
    film = Film(str(path))
    assert len(list(film.show(np.array([0.81])))) == 1
    assert [warning.partition(" is damaged: ")[2] for warning in film.warnings] == [
        "1 of the 1 frames that are looked at are, or follow from such."
    ]


def test_what_follows_from_a_damaged_frame_is_counted(tmp_path):
    """Of two in five frames none is the damaged one, whose blocks they show until the next key frame."""
    path = write(tmp_path, "libx264 without B", "mkv", g="50", sc_threshold="0")
    with av.open(str(path)) as container:
        hurt = bytes([packet for packet in container.demux(video=0) if packet.size][61])
    data = path.read_bytes()
    path.write_bytes(data.replace(hurt, hurt[:20] + bytes(len(hurt) - 20)))
    (warning,) = open_video(str(path), lambda total, fps: np.array([10, 40, 70, 99])).about.warnings or [""]
    film = Film(str(path))
    list(film.show(np.array([10, 40, 70, 99]) / 25 + 0.01))
    assert " is damaged: 2 of the 4 " in film.warnings[0] and warning in ("", film.warnings[0])


@pytest.mark.parametrize(("name", "codec"), [("film.h264", "libx264"), ("film.hevc", "libx265")])
def test_a_film_without_times_has_the_rate_of_its_codec(tmp_path, name, codec):
    """And not the 25 frames a second that FFmpeg takes for one without a clock."""
    film = Film(str(write_film(tmp_path / name, codec, range(0, 4000, 100), 10)))
    assert (film.total, film.fps, film.timed) == (40, 10.0, False)


def test_a_long_pause_is_said(tmp_path):
    path = write_film(tmp_path / "pause.mkv", "libx264", [0, 40, 80, 3_600_000, 3_600_040])
    assert "has no frame for 3600 s from 0.1 s on" in open_video(str(path), lambda *_: np.array([0])).about.warnings[0]


def test_a_frame_after_years_costs_no_memory(tmp_path, loaded):
    years = 2 * 10**11
    path = str(write_film(tmp_path / "gap.mkv", "libx264", [*range(0, 9000, 1000), years]))
    tracemalloc.start()
    try:
        video = encode(*loaded, path, max_frames=4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**26
    assert video.frames == 4
    assert "has no frame for 199999992 s" in video.about.warnings[0]
    with pytest.raises(ValueError, match=r"All 2,000,000,001 frames of a video were asked for; expected 1,048,576"):
        loaded[1](videos=path, do_sample_frames=False)
    with pytest.raises(ValueError, match=r"The evidence is more than 1,048,576 frames"):
        _frames_within(video, [Interval(0.0, 1e8, 1.0)])


def test_what_was_cut_out_of_a_recording_is_said(tmp_path):
    path = tmp_path / "cut.ts"
    data = write(tmp_path, "libx264", "ts").read_bytes()
    keys = [packet.pos for packet in av.open(str(tmp_path / "part-0.ts")).demux(video=0) if packet.is_keyframe]
    path.write_bytes(data[: keys[2] - 188 * 3 - 50] + data[keys[8] + 90 :])
    assert "s are missing" in " ".join(open_video(str(path), choose_frames).about.warnings)


def test_a_recording_in_pieces_on_one_clock_has_no_damage(tmp_path):
    """As a stream's segments: where they meet MPEG-TS counts its packets anew, which FFmpeg takes for damage."""
    path = tmp_path / "stream.ts"
    join(path, [write(tmp_path, "libx264", "ts", 4000 * part, 10 + 4 * part) for part in range(3)])
    assert open_video(str(path), choose_frames).about.warnings == []
    assert len(look(path)[1]) == 300


def test_a_still_and_a_busy_stretch_are_looked_at_by_the_clock(tmp_path):
    """As a screen that was recorded: a frame in 20 s, and 100 in 10 s."""
    shown = [*range(0, 60_000, 20_000), *range(60_000, 65_000, 50)]
    write_film(tmp_path / "screen.mp4", "libx264", shown)
    claimed, frames = look(tmp_path / "screen.mp4", fps=2.0)
    assert claimed == pytest.approx(np.arange(130) / 2, abs=NEAR / 1000)
    assert shown_too_early_or_late(claimed, frames, shown) == []
    assert len({read_paint(frame) for frame in frames}) == 3 + 10
    assert len(look(tmp_path / "screen.mp4", fps=2.0, max_frames=64)[1]) == 64


# --- What is decoded ---


def test_only_what_a_frame_is_made_from_is_decoded(tmp_path):
    write_film(tmp_path / "film.mp4", "libx264", range(0, 20_000, 40), 25, g="50", sc_threshold="0", bf="2")
    needed = Film(str(tmp_path / "film.mp4")).needed(np.array([52, 449]))
    assert np.count_nonzero(needed == 2) == 2 and needed[[52, 449]].tolist() == [2, 2]
    assert np.count_nonzero(needed) <= 3 + 50 and needed[50] == 1 and not needed[53:400].any()


def test_a_film_that_does_not_follow_from_its_key_frames_is_read_through(tmp_path, caplog):
    """Its key frames are whole only after the frames behind them."""
    x264 = {"x264-params": "intra-refresh=1:keyint=40", "preset": "veryfast"}
    path = write_film(tmp_path / "refresh.mp4", "libx264", range(0, 8000, 40), 25, **x264)
    claimed, frames = look(path, num_frames=4)
    assert shown_too_early_or_late(claimed, frames, range(0, 8000, 40)) == []
    (said,) = [record.message for record in caplog.records]
    assert said == f"Every frame of the video {str(path)!r} is decoded, since not all follow from its key frames."


# --- What is in a file ---


def mux(path, *streams, **options):
    """Streams of painted films and of silence: (codec, milliseconds, disposition)."""
    with av.open(str(path), "w", **options) as container:
        made = []
        for codec, _, disposition in streams:
            stream = container.add_stream(codec, rate=16000 if codec in ("aac", "libmp3lame", "libopus") else 25)
            if stream.type == "video":
                stream.width = stream.height = SIDE
                stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            stream.disposition = disposition
            made.append(stream)
        for stream, (_, milliseconds, _) in zip(made, streams, strict=True):
            for index, one in enumerate(milliseconds):
                if stream.type == "video":
                    frame = av.VideoFrame.from_ndarray(paint(one), format="rgb24")
                    frame.pts, frame.time_base = index, Fraction(1, 25)
                else:
                    frame = av.AudioFrame.from_ndarray(np.zeros((1, 640), np.float32), "fltp", "mono")
                    frame.sample_rate, frame.pts, frame.time_base = 16000, 640 * index, Fraction(1, 16000)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    return path


DEFAULT, COVER = av.stream.Disposition.default, av.stream.Disposition.attached_pic
NONE = DEFAULT & COVER


def test_the_default_stream_is_read(tmp_path):
    other, main = range(10_000, 11_000, 40), range(0, 3000, 40)
    path = mux(tmp_path / "two.mkv", ("libx264", other, NONE), ("libx264", main, DEFAULT))
    claimed, frames = look(path)
    assert [read_paint(frame) for frame in frames] == [*main]
    assert open_video(str(path), choose_frames).about.warnings == []
    assert {read_paint(frame) for _, frame in Source(str(path), 2.0, 0.01, 0.0)} <= {*main}
    path = mux(tmp_path / "both.mkv", ("libx264", other, DEFAULT), ("libx264", main, DEFAULT))
    (warning,) = open_video(str(path), choose_frames).about.warnings
    number = 1 + (read_paint(look(path)[1][0]) < 10_000)
    assert f"has 2 video streams, and names none; number {number}, of 96 x 96 pixels, is read" in warning


@pytest.mark.parametrize(
    ("within", "shown"), [((2.005, 2.02), 2000), ((3.999, None), 3960), ((2.0, 2.0), 2000), ((2.01, 2.05), 2040)]
)
def test_between_two_times_a_frame_is_shown(tmp_path, within, shown):
    path = write(tmp_path, "libx264", "mp4")
    video = open_video(str(path), choose_frames, within)
    assert [read_paint(frame) for frame in video.decode()] == [shown] and video.about.start == pytest.approx(
        shown / 1000
    )
    with pytest.raises(ValueError, match="shows no frame"):
        open_video(str(path), choose_frames, (4.001, None))


def test_neither_a_cover_nor_sound_is_a_film(tmp_path):
    path = mux(tmp_path / "song.mp3", ("libmp3lame", range(50), DEFAULT), ("mjpeg", [7], COVER))
    with pytest.raises(ValueError, match=r"song\.mp3' as a video: it has a cover and no video"):
        open_video(str(path), choose_frames)
    with pytest.raises(ValueError, match="it has a cover and no video"):
        list(Source(str(path), 2.0, 0.01, 0.0))
    with pytest.raises(ValueError, match=r"Cannot decode '.*sound\.mp4' as a video"):
        open_video(str(mux(tmp_path / "sound.mp4", ("aac", range(50), DEFAULT))), choose_frames)


@pytest.mark.parametrize("kind, sound", [("mkv", "aac"), ("webm", "libopus")])
def test_sound_may_be_longer_than_the_picture(tmp_path, kind, sound):
    video = "libx264" if kind == "mkv" else "libvpx"
    path = mux(tmp_path / f"long.{kind}", (video, range(0, 3000, 40), DEFAULT), (sound, range(300), DEFAULT))
    assert open_video(str(path), choose_frames).about.warnings == []


def test_pixels_that_are_not_square(tmp_path, tiny_published):
    """As DVDs and DV tapes have them: a player stretches the frames."""
    path = write_film(tmp_path / "wide.mp4", "libx264", range(0, 2000, 40), 25, aspect=Fraction(3, 2))
    claimed, frames = look(path)
    assert frames[0].shape == (SIDE, SIDE * 3 // 2, 3)
    assert shown_too_early_or_late(claimed, frames, range(0, 2000, 40)) == []
    model, processor = session.load(tiny_published, "cpu")
    video = session.encode(model, processor, path)
    answer = session.ask(model, processor, video, "What moves?", max_new_tokens=2, selection="all")
    assert answer.evidence[0].pixels == (0, 0, SIDE * 3 // 2, SIDE)
    draw_evidence(answer, {video.video: video}, tmp_path / "drawn")
    with av.open(str(tmp_path / "drawn" / "kept.mp4")) as kept:
        stream = kept.streams.video[0]
        assert stream.width * (stream.sample_aspect_ratio or 1) == SIDE * 3 // 2 and stream.height == SIDE


@pytest.mark.parametrize(
    ("kind", "clock"),
    [("mp4", "constant"), ("ts", "late"), ("mp4", "dropped"), ("mkv", "variable"), ("mirrored", "late")],
)
def test_the_film_of_the_evidence_shows_what_it_says_and_when(tmp_path, kind, clock):
    """Of two stretches, what a player shows in them, one behind the other."""
    mirrored, rate = kind == "mirrored", None if clock == "variable" else 25
    path = tmp_path / f"film.{'mp4' if mirrored else kind}"
    shown = list(CLOCKS[clock])
    write_film(path, "libx264", shown, rate, mirrored=mirrored, g="10", crf="10")
    if mirrored:  # a point (x, y) is shown at (-x, y)
        data = bytearray(path.read_bytes())
        place = data.index(b"tkhd") + 44
        data[place : place + 36] = struct.pack(">9i", -(2**16), 0, 0, 0, 2**16, 0, 0, 0, 1 << 30)
        path.write_bytes(data)
    opened = open_video(str(path), lambda total, fps: choose_frames(total, fps, num_frames=8))
    begin = shown[0] if kind in BROADCASTS else 0
    metadata = opened.about.metadata
    step = 2 / metadata.sampled_fps
    video = EncodedVideo(str(path), torch.empty(16, 4), torch.tensor([[4, 4, 4]]), step, opened.about, 0.0)
    spans = [placed(Interval(at * step, (at + 1) * step, 0.5), "film", video) for at in (2, 0)]
    maps = {"film": torch.ones(4, 2, 2, dtype=torch.bool)}
    answer = Answer("yes", "film", 8, video.length, 16, 16, 1.0, spans, {}, maps)
    draw_evidence(answer, {"film": video}, tmp_path / "drawn")
    with av.open(str(tmp_path / "drawn" / "kept.mp4")) as kept:
        decoded = [(float(one.pts * one.time_base), one.to_ndarray(format="rgb24")) for one in kept.decode(video=0)]
    times, frames = zip(*decoded, strict=True)
    assert times == pytest.approx([index / metadata.fps for index in range(len(times))], abs=1e-3)
    bounds = [[round((at - video.about.start) * metadata.fps) for at in (one.start, one.end)] for one in spans[::-1]]
    times = [video.about.start + index / metadata.fps for first, last in bounds for index in range(first, last)]
    assert shown_too_early_or_late(times, frames, shown, begin) == []


def test_frames_that_change_their_size_are_as_large_as_the_first(tmp_path):
    small = write_film(tmp_path / "small.ts", "libx264", range(0, 2000, 40), 25, 2000, side=48)
    join(tmp_path / "both.ts", [write_film(tmp_path / "large.ts", "libx264", range(0, 2000, 40), 25), small])
    claimed, frames = look(tmp_path / "both.ts")
    assert {frame.shape for frame in frames} == {(SIDE, SIDE, 3)}
    assert shown_too_early_or_late(claimed, frames, range(0, 4000, 40)) == []


LISTS = {
    "list.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2.0,\nfilm.ts\n#EXT-X-ENDLIST\n",
    "list.concat": "ffconcat version 1.0\nfile list.concat\n",
    "list.txt": "file film.ts\n",
    "list.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 40000 RTP/AVP 96\n",
    "list.mpd": '<?xml version="1.0"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"/>',
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_other_files_is_refused(tmp_path, name):
    write_film(tmp_path / "film.ts", "libx264", range(0, 2000, 40), 25)
    (tmp_path / name).write_text(LISTS[name])
    for read in (lambda path: open_video(path, choose_frames), lambda path: list(Source(path, 2.0, 0.01, 0.0))):
        with pytest.raises(ValueError, match=r"it is a list of other places, which is not followed") as refused:
            read(str(tmp_path / name))
        assert "\n" not in str(refused.value)


def test_a_list_that_is_not_known_leads_nowhere(tmp_path):
    """Before what tells it from a film stands something else."""
    write_film(tmp_path / "film.ts", "libx264", range(0, 2000, 40), 25)
    (tmp_path / "list.concat").write_text("# a comment\nffconcat version 1.0\nfile film.ts\n")
    for read in (lambda path: open_video(path, choose_frames), lambda path: list(Source(path, 2.0, 0.01, 0.0))):
        with pytest.raises(ValueError, match="Cannot"):
            read(str(tmp_path / "list.concat"))
