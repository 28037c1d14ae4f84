"""Which videos a request may name: real servers over loopback, of which some must not be asked."""

import os
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtsplus.model.addresses_qtsplus import download, shown_name
from qtsplus.model.decoding_qtsplus import VideoDecoder
from qtsplus.serve.door import Door, _is_public
from server_process import hosting

REFUSED = "may not be read: expected data:video/mp4;base64"


def read(door, url):
    """The bytes of the video that a door hands on."""
    with door.place(url) as place:
        return Path(place).read_bytes()


@pytest.fixture
def host():
    with hosting() as served:
        yield served


def test_a_video_is_fetched_from_the_host_that_was_named(host):
    port, seen = host
    for domain in ("localhost", "127.0.0.1"):
        with Door(domains=[f"{domain}:{port}"]).place(f"http://{domain}:{port}/a%20b.mp4?c=d#e") as place:
            assert Path(place).read_bytes() == b"video"
        assert not Path(place).exists()
    assert seen == ["/a%20b.mp4?c=d"] * 2


def test_no_other_host_is_asked(host):
    port, seen = host
    door = Door(domains=["localhost", "videos.example.org", "localhost:1"])
    addresses = [
        f"http://videos.example.org:{'x' * 5000}@127.0.0.1:{port}/a",  # the user's part is long
        f"http://videos.example.org@127.0.0.1:{port}/a",
        f"http://127.0.0.1:{port}\\@localhost/a",
        f"http://127.0.0.1:{port}/a",
        f"http://localhost:{port}/a",  # another port
        f"https://localhost:{port}/a",
        f"http://localhost%3A{port}/a",
        f"http://localhost%2Fx@127.0.0.1:{port}/a",
        f"http://localhost.:{port}/a",
        f"http://local\thost:{port}/a",
        f"http://LOCALHOST:{port}/{'a' * 10_000}",
        f"http://[::ffff:127.0.0.1]:{port}/a",
        f"http://2130706433:{port}/a",
        f"ftp://localhost:{port}/a",
        "http://[::1/a",
        "http:///a",
        "http://localhost:99999/a",
    ]
    for address in addresses:
        with pytest.raises(ValueError, match=f"{REFUSED}|Cannot load the video at"):
            read(door, address)
    assert seen == []


SIGNS = "http:// https:// // @ : \\ / # ? [ ] %40 %2f %3a é 。 127.0.0.1 ::1 80 443 8080 0x7f.1 u:p"
PARTS = SIGNS.split() + ["\t", " ", "\x00", "videos.example.org", "VIDEOS.example.org.", "x" * 5000]


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.sampled_from(["http://", "https://", ""]))
def test_whatever_an_address_is_made_of_no_other_host_is_looked_up(rest, scheme):
    asked = []

    def look_up(name, port, *_, **__):
        asked.append((name, port))
        raise OSError("nobody is asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", look_up)
        with pytest.raises(ValueError):
            read(Door(Path("/nowhere"), ["videos.example.org"]), scheme + rest)
    assert set(asked) <= {("videos.example.org", 80), ("videos.example.org", 443)}


def test_redirects_and_proxies_lead_nowhere(host, monkeypatch):
    port, seen = host
    with hosting() as (proxy, seen_by_proxy):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy}")
        door = Door(domains=[f"localhost:{port}"])
        with pytest.raises(ValueError, match="Cannot load the video at .*302"):
            read(door, f"http://localhost:{port}/there")
    assert seen == ["/there"]
    assert seen_by_proxy == []


def test_a_name_has_to_lead_to_a_public_address(host, monkeypatch):
    port, seen = host
    names = []
    look_up = socket.getaddrinfo

    def look_up_here(name, *more, **options):
        names.append(name)
        return look_up("127.0.0.1", *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    with pytest.raises(ValueError, match="leads to an address that is not public"):
        read(Door(domains=[f"videos.example.org:{port}"]), f"http://videos.example.org:{port}/a")
    assert names == ["videos.example.org"], "looked up again, it could lead elsewhere"
    assert seen == []
    read(Door(domains=[f"localhost:{port}"]), f"http://localhost:{port}/a")
    assert seen == ["/a"]


PUBLIC = "8.8.8.8 2606:4700::1111 ::ffff:8.8.8.8"
NOT_PUBLIC = """
    127.0.0.1 10.1.2.3 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 240.0.0.1 192.0.0.192 192.0.0.9
    192.88.99.1 198.18.0.1 203.0.113.1 ::1 :: fe80::1%lo fc00::1 ff02::1 ::ffff:127.0.0.1 64:ff9b::7f00:1 2002:7f00:1::
    2001:0:7f00:1:: fec0::1 ::127.0.0.1 ::ffff:0:7f00:1 5f00::1 100::1 3fff::1 2001:db8::1 2001:20::1 64:ff9b:1::1
    4000::1 2620:4f:8000::1
"""


@pytest.mark.parametrize("address", PUBLIC.split())
def test_a_public_address(address):
    assert _is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_an_address_that_is_not_public(address):
    assert not _is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "http://user:pa\r\nSECRET@host/video",
        "http://user\r\n:SECRET@host/video",
        "\r\nhttp://user:SECRET@host/video",
        "http://user:SECRET\n/x@host/video",
        "rtsp://user:x\nSECRET@host/video",
    ],
)
def test_no_password_is_shown(address):
    shown = shown_name(address)
    assert "SECRET" not in shown
    assert "host/video" in shown
    for opened in (VideoDecoder, download, lambda video: read(Door(), video)):
        with pytest.raises(ValueError) as refused:
            opened(address)
        assert "SECRET" not in str(refused.value)


