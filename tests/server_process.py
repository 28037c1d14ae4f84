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
from collections.abc import Iterator, Mapping
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
def hosting(context: ssl.SSLContext | None = None):
    """The port of a server at 127.0.0.1 that leads from `/there` to `/secret`, has a `/list`, and what it was asked."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            self.send_response(302 if self.path == "/there" else 200)
            self.send_header("Location", "/secret")
            self.end_headers()
            playlist = b"#EXTM3U\n#EXTINF:2.0,\nhttp://127.0.0.1:%d/secret\n" % self.server.server_port
            self.wfile.write(playlist if self.path == "/list" else b"video")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, seen
        server.shutdown()
