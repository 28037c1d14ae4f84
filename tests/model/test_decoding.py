"""When a player shows the frames of videos: those of many containers, codecs and clocks, with painted times."""

import gc
import struct
import tracemalloc
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from painted_videos import CLOCKS, SIDE, packets_of, paint, read_paint, spoil, write_video
from qtsplus.asking import session
from qtsplus.asking.picture import frame_at
from qtsplus.live.watching import Source
from qtsplus.model.decoding_qtsplus import VideoDecoder
from qtsplus.model.sampling_qtsplus import choose_frames
from qtsplus.model.video_qtsplus import open_video
from qtsplus.video.encoded import EncodedVideo, encode

NEAR = 50  # milliseconds
FOUR_SECONDS = range(0, 4000, 40)
H264 = {"g": "10", "preset": "veryfast"}
MPEG = {"g": "10", "bf": "2"}
VPX = {"g": "10", "deadline": "realtime", "cpu-used": "8"}
CODECS = {
    "libx264": H264,
    "libx264 without B": {**H264, "bf": "0"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=error:keyint=12"},
    "libvpx": VPX,
    "libvpx-vp9": VPX,
    "libsvtav1": {"g": "10", "preset": "8", "crf": "10"},
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
# Codec: containers: clocks
CORPUS_LINES = """
    libx264: mp4 mov mkv ts m4v 3gp: constant variable dropped
    libx264: m2ts avi: constant late
    libx264: mp4 mkv mov ts: late
    libx264 without B: avi flv: constant variable
    libx264 without B: flv: late
    libx265: mp4 mkv ts: constant variable
    libvpx: webm: constant variable
    libvpx-vp9: webm mp4: constant variable late
    libsvtav1: mkv mp4: constant variable
    mpeg4: mp4 mkv avi: constant
    mpeg4 without B: avi mkv: variable
    mpeg2video: mpg vob ts mkv: constant
    mpeg1video: mpeg: constant
    mjpeg: avi mov: constant dropped
    flv: flv: constant
    wmv2: wmv: constant variable late
    msmpeg4: avi: constant
    gif: gif: constant variable
    prores_ks: mov: constant
    ffv1: mkv: constant variable
"""
CORPUS = []  # codec, container, clock
for line in CORPUS_LINES.strip().splitlines():
    codec_of_line, kinds, clocks = line.strip().split(": ")
    for kind_of_line in kinds.split():
        for clock_of_line in clocks.split():
            made_of = (codec_of_line, kind_of_line, clock_of_line)
            CORPUS.append(made_of)
BROADCASTS = ("ts", "m2ts", "mpg", "mpeg", "vob")  # whose clock is not 0 where a video begins


def make(folder, codec, kind, clock):
    """A video, when its frames are shown, in milliseconds, and when its clock begins."""
    shown = list(CLOCKS[clock])
    rate = None if clock == "variable" else 25
    encoder = codec.split()[0]
    path = write_video(folder / f"video.{kind}", encoder, shown, rate, **CODECS[codec])
    begin = shown[0] if kind in BROADCASTS else 0
    return path, shown, begin


def write(folder, codec, kind, later=0, offset=0, **options):
    """Four seconds; a player's clock begins at `offset` seconds."""
    path = folder / f"part-{later}.{kind}"
    encoder = codec.split()[0]
    return write_video(path, encoder, FOUR_SECONDS, 25, later, offset=offset, **(CODECS[codec] | options))


def join(path, parts):
    """The files one behind the other, as `cat red.ts blue.ts`."""
    contents = [part.read_bytes() for part in parts]
    path.write_bytes(b"".join(contents))
    return path


def write_joined(folder, codec, kind, offsets, **options):
    """Recordings of four seconds, one behind the other; their clocks begin at these seconds."""
    parts = [write(folder, codec, kind, 4000 * number, offset, **options) for number, offset in enumerate(offsets)]
    return join(folder / f"joined.{kind}", parts)


def seconds_of(about):
    """When a player shows the frames that were chosen."""
    return [about.start + timestamp for timestamp in about.metadata.timestamps]


def look(path, **sampling):
    """The frames of a video, each behind the seconds on a player's clock that are said of it."""

    def choose(total, fps):
        return choose_frames(total, fps, **sampling)

    video = open_video(str(path), choose)
    return list(zip(seconds_of(video.about), video.decode(), strict=True))


def watch(path, fps):
    """The same, as a stream is read."""
    return Source(str(path), fps, 0.01, 0.0)


def check_times(frames, shown, begin=0):
    """Every frame is shown by a player when it is said to be; `shown` and `begin` are milliseconds."""
    wrong = []
    for seconds, frame in frames:
        said = 1000 * seconds + begin
        painted = read_paint(frame)
        later_frames = [time for time in shown if time > painted]
        last = min(later_frames, default=np.inf) + NEAR
        is_right = painted in shown and painted - NEAR <= said <= last
        if not is_right:
            wrong.append((said, painted))
    assert wrong == []


def warnings_of(path):
    return open_video(str(path), choose_frames).about.warnings


@pytest.mark.parametrize(("codec", "kind", "clock"), CORPUS, ids=lambda value: value.replace(" ", "-"))
def test_every_frame_says_when_it_is_shown(tmp_path, codec, kind, clock):
    """And is the same whether or not frames in front of it are skipped."""
    path, shown, begin = make(tmp_path, codec, kind, clock)
    video = VideoDecoder(str(path))
    assert video.warnings == []
    check_times(look(path), shown, begin)
    check_times(look(path, fps=2.0), shown, begin)
    check_times(look(path, num_frames=6), shown, begin)
    check_times(watch(path, 25.0), shown, begin)
    # Nothing is skipped of these; FFmpeg writes others of MPEG-2 without good times where it has one processor alone.
    if clock == "late" or kind in ("vob", "avi") or not video.frames_carry_times:
        return
    end = video.times[-1]
    for count in (2, 3, 7, 25):
        shares = (np.arange(count) + 0.3) / count
        instants = shares * end
        through = list(video.read(instants))
        skipping = list(video.read(instants, skipping=True))
        assert len(through) == count
        for (frame, is_whole), (same_frame, _) in zip(through, skipping, strict=True):
            assert is_whole
            assert np.array_equal(frame, same_frame)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_avi_shows_its_frames_in_order_and_from_its_start(tmp_path, codec):
    path = write_video(tmp_path / "video.avi", codec, range(0, 6000, 125), 8, bf="2")
    for frames in (watch(path, 8.0), look(path)):
        for seconds, frame in frames:
            assert round(1000 * seconds) == read_paint(frame)


def test_avi_with_frames_left_out_is_complete(tmp_path):
    """It counts them, and so slow a video has a clock of its own."""
    path = write_video(tmp_path / "video.avi", "mpeg4", [0, *range(2000, 6000, 200)], 5)
    video = VideoDecoder(str(path))
    assert video.total / video.fps == 6.0
    assert video.warnings == []


def test_a_damaged_video_is_read_where_few_of_its_frames_are_looked_at(tmp_path):
    """A decoder with several threads may find a broken frame only when it is asked for the last."""
    path = write_video(tmp_path / "video.mp4", "libx264", range(0, 6000, 40), 25, g="12", bf="2")
    data = path.read_bytes()
    end_of_frames = data.find(b"moov") - 400
    random = np.random.default_rng(0)
    for place in range(600, end_of_frames, 700):
        damage = random.bytes(300)
        path.write_bytes(data[:place] + damage + data[place + 300 :])
        assert len(look(path, num_frames=12)) == 12


def test_a_frame_that_was_shown_is_let_go(tmp_path):
    """Not by Python's collection, which comes after hundreds of them."""
    path = write_video(tmp_path / "video.mp4", "libx264", range(0, 3000, 40), 25, g="12")
    gc.collect()
    gc.disable()
    try:
        for _ in VideoDecoder(str(path)).show(np.arange(0, 3, 0.04)):
            pass
        held = [thing for thing in gc.get_objects() if type(thing) is av.VideoFrame]
        assert len(held) < 5
    finally:
        gc.enable()


# --- Clocks ---


@pytest.mark.parametrize(
    ("codec", "kind", "parts"),
    [
        ("libx264", "ts", 3),
        ("mpeg4", "ts", 2),
        ("mpeg2video", "mpg", 3),
        ("libx264", "mkv", 2),
        ("mpeg2video", "vob", 3),
        ("mpeg1video", "mpeg", 2),
        ("libx264", "mpg", 2),
        ("mpeg4", "avi", 2),
    ],
)
def test_recordings_joined_end_to_end_are_read_to_their_end(tmp_path, codec, kind, parts):
    """Their clocks are equal."""
    path = write_joined(tmp_path, codec, kind, [0] * parts)
    shown = range(0, 4000 * parts, 40)
    for sampling in ({}, {"fps": 2.0}, {"num_frames": 6}):
        check_times(look(path, **sampling), shown)
    about = open_video(str(path), choose_frames).about
    assert about.metadata.duration == pytest.approx(4 * parts, abs=0.05)
    for warning in about.warnings:
        assert "restarts after 4." in warning
    watched = list(watch(path, 2.0))
    check_times(watched, shown)
    assert len(watched) == 8 * parts


@pytest.mark.parametrize(("kind", "parts"), [("mp4", 2), ("flv", 2), ("mkv", 3)])
def test_what_players_pass_over_of_a_joined_file_is_said(tmp_path, kind, parts):
    path = write_joined(tmp_path, "libx264", kind, [0] * parts, bf="0")
    warnings = " ".join(warnings_of(path))
    assert warnings.count("is followed by another") == 1


@pytest.mark.parametrize("offsets", [(0, 5000), (5000, 0), (0, 90), (0, 95000, 20)], ids=str)
def test_what_comes_after_a_clock_that_jumps_is_put_behind(tmp_path, caplog, offsets):
    path = write_joined(tmp_path, "libx264", "ts", offsets)
    shown = range(0, 4000 * len(offsets), 40)
    frames = look(path)
    check_times(frames, shown)
    assert len(frames) == len(shown)
    (record,) = caplog.records
    assert "restarts after 4." in record.message
    check_times(watch(path, 2.0), shown)


def set_time(path, place, seconds):
    """Writes another time over that at which a packet of a .ts is shown: 33 bits in five bytes, with bits between."""
    data = bytearray(path.read_bytes())
    begin = -1
    for _ in range(place + 1):
        begin = data.index(b"\0\0\1\xe0", begin + 1)
    field = begin + 9
    ticks = round(90_000 * seconds)
    first_3_bits = ticks >> 29 & 0x0E
    next_15_bits = ticks >> 14 & 0xFFFE
    last_15_bits = ticks << 1 & 0xFFFE
    kind = data[field] & 0xF0
    struct.pack_into(">BHH", data, field, kind | first_3_bits | 1, next_15_bits | 1, last_15_bits | 1)
    path.write_bytes(data)


@pytest.mark.parametrize("seconds", [1.9, 7.0, 25.2, 3000.0])
@pytest.mark.parametrize("codec", ["libx264", "libx264 without B", "mpeg2video"])
def test_a_time_that_is_damaged_moves_no_other(tmp_path, codec, seconds):
    path = write(tmp_path, codec, "ts", offset=2)
    set_time(path, 61, seconds)
    frames = look(path)
    check_times(frames, FOUR_SECONDS)
    assert len(frames) == 100
    source = watch(path, 5.0)
    watched = list(source)
    check_times(watched, FOUR_SECONDS)
    assert len(watched) >= 19
    (warning,) = warnings_of(path)
    assert " has damaged times among its frames (1), " in warning
    assert " has damaged times among its frames (1), " in source.warnings[0]


def test_no_more_is_lost_than_is_looked_at(tmp_path):
    path = write(tmp_path, "mpeg4 without B", "mp4", g="50")
    spoil(path, range(3, 12), kept=1)
    video = VideoDecoder(str(path))
    frames = list(video.show(np.array([0.81])))
    assert len(frames) == 1
    (warning,) = video.warnings
    assert warning.endswith(" is damaged, and with it 1 of the 1 frames that are looked at.")


def test_a_packet_that_a_decoder_drops_is_said(tmp_path):
    """In an AVI nothing tells which frame is missing: as many come out as are expected."""
    path = write(tmp_path, "libx264", "avi")
    spoil(path, [2], kept=6)
    video = VideoDecoder(str(path))
    list(video.show(video.times))
    (warning,) = video.warnings
    assert warning.endswith(" is damaged, and with it 1 of the 100 frames that are looked at.")


def test_what_follows_from_a_damaged_frame_is_counted(tmp_path):
    """Of two in five frames none is the damaged one, whose blocks they show until the next key frame."""
    path = write(tmp_path, "libx264 without B", "mkv", g="50", sc_threshold="0")
    spoil(path, [61], kept=20)
    video = VideoDecoder(str(path))
    looked_at = np.array([10, 40, 70, 99]) / 25
    list(video.show(looked_at + 0.01))
    (warning,) = video.warnings
    assert " is damaged, and with it 2 of the 4 " in warning


@pytest.mark.parametrize(("name", "codec"), [("video.h264", "libx264"), ("video.hevc", "libx265")])
def test_a_video_without_times_has_the_rate_of_its_codec(tmp_path, name, codec):
    """And not the 25 frames a second that FFmpeg takes for one without a clock."""
    path = write_video(tmp_path / name, codec, range(0, 4000, 100), 10)
    video = VideoDecoder(str(path))
    assert video.total == 40
    assert video.fps == 10.0
    assert not video.frames_carry_times


def test_a_frame_after_years_costs_no_memory(tmp_path, loaded):
    years = 2 * 10**11
    path = str(write_video(tmp_path / "gap.mkv", "libx264", [*range(0, 9000, 1000), years]))
    tracemalloc.start()
    try:
        video = encode(*loaded, path, max_frames=4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**26
    assert video.frames == 4
    assert "has no frame for 199999992 s" in video.about.warnings[0]
    _, processor = loaded
    with pytest.raises(ValueError, match=r"2,000,000,001 frames of a video were asked for; expected 1,048,576"):
        processor(videos=path, do_sample_frames=False)


def test_damage_in_a_recording_is_said(tmp_path):
    path = write(tmp_path, "libx264", "ts")
    places = [place for place, _ in packets_of(path)]
    data = path.read_bytes()
    end = places[20] - 188 * 3 - 50
    begin = places[80] + 90
    path.write_bytes(data[:end] + data[begin:])
    assert "damaged frames are left out" in " ".join(warnings_of(path))


def test_a_recording_in_pieces_on_one_clock_has_no_damage(tmp_path):
    """As a stream's segments: where they meet MPEG-TS counts its packets anew, which FFmpeg takes for damage."""
    path = write_joined(tmp_path, "libx264", "ts", [10, 14, 18])
    assert warnings_of(path) == []
    assert len(look(path)) == 300


def test_a_still_and_a_busy_stretch_are_looked_at_by_the_clock(tmp_path):
    """As a screen that was recorded: a frame in 20 s, and 100 in 10 s."""
    still = [0, 20_000, 40_000]
    busy = range(60_000, 65_000, 50)
    shown = [*still, *busy]
    path = write_video(tmp_path / "screen.mp4", "libx264", shown)
    frames = look(path, fps=2.0)
    seconds = [seconds for seconds, _ in frames]
    assert seconds == pytest.approx(np.arange(130) / 2, abs=0.05)
    check_times(frames, shown)
    painted = {read_paint(frame) for _, frame in frames}
    assert len(painted) == 3 + 10
    assert len(look(path, fps=2.0, max_frames=64)) == 64


# --- What is decoded ---


def test_only_what_a_frame_is_made_from_is_decoded(tmp_path):
    path = write_video(tmp_path / "video.mp4", "libx264", range(0, 20_000, 40), 25, g="50", sc_threshold="0", bf="2")
    needed = VideoDecoder(str(path)).needed(np.array([52, 449]))
    assert np.flatnonzero(needed == 2).tolist() == [52, 449]
    assert np.count_nonzero(needed) <= 3 + 50
    assert needed[50] == 1
    assert not needed[53:400].any()


def test_a_video_that_does_not_follow_from_its_key_frames_is_read_through(tmp_path):
    """Its key frames are whole only after the frames behind them."""
    x264 = {"x264-params": "intra-refresh=1:keyint=40", "preset": "veryfast"}
    path = write_video(tmp_path / "refresh.mp4", "libx264", range(0, 8000, 40), 25, **x264)
    check_times(look(path, num_frames=4), range(0, 8000, 40))


# --- What is in a file ---

DEFAULT = av.stream.Disposition.default
COVER = av.stream.Disposition.attached_pic
NONE = DEFAULT & COVER


def mux(path, *streams):
    """Streams of painted videos and of silence: (codec, milliseconds, disposition)."""
    with av.open(str(path), "w") as container:
        added = [add_stream(container, codec, disposition) for codec, _, disposition in streams]
        for stream, (_, milliseconds, _) in zip(added, streams, strict=True):
            for number, time in enumerate(milliseconds):
                container.mux(stream.encode(frame_of(stream, number, time)))
            container.mux(stream.encode())
    return path


def add_stream(container, codec, disposition):
    is_sound = codec in ("aac", "libmp3lame", "libopus")
    stream = container.add_stream(codec, rate=16000 if is_sound else 25)
    if not is_sound:
        stream.width = SIDE
        stream.height = SIDE
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    stream.disposition = disposition
    return stream


def frame_of(stream, number, milliseconds):
    if stream.type == "video":
        frame = av.VideoFrame.from_ndarray(paint(milliseconds), format="rgb24")
        frame.pts = number
        frame.time_base = Fraction(1, 25)
        return frame
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 640), np.float32), "fltp", "mono")
    frame.sample_rate = 16000
    frame.pts = 640 * number
    frame.time_base = Fraction(1, 16000)
    return frame