def test_the_certificate_is_that_of_the_name(tmp_path, monkeypatch):
    key = tmp_path / "key"
    certificate = tmp_path / "certificate"
    options = f"-x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout {key} -out {certificate}"
    command = f"openssl req {options} -addext subjectAltName=DNS:localhost"
    try:
        subprocess.run(command.split(), check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with hosting(context) as (port, seen):
        door = Door(domains=[f"localhost:{port}", f"127.0.0.1:{port}"])
        with pytest.raises(ValueError, match="CERTIFICATE_VERIFY_FAILED"):
            read(door, f"https://localhost:{port}/a")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with pytest.raises(ValueError, match="CERTIFICATE_VERIFY_FAILED"):
            read(door, f"https://127.0.0.1:{port}/a")
        assert seen == []
        read(door, f"https://localhost:{port}/a")
        assert seen == ["/a"]


@pytest.fixture
def root(tmp_path):
    """A folder with a video, links and a pipe, beside a secret."""
    root = tmp_path / "videos"
    root.mkdir()
    (root / "a b.mp4").write_bytes(b"video")
    (root / "within.mp4").symlink_to("a b.mp4")
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (root / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe")
    return root


@pytest.mark.parametrize("name", ["a%20b.mp4", "within.mp4"])
def test_a_file_under_the_root_is_read(root, name):
    assert read(Door(root), f"file://{root}/{name}") == b"video"
    with pytest.raises(ValueError, match=REFUSED):
        read(Door(), f"file://{root}/{name}")


LONG = "x" * 300
OUTSIDE = ["link.mp4", "../secret.mp4", "%2e%2e/secret.mp4"]
NO_FILES = ["", LONG, LONG + "/x" * 3000, "%00", "a%00b", "a b.mp4/..", "loop", "pipe", "\ud800"]


@pytest.mark.parametrize("name", OUTSIDE + NO_FILES)
def test_no_other_file_is_read(root, name):
    with pytest.raises(ValueError, match=REFUSED):
        read(Door(root), f"file://{root}/{name}")


def test_neither_a_file_of_another_machine_nor_a_long_text_is_read(root):
    for address in (f"file://other{root}/a%20b.mp4", LONG * 10**5):  # the time must not grow with the square
        with pytest.raises(ValueError, match=REFUSED):
            read(Door(root), address)


def test_a_file_that_was_opened_is_read_on(root, tmp_path):
    """Also where its folder has become a link to a secret."""
    with Door(root).place(f"file://{root}/a%20b.mp4") as place:
        root.rename(tmp_path / "moved")
        (tmp_path / "secret.mp4").rename(tmp_path / "a b.mp4")
        root.symlink_to(tmp_path)
        assert (root / "a b.mp4").read_bytes() == b"secret"
        assert Path(place).read_bytes() == b"video"


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(root, monkeypatch):
    monkeypatch.setattr(os.path, "isfile", lambda path: True)
    with pytest.raises(ValueError, match=REFUSED):
        read(Door(root), f"file://{root}/pipe")


def test_links_that_come_later_do_not_move_an_open_file(root, tmp_path, monkeypatch):
    """As soon as it is known where a file outside is, its folder becomes a link into the root."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.mp4").write_bytes(b"secret")
    read_link = os.readlink

    def read_link_and_swap(path, **options):
        target = read_link(path, **options)
        if target == str(outside / "a.mp4"):
            outside.rename(tmp_path / "moved")
            outside.symlink_to(root)
        return target

    monkeypatch.setattr(os, "readlink", read_link_and_swap)
    with pytest.raises(ValueError, match=REFUSED):
        read(Door(root), f"file://{outside}/a.mp4")


def test_a_system_that_does_not_say_where_an_open_file_is_reads_none(root, monkeypatch):
    monkeypatch.setattr("qtsplus.serve.door.OPEN_FILES", root / "missing")
    with pytest.raises(ValueError, match="This system does not say where an open file is"):
        read(Door(root), f"file://{root}/a%20b.mp4")


def test_the_reader_of_videos_takes_what_a_door_hands_on(tiny_mp4):
    with Door(tiny_mp4.parent).place(f"file://{tiny_mp4}") as place:
        assert VideoDecoder(place).total == VideoDecoder(str(tiny_mp4)).total
