"""Videos at addresses: over http, as `file://`, and as `data:`."""

import base64
import threading
from contextlib import contextmanager

import pytest
import torch
from PIL import Image

from qtsplus.asking import session
from qtsplus.live.watching import Source
from qtsplus.model import addresses_qtsplus
from qtsplus.model.addresses_qtsplus import download
from qtsplus.model.decoding_qtsplus import VideoDecoder
from server_process import serving


@contextmanager
def serving_clip(answer):
    """The address of a video at a server on loopback that answers every GET with `answer(handler)`."""
    with serving(answer) as port:
        yield f"http://127.0.0.1:{port}/clip.mp4"


def sending(data, stated=None):
    """Answers with a file, and with its length if that is stated."""

    def answer(handler):
        handler.send_response(200)
        if stated is not None:
            handler.send_header("Content-Length", str(stated))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


@pytest.fixture(scope="module")
def clip(tiny_mp4):
    """The bytes of a video of 32 frames."""
    return tiny_mp4.read_bytes()


def inline(content):
    """The `data:` address of a video with this content."""
    return "data:video/mp4;base64," + base64.b64encode(content).decode()


@pytest.mark.parametrize("name", ["a b#1.mp4", "100%25.mp4"])
def test_a_file_address_is_quoted_or_as_it_is_written(tmp_path, tiny_processor, clip, name):
    """`Path.as_uri` writes a space as `%20`; others put `file://` before the path."""
    path = tmp_path / name
    path.write_bytes(clip)
    for address in (path.as_uri(), f"file://{path}"):
        watched = list(Source(address, 2.0, 10.0, 0.0))
        assert len(watched) == 8
        assert len(VideoDecoder(address).order) == 32
        assert tiny_processor.video_chunks(address).shape[0] == 8


def test_a_file_address_may_be_that_of_a_folder(tmp_path, tiny_processor):
    folder = tmp_path / "some frames"
    folder.mkdir()
    image = Image.new("RGB", (56, 56))
    image.save(folder / "1.png")
    image.save(folder / "2.png")
    for address in (folder.as_uri(), f"file://{folder}"):
        assert tiny_processor.video_chunks(address, fps=2).shape[0] == 2
        inputs = tiny_processor(videos=address, fps=2, return_tensors="pt")
        assert inputs["video_grid_thw"][0, 0] == 1


@pytest.mark.parametrize("states_its_length", [True, False])
def test_a_video_at_an_address_is_the_file(loaded, tiny_mp4, clip, states_its_length):
    stated = len(clip) if states_its_length else None
    with serving_clip(sending(clip, stated)) as address:
        there = session.encode(*loaded, address)
        answer = session.ask(*loaded, address, "What moves?", max_new_tokens=2)
    assert torch.equal(there.features, session.encode(*loaded, tiny_mp4).features)
    assert there.video == address
    assert answer.video == address


def test_a_server_that_is_silent_is_not_waited_for(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(addresses_qtsplus, "ADDRESS_TIMEOUT", 0.2)
    with serving_clip(lambda handler: over.wait(60)) as address:
        with pytest.raises(ValueError, match=r"Cannot load the video at 'http://127.*clip\.mp4'.*timed out"):
            download(address)
        over.set()


@pytest.mark.parametrize("states_its_length", [True, False])
def test_a_video_at_an_address_has_a_largest_size(monkeypatch, clip, states_its_length):
    stated = len(clip) if states_its_length else None
    monkeypatch.setattr(addresses_qtsplus, "ADDRESS_BYTES", len(clip))
    with serving_clip(sending(clip, stated)) as address:
        assert download(address).getvalue() == clip
        monkeypatch.setattr(addresses_qtsplus, "ADDRESS_BYTES", 1000)
        with pytest.raises(ValueError, match="is larger than 1,000 bytes.*download it"):
            download(address)
        with pytest.raises(ValueError, match="is larger than"):
            VideoDecoder(inline(clip))


def test_a_connection_that_ends_early_is_named(clip):
    answer = sending(clip[:1000], stated=len(clip))
    expected = f"ended after 1000 of {len(clip)} bytes"
    with serving_clip(answer) as address, pytest.raises(ValueError, match=expected):
        download(address)


def test_an_address_without_a_video_is_named():
    not_found = pytest.raises(ValueError, match="Cannot load the video at .*404")
    with serving_clip(lambda handler: handler.send_error(404)) as address, not_found:
        download(address)
    with pytest.raises(ValueError, match=r"Cannot load the video at 'http://\[nowhere'"):
        download("http://[nowhere")


@pytest.mark.parametrize("scheme", ["HTTP", "Http"])
def test_an_address_is_read_however_it_is_written(clip, scheme):
    """Its scheme in capitals, letters that have to be encoded in its path."""
    asked = []
    send_clip = sending(clip)

    def answer(handler):
        asked.append(handler.path)
        send_clip(handler)

    with serving_clip(answer) as address:
        odd_path = address.replace("clip.mp4", "ü b%20c.mp4?d=é#e")
        assert VideoDecoder(odd_path.replace("http", scheme)).total == 32
    assert asked == ["/%C3%BC%20b%20c.mp4?d=%C3%A9"]


def test_a_data_address_is_the_file(loaded, tiny_mp4, clip):
    _, processor = loaded
    address = inline(clip)
    there = session.encode(*loaded, address)
    assert torch.equal(there.features, session.encode(*loaded, tiny_mp4).features)
    assert len(there.video) < 50
    pixels = []
    for video in (address, str(tiny_mp4)):
        inputs = processor(text=[processor.video_token], videos=[video], return_tensors="pt")
        pixels.append(inputs["pixel_values_videos"])
    assert torch.equal(*pixels)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(",AAAA", "does not begin"), (";base64,@@", "base64"), (";base64,QUJD", "Cannot decode")],
)
def test_a_data_address_without_a_video_is_refused(content, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        VideoDecoder(f"data:video/mp4{content}")
    assert len(str(refused.value)) < 300


def test_a_password_is_used_and_not_said(loaded, clip):
    sent = []
    send_clip = sending(clip)

    def answer(handler):
        sent.append(handler.headers["Authorization"])
        send_clip(handler)

    with serving_clip(answer) as address:
        encoded = session.encode(*loaded, address.replace("//", "//user:s%40cret@"))
    (authorization,) = sent
    kind, _, credentials = authorization.partition(" ")
    assert kind == "Basic"
    assert base64.b64decode(credentials) == b"user:s@cret"
    assert encoded.video == address.replace("//", "//***@")


@pytest.mark.parametrize(
    "address",
    [
        "http://user:secret@127.0.0.1:9/a.mp4",
        "http://user:secret@127.0.0.1:99999/a.mp4",
        "http://:secret@/a.mp4",
        "http://user:secret/x@127.0.0.1/a.mp4",
        "HTTPS://user:secret@[::1/a.mp4",
        "http://127.0.0.1:99999/a.mp4",
    ],
)
def test_an_address_that_is_none_is_named_without_its_password(address):
    with pytest.raises(ValueError, match="Cannot load the video at '") as error:
        download(address)
    message = str(error.value)
    assert "secret" not in message
    assert "a.mp4" in message
