"""Which videos a request may name: real servers over loopback, of which some must not be asked."""

import os
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtsplus.common import files
from qtsplus.model.addresses_qtsplus import download, shown_name
from qtsplus.model.decoding_qtsplus import Film
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
            assert Path(place).read_bytes() == b"film"
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


PARTS = [
    "http://",
    "https://",
    "//",
    "@",
    ":",
    "\\",
    "/",
    "#",
    "?",
    "[",
    "]",
    "%40",
    "%2f",
    "%3a",
    "\t",
    " ",
    "\x00",
    "é",
    "。",
]
PARTS += [
    "films.example.org",
    "FILMS.example.org.",
    "127.0.0.1",
    "::1",
    "80",
    "443",
    "8080",
    "0x7f.1",
    "u:p",
    "x" * 5000,
]


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.sampled_from(["http://", "https://", ""]))
def test_no_spelling_looks_up_another_host(parts, scheme):
    with pytest.MonkeyPatch.context() as patch:
        asked = []

        def look_up(host, port, **_):
            asked.append((host, port))
            raise socket.gaierror("nowhere")

        patch.setattr(socket, "getaddrinfo", look_up)
        with pytest.raises(ValueError):
            read(Door(Path("/nowhere"), ["films.example.org"]), scheme + "".join(parts))
        assert {host for host, _ in asked} <= {"films.example.org"} and {port for _, port in asked} <= {80, 443}


def test_redirects_and_proxies_lead_nowhere(host, monkeypatch):
    port, seen = host
    with hosting() as (proxy, asked):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy}")
        door = Door(domains=[f"localhost:{port}"])
        with pytest.raises(ValueError, match="Cannot load the video at .*302"):
            read(door, f"http://localhost:{port}/there")
        assert seen == ["/there"] and asked == []


