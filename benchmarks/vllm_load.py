"""Many questions about a few videos at once: vLLM with the selector, at stated budgets and at the model's own; the same
vLLM with all tokens; vLLM with its own pruning (EVS, which never sees the question); and Transformers with the
selector, one question after another.

    python -m benchmarks.vllm_load benchmarks/results/vllm-load-cpu.json
    python -m benchmarks.vllm_load benchmarks/results/vllm-load-deep-cpu.json deep
    python -m benchmarks.vllm_load benchmarks/results/vllm-gpu.json 3b

It needs vLLM, and runs in one process with models of random weights, three of them beside each other on a GPU. Every
run begins with no video known; within a run each side encodes a video once. Frames are handed over decoded. On a CPU
seconds are those of the processor, in one thread, so that what else runs there counts little.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtsplus import ask, encode
from qtsplus.common.journals import write_json
from qtsplus.hub.publish import assemble_folder

from .machine import environment
from .speed.results import spread
from .speed.shapes import build, find_shape, make_processor, prompt_text, write_stock

VIDEOS, QUESTIONS, REQUESTS, NEW_TOKENS = 8, 12, 96, 16
RETENTIONS = (0.05, 0.1, 0.2)
SLOW = {"vllm_all_tokens": 3, "transformers_one_by_one": 3}  # runs at most
FRAMES = 64
ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE, REPEATS = ("cuda", torch.bfloat16, 3) if ON_GPU else ("cpu", torch.float32, 7)


class Load:
    """
    The requests, and the ways to answer them.

    Args:
        shape: of the model.
        folder: an empty one, for the published model.
    """

    def __init__(self, shape: Any, folder: Path):
        draw = random.Random(0)
        self.requests = [
            (draw.randrange(VIDEOS), f"What is in the picture number {draw.randrange(QUESTIONS)}?", retention)
            for retention in draw.choices(RETENTIONS, k=REQUESTS)
        ]
        # As many tokens as the requests keep on average, for those that keep one fraction of all.
        fraction = statistics.mean(retention for _, _, retention in self.requests)
        self.processor, self.model = make_processor(shape), build(shape, "ours", DEVICE, DTYPE)
        selector = self.model.config.qtsplus_config
        selector.rho_min = selector.rho_max = fraction
        publish(self.model, self.processor, folder)
        rng, (width, height) = np.random.default_rng(0), shape.size
        self.length = FRAMES * width * height // 28**2  # twice the tokens of a video
        self.videos = [rng.integers(0, 255, (FRAMES, height, width, 3), dtype=np.uint8) for _ in range(VIDEOS)]
        self.described: dict[str, Any] = {"fps": 2.0, "total_num_frames": FRAMES, "frames_indices": list(range(FRAMES))}
        self.marks = [f"video {number}" for number in range(VIDEOS)]  # in place of hashes of the frames
        write_stock(folder / "published", folder / "stock")
        self.llm = self._start_vllm(folder / "published", worker_extension_cls="qtsplus.vllm.worker.Worker")
        processor = self.llm.llm_engine.renderer.get_mm_processor()
        processor.call_engine = lambda method, args: self.llm.collective_rpc(method, args=args)
        processor.release = lambda videos: None
        self.evs = self._start_vllm(folder / "stock", video_pruning_rate=1 - fraction)
        self.evs.collective_rpc(_switch_pruning_on)

    def _start_vllm(self, folder: Path, **more: Any) -> Any:
        from vllm import LLM

        sizes = {"max_model_len": self.length, "max_num_batched_tokens": self.length, "max_num_seqs": 32}
        options: dict[str, Any] = {"dtype": DTYPE, "enable_prefix_caching": False, **sizes}
        options |= {"gpu_memory_utilization": 0.25} if ON_GPU else {"enforce_eager": True}
        return LLM(model=str(folder), limit_mm_per_prompt={"video": 1, "image": 0}, **options, **more)

    def ask_vllm(self, way: str) -> None:
        """All requests at once: the "selector", without its "re-encoder", its "learned" budget, "all" tokens, "evs"."""
        from vllm import SamplingParams

        prompts = []
        for video, question, retention in self.requests:
            described = {**self.described, "duration": FRAMES / 2, "video_backend": "opencv", "do_sample_frames": False}
            if way != "evs":  # as the server hands over what it has read
                described["mark"] = self.marks[video]
            prompts.append(
                {
                    "prompt": prompt_text(self.processor, question),
                    "multi_modal_data": {"video": [(self.videos[video], described)]},
                    "mm_processor_kwargs": {
                        "selector": {"retention": retention},
                        "re-encoder": {"retention": retention, "reencode": False},
                        "learned": {},
                        "all": {"selection": "all", "reencode": False},
                        "evs": {},
                    }[way],
                }
            )
        settings = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        (self.evs if way == "evs" else self.llm).generate(prompts, settings, use_tqdm=False)

    def ask_transformers(self) -> None:
        """One request after another."""
        known: dict[int, Any] = {}
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        for video, question, retention in self.requests:
            if video not in known:
                known[video] = encode(self.model, self.processor, self.videos[video], metadata=self.described)
            ask(self.model, self.processor, known[video], question, retention=retention, **length)

    def forget(self) -> None:
        """What vLLM and the plugin know of videos."""
        for llm in (self.llm, self.evs):
            llm.llm_engine.reset_mm_cache()
            llm.llm_engine.reset_encoder_cache()
        self.llm.llm_engine.renderer.get_mm_processor()._processed.clear_cache()
        self.llm.apply_model(_forget_videos)


def publish(model: Any, processor: Any, folder: Path) -> None:
    """Saves a model, and makes the folder `published` of it."""
    for part in (model, processor):
        part.save_pretrained(folder / "saved")
    assemble_folder(folder / "saved", folder / "published")


def _forget_videos(model: Any) -> None:
    for known in (model.cache, model.held, model.users):
        known.clear()


def _switch_pruning_on(worker: Any) -> None:
    """vLLM 0.32 forgets to on a CPU."""
    worker.model_runner.is_multimodal_pruning_enabled = True


def seconds_of(run: Callable[[], None]) -> float:
    clock = time.perf_counter if ON_GPU else time.process_time
    start = clock()
    run()
    return clock() - start


def measure(out: Path, shape_name: str) -> dict[str, Any]:
    """Runs the ways in turn, and writes every run."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    if not ON_GPU:
        torch.set_num_threads(1)
    shape = find_shape(shape_name)
    with tempfile.TemporaryDirectory() as folder:
        load = Load(shape, Path(folder))
        sides: dict[str, Callable[[], None]] = {
            "vllm": lambda: load.ask_vllm("selector"),
            "vllm_without_reencoder": lambda: load.ask_vllm("re-encoder"),
            "vllm_own_budget": lambda: load.ask_vllm("learned"),
            "vllm_all_tokens": lambda: load.ask_vllm("all"),
            "vllm_evs": lambda: load.ask_vllm("evs"),
            "transformers_one_by_one": load.ask_transformers,
        }
        runs: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(REPEATS):
            for name in [*sides][repeat % len(sides) :] + [*sides][: repeat % len(sides)]:  # none is always the first
                if repeat >= SLOW.get(name, REPEATS):
                    continue
                load.forget()
                runs[name].append(seconds_of(sides[name]))
    from vllm import __version__ as vllm_version

    medians = {name: statistics.median(times) for name, times in runs.items()}
    document = {
        "command": f"python -m benchmarks.vllm_load {out} {shape_name}",
        "environment": {**environment(DEVICE), "vllm": vllm_version},
        "figures": {
            "all_tokens_over_ours": medians["vllm_all_tokens"] / medians["vllm"],
            "evs_over_ours": medians["vllm_evs"] / medians["vllm"],
            "evs_over_ours_without_reencoder": medians["vllm_evs"] / medians["vllm_without_reencoder"],
            "own_budget_over_ours": medians["vllm_own_budget"] / medians["vllm"],
            "one_by_one_over_ours": medians["transformers_one_by_one"] / medians["vllm"],
        },
        "seconds": {name: spread(times) for name, times in runs.items()},
        "runs": runs,
    }
    write_json(out, document)
    return document


if __name__ == "__main__":
    print(measure(Path(sys.argv[1]), *sys.argv[2:] or ["small"])["figures"])