def test_the_default_stream_is_read(tmp_path):
    other = range(10_000, 11_000, 40)
    path = mux(tmp_path / "two.mkv", ("libx264", other, NONE), ("libx264", FOUR_SECONDS, DEFAULT))
    painted = [read_paint(frame) for _, frame in look(path)]
    assert painted == list(FOUR_SECONDS)
    assert warnings_of(path) == []
    for _, frame in watch(path, 2.0):
        assert read_paint(frame) in FOUR_SECONDS


@pytest.mark.parametrize(
    ("within", "shown"),
    [
        ((2.005, 2.02), 2000),
        ((3.999, None), 3960),
        ((2.0, 2.0), 2000),
        ((2.01, 2.08), 2040),
    ],
)
def test_between_two_times_a_frame_is_shown(tmp_path, within, shown):
    path = str(write(tmp_path, "libx264", "mp4"))
    video = open_video(path, choose_frames, within)
    assert [read_paint(frame) for frame in video.decode()] == [shown]
    assert video.about.start == pytest.approx(shown / 1000)
    with pytest.raises(ValueError, match="shows no frame"):
        open_video(path, choose_frames, (4.001, None))


def test_neither_a_cover_nor_sound_is_a_video(tmp_path):
    song = mux(tmp_path / "song.mp3", ("libmp3lame", range(50), DEFAULT), ("mjpeg", [7], COVER))
    with pytest.raises(ValueError, match=r"song\.mp3' as a video: it has no video stream"):
        look(song)
    with pytest.raises(ValueError, match="it has no video stream"):
        list(watch(song, 2.0))
    sound = mux(tmp_path / "sound.mp4", ("aac", range(50), DEFAULT))
    with pytest.raises(ValueError, match=r"Cannot decode '.*sound\.mp4' as a video"):
        look(sound)


