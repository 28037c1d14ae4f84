"""Files that are cut off, at addresses, or larger than memory."""

import base64
import functools
import re
import struct
import threading
import tracemalloc
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import av
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from clips import read_video, write_mp4
from films import write_film
from qtsplus.asking import session
from qtsplus.cli import app
from qtsplus.live.watching import Source
from qtsplus.model import addresses_qtsplus
from qtsplus.model.containers_qtsplus import TAGS
from qtsplus.model.decoding_qtsplus import Film
from qtsplus.model.frames_qtsplus import load_frames
from qtsplus.model.sampling_qtsplus import choose_frames
from qtsplus.model.video_qtsplus import open_video
from qtsplus.video.subtitles import read_subtitles


def every_frame(total, fps):
    return np.arange(total)


@pytest.fixture(scope="module")
def loaded(tiny_published, tiny_processor):
    """With the package's own processor, whose module the tests change."""
    return session.load(tiny_published)[0], tiny_processor


# Times ----------------------------------------------------------------------------------------------------------------


def test_a_rate_that_was_rounded_costs_no_frame():
    assert len(choose_frames(40, 10.000000000000002, 2)) == len(choose_frames(40, 10, 2)) == 8


def test_one_frame_is_looked_at_where_one_is_allowed():
    assert choose_frames(100, 25, fps=2, max_frames=1).tolist() == [0]
    assert len(choose_frames(100, 25, fps=2, max_frames=3)) == 2


def test_a_video_that_is_too_narrow_is_named(loaded, tmp_path):
    write_mp4(tmp_path / "narrow.mp4", np.zeros((8, 2, 1024, 3), np.uint8), 8)
    for read in (lambda path: session.encode(*loaded, path), lambda path: loaded[1](videos=str(path))):
        with pytest.raises(ValueError, match=r"The video '.*narrow\.mp4' cannot be sized for the model"):
            read(tmp_path / "narrow.mp4")


# Folders of frames ----------------------------------------------------------------------------------------------------


def write_frames(folder, names):
    for index, name in enumerate(names):
        Image.new("RGB", (56, 56), (9 * index,) * 3).save(folder / name)


def shades(folder):
    return (load_frames(str(folder))[:, 0, 0, 0] // 9).tolist()


def test_every_kind_of_image_is_a_frame_and_hidden_files_are_none(tmp_path):
    write_frames(tmp_path, [f"{index}.{kind}" for index, kind in enumerate(("png", "gif", "tif", "TIFF", "bmp"))])
    (tmp_path / "._0.png").write_bytes(b"of another system")
    assert shades(tmp_path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["webp", "gif", "png"])
def test_an_animation_is_no_frame(tmp_path, kind):
    pictures = [Image.new("RGB", (56, 56), (90 * index,) * 3) for index in range(3)]
    pictures[0].save(tmp_path / f"0.{kind}", save_all=True, append_images=pictures[1:])
    with pytest.raises(ValueError, match=rf"0\.{kind}' is an animation; expected one"):
        load_frames(str(tmp_path))


def test_an_image_too_large_to_be_meant_is_unreadable(loaded, tmp_path):
    Image.new("1", (13400, 13400)).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match=r"Cannot read the frame '.*0\.png' as an image: .*179560000 pixels"):
        session.encode(*loaded, tmp_path, fps=1)


# Cut off --------------------------------------------------------------------------------------------------------------


def write(path, **muxer):
    """48 frames of noise at 8 a second: 6 s."""
    write_mp4(path, np.random.default_rng(0).integers(0, 255, (48, 64, 64, 3), np.uint8), 8, muxer=muxer, g="8")
    return path


@pytest.fixture(scope="module")
def header_first(tmp_path_factory):
    return write(tmp_path_factory.mktemp("whole") / "whole.mp4", movflags="faststart").read_bytes()


def packet_ends(path):
    with av.open(str(path)) as container:
        return [packet.pos + packet.size for packet in container.demux(video=0) if packet.size]


@pytest.mark.parametrize("beyond", [0, 1, 200], ids=["between frames", "in a header", "in a frame"])
def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes_and_said_so(loaded, header_first, tmp_path, caplog, beyond):
    path = tmp_path / "cut.mp4"
    path.write_bytes(header_first)
    end = packet_ends(path)[23] + beyond
    path.write_bytes(header_first[:end])

    answer = session.ask(*loaded, path, "What moves?", max_new_tokens=2)
    (warning,) = answer.as_dict()["warnings"]
    assert warning == f"The video {str(path)!r} is incomplete: its header states 48 frames, and 24 can be read."
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [warning]
    assert answer.seconds_of_video == 3.0
    frames, metadata = read_video(str(path), every_frame)
    assert len(frames) == metadata.total_num_frames == 24


