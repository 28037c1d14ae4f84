"""A server in a process of its own, which others wrote or we did, for as long as a test needs it; and a small host."""

import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

TAKEN = re.compile("already in use|empty port", re.IGNORECASE)  # what servers say of a port that another one has


@contextlib.contextmanager
def running_server(
    log: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    path: str = "/health",
) -> Iterator[int]:
    """
    Starts Python with arguments, waits until a server answers a path such as /health, and stops it at the end of the
    block.

    A port that is free can be taken by another process before the server has it. Then another port is tried.

    Args:
        arguments: `{port}` in them stands for the port.
        environment: what is added to this process's.

    Yields:
        the port.
    """
    added = {"OMP_NUM_THREADS": "1"} | (environment or {})
    process = None
    while process is None:
        port = free_port()
        command = [argument.replace("{port}", str(port)) for argument in arguments]
        with open(log, "w") as output:
            process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, env=os.environ | added)
        while process.poll() is None and not answers(port, path):
            time.sleep(0.2)
        if process.poll() is not None:
            said = log.read_text()
            assert TAKEN.search(said), said[-3000:]
            process = None
    try:
        yield port
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def answers(port: int, path: str) -> bool:
    """Whether a server is ready: it may want a key, which is an answer too."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


@contextlib.contextmanager
def serving(
    answer: Callable[[BaseHTTPRequestHandler], None],
    protocol: str = "HTTP/1.0",
    context: ssl.SSLContext | None = None,
) -> Iterator[int]:
    """The port of a server at 127.0.0.1 that answers every GET by a function of its handler."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = protocol

        def do_GET(self):
            answer(self)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@contextlib.contextmanager
def hosting(context: ssl.SSLContext | None = None):
    """The port of a server at 127.0.0.1 that leads from `/there` to `/secret`, has a `/list`, and what it was asked."""
    seen = []

    def answer(handler):
        seen.append(handler.path)
        handler.send_response(302 if handler.path == "/there" else 200)
        handler.send_header("Location", "/secret")
        handler.end_headers()
        playlist = b"#EXTM3U\n#EXTINF:2.0,\nhttp://127.0.0.1:%d/secret\n" % handler.server.server_port
        handler.wfile.write(playlist if handler.path == "/list" else b"video")

    with serving(answer, context=context) as port:
        yield port, seen
