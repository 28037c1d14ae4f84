"""`qtsplus watch` and the sources behind it: files, pipes, servers and cameras, each a real one."""

import io
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import av
import numpy as np
import pytest
from typer.testing import CliRunner

from clips import make_world, render_world
from qtsplus.asking import session
from qtsplus.cli import app
from qtsplus.live import watching
from qtsplus.live.watching import ROOM, Source, watch
from qtsplus.model.decoding_qtsplus import VideoDecoder
from qtsplus.model.video_qtsplus import open_video
from server_process import serving

WORLD = make_world(3)
QUESTION = WORLD.objects[0].question
ANSWER = WORLD.objects[0].mark
FRAMES = np.repeat(render_world(WORLD), 4, axis=0)  # 8 a second, of 8 s
TIMES = pytest.approx(np.arange(16) / 2, abs=0.01)  # of two frames a second


def write(path, frames, rate, **options):
    """H.264 by PyAV, such as a camera's; to a file or an address."""
    with av.open(str(path), "w", **options) as container:
        coding = {"g": str(rate), "crf": "12", "bf": "0"}
        stream = container.add_stream("libx264", rate=rate, options=coding)
        stream.width = 168
        stream.height = 168
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        container.mux(stream.encode())


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """8 s of shapes as MPEG-TS, 8 frames a second."""
    path = tmp_path_factory.mktemp("video") / "video.ts"
    write(path, FRAMES, 8)
    return path


def read(address, timeout=60.0, fps=2.0):
    """The seconds of a source's frames. Unless a test is about patience, a busy machine has enough of it."""
    return [seconds for seconds, _ in Source(str(address), fps, timeout, time.monotonic())]


@pytest.fixture
def wall(monkeypatch):
    """
    Has sources read a wall clock that shows these times, one a look, and then the last for ever; else one that goes on
    by 1/8 s. Each thread has a clock of its own: the reader of an earlier test may still look at it.
    """

    def put(times):
        own_clocks = threading.local()

        def monotonic():
            if not hasattr(own_clocks, "looks"):
                own_clocks.looks = itertools.count()
            return times(next(own_clocks.looks))

        monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=monotonic))

    put(lambda look: look / 8)
    return put


def answers_about(loaded, address, every=100, **options):
    """The answers of `watch` about one source, which is called door."""
    return list(watch(*loaded, {"door": str(address)}, QUESTION, every=every, **options))


def times_of(answers):
    return [answer.seconds_of_video for answer in answers]


# --- Sources ---


@pytest.mark.parametrize("movflags", ["", "frag_keyframe"])
@pytest.mark.parametrize("suffix", ["ts", "mkv", "mp4"])
def test_a_file_is_read_at_the_rate_that_was_asked_for(tmp_path, suffix, movflags):
    path = tmp_path / f"video.{suffix}"
    options = {"movflags": movflags} if movflags else {}
    write(path, FRAMES, 8, options=options)
    assert read(path) == TIMES


def test_a_clock_that_goes_back_goes_on(loaded, video, tmp_path):
    """As where an encoder was started anew, or two recordings are one file."""
    twice = tmp_path / "twice.ts"
    twice.write_bytes(2 * video.read_bytes())
    assert read(twice) == pytest.approx(np.arange(32) / 2, abs=0.01)
    (last,) = answers_about(loaded, twice)
    assert last.answer == ANSWER
    assert last.seconds_of_video == 16


def test_a_source_with_fewer_frames_keeps_its_clock(loaded, tmp_path):
    slow = tmp_path / "slow.ts"
    frames = render_world(WORLD)[::2]
    write(slow, frames, 1)
    (answer,) = answers_about(loaded, slow)
    expected = session.ask(*loaded, frames.repeat(2, axis=0), QUESTION, fps=2)
    assert answer.answer == expected.answer == ANSWER
    assert answer.seconds_of_video in (7.5, 8)
    assert len(answer.keep_map) == 8, "without a gap"
    seen = answer.evidence[0]
    truth = expected.evidence[0]
    assert seen.start < truth.end
    assert truth.start < seen.end


