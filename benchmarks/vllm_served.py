"""Clients of a server: `qtsplus serve` beside vLLM with its own pruning (EVS), which never sees the question.

    python -m benchmarks.vllm_served benchmarks/results/vllm-served-cpu.json
    python -m benchmarks.vllm_served benchmarks/results/vllm-served-prefix-cpu.json deep enable
    python -m benchmarks.vllm_served benchmarks/results/vllm-gap-cpu.json gap
    python -m benchmarks.vllm_served benchmarks/results/vllm-keys-cpu.json keys

Each of 32 clients sends its questions about mp4 files one after the other. The models have random weights. The second
command leaves vLLM its prefix cache, by which EVS gains and a choice by the question does not; "alike" is EVS's method
and fraction in ours, which gains too. "small" in place of "deep" is a model that is less deep. Every run is about files
that no server has seen; the servers take turns. Seconds are of the processors, in one thread, without those of vLLM's
scheduler: it waits busily for the model where a core is free. The third measures how long other clients wait beside a
long video, the fourth what a further question about it costs if its keys are kept. It needs vLLM.
"""

import json
import os
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

from .machine import environment
from .speed.results import spread
from .speed.shapes import build, find_shape, make_processor, write_stock
from .vllm_load import DTYPE, FRAMES, NEW_TOKENS, QUESTIONS, REQUESTS, RETENTIONS, VIDEOS, publish

CLIENTS, REPEATS, SOURCE_FPS = 32, 7, 24
SLOW = {"all tokens": 2}  # runs at most
STARTING_SECONDS, ANSWER_SECONDS = 1800, 1800


class Pruned(CPUWorker):
    """vLLM 0.32 forgets on a CPU that it prunes."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.model_runner.is_multimodal_pruning_enabled = True


class Server:
    """A server in processes of its own, and what they cost."""

    def __init__(self, process: psutil.Popen, port: int):
        self.process, self.address = process, f"http://127.0.0.1:{port}"

    def seconds(self) -> float:
        """Of all processes but the scheduler."""
        processes = [self.process, *self.process.children(recursive=True)]
        return sum(sum(one.cpu_times()[:2]) for one in processes if "EngineCore" not in "".join(one.cmdline()))

    def peak_mb(self) -> float:
        """Of the largest of its processes, which has the model."""
        statuses = [Path(f"/proc/{one.pid}/status").read_text() for one in self.process.children(recursive=True)]
        return max(int(status.split("VmHWM:")[1].split()[0]) / 1e3 for status in statuses)

    def ask(self, video: Path, question: str, settings: dict[str, Any], before: str = "") -> int:
        """Asks, with a text before the video, and returns how many tokens the prompt had."""
        content: list[Any] = [{"type": "text", "text": text} for text in (before, question)]
        content.insert(1, {"type": "video_url", "video_url": {"url": video.as_uri()}})
        asked: dict[str, Any] = {"model": "served", "messages": [{"role": "user", "content": content}]}
        asked |= {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        if settings:
            asked["mm_processor_kwargs"] = settings
        with self._post("chat/completions", asked) as answer:
            return json.load(answer)["usage"]["prompt_tokens"]

    def stream(self) -> list[float]:
        """When each of 100 tokens of an answer without a video came."""
        asked = {"model": "served", "prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with self._post("completions", asked) as answer:
            return [time.monotonic() for line in answer if line.startswith(b"data: {")]

    def _post(self, path: str, asked: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self.address}/v1/{path}", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        try:
            return urllib.request.urlopen(request, timeout=ANSWER_SECONDS)
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error


@contextmanager
def running(log: Path, *command: Any) -> Iterator[Server]:
    """A server of Python's arguments, until the block ends."""
    port = random.Random(str(log)).randrange(20_000, 30_000)
    own = {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    line = [sys.executable, "-m", *map(str, command)]
    place = line.index("--") if "--" in line else len(line)
    line[place:place] = ["--port", str(port)]
    with log.open("w") as output:
        process = psutil.Popen(
            line,
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
    requests = []
    for retention in draw.choices(RETENTIONS, k=REQUESTS):
        question = f"What is in the picture number {draw.randrange(QUESTIONS)}?"
        requests.append((videos[draw.randrange(VIDEOS)], question, settings(retention)))
    start, begun = server.seconds(), time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda request: server.ask(*request), requests))
    wall = time.monotonic() - begun
    return {"seconds": server.seconds() - start, "wall": wall}


