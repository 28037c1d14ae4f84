"""Files that are cut off, damaged, trimmed, turned, or larger than memory; and folders of frames."""

import re
import struct
import tracemalloc

import av
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from clips import noise, read_video, write_mp4
from painted_videos import packets_of, spoil, write_video
from qtsplus.asking import session
from qtsplus.cli import app
from qtsplus.live.watching import Source
from qtsplus.model.containers_qtsplus import TAGS, read_packets
from qtsplus.model.decoding_qtsplus import VideoDecoder
from qtsplus.model.frames_qtsplus import image_paths, load_frames
from qtsplus.model.sampling_qtsplus import choose_frames
from qtsplus.video.subtitles import read_subtitles

TENTHS = range(0, 4000, 100)  # the milliseconds at which 40 frames of 4 s are shown


def frames_of(video):
    """All frames of a video, at their times."""
    return list(video.show(video.times + 1e-3))


def watch(path):
    """The stream of a file, read to its end, and its frames."""
    source = Source(str(path), 8.0, 10.0, 0.0)
    return source, list(source)


def check_silent(path):
    """Nothing is said about the file."""
    assert VideoDecoder(str(path)).warnings == []


def cut(whole, folder, length):
    """A copy in a folder that ends after so many bytes."""
    path = folder / f"cut{whole.suffix}"
    path.write_bytes(whole.read_bytes()[:length])
    return path


def test_a_rate_that_was_rounded_costs_no_frame():
    exact = choose_frames(40, 10, 2)
    rounded = choose_frames(40, 10.000000000000002, 2)
    assert len(exact) == len(rounded) == 8


def test_a_video_that_is_too_narrow_is_named(loaded, tmp_path):
    path = tmp_path / "narrow.mp4"
    write_mp4(path, np.zeros((8, 2, 1024, 3), np.uint8), 8)
    _, processor = loaded
    reason = r"The video '.*narrow\.mp4' cannot be sized for the model"
    with pytest.raises(ValueError, match=reason):
        session.encode(*loaded, path)
    with pytest.raises(ValueError, match=reason):
        processor(videos=str(path))


# --- Folders of frames ---


def test_every_kind_of_image_is_a_frame_and_hidden_files_are_none(tmp_path):
    for shade, kind in enumerate(("png", "gif", "tif", "TIFF", "bmp")):
        Image.new("RGB", (56, 56), (shade, shade, shade)).save(tmp_path / f"{shade}.{kind}")
    hidden = tmp_path / "._0.png"
    hidden.write_bytes(b"of another system")
    frames = load_frames(image_paths(str(tmp_path)))
    assert frames[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_an_image_too_large_to_be_meant_is_unreadable(tiny_processor, tmp_path):
    Image.new("1", (13400, 13400)).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match=r"Cannot read the frame '.*0\.png' as an image: .*179560000 pixels"):
        tiny_processor.video_chunks(tmp_path, fps=1)


# --- Cut off ---