@contextmanager
def served(handle):
    """An http server on loopback, which answers every request by a function of its handler."""

    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Type", "video/mp2t")
        handle(handler)

    with serving(answer, "HTTP/1.1") as port:
        yield f"http://127.0.0.1:{port}/video.ts"


def send_in_chunks(handler, content):
    handler.send_header("Transfer-Encoding", "chunked")  # the video is still being made: nobody knows its length
    handler.end_headers()
    for first in range(0, len(content), 20_000):
        piece = content[first : first + 20_000]
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    handler.wfile.write(b"0\r\n\r\n")


def send_until_it_closes(handler, content):
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(content)


@contextmanager
def served_list(video, place):
    """A playlist on loopback, as HLS has it, and a video beside it."""
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:8\n#EXTINF:8,\n{place}\n#EXT-X-ENDLIST\n"

    def send(handler):
        content = video.read_bytes() if handler.path == "/video.ts" else playlist.encode()
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    with served(send) as address:
        yield address.replace("video.ts", "list.m3u8")


def test_a_list_at_an_address_is_followed_to_its_server(video):
    with served_list(video, "video.ts") as address:
        assert read(address) == TIMES


@pytest.mark.parametrize("scheme", ["file://", "concat:", "subfile,,start,0,end,0,,:", ""])
def test_a_list_at_an_address_leads_to_no_file(video, scheme):
    with served_list(video, f"{scheme}{video}") as address, pytest.raises(ValueError, match="Cannot read the stream"):
        read(address)


@pytest.mark.parametrize("send", [send_in_chunks, send_until_it_closes])
def test_a_server_that_sends_as_it_goes(loaded, video, send):
    content = video.read_bytes()
    with served(lambda handler: send(handler, content)) as address:
        assert read(address, fps=100.0) == read(video, fps=100.0), "to the last frame"
        (answer,) = answers_about(loaded, address)
    assert answer.seconds_of_video == 8
    assert answer.answer == ANSWER


def test_a_server_that_stalls(video):
    done = threading.Event()

    def stall(handler):
        handler.end_headers()
        handler.wfile.write(video.read_bytes()[:100_000])
        done.wait(30)

    with served(stall) as address, pytest.raises((TimeoutError, ValueError), match="video.ts"):
        read(address, 1.0)
    done.set()


def test_a_server_that_breaks_off(video):
    def break_off(handler):
        handler.send_header("Content-Length", str(len(video.read_bytes())))
        handler.end_headers()
        handler.wfile.write(video.read_bytes()[:100_000])
        handler.close_connection = True

    with served(break_off) as address, pytest.raises((TimeoutError, ValueError), match="video.ts"):
        read(address, 2.0)


@contextmanager
def rtsp_camera(video, stalls=False):
    """
    A camera on loopback that speaks RTSP (RFC 2326), sends a video as MPEG-TS in RTP (RFC 2250) over the same
    connection, and then hangs up, or stalls.
    """
    server = socket.create_server(("127.0.0.1", 0))
    sdp = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=video\r\nt=0 0\r\nm=video 0 RTP/AVP 33\r\na=control:track\r\n"
    replies = {
        "OPTIONS": "Public: OPTIONS, DESCRIBE, SETUP, PLAY\r\n\r\n",
        "DESCRIBE": f"Content-Type: application/sdp\r\nContent-Length: {len(sdp)}\r\n\r\n{sdp}",
        "SETUP": "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n\r\n",
        "PLAY": "Session: 1\r\n\r\n",
    }
    stop = threading.Event()

    def serve():
        connection, _ = server.accept()
        method = ""
        with connection, connection.makefile("rb") as requests:
            while method != "PLAY":
                request = [line.decode().strip() for line in iter(requests.readline, b"\r\n")]
                method = request[0].split()[0]
                number = next(line for line in request if line.startswith("CSeq"))
                connection.sendall(f"RTSP/1.0 200 OK\r\n{number}\r\n{replies[method]}".encode())
            content = video.read_bytes()
            size = 7 * 188
            for index, first in enumerate(range(0, len(content), size)):
                payload = content[first : first + size]
                frame = struct.pack(">cBH", b"$", 0, 12 + len(payload))
                header = struct.pack(">BBHII", 0x80, 33, index, 90 * index, 1)
                connection.sendall(frame + header + payload)
            if stalls:
                stop.wait(120)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"rtsp://127.0.0.1:{server.getsockname()[1]}/video"
    finally:
        stop.set()
        server.close()
        thread.join(10)