@contextmanager
def attentive(*options: Any) -> Iterator[tuple[Server, Path]]:
    """A server that chooses by `lm_attention`, and a video of ten minutes."""
    shape = find_shape("small")
    width, height = shape.size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        video = folder / "video.mp4"
        frame = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
        write_mp4(video, (np.roll(frame, number, 1) for number in range(2 * 600)), 2)
        model = build(shape, "ours", "cpu", DTYPE)
        model.config.qtsplus_config.selection = "lm_attention"
        publish(model, make_processor(shape), folder)
        options = ("--served-model-name", "served", "--max-model-len", 32768, "--enforce-eager", *options)
        ours = ["qtsplus.cli", "serve", folder / "published", "--allow-media-root", folder, "--"]
        with running(folder / "log", *ours, *options) as server:
            yield server, video


def measure_gap() -> dict[str, Any]:
    """The time between tokens of a client while `lm_attention` chooses for another one's video of ten minutes."""
    with attentive() as (server, video), ThreadPoolExecutor(1) as pool:
        before, alone = server.peak_mb(), server.stream()
        asking = pool.submit(server.ask, video, "What is it?", {"retention": 0.05})
        beside, begun = server.stream(), time.monotonic()
        while not asking.done():
            beside += server.stream()
        return {
            "longest_gap": {
                "alone": max(np.diff(alone)),
                "beside": max(np.diff(beside)),
                "seconds": beside[-1] - begun,
            },
            "peak_mb": {"before": before, "after": server.peak_mb()},
            "prompt_tokens": asking.result(),
        }


def measure_keys() -> dict[str, Any]:
    """What a further question about that video costs: behind another text, where its keys are not kept, and alike."""
    runs: dict[str, list[float]] = {"read": [], "kept": []}
    with attentive("--additional-config", '{"qtsplus_keep_keys": true}') as (server, video):
        server.ask(video, "What is it?", {"retention": 0.05})
        for number in range(REPEATS):
            for side, before in (("read", f"{number}"), ("kept", "")):
                start = server.seconds()
                server.ask(video, f"Where is it {number}?", {"retention": 0.05}, before)
                runs[side].append(server.seconds() - start)
    ratios = [read / kept for read, kept in zip(runs["read"], runs["kept"], strict=True)]
    return {"read over kept": spread(ratios), "runs": runs}


def measure(shape_name: str = "deep", prefix_cache: str = "no-enable") -> dict[str, Any]:
    """Runs the ways in turn; the servers have a prefix cache with "enable"."""
    shape, fraction = find_shape(shape_name), statistics.mean(random.Random(0).choices(RETENTIONS, k=REQUESTS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processor, model = make_processor(shape), build(shape, "ours", "cpu", DTYPE)
        selector = model.config.qtsplus_config
        selector.rho_min = selector.rho_max = fraction
        publish(model, processor, folder)
        write_stock(folder / "published", folder / "stock")
        del model
        length = FRAMES * shape.size[0] * shape.size[1] // 28**2  # twice the tokens of a video
        common = ["--served-model-name", "served", "--max-model-len", length, "--max-num-batched-tokens", length]
        common += ["--max-num-seqs", CLIENTS, "--enforce-eager", f"--{prefix_cache}-prefix-caching"]
        stock = ["--model", folder / "stock", "--dtype", "float32", "--allowed-local-media-path", folder]
        stock += ["--worker-cls", f"{__spec__.name}.Pruned", "--video-pruning-rate", 1 - fraction]
        stock += ["--media-io-kwargs", json.dumps({"video": {"num_frames": FRAMES}})]
        stock += ["--mm-processor-kwargs", '{"do_sample_frames": false}']  # the reader has chosen them
        ours = ["qtsplus.cli", "serve", folder / "published", "--allow-media-root", folder, "--"]
        with (
            running(folder / "ours.log", *ours, *common) as own,
            running(folder / "evs.log", "vllm.entrypoints.launchers.api_server.entry", *stock, *common) as evs,
        ):
            sides: dict[str, tuple[Server, Callable[[float], dict[str, Any]]]] = {
                "ours": (own, lambda retention: {"retention": retention}),
                "own budget": (own, lambda retention: {}),
                "alike": (own, lambda retention: {"selection": "temporal_redundancy", "retention": fraction}),
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
    return {
        **{  # what ran next to each other, since the machine is not the same all the time
            f"{name} over ours by round": {
                side: spread([one[name] / ours[name] for one, ours in zip(every, runs["ours"], strict=False)])
                for side, every in runs.items()
                if side != "ours"
            }
            for name in ("seconds", "wall")
        },
        **{
            name: {side: spread([run[name] for run in every]) for side, every in runs.items()}
            for name in ("seconds", "wall")
        },
        "runs": runs,
    }


def main(out: Path, *what: str) -> None:
    """Measures, and writes every run."""
    others = {"gap": measure_gap, "keys": measure_keys}
    measured = others[what[0]]() if others.keys() & what else measure(*what)
    command = " ".join(["python -m benchmarks.vllm_served", str(out), *what])
    write_json(out, {"command": command, "environment": {**environment("cpu"), "vllm": vllm_version}, **measured})
    print(measured)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
