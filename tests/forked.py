"""
Python in a process of its own that need not import anything: it is forked from one that has imported PyTorch,
Transformers and the package. Only what is asked of an installed package or of a first import needs more.

As a script this is the process that forks, or what stands for a forked one where that was started: with its arguments,
its environment, its standard streams and its signals, and ending as it ends.
"""

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PRELOADED = ("qtsplus.cli", "qtsplus.cli.asking", "qtsplus.loading", "qtsplus.session", "qtsplus.hub.convert")


@contextlib.contextmanager
def forking(folder: Path) -> Iterator[list[str]]:
    """What to write for `sys.executable` in front of `-m` or `-c`."""
    script, place = str(Path(__file__)), str(folder / "socket")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script, "", place], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        yield [sys.executable, "-S", script, place]
        process.terminate()


def serve(place: str) -> None:
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # else those who wait would stay
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return wait_for_child(connection)
            connection.close()


def wait_for_child(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    arguments, environment, folder = json.loads(receive(connection, int.from_bytes(size, "big")))
    child = os.fork()
    if child == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        return run(*arguments)
    for stream in streams:
        os.close(stream)
    connection.sendall(child.to_bytes(4, "big"))
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if select.select([connection], [], [], 0.02)[0]:
            os.kill(child, signal.SIGKILL)  # as what stands for it was
    code = os.waitstatus_to_exitcode(ended[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def run(kind: str, what: str, *arguments: str) -> None:
    sys.argv = [kind, *arguments]
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def stand_in(place: str, arguments: list[str]) -> None:
    asked = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        socket.send_fds(connection, [len(asked).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(asked)
        child = int.from_bytes(receive(connection, 4), "big")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(child, number))
        code = int.from_bytes(receive(connection, 4), "big", signed=True)
    if code < 0:
        with contextlib.suppress(OSError):  # of a signal that nobody handles
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the process that forks has ended")
        data += part
    return data


if __name__ == "__main__":
    if sys.argv[1]:
        stand_in(sys.argv[1], sys.argv[2:])
    else:
        serve(sys.argv[2])
