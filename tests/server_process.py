"""A server in a process of its own, which others wrote or we did, for as long as a test needs it; and a small host."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def running_server(
    port: int, log: Path, *arguments: str, environment: Mapping[str, str] | None = None, path: str = "/health"
) -> Iterator[subprocess.Popen]:
    """
    Starts Python with arguments, waits until a path such as /health answers, and stops it at the end of the block.

    Args:
        environment: what is added to this process's.
    """
    added = {"OMP_NUM_THREADS": "1", **(environment or {})}
    with open(log, "w") as output:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **added})
    try:
        while not healthy(port, path):
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        yield process
    finally:
        process.terminate()
        process.wait()


def healthy(port: int, path: str = "/health") -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status == 200
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
            list_of_films = b"#EXTM3U\n#EXTINF:2.0,\nhttp://127.0.0.1:%d/secret\n" % self.server.server_port
            self.wfile.write(list_of_films if self.path == "/list" else b"film")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, seen
        server.shutdown()