def test_the_command_line_says_it_once(header_first, tiny_published, tmp_path, caplog):
    (tmp_path / "cut.mp4").write_bytes(header_first)
    (tmp_path / "cut.mp4").write_bytes(header_first[: packet_ends(tmp_path / "cut.mp4")[23]])
    call = ["ask", str(tmp_path / "cut.mp4"), "What moves?", "--max-new-tokens", "1", "--model", str(tiny_published)]
    result = CliRunner().invoke(app, call)
    said = "".join([result.stderr, *(record.message for record in caplog.records)])
    assert result.exit_code == 0 and said.count("header states 48 frames") == 1, said


def test_a_file_that_states_only_its_length(tmp_path):
    whole = write(tmp_path / "whole.mkv")
    assert open_video(str(whole), every_frame).about.warnings == []
    data = whole.read_bytes()
    (tmp_path / "cut.mkv").write_bytes(data[: len(data) // 2])
    (warning,) = open_video(str(tmp_path / "cut.mkv"), every_frame).about.warnings
    assert "its header states 6.0 s, and 2." in warning


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("avi", "libx264"), ("avi", "mpeg4"), ("avi", "mjpeg"), ("flv", "libx264"), ("wmv", "wmv2"), ("mkv", "libx264")],
)
def test_a_cut_off_video_says_how_long_its_header_states_that_it_is(tmp_path, kind, codec):
    """Wherever it was cut: FFmpeg estimates the length of such an AVI from what is there, and forgets that of a WMV."""
    pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    whole = write_film(tmp_path / f"whole.{kind}", codec, range(0, 20000, 100), 10, pix_fmt=pix_fmt, g="20")
    assert Film(str(whole)).warnings == []
    data = whole.read_bytes()
    cut = tmp_path / f"cut.{kind}"
    ends = packet_ends(whole)
    for number in (160, 100, 60):
        cut.write_bytes(data[: ends[number] + 3])
        (warning,) = Film(str(cut)).warnings
        assert re.search("its header states (20|21)[.][0-9] s, and [0-9]{1,2}[.][0-9] s can be read", warning)
    assert "is incomplete: its header states 2" in warnings_of_stream(cut)[-1]


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_video_is_read_up_to_where_its_reader_fails(tmp_path, share):
    """As FFmpeg's for RealMedia does where a file ends in a packet."""
    whole = write_film(tmp_path / "whole.rm", "rv20", range(0, 4000, 100), 10)
    assert Film(str(whole)).warnings == []
    data = whole.read_bytes()
    cut = tmp_path / "cut.rm"
    cut.write_bytes(data[: int(share * len(data))])
    film = Film(str(cut))
    (warning,) = film.warnings
    assert re.search(" is incomplete: its header states 4.0 s, and [0-9.]+ s can be read", warning)
    assert len(film.order) == pytest.approx(40 * share, abs=6)
    assert len(list(film.show(film.times))) == len(film.order)


def test_an_avi_that_was_written_to_a_pipe_is_whole(tmp_path):
    """It states as many frames as FFmpeg would write into one."""
    path = write_film(tmp_path / "piped.avi", "mpeg4", range(0, 4000, 100), 10)
    data = bytearray(path.read_bytes())
    for field in (data.index(b"avih") + 8 + 16, data.index(b"strh") + 8 + 32):
        (frames,) = struct.unpack_from("<I", data, field)
        assert frames == 40
        struct.pack_into("<I", data, field, 2**30)
    path.write_bytes(data)
    assert Film(str(path)).warnings == []
    assert warnings_of_stream(path) == []


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
        for number in range(400):
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 2 * 1024), np.int16), "s16", "stereo")
            silence.rate = 44100
            silence.pts = 1024 * number
            container.mux(sound.encode(silence))
        container.mux(sound.encode())


@pytest.mark.parametrize("kind", ["avi", "flv", "mkv", "mp4", "wmv"])
def test_a_video_with_longer_sound_is_whole(tmp_path, kind):
    path = tmp_path / f"whole.{kind}"
    video_codec = "flv" if kind == "flv" else "mpeg4"
    sound_codec = "aac" if kind in ("flv", "mp4") else "mp2"
    write_with_sound(path, video_codec, sound_codec)
    assert Film(str(path)).warnings == []
    assert warnings_of_stream(path) == []