def until_it_fails(source):
    frames = []
    with pytest.raises((TimeoutError, ValueError), match="video"):
        for item in source:
            frames.append(item)
    return frames


def test_a_camera_that_stalls(video, wall):
    """What it sent is there first, with the video's seconds on the stream's clock."""
    with rtsp_camera(video, stalls=True) as address:
        frames = until_it_fails(Source(address, 2.0, 4.0, -100))
    seconds = np.array([one for one, _ in frames])
    assert 14 <= len(frames) <= 17
    assert frames[0][1].shape == (168, 168, 3)
    assert seconds[0] >= 100
    assert np.allclose(np.diff(seconds), 0.5, atol=0.13)


def test_a_camera_waits_for_nobody(video, wall):
    """Of 64 frames that come while nobody takes one the newest are there, and the others are counted."""
    with rtsp_camera(video) as address:
        source = Source(address, 1000.0, 60.0, 0)
        while source.dropped < 40:
            time.sleep(0.1)
        frames = list(source)
    seconds = [seconds for seconds, _ in frames]
    assert ROOM <= len(frames) <= 64 - source.dropped
    assert np.diff(seconds) == pytest.approx(1 / 8, abs=0.01), "the newest, all of them"


@pytest.mark.parametrize("held, opening", [(0, 6.0), (12, 6.0), (40, 6.0), (40, 3.0)])
def test_a_cameras_clock_is_never_ahead(video, wall, monkeypatch, held, opening):
    """Of 64 frames, 8 a second, FFmpeg held some while it opened the camera; the others come as they are taken."""
    late = 64 - max(held, 1)  # frames; that first one was taken nobody knows when
    frames_to_come = np.arange(1, 65 - held)
    arrivals = opening + frames_to_come / 8
    looks = [0]  # at the clock: of the opening, and of each frame
    looks += [opening] * held
    looks += arrivals.tolist()
    last = len(looks) - 1
    wall(lambda number: looks[min(number, last)])
    monkeypatch.setattr(watching, "ROOM", 64)
    monkeypatch.setattr(Source, "_open", lambda _: av.open(str(video)))
    seconds = [time for time, _ in Source("udp://127.0.0.1:9", 1000.0, 60.0, 0.0)]
    early = seconds[:-late]
    on_time = seconds[-late:]
    assert on_time == pytest.approx(looks[-late:]), "on the wall clock, whatever the opening took"
    frames = np.arange(len(early))
    assert early == pytest.approx(frames / 8)
    assert early[-1] <= opening


def test_a_named_pipe_is_read(tmp_path):
    video = tmp_path / "video.ts"
    write(video, render_world(WORLD), 2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_bytes, args=[video.read_bytes()], daemon=True).start()
    seconds = read(pipe)
    assert seconds
    assert seconds == read(video)


@pytest.mark.parametrize("place, reason", [("pipe", "is a pipe or a device"), ("-", "qtsplus watch -")])
def test_ask_says_what_a_pipe_is(tmp_path, tiny_published, monkeypatch, place, reason):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match=reason):
        VideoDecoder(place)
    result = CliRunner().invoke(app, ["ask", place, "Who?", "--model", str(tiny_published)])
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())