def write(path, **muxer):
    """48 frames of noise at 8 a second: 6 s."""
    write_mp4(path, noise(48, 64, 64), 8, muxer=muxer, g="8")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A video whose header comes first."""
    return write(tmp_path_factory.mktemp("whole") / "whole.mp4", movflags="faststart")


@pytest.mark.parametrize("beyond", [0, 1, 200], ids=["between frames", "in a header", "in a frame"])
def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes_and_said_so(loaded, whole, tmp_path, caplog, beyond):
    start, _ = packets_of(whole)[24]
    path = cut(whole, tmp_path, start + beyond)
    answer = session.ask(*loaded, path, "What moves?", max_new_tokens=2)
    expected = f"The video {str(path)!r} is incomplete: its header states 48 frames, and 24 can be read."
    assert answer.as_dict()["warnings"] == [expected]
    assert caplog.messages.count(expected) == 1
    assert answer.seconds_of_video == 3.0
    video = VideoDecoder(str(path))
    assert video.total == 24
    assert len(frames_of(video)) == 24


def test_the_command_line_says_it_once(whole, tiny_published, tmp_path, caplog):
    start, _ = packets_of(whole)[24]
    path = cut(whole, tmp_path, start)
    options = ["--max-new-tokens", "1", "--model", str(tiny_published)]
    result = CliRunner().invoke(app, ["ask", str(path), "What moves?"] + options)
    said = result.stderr + caplog.text
    assert result.exit_code == 0
    assert said.count("header states 48 frames") == 1


def test_a_file_that_states_only_its_length(tmp_path):
    whole = write(tmp_path / "whole.mkv")
    check_silent(whole)
    half = whole.stat().st_size // 2
    (warning,) = VideoDecoder(str(cut(whole, tmp_path, half))).warnings
    assert "its header states 6.0 s, and 2." in warning


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("avi", "libx264"),
        ("avi", "mpeg4"),
        ("avi", "mjpeg"),
        ("flv", "libx264"),
        ("wmv", "wmv2"),
        ("mkv", "libx264"),
    ],
)
def test_a_cut_off_video_says_how_long_its_header_states_that_it_is(tmp_path, kind, codec):
    """Wherever it was cut: FFmpeg estimates the length of such an AVI from what is there, and forgets that of a WMV."""
    pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    whole = write_video(
        tmp_path / f"whole.{kind}",
        codec,
        range(0, 20_000, 100),
        10,
        pix_fmt=pix_fmt,
        g="20",
    )
    check_silent(whole)
    packets = packets_of(whole)
    for number in (160, 100, 60):
        start, packet = packets[number]
        in_next_packet = start + len(packet) + 3
        path = cut(whole, tmp_path, in_next_packet)
        (warning,) = VideoDecoder(str(path)).warnings
        assert re.search("its header states (20|21)[.][0-9] s, and [0-9]{1,2}[.][0-9] s can be read", warning)
    stream, _ = watch(path)
    assert "is incomplete: its header states 2" in stream.warnings[-1]


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_video_is_read_up_to_where_its_reader_fails(tmp_path, share):
    """As FFmpeg's for RealMedia does where a file ends in a packet."""
    whole = write_video(tmp_path / "whole.rm", "rv20", TENTHS, 10)
    check_silent(whole)
    length = int(share * whole.stat().st_size)
    video = VideoDecoder(str(cut(whole, tmp_path, length)))
    (warning,) = video.warnings
    assert re.search(" is incomplete: its header states 4.0 s, and [0-9.]+ s can be read", warning)
    assert len(video.order) == pytest.approx(40 * share, abs=6)
    assert len(frames_of(video)) == len(video.order)


def test_an_avi_that_was_written_to_a_pipe_is_whole(tmp_path):
    """It states as many frames as FFmpeg would write into one."""
    path = write_video(tmp_path / "piped.avi", "mpeg4", TENTHS, 10)
    data = bytearray(path.read_bytes())
    in_main_header = data.index(b"avih") + 8 + 16
    in_stream_header = data.index(b"strh") + 8 + 32
    for field in (in_main_header, in_stream_header):
        (frames,) = struct.unpack_from("<I", data, field)
        assert frames == 40
        struct.pack_into("<I", data, field, 2**30)
    path.write_bytes(data)
    check_silent(path)
    stream, _ = watch(path)
    assert stream.warnings == []


def write_with_sound(path, video_codec, sound_codec):
    """4 s of a video, with 9 s of sound."""
    with av.open(str(path), "w") as container:
        video = container.add_stream(video_codec, rate=10)
        video.width = 64
        video.height = 64
        video.pix_fmt = "yuv420p"
        sound = container.add_stream(sound_codec, rate=44100)
        for shade in range(40):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), shade, np.uint8))
            container.mux(video.encode(frame))
        container.mux(video.encode())
        samples = np.zeros((1, 2 * 1024), np.int16)
        for number in range(400):
            silence = av.AudioFrame.from_ndarray(samples, "s16", "stereo")
            silence.rate = 44100
            silence.pts = 1024 * number
            container.mux(sound.encode(silence))
        container.mux(sound.encode())
    return path