def test_pixels_that_are_not_square(tmp_path, loaded):
    """As DVDs and DV tapes have them: a player stretches the frames."""
    path = write_video(tmp_path / "wide.mp4", "libx264", FOUR_SECONDS, 25, aspect=Fraction(3, 2))
    wide = SIDE * 3 // 2
    frames = look(path)
    _, first_frame = frames[0]
    assert first_frame.shape == (SIDE, wide, 3)
    check_times(frames, FOUR_SECONDS)
    video = encode(*loaded, path)
    answer = session.ask(*loaded, video, "What moves?", max_new_tokens=2, selection="all")
    assert answer.evidence[0].pixels == (0, 0, wide, SIDE)
    assert frame_at(video, 0.5).shape == (SIDE, wide, 3)


def mirror(path):
    """Has a player show a point (x, y) at (-x, y)."""
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 44
    struct.pack_into(">9i", data, matrix, -(2**16), 0, 0, 0, 2**16, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "clock"),
    [
        ("mp4", "constant"),
        ("ts", "late"),
        ("mp4", "dropped"),
        ("mkv", "variable"),
        ("mirrored", "late"),
    ],
)
def test_a_frame_at_a_time_is_what_a_player_shows(tmp_path, kind, clock):
    is_mirrored = kind == "mirrored"
    path = tmp_path / f"video.{'mp4' if is_mirrored else kind}"
    shown = list(CLOCKS[clock])
    rate = None if clock == "variable" else 25
    write_video(path, "libx264", shown, rate, mirrored=is_mirrored, g="10", crf="10")
    if is_mirrored:
        mirror(path)
    about = open_video(str(path), choose_frames).about
    fps = about.metadata.fps
    grid = torch.tensor([[4, 4, 4]])
    video = EncodedVideo(str(path), torch.empty(16, 4), grid, 1.0, about, 0.0)
    count = round(video.length * fps)
    seconds = about.start + np.arange(count) / fps
    frames = [frame_at(video, second) for second in seconds]
    begin = shown[0] if kind in BROADCASTS else 0
    check_times(zip(seconds, frames, strict=True), shown, begin)


