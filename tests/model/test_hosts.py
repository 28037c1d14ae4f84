"""Hosts of videos that never end their answer, or that lead elsewhere."""

import socket
from contextlib import contextmanager, suppress
from threading import Event, Thread

import pytest

from qtsplus.model import addresses_qtsplus
from qtsplus.model.addresses_qtsplus import download

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DRIPS = {
    "body": (b"HTTP/1.0 200 OK\r\n\r\n", b"x"),
    "header": (b"HTTP/1.0 200 OK\r\nX: ", b"x"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunk": (CHUNKED + b"1;", b"x"),
    "trailers": (CHUNKED + b"0\r\n", b"X: x\r\n"),
}
VIDEO = b"HTTP/1.0 200 OK\r\n\r\nvideo"
REDIRECT = b"HTTP/1.0 302 Found\r\nLocation: %s\r\n\r\n"


@contextmanager
def answering(answer, drop=b""):
    """The address of a host that answers one request with some bytes, then with a drop again and again."""

    def serve():
        connection, _ = listener.accept()
        with connection, suppress(ConnectionError):
            connection.recv(4096)
            connection.sendall(answer)
            for _ in range(300):
                if not drop or is_over.wait(0.01):
                    return
                connection.sendall(drop)

    is_over = Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Thread(target=serve, daemon=True)
        server.start()
        port = listener.getsockname()[1]
        yield f"http://127.0.0.1:{port}/clip.mp4"
        is_over.set()
        server.join()


@pytest.mark.parametrize("place", DRIPS)
def test_a_host_that_drips_is_not_waited_for(monkeypatch, place):
    monkeypatch.setattr(addresses_qtsplus, "ADDRESS_SECONDS", 0.3)
    message = r"Cannot load the video at .*TimeoutError: it takes longer than 0\.3 s; download it"
    with answering(*DRIPS[place]) as address, pytest.raises(ValueError, match=message):
        download(address)


def test_a_redirect_is_followed():
    with answering(VIDEO) as other, answering(REDIRECT % other.encode()) as address:
        assert download(address).getvalue() == b"video"


def test_a_redirect_leads_to_http_alone():
    elsewhere = REDIRECT % b"ftp://127.0.0.1:1/there"
    with answering(elsewhere) as address, pytest.raises(ValueError, match="HTTP Error 302"):
        download(address)