@pytest.mark.parametrize(
    ("kind", "video_codec", "sound_codec"),
    [
        ("avi", "mpeg4", "mp2"),
        ("flv", "flv", "aac"),
        ("mkv", "mpeg4", "mp2"),
        ("mp4", "mpeg4", "aac"),
        ("wmv", "mpeg4", "mp2"),
    ],
)
def test_a_video_with_longer_sound_is_whole(tmp_path, kind, video_codec, sound_codec):
    path = write_with_sound(tmp_path / f"whole.{kind}", video_codec, sound_codec)
    check_silent(path)
    stream, _ = watch(path)
    assert stream.warnings == []


def test_the_length_of_a_wmv_is_that_in_its_header(tmp_path):
    """FFmpeg makes another one of the rate of bits where little is left of a file."""
    whole = write_with_sound(tmp_path / "whole.wmv", "wmv2", "mp2")
    (warning,) = VideoDecoder(str(cut(whole, tmp_path, 5000))).warnings
    assert re.search("its header states 9[.][0-9] s, and 0[.][0-9] s can be read", warning)


# --- Damaged ---


@pytest.mark.parametrize(
    ("chunk", "place", "raised"),
    [
        (b"IHDR", 12, av.error.PatchWelcomeError),
        (b"IDAT", 4, av.error.ExternalError),
    ],
    ids=["an unknown depth of bits", "no zlib"],
)
def test_one_frame_that_a_decoder_refuses_is_left_out(tmp_path, chunk, place, raised):
    """Decoders do not call every damage invalid data: FFmpeg's for PNG asks for a patch, or blames zlib."""
    path = write_video(tmp_path / "damaged.mov", "png", TENTHS, 10, pix_fmt="rgb24")
    data = bytearray(path.read_bytes())
    start, _ = packets_of(path)[20]
    start_of_chunk = data.index(chunk, start)
    data[start_of_chunk + place] = 1
    path.write_bytes(data)
    with av.open(str(path)) as container, pytest.raises(raised):
        list(container.decode(video=0))

    video = VideoDecoder(str(path))
    assert len(frames_of(video)) == 40
    (warning,) = video.warnings
    assert re.search(" is damaged, and with it [1-9] of the 40 frames that are looked at.", warning)
    stream, _ = watch(path)
    assert "is damaged, and what cannot be decoded is left out" in stream.warnings[0]


def test_a_damaged_end_is_left_out_and_said(tmp_path):
    """A fragmented file states nothing about its whole."""
    whole = write(tmp_path / "whole.mp4", movflags="frag_keyframe+empty_moov")
    half = whole.stat().st_size // 2
    video = VideoDecoder(str(cut(whole, tmp_path, half)))
    (warning,) = video.warnings
    assert "damaged frames are left out (1 of 24)" in warning
    assert len(frames_of(video)) == 23


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("mp4", "libx264"),
        ("mkv", "libx264"),
        ("avi", "mpeg4"),
        ("mp4", "mpeg4"),
    ],
)
def test_frames_that_cannot_be_decoded_whole_are_said(loaded, tmp_path, kind, codec):
    path = tmp_path / f"damaged.{kind}"
    write_mp4(path, noise(24, 64, 64), 8, codec, g="12")
    kept = 1 if codec == "mpeg4" else 40
    spoil(path, [5], kept=kept)

    video = session.encode(*loaded, path, fps=8)
    (warning,) = video.about.warnings
    assert " is damaged, and with it " in warning
    assert " of the 24 frames that are looked at" in warning
    assert video.about.frames == 24
    assert session.ask(*loaded, video, "What moves?").warnings == [warning]
    _, frames = watch(path)
    assert len(frames) >= 23


# --- Trimmed ---


def box(kind, content):
    """A box of an mp4 file."""
    return struct.pack(">I4s", 8 + len(content), kind) + content


def number_behind(data, kind, offset):
    """Four bytes of the first box of a kind, as a number."""
    start = data.index(kind) + offset
    return int.from_bytes(data[start : start + 4], "big")