def test_the_length_of_a_wmv_is_that_in_its_header(tmp_path):
    """FFmpeg makes another one of the rate of bits where little is left of a file."""
    whole = tmp_path / "whole.wmv"
    write_with_sound(whole, "wmv2", "mp2")
    cut = tmp_path / "cut.wmv"
    cut.write_bytes(whole.read_bytes()[:5000])
    (warning,) = Film(str(cut)).warnings
    assert re.search("its header states 9[.][0-9] s, and 0[.][0-9] s can be read", warning)


def warnings_of_stream(path):
    """What `watch` says of a file that it reads to its end."""
    source = Source(str(path), 1.0, 10.0, 0.0)
    for _ in source:
        pass
    return source.warnings


@pytest.mark.parametrize(
    ("chunk", "place", "raised"),
    [(b"IHDR", 12, av.error.PatchWelcomeError), (b"IDAT", 4, av.error.ExternalError)],
    ids=["an unknown depth of bits", "no zlib"],
)
def test_one_frame_that_a_decoder_refuses_is_left_out(tmp_path, chunk, place, raised):
    """Decoders do not call every damage invalid data: FFmpeg's for PNG asks for a patch, or blames zlib."""
    path = write_film(tmp_path / "damaged.mov", "png", range(0, 4000, 100), 10, pix_fmt="rgb24")
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        packets = [packet.pos for packet in container.demux(video=0) if packet.size]
    data[data.index(chunk, packets[20]) + place] = 1
    path.write_bytes(data)
    with av.open(str(path)) as container, pytest.raises(raised):
        list(container.decode(video=0))

    film = Film(str(path))
    assert len(list(film.show(film.times))) == 40
    (warning,) = film.warnings
    assert re.search(" is damaged, and with it [1-9] of the 40 frames that are looked at.", warning)
    assert "is damaged, and what cannot be decoded is left out" in warnings_of_stream(path)[0]


def test_a_damaged_end_is_left_out_and_said(tmp_path):
    """A fragmented file states nothing about its whole."""
    data = write(tmp_path / "whole.mp4", movflags="frag_keyframe+empty_moov").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    (warning,) = open_video(str(tmp_path / "cut.mp4"), every_frame).about.warnings
    assert "1 of its 24 frames are damaged and left out" in warning
    assert len(read_video(str(tmp_path / "cut.mp4"), every_frame)[0]) == 23