@pytest.mark.parametrize("error", [KeyError("a key"), MemoryError("all is full"), SystemExit("an end")])
def test_an_unexpected_error_of_the_reader_reaches_who_reads(monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(Source, "_open", fail)
    with pytest.raises(type(error), match="a"):
        list(Source("udp://127.0.0.1:9", 1.0, 60.0, 0.0))


def motion_jpeg(kind, rate=5):
    with av.open(data := io.BytesIO(), "w", format=kind) as container:
        stream = container.add_stream("mjpeg", rate=rate)
        stream.width = 168
        stream.height = 168
        stream.pix_fmt = "yuvj420p"
        for frame in render_world(WORLD):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
    return data.getvalue()


def test_multipart_jpeg_has_the_times_of_its_arrival(wall):

    def send(handler):
        handler.send_header("Content-Type", "multipart/x-mixed-replace;boundary=ffmpeg")
        send_until_it_closes(handler, motion_jpeg("mpjpeg"))

    with served(send) as address:
        source = Source(address, 1000.0, 60.0, 0.0)
        seconds = [one for one, _ in itertools.islice(source, 12)]
    arrivals = np.arange(1, 13) / 8
    assert seconds == pytest.approx(arrivals), "not 25 frames a second, as FFmpeg counts"


@pytest.mark.parametrize(
    "address",
    [
        "/nonexistent/video.ts",
        "/dev/video99",
        "v4l2:/dev/video99",
        "dshow:video=None",
        "http://127.0.0.1:9/video.ts",
        "nonsense://x",
    ],
)
def test_what_is_no_source(address):
    with pytest.raises(ValueError, match="stream"):
        read(address, 1.0)


def test_nothing_to_watch(loaded):
    with pytest.raises(ValueError, match="nothing to watch"):
        list(watch(*loaded, {}, QUESTION))


def test_what_is_no_video(tmp_path):
    (tmp_path / "text.ts").write_text("not a video\n" * 100)
    with pytest.raises(ValueError, match="Cannot read the stream .*text.ts"):
        read(tmp_path / "text.ts")


# --- Watching ---


def test_two_cameras_on_one_clock(loaded, video, tmp_path):
    yard = str(tmp_path / "yard.ts")
    write(yard, [np.full((168, 168, 3), 120, np.uint8)] * 24, 8)
    sources = {"yard": yard, "door": str(video)}
    answers = list(watch(*loaded, sources, QUESTION, every=2, memory_tokens=150))
    assert times_of(answers) == [2, 4, 6, 8], "one ends after 3 s, the other goes on"
    assert all(answer.evidence[0].name == "door" for answer in answers)
    assert answers[-1].visual_tokens == 150
    assert answers[-1].answer == ANSWER


def test_messages_name_a_source_and_hide_its_address(loaded, video):
    twice = 2 * video.read_bytes()
    with served(lambda handler: send_until_it_closes(handler, twice)) as address:
        (answer,) = answers_about(loaded, f"{address}?token=SECRET")
    (warning,) = answer.warnings
    assert warning.startswith("The stream 'door'")
    assert "SECRET" not in warning
    with pytest.raises(ValueError, match="^Cannot read the stream 'door': [^/]* refused[.]$"):
        answers_about(loaded, "http://name:word@127.0.0.1:9/video?token=SECRET")


@pytest.mark.parametrize("fps", [2.0, 0.5])
def test_the_evidence_has_the_times_of_the_frames(loaded, video, tmp_path, fps):
    path = str(tmp_path / "late.mp4")
    with av.open(str(video)) as given, av.open(path, "w") as late:
        stream = late.add_stream_from_template(given.streams.video[0])
        for packet in given.demux(video=0):
            if packet.size:
                delay = round(2.9 / packet.time_base)
                packet.pts += delay
                packet.dts += delay
                packet.stream = stream
                late.mux(packet)
    begin = open_video(path, lambda total, rate: np.arange(total)).about.start
    (answer,) = answers_about(loaded, path, selection="uniform", retention=1.0, fps=fps)
    starts = [interval.start for interval in answer.evidence]
    assert begin > 2.5
    assert min(starts) == pytest.approx(begin, abs=0.05)


@pytest.mark.parametrize("fps", [0.01, 0.1, 0.5, 2.0, 10.0, 1000.0])
def test_a_step_lasts_until_a_player_shows_the_next_frame(loaded, video, fps):
    answers = answers_about(loaded, video, every=4, selection="uniform", retention=1.0, fps=fps)
    last = answers[-1]
    edges = sorted((interval.start, interval.end) for interval in last.evidence)
    assert last.seconds_of_video == pytest.approx(8, abs=0.05)
    assert edges[0][0] == 0
    assert edges[-1][1] == pytest.approx(8, abs=0.05)
    for (_, end), (start, _) in itertools.pairwise(edges):
        assert end == pytest.approx(start, abs=0.05), "without a gap"


@pytest.mark.parametrize("name, value", [("every", 0), ("timeout", -1), ("fps", float("nan"))])
def test_numbers_out_of_range(loaded, video, name, value):
    with pytest.raises(ValueError, match=name):
        answers_about(loaded, video, **{name: value})


# --- The command ---


@pytest.fixture
def watch_pipe(tiny_published, shared_model, video):
    """Runs `qtsplus watch` on a video that comes through a pipe, which ends behind it or stalls."""

    def run(*arguments, stalls=False, content=None):
        ours, pipe = os.pipe()
        before = os.dup(0)
        os.dup2(ours, 0)

        def send():
            with open(pipe, "wb", closefd=False) as target:
                target.write(content or video.read_bytes())
            if not stalls:
                os.close(pipe)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            return CliRunner().invoke(app, ["watch", *arguments, "--model", str(tiny_published)])
        finally:
            thread.join()
            os.dup2(before, 0)
            for one in (before, ours, *[pipe] * stalls):
                os.close(one)

    return run


def test_a_pipe_that_ends(watch_pipe):
    result = watch_pipe("door=-", QUESTION, "--every", "4", "--json")
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["seconds_of_video"] for answer in answers] == [4, 8]
    assert [answer["answer"] for answer in answers] == [ANSWER] * 2
    assert answers[0]["evidence"][0]["video"] == "door"