def write_edits(path, data, parts):
    """
    Writes an mp4 file with another edit list, which stands behind the frames.

    Args:
        parts: per part the seconds that are shown, and the second of the video from which on.
    """
    ticks_per_second = number_behind(data, b"mdhd", 16)
    first_tick = number_behind(data, b"elst", 16)
    entries = struct.pack(">II", 0, len(parts))
    for seconds, start in parts:
        milliseconds = int(1000 * seconds)
        tick = first_tick + int(start * ticks_per_second)
        entries += struct.pack(">IiHH", milliseconds, tick, 1, 0)
    edits = box(b"edts", box(b"elst", entries))
    place = data.index(b"edts") - 4
    old_size = number_behind(data, b"edts", -4)
    behind = place + old_size
    changed = bytearray(data[:place] + edits + data[behind:])
    for kind in (b"moov", b"trak"):
        size = number_behind(changed, kind, -4) + len(edits) - old_size
        start = changed.index(kind) - 4
        changed[start : start + 4] = size.to_bytes(4, "big")
    path.write_bytes(changed)


EDITS = {  # seconds that are shown, from which second of the video on
    "cut": [(2, 0), (3, 5)],
    "cut between key frames": [(2, 0), (2.4, 4.6)],
    "turned round": [(4, 4), (4, 0)],
    "repeated": [(3, 0)] * 3,
    "trimmed": [(4, 1.4)],
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("b_frames", ["0", "2"])
def test_an_edit_list_is_followed(tmp_path, name, b_frames):
    """Frames and times are those that FFmpeg shows, whose packets go back to a key frame at every cut."""
    path = tmp_path / "video.mp4"
    shades = np.arange(200, dtype=np.uint8)
    frames = np.broadcast_to(shades[:, None, None, None], (200, 64, 64, 3))
    write_mp4(path, frames, 25, g="50", bf=b_frames)
    write_edits(path, path.read_bytes(), EDITS[name])
    times = []
    shown = []
    with av.open(str(path)) as container:
        for frame in container.decode():
            times.append(float(frame.pts * frame.time_base))
            shown.append(frame.to_ndarray(format="rgb24").mean())
    video = VideoDecoder(str(path))
    assert video.warnings == []
    expected = np.array(times) - times[0]
    assert video.times == pytest.approx(expected, abs=0.03)
    means = [frame.mean() for frame in frames_of(video)]
    assert means == pytest.approx(shown, abs=1)


@pytest.mark.parametrize("part", [(3, 0), (2, 2), (3, 3)], ids=str)
def test_a_trimmed_file_is_whole(tmp_path, part):
    """Its edit list shows a part; the header counts all frames."""
    whole = write(tmp_path / "whole.mp4")
    trimmed = tmp_path / "trimmed.mp4"
    write_edits(trimmed, whole.read_bytes(), [part])
    check_silent(trimmed)


# --- Turned ---


def write_turned(path, frames, matrix):
    """Writes a video with the nine numbers by which a player turns its frames, and reads its frames."""
    write_mp4(path, frames, 8)
    data = bytearray(path.read_bytes())
    place = data.index(b"tkhd") + 44
    data[place : place + 36] = struct.pack(">9i", *matrix)
    path.write_bytes(data)
    return read_video(str(path), lambda total, fps: np.arange(total))


def test_a_video_that_states_no_direction_is_upright(tmp_path):
    """As some writers leave its matrix: all zeros."""
    frames = np.full((4, 32, 64, 3), 90, np.uint8)
    shown, _ = write_turned(tmp_path / "phone.mp4", frames, [0] * 9)
    assert shown.shape == frames.shape


SHADES = {  # of the quarters of a frame, by the signs of x and y
    (-1, -1): 40,
    (1, -1): 90,
    (-1, 1): 150,
    (1, 1): 210,
}


TURNS = [(1, 0, 0, 1), (-1, 0, 0, -1), (0, 1, -1, 0), (0, -1, 1, 0)]
MIRRORED = [(-1, 0, 0, 1), (1, 0, 0, -1), (0, -1, -1, 0), (0, 1, 1, 0)]


@pytest.mark.parametrize("turn", [*TURNS, *MIRRORED])
def test_a_phone_video_is_shown_upright(tmp_path, turn):
    """A file states where a point (x, y) of its frames is shown: at (ax + cy, bx + dy)."""
    a, b, c, d = turn
    frames = np.zeros((4, 32, 64, 3), np.uint8)
    for (x, y), shade in SHADES.items():
        top = 16 if y > 0 else 0
        left = 32 if x > 0 else 0
        frames[:, top : top + 16, left : left + 32] = shade
    one = 2**16
    matrix = (a * one, b * one, 0, c * one, d * one, 0, 0, 0, 2**30)
    shown, metadata = write_turned(tmp_path / "phone.mp4", frames, matrix)
    _, height, width, _ = shown.shape
    assert metadata.height == height
    assert metadata.width == width
    is_wide = a != 0
    assert (height, width) == ((32, 64) if is_wide else (64, 32))
    for (x, y), shade in SHADES.items():
        shown_x = a * x + c * y
        shown_y = b * x + d * y
        row = height * (2 + shown_y) // 4
        column = width * (2 + shown_x) // 4
        assert shown[:, row, column].mean() == pytest.approx(shade, abs=12)


# --- Others ---


@pytest.mark.parametrize("is_in_chunks", [False, True])
def test_the_frames_of_a_large_video_are_never_all_there(tiny_processor, tmp_path, is_in_chunks):
    """numpy tells tracemalloc of its memory, and decoded frames are arrays of numpy's."""
    path = str(tmp_path / "large.mp4")
    shape = (720, 1280, 3)
    count = 16
    shades = (np.full(shape, 9 * number, np.uint8) for number in range(count))
    write_mp4(path, shades, 8)

    def read():
        if is_in_chunks:
            chunks = tiny_processor.video_chunks(path, num_frames=count)
            assert len(list(chunks)) == 1
        else:
            tiny_processor(
                text=tiny_processor.video_token,
                videos=path,
                num_frames=count,
                return_tensors="pt",
            )

    read()  # imports and caches
    tracemalloc.start()
    try:
        read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * np.prod(shape), "more than four frames were there at once"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mkv", ["has no frame for 2 s from 1.2 s on."]),
        ("mp4", []),  # whose header states how many frames there are
    ],
)
def test_a_gap_in_a_constant_rate_is_said(tmp_path, kind, said):
    shown = [*range(0, 1200, 40), *range(3200, 4400, 40)]
    path = write_video(tmp_path / f"gap.{kind}", "libx264", shown)
    stream, _ = watch(path)
    for warnings in (VideoDecoder(str(path)).warnings, stream.warnings):
        assert [warning.split("' ")[1] for warning in warnings] == said


class ReaderWithANewStream:
    """As PyAV's, which may read behind the list of the streams that it knew at the beginning."""

    def demux(self):
        yield "a packet"
        raise IndexError("list index out of range")


def test_a_stream_that_appears_in_the_middle_costs_no_video():
    assert list(read_packets(ReaderWithANewStream())) == ["a packet"]


def test_tags_that_are_no_utf8_cost_no_video(tmp_path, tiny_mp4):
    path = tmp_path / "video.mkv"
    bytes_as_they_are = {"metadata_errors": "surrogateescape"} if TAGS else {}
    original_file = av.open(str(tiny_mp4))
    with original_file as video, av.open(str(path), "w", **bytes_as_they_are) as copy:
        copy.metadata["title"] = b"Caf\xe9 du monde".decode(errors="surrogateescape")
        original = video.streams.video[0]
        stream = copy.add_stream_from_template(original)
        for packet in video.demux(original):
            if packet.dts is not None:
                packet.stream = stream
                copy.mux(packet)
    assert b"Caf\xe9 du" in path.read_bytes()
    assert len(frames_of(VideoDecoder(str(path)))) == 32
    _, frames = watch(path)
    assert frames
    with pytest.raises(ValueError, match="No subtitles are"):
        read_subtitles(path)