@pytest.mark.parametrize("kind, codec", [("mp4", "libx264"), ("mkv", "libx264"), ("avi", "mpeg4"), ("mp4", "mpeg4")])
def test_frames_that_cannot_be_decoded_whole_are_said(loaded, tmp_path, kind, codec):
    path = tmp_path / f"damaged.{kind}"
    noise = np.random.default_rng(0).integers(0, 255, (24, 64, 64, 3), np.uint8)
    write_mp4(path, noise, 8, codec, g="12")
    with av.open(str(path)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    packet = packets[5]
    data = path.read_bytes()
    assert data.count(packet) == 1
    whole_bytes = 1 if codec == "mpeg4" else 40
    damaged = packet[:whole_bytes].ljust(len(packet), b"\0")
    path.write_bytes(data.replace(packet, damaged))

    video = session.encode(*loaded, path, fps=8)
    (warning,) = video.about.warnings
    assert " is damaged, and with it " in warning
    assert " of the 24 frames that are looked at" in warning
    assert video.about.frames == 24
    assert session.ask(*loaded, video, "What moves?").warnings == [warning]
    assert len(list(Source(str(path), 8.0, 0.01, 0.0))) >= 23


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
        tick = first_tick + int(start * ticks_per_second)
        entries += struct.pack(">IiHH", int(1000 * seconds), tick, 1, 0)
    edits = box(b"edts", box(b"elst", entries))
    place = data.index(b"edts") - 4
    old_size = number_behind(data, b"edts", -4)
    changed = bytearray(data[:place] + edits + data[place + old_size :])
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
    film = Film(str(path))
    assert film.warnings == []
    assert film.times == pytest.approx(np.array(times) - times[0], abs=0.03)
    assert [frame.mean() for frame in film.show(film.times + 1e-3)] == pytest.approx(shown, abs=1)


@pytest.mark.parametrize("part", [(3, 0), (2, 2), (3, 3)], ids=str)
def test_a_trimmed_file_is_whole(tmp_path, part):
    """Its edit list shows a part; the header counts all frames."""
    whole = write(tmp_path / "whole.mp4").read_bytes()
    write_edits(tmp_path / "trimmed.mp4", whole, [part])
    assert open_video(str(tmp_path / "trimmed.mp4"), every_frame).about.warnings == []


# Larger than memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["call", "chunks"])
def test_the_frames_of_a_large_video_are_never_all_there(tiny_processor, tmp_path, how):
    """numpy tells tracemalloc of its memory, and decoded frames are arrays of numpy's."""
    height, width, count = 720, 1280, 16
    write_mp4(tmp_path / "large.mp4", (np.full((height, width, 3), 9 * i, np.uint8) for i in range(count)), 8)
    path = str(tmp_path / "large.mp4")

    def read():
        if how == "call":
            tiny_processor(text=tiny_processor.video_token, videos=path, num_frames=count, return_tensors="pt")
        else:
            assert len(list(tiny_processor.video_chunks(path, num_frames=count))) == 1

    read()  # imports and caches
    tracemalloc.start()
    try:
        read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * height * width * 3, f"{peak / (height * width * 3):.1f} frames were there at once"


# Addresses ------------------------------------------------------------------------------------------------------------


@contextmanager
def serving(answer):
    """A server on loopback that answers every GET with `answer(handler)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/clip.mp4"
    finally:
        server.shutdown()
        server.server_close()


def send(handler, data, stated=None):
    handler.send_response(200)
    if stated is not None:
        handler.send_header("Content-Length", str(stated))
    handler.end_headers()
    handler.wfile.write(data)


@pytest.mark.parametrize("name", ["a b#1.mp4", "100%25.mp4"])
def test_a_file_address_is_quoted_or_as_it_is_written(tmp_path, loaded, tiny_mp4, name):
    """`Path.as_uri` writes a space as `%20`; others put `file://` before the path."""
    _, processor = loaded
    path = tmp_path / name
    path.write_bytes(tiny_mp4.read_bytes())
    for address in (path.as_uri(), f"file://{path}"):
        assert len(Film(address).order) == 32
        assert len(list(Source(address, 2.0, 10.0, 0.0))) == 8
        assert processor.video_chunks(address).shape[0] == 8

    folder = tmp_path / "some frames"
    folder.mkdir()
    write_frames(folder, ["1.png", "2.png"])
    for address in (folder.as_uri(), f"file://{folder}"):
        assert processor.video_chunks(address, fps=2).shape[0] == 2
        assert processor(videos=address, fps=2, return_tensors="pt")["video_grid_thw"][0, 0] == 1


@pytest.mark.parametrize("states_its_length", [True, False])
def test_a_video_at_an_address_is_the_file(loaded, tiny_mp4, states_its_length):
    data = tiny_mp4.read_bytes()
    model, processor = loaded
    with serving(lambda handler: send(handler, data, len(data) if states_its_length else None)) as address:
        there = session.encode(model, processor, address)
        answer = session.ask(model, processor, address, "What moves?", max_new_tokens=2)
    here = session.encode(model, processor, tiny_mp4)
    assert torch.equal(there.features, here.features)
    assert there.video == answer.video == address


def test_a_server_that_is_silent_is_not_waited_for(loaded, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(addresses_qtsplus, "ADDRESS_TIMEOUT", 0.2)
    with serving(lambda handler: over.wait(60)) as address:
        with pytest.raises(ValueError, match=r"Cannot load the video at 'http://127.*clip\.mp4'.*timed out"):
            session.encode(*loaded, address)
        over.set()


@pytest.mark.parametrize("states_its_length", [True, False])
def test_a_video_at_an_address_has_a_largest_size(loaded, monkeypatch, states_its_length):
    monkeypatch.setattr(addresses_qtsplus, "ADDRESS_BYTES", 2**20)
    data = bytes(2**20 + 1)
    with (
        serving(lambda handler: send(handler, data, len(data) if states_its_length else None)) as address,
        pytest.raises(ValueError, match="is larger than 1,048,576 bytes.*download it"),
    ):
        session.encode(*loaded, address)


def test_a_file_of_the_largest_size_is_read(monkeypatch):
    data = bytes(2**20)
    monkeypatch.setattr(addresses_qtsplus, "ADDRESS_BYTES", len(data))
    with serving(functools.partial(send, data=data, stated=len(data))) as address:
        assert addresses_qtsplus.download(address).getvalue() == data


def test_a_connection_that_ends_early_is_named(loaded, tiny_mp4):
    data = tiny_mp4.read_bytes()
    with (
        serving(lambda handler: send(handler, data[:1000], len(data))) as address,
        pytest.raises(ValueError, match=f"ended after 1000 of {len(data)} bytes"),
    ):
        session.encode(*loaded, address)


def test_an_address_without_a_video_is_named(loaded):
    with (
        serving(lambda handler: handler.send_error(404)) as address,
        pytest.raises(ValueError, match="Cannot load the video at .*404"),
    ):
        session.encode(*loaded, address)
    with pytest.raises(ValueError, match=r"Cannot load the video at 'http://\[nowhere'"):
        session.encode(*loaded, "http://[nowhere")


@pytest.mark.parametrize("change", [str.upper, lambda scheme: scheme.title()])
def test_an_address_is_read_however_it_is_written(tiny_mp4, change):
    """Its scheme in capitals, letters that have to be encoded in its path."""
    asked = []

    def answer(handler):
        asked.append(handler.path)
        send(handler, tiny_mp4.read_bytes())

    with serving(answer) as address:
        address = address.replace("http", change("http")).replace("clip.mp4", "ü b%20c.mp4?d=é#e")
        assert open_video(address, every_frame).about.metadata.total_num_frames == 32
    assert asked == ["/%C3%BC%20b%20c.mp4?d=%C3%A9"]


def test_a_data_address_is_the_file(loaded, tiny_mp4, monkeypatch):
    address = "data:video/mp4;base64," + base64.b64encode(tiny_mp4.read_bytes()).decode()
    there, here = session.encode(*loaded, address), session.encode(*loaded, tiny_mp4)
    assert torch.equal(there.features, here.features) and len(there.video) < 50
    inputs = [
        loaded[1](text=[loaded[1].video_token], videos=[video], return_tensors="pt") for video in (address, tiny_mp4)
    ]
    assert torch.equal(*(one["pixel_values_videos"] for one in inputs))
    for wrong, said in ((",AAAA", "does not begin"), (";base64,@@", "base64"), (";base64,QUJD", "Cannot decode")):
        with pytest.raises(ValueError, match=said) as refused:
            session.encode(*loaded, f"data:video/mp4{wrong}")
        assert len(str(refused.value)) < 300
    monkeypatch.setattr(addresses_qtsplus, "ADDRESS_BYTES", tiny_mp4.stat().st_size // 2)
    with pytest.raises(ValueError, match="is larger than"):
        session.encode(*loaded, address)


def test_what_was_sent_leads_nowhere(loaded):
    """FFmpeg reads lists of other places too."""
    asked = []
    with serving(lambda handler: asked.append(handler.path)) as address:
        lists = (
            f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2.0,\n{address}\n#EXT-X-ENDLIST\n",
            f"ffconcat version 1.0\nfile {address}\n",
            "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 40000 RTP/AVP 96\n",
        )
        for text in lists:
            with pytest.raises(ValueError, match="Cannot decode.*a list of other places"):
                session.encode(*loaded, f"data:video/mp4;base64,{base64.b64encode(text.encode()).decode()}")
    assert asked == []


def test_a_password_is_used_and_not_said(loaded, tiny_mp4):
    sent = []

    def answer(handler):
        sent.append(handler.headers["Authorization"])
        send(handler, tiny_mp4.read_bytes())

    with serving(answer) as address:
        known = session.encode(*loaded, address.replace("//", "//user:s%40cret@"))
    assert base64.b64decode(sent[0].removeprefix("Basic ")) == b"user:s@cret"
    assert known.video == address.replace("//", "//***@")


@pytest.mark.parametrize(
    "address",
    [
        *("http://user:secret@127.0.0.1:9/a.mp4", "http://user:secret@127.0.0.1:99999/a.mp4", "http://:secret@/a.mp4"),
        *("http://user:secret/x@127.0.0.1/a.mp4", "HTTPS://user:secret@[::1/a.mp4", "http://127.0.0.1:99999/a.mp4"),
    ],
)
def test_an_address_that_is_none_is_named_without_its_password(loaded, address):
    with pytest.raises(ValueError, match="Cannot load the video at '") as error:
        session.encode(*loaded, address)
    assert "secret" not in str(error.value) and "a.mp4" in str(error.value)


def test_tags_that_are_no_utf8_cost_no_film(tmp_path, tiny_mp4):
    path = tmp_path / "film.mkv"
    bytes_as_they_are = {"metadata_errors": "surrogateescape"} if TAGS else {}
    with av.open(str(tiny_mp4)) as film, av.open(str(path), "w", **bytes_as_they_are) as copy:
        copy.metadata["title"] = b"Caf\xe9 du monde".decode(errors="surrogateescape")
        stream = copy.add_stream_from_template(film.streams.video[0])
        for packet in film.demux(film.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                copy.mux(packet)
    assert b"Caf\xe9 du" in path.read_bytes()
    film, same = (list(open_video(str(one), every_frame).decode()) for one in (path, tiny_mp4))
    assert len(film) == len(same)
    assert len(list(Source(str(path), 2.0, 5.0, 0.0)))
    with pytest.raises(ValueError, match="No subtitles are"):
        read_subtitles(path)