def test_a_name_is_looked_up_once_and_has_to_lead_to_a_public_address(host, monkeypatch):
    port, seen = host
    names, look_up = [], socket.getaddrinfo

    def looked_up(name, *more, **options):
        if name in ("127.0.0.1", "192.0.2.1"):
            return look_up(name, *more, **options)
        names.append(name)
        return look_up("127.0.0.1" if len(names) % 2 else "192.0.2.1", *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    with pytest.raises(ValueError, match="leads to an address that is not public"):
        read(Door(domains=[f"films.example.org:{port}"]), f"http://films.example.org:{port}/a")
    assert names == ["films.example.org"] and seen == []
    names.clear()
    read(Door(domains=[f"localhost:{port}"]), f"http://localhost:{port}/a")
    assert names == ["localhost"] and seen == ["/a"]


@pytest.mark.parametrize(
    ("address", "is_public"),
    [("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True)]
    + [(inner, False) for inner in ("127.0.0.1", "10.1.2.3", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0")]
    + [(inner, False) for inner in ("224.0.0.1", "240.0.0.1", "::1", "::", "fe80::1%lo", "fc00::1", "ff02::1")]
    + [(inner, False) for inner in ("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::")]
    + [(inner, False) for inner in ("fec0::1", "::127.0.0.1", "::ffff:0:7f00:1", "5f00::1", "100::1", "3fff::1")]
    + [(inner, False) for inner in ("2001:db8::1", "2001:20::1", "64:ff9b:1::1", "4000::1", "2620:4f:8000::1")]
    + [(inner, False) for inner in ("192.0.0.192", "192.0.0.9", "192.88.99.1", "198.18.0.1", "203.0.113.1")],
)
def test_what_is_a_public_address(address, is_public):
    assert _is_public(address) is is_public


@pytest.mark.parametrize(
    "address",
    [
        "http://user:pa\r\nSECRET@host/film",
        "http://user\r\n:SECRET@host/film",
        "\r\nhttp://user:SECRET@host/film",
        "http://user:SECRET\n/x@host/film",
        "rtsp://user:x\nSECRET@host/film",
    ],
)
def test_no_password_is_shown(address):
    assert "SECRET" not in shown_name(address) and "host/film" in shown_name(address)
    for opened in (Film, download, lambda video: read(Door(), video)):
        with pytest.raises(ValueError) as refused:
            opened(address)
        assert "SECRET" not in str(refused.value)


def test_the_certificate_is_that_of_the_name(tmp_path, monkeypatch):
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", tmp_path / "key", "-out", tmp_path / "certificate"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *names, *files]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    with hosting(context) as (port, seen):
        door = Door(domains=[f"localhost:{port}", f"127.0.0.1:{port}"])
        with pytest.raises(ValueError, match="CERTIFICATE_VERIFY_FAILED"):
            read(door, f"https://localhost:{port}/a")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate"))
        with pytest.raises(ValueError, match="CERTIFICATE_VERIFY_FAILED"):
            read(door, f"https://127.0.0.1:{port}/a")
        assert seen == []
        read(door, f"https://localhost:{port}/a")
        assert seen == ["/a"]


def test_files_are_those_under_the_root(tmp_path):
    root = tmp_path / "films"
    root.mkdir()
    for file in (root / "a b.mp4", tmp_path / "secret.mp4"):
        file.write_bytes(b"film")
    (root / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe")
    door = Door(root)
    (root / "within.mp4").symlink_to("a b.mp4")
    for name in ("a%20b.mp4", "within.mp4"):
        assert read(door, f"file://{root}/{name}") == b"film"
    names = [
        "x" * 300,
        "x/" * 3000,
        "%00",
        "a%00b",
        "a b.mp4/..",
        "link.mp4",
        "loop",
        "pipe",
        "../secret.mp4",
        "%2e%2e/secret.mp4",
    ]
    for url in [*(f"file://{root}/{name}" for name in (*names, "\ud800", "")), f"file://other{root}/a%20b.mp4"]:
        with pytest.raises(ValueError, match=REFUSED):
            read(door, url)
    with pytest.raises(ValueError, match=REFUSED):
        read(Door(), f"file://{root}/a%20b.mp4")


@pytest.fixture
def swapped(tmp_path):
    """A folder of films, and a function that swaps what is in it for a link to a secret, and back."""
    root = tmp_path / "films"
    for folder, content in ((root / "camera", b"film"), (tmp_path / "secrets", b"secret")):
        folder.mkdir(parents=True)
        (folder / "a.mp4").write_bytes(content)
    (root / "link").symlink_to(tmp_path / "secrets")

    def swap():
        (root / "camera").rename(root / "other")
        (root / "link").rename(root / "camera")
        (root / "other").rename(root / "link")

    return root, swap


def test_a_folder_that_is_swapped_after_it_was_checked_leads_nowhere(swapped, monkeypatch):
    root, swap = swapped
    resolve = os.path.realpath
    url = f"file://{root}/camera/a.mp4"

    def resolve_and_swap(path, **options):
        resolved = resolve(path, **options)
        if str(path).endswith("a.mp4"):
            swap()
        return resolved

    monkeypatch.setattr(os.path, "realpath", resolve_and_swap)
    with pytest.raises(ValueError, match=REFUSED):
        read(Door(root), url)
    swap()
    monkeypatch.undo()
    with Door(root).place(url) as place:
        swap()
        assert Path(place).read_bytes() == b"film", "what was opened is read on"


def test_a_folder_that_is_swapped_again_and_again_is_never_left(swapped):
    root, swap = swapped
    is_over = Event()

    def swap_on():
        while not is_over.is_set():
            swap()

    swapping = Thread(target=swap_on)
    swapping.start()
    contents = set()
    try:
        for _ in range(2000):
            with suppress(ValueError):
                contents.add(read(Door(root), f"file://{root}/camera/a.mp4"))
    finally:
        is_over.set()
        swapping.join()
    assert contents <= {b"film"}


def test_without_the_list_of_open_files_a_copy_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.mp4").write_bytes(b"film")
    monkeypatch.setattr(files, "OPEN_FILES", tmp_path / "missing")
    with Door(tmp_path).place(f"file://{tmp_path}/a.mp4") as place:
        assert Path(place).read_bytes() == b"film"
    assert not Path(place).exists()


def test_a_system_that_cannot_open_folder_by_folder_says_so(tmp_path, monkeypatch):
    (tmp_path / "a.mp4").write_bytes(b"film")
    monkeypatch.setattr(os, "supports_dir_fd", set())
    with pytest.raises(ValueError, match="This system cannot open a file folder by folder"):
        read(Door(tmp_path), f"file://{tmp_path}/a.mp4")


def test_the_reader_of_videos_takes_what_a_door_hands_on(tiny_mp4):
    with Door(tiny_mp4.parent).place(f"file://{tiny_mp4}") as place:
        opened = Film(place)
        assert opened.total == Film(str(tiny_mp4)).total