def test_frames_that_change_their_size_are_as_large_as_the_first(tmp_path):
    large = write_video(tmp_path / "large.ts", "libx264", range(0, 2000, 40), 25)
    small = write_video(tmp_path / "small.ts", "libx264", range(0, 2000, 40), 25, 2000, side=48)
    frames = look(join(tmp_path / "both.ts", [large, small]))
    for _, frame in frames:
        assert frame.shape == (SIDE, SIDE, 3)
    check_times(frames, FOUR_SECONDS)


LISTS = {
    "list.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2.0,\nvideo.ts\n#EXT-X-ENDLIST\n",
    "list.concat": "ffconcat version 1.0\nfile list.concat\n",
    "list.txt": "file video.ts\n",
    "list.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 40000 RTP/AVP 96\n",
    "list.mpd": '<?xml version="1.0"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"/>',
    # What tells it from a video has something else in front of it.
    "unknown.concat": "# a comment\nffconcat version 1.0\nfile video.ts\n",
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("read", [look, lambda path: list(watch(path, 2.0))], ids=["looked at", "watched"])
def test_a_list_of_other_files_leads_nowhere(tmp_path, name, read):
    write_video(tmp_path / "video.ts", "libx264", range(0, 2000, 40), 25)
    (tmp_path / name).write_text(LISTS[name])
    said = "Cannot" if name == "unknown.concat" else "it is a list of other places, which is not followed"
    with pytest.raises(ValueError, match=said) as refused:
        read(tmp_path / name)
    assert "\n" not in str(refused.value)