def test_a_pipe_without_times(watch_pipe):
    result = watch_pipe("-", QUESTION, content=motion_jpeg("mjpeg"))
    assert result.exit_code == 2
    assert "'-': its frames have no times." in result.stderr


def test_a_pipe_that_stalls(watch_pipe):
    result = watch_pipe("-", QUESTION, "--every", "2", "--timeout", "4", stalls=True)
    assert f"[2.0 s] {ANSWER}" in result.stdout.splitlines()[0]
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "qtsplus: The stream '-' sent no frame for 4 s."


@pytest.mark.slow
def test_interrupted(tiny_published, video):
    """In a process of its own."""
    options = ["--every", "2", "--timeout", "600", "--model", str(tiny_published)]
    command = [sys.executable, "-m", "qtsplus.cli", "watch", "-", QUESTION, *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdin.write(video.read_bytes())
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        assert process.stderr.read().decode().splitlines()[-1] == "qtsplus: stopped"


def test_a_device():
    """One of libavdevice that needs no camera: its frames have the stream's clock, and it waits for nobody."""
    source = Source("lavfi:testsrc=size=168x84:rate=20,realtime", 4.0, 60.0, time.monotonic() - 100)
    frames = list(itertools.islice(source, 6))
    source.close()
    assert source.is_camera
    assert {frame.shape for _, frame in frames} == {(84, 168, 3)}
    seconds = np.array([one for one, _ in frames])
    assert seconds[0] >= 100
    assert np.diff(seconds) == pytest.approx(0.25, abs=0.06)
