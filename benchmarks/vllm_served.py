"""Clients of a server: `qtsplus serve` beside vLLM with its own pruning (EVS), which never sees the question.

    python -m benchmarks.vllm_served benchmarks/results/vllm-served-cpu.json
    python -m benchmarks.vllm_served benchmarks/results/vllm-served-prefix-cpu.json deep enable

Each of 32 clients sends its questions about mp4 files one after the other. The models have random weights. The second
command leaves vLLM its prefix cache, by which EVS gains and a choice by the question does not. Every run is about files
that no server has seen; the servers take turns. Seconds are of the processors, in one thread, without those of vLLM's
scheduler: it waits busily for the model where a core is free, and they stand apart. It needs vLLM.
"""

import json
import os
import queue
import random
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tests.clips import write_mp4
from vllm import __version__ as vllm_version
from vllm.v1.worker.cpu_worker import CPUWorker

from qtsplus.common.journals import write_json
from qtsplus.hub.publish import assemble_folder

from .machine import environment
from .speed.results import spread
from .speed.shapes import build, find_shape, make_processor, write_stock
from .vllm_load import DTYPE, FRAMES, NEW_TOKENS, QUESTIONS, REQUESTS, RETENTIONS, VIDEOS

CLIENTS, REPEATS, SOURCE_FPS = 32, 7, 24
SLOW = {"all tokens": 2}  # runs at most
STARTING_SECONDS, ANSWER_SECONDS = 300, 1800


class Pruned(CPUWorker):
    """vLLM 0.32 forgets on a CPU that it prunes."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.model_runner.is_multimodal_pruning_enabled = True


class Server:
    """A server in processes of its own, and what they cost."""

    def __init__(self, process: psutil.Popen, port: int):
        self.process, self.address = process, f"http://127.0.0.1:{port}"

    def seconds(self) -> tuple[float, float]:
        """Of the scheduler, and of all other processes."""
        processes = [self.process, *self.process.children(recursive=True)]
        times = {"".join(one.cmdline()): sum(one.cpu_times()[:2]) for one in processes}
        scheduler = sum(seconds for name, seconds in times.items() if "EngineCore" in name)
        return scheduler, sum(times.values()) - scheduler

    def peak_mb(self) -> float:
        """Of the largest of its processes, which has the model."""
        statuses = [Path(f"/proc/{one.pid}/status").read_text() for one in self.process.children(recursive=True)]
        return max(int(status.split("VmHWM:")[1].split()[0]) / 1e3 for status in statuses)

    def ask(self, video: Path, question: str, settings: dict[str, Any]) -> int:
        """Asks, and returns how many tokens the prompt had."""
        content = [{"type": "video_url", "video_url": {"url": video.as_uri()}}, {"type": "text", "text": question}]
        asked = {
            **{"model": "served", "messages": [{"role": "user", "content": content}]},
            **{"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True},
            **({"mm_processor_kwargs": settings} if settings else {}),
        }
        request = urllib.request.Request(f"{self.address}/v1/chat/completions", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)["usage"]["prompt_tokens"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error


@contextmanager
def running(log: Path, *command: Any) -> Iterator[Server]:
    """A server of Python's arguments, until the block ends."""
    port = random.Random(str(log)).randrange(20_000, 30_000)
    own = {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as output:
        process = psutil.Popen(
            [sys.executable, "-m", *map(str, command), "--port", str(port)],
            stdout=output,
            stderr=output,
            env={**os.environ, **own, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        )
    server, deadline = Server(process, port), time.monotonic() + STARTING_SECONDS
    try:
        while not _healthy(f"{server.address}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text()[-3000:])
            time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        process.wait()


def _options(**values: Any) -> list[str]:
    """On a command line; one without a value is named alone."""
    return [part for name, value in values.items() for part in (f"--{name}", *([] if value is None else [str(value)]))]


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def render(folder: Path, size: tuple[int, int]) -> list[Path]:
    """Films of noise that moves, no two alike, whose every 12th frame is looked at."""
    width, height = size
    folder.mkdir()
    paths = [folder / f"{number}.mp4" for number in range(VIDEOS)]
    for path in paths:
        drawn = np.random.default_rng(list(str(path).encode())).integers(
            0, 255, (height // 8, width, 3), dtype=np.uint8
        )
        large = drawn.repeat(8, 0)
        frames = (np.roll(large, 3 * number, 1) for number in range(FRAMES * SOURCE_FPS // 2))
        write_mp4(path, frames, SOURCE_FPS)
    return paths


def ask_all(server: Server, videos: list[Path], settings: Callable[[float], dict[str, Any]]) -> dict[str, float]:
    """All requests, by so many clients at once."""
    draw = random.Random(0)
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for retention in draw.choices(RETENTIONS, k=REQUESTS):
        question = f"What is in the picture number {draw.randrange(QUESTIONS)}?"
        waiting.put((videos[draw.randrange(VIDEOS)], question, settings(retention)))
    start, begun = server.seconds(), time.monotonic()
    tokens: list[int] = []

    def client(_: int) -> None:
        while True:
            try:
                asked = waiting.get_nowait()
            except queue.Empty:
                return
            tokens.append(server.ask(*asked))

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    wall = time.monotonic() - begun
    scheduler, others = (after - before for after, before in zip(server.seconds(), start, strict=True))
    return {"seconds": others, "scheduler": scheduler, "wall": wall, "prompt_tokens": statistics.mean(tokens)}


def measure(out: Path, shape_name: str = "deep", prefix_cache: str = "no-enable") -> dict[str, Any]:
    """Runs the ways in turn, and writes every run; the servers have a prefix cache with "enable"."""
    shape, fraction = find_shape(shape_name), statistics.mean(random.Random(0).choices(RETENTIONS, k=REQUESTS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processor, model = make_processor(shape), build(shape, "ours", "cpu", DTYPE)
        selector = model.config.qtsplus_config
        selector.rho_min = selector.rho_max = fraction
        for part in (model, processor):
            part.save_pretrained(folder / "saved")
        assemble_folder(folder / "saved", folder / "published")
        write_stock(folder / "published", folder / "stock")
        del model
        length = FRAMES * shape.size[0] * shape.size[1] // 28**2  # twice the tokens of a video
        common = _options(
            **{"served-model-name": "served", "max-model-len": length, "max-num-batched-tokens": length},
            **{"max-num-seqs": CLIENTS, "enforce-eager": None, f"{prefix_cache}-prefix-caching": None},
        )
        stock = _options(
            **{"model": folder / "stock", "dtype": "float32", "allowed-local-media-path": folder},
            **{"worker-cls": f"{__spec__.name}.Pruned", "video-pruning-rate": 1 - fraction},
            **{"media-io-kwargs": json.dumps({"video": {"num_frames": FRAMES}})},
            **{"mm-processor-kwargs": json.dumps({"do_sample_frames": False})},  # the reader has chosen them
        )
        ours = ["qtsplus.cli", "serve", folder / "published", "--allow-media-root", folder, "--"]
        with (
            running(folder / "ours.log", *ours, *common) as own,
            running(folder / "evs.log", "vllm.entrypoints.openai.api_server", *stock, *common) as evs,
        ):
            sides: dict[str, tuple[Server, Callable[[float], dict[str, Any]]]] = {
                "ours": (own, lambda retention: {"retention": retention}),
                "own budget": (own, lambda retention: {}),
                "evs": (evs, lambda retention: {}),
                "all tokens": (own, lambda retention: {"selection": "all", "reencode": False}),
            }
            warm = render(folder / "warm", shape.size)
            for server in (own, evs):
                ask_all(server, warm[:1] * VIDEOS, lambda retention: {})
            runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for repeat in range(REPEATS):
                for side in [*sides][repeat % len(sides) :] + [*sides][: repeat % len(sides)]:
                    if repeat >= SLOW.get(side, REPEATS):
                        continue
                    server, settings = sides[side]
                    videos = render(folder / f"{side}-{repeat}".replace(" ", "-"), shape.size)
                    runs[side].append(ask_all(server, videos, settings))
                    print(side, runs[side][-1], file=sys.stderr, flush=True)
            peaks = {"ours": own.peak_mb(), "evs": evs.peak_mb()}
    return _write(out, shape_name, prefix_cache, runs, peaks)


def _write(
    out: Path, shape_name: str, prefix_cache: str, runs: dict[str, list[dict[str, float]]], peaks: dict[str, float]
) -> dict[str, Any]:
    document = {
        "command": f"python -m benchmarks.vllm_served {out} {shape_name} {prefix_cache}",
        "environment": {**environment("cpu"), "vllm": vllm_version},
        "settings": {
            **{"shape": shape_name, "frames": FRAMES, "source_fps": SOURCE_FPS, "clients": CLIENTS, "videos": VIDEOS},
            **{"questions": QUESTIONS, "requests": REQUESTS, "new_tokens": NEW_TOKENS, "retentions": RETENTIONS},
        },
        **{  # what ran next to each other, since the machine is not the same all the time
            f"{name} over ours by round": {
                side: spread([one[name] / ours[name] for one, ours in zip(every, runs["ours"], strict=False)])
                for side, every in runs.items()
                if side != "ours"
            }
            for name in ("seconds", "wall")
        },
        "peak_mb": peaks,
        "seconds": {side: spread([run["seconds"] for run in every]) for side, every in runs.items()},
        **{
            name: {side: spread([run[name] for run in every]) for side, every in runs.items()}
            for name in ("scheduler", "wall")
        },
        "runs": runs,
    }
    write_json(out, document)
    return document


if __name__ == "__main__":
    print(measure(Path(sys.argv[1]), *sys.argv[2:])["seconds over ours by round"])
