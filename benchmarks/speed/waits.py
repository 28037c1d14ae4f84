"""How often a GPU would wait for the host, and how many kernels it would run, for both models: the command `waits`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests import pretend_device

from qtsplus.model.methods_qtsplus import METHODS

from ..files import write_result
from ..machine import environment
from ..tables import markdown_table
from .peak import in_own_process
from .shapes import SIDES, build_pair, fill_pixels, find_shape, video_inputs

FRAMES = (8, 32, 128, 256)
RETENTIONS = (0.05, 0.1, 0.2, 0.5)
RETENTION = 0.1  # at each number of frames
# Layers and blocks of Qwen2.5-VL-3B: a step's kernels are those of its layers, and a few for each call.
DEEP_TEXT = {"num_hidden_layers": 36, "max_window_layers": 36}
DEEP_VISION = {"depth": 32, "fullatt_block_indexes": [7, 15, 23, 31]}
Counts = dict[str, dict[str, tuple[int, int]]]  # (waits, kernels) by step and side


def run_waits(out: Path, *, frames: Sequence[int] = FRAMES, retentions: Sequence[float] = RETENTIONS) -> Path:
    """
    Counts with several numbers of frames, and with several fractions kept of the shortest video; writes `waits.json`
    and `waits.md`. A model as deep as Qwen2.5-VL-3B, but narrow, runs on a device that is made of CPU memory
    (tests/pretend_device.py).
    """
    by_frames = {count: in_own_process(count_waits, frames=count, retention=RETENTION) for count in frames}
    by_share = {share: in_own_process(count_waits, frames=frames[0], retention=share) for share in retentions}
    document = {
        "command": "python -m benchmarks waits",
        "environment": environment("cpu"),
        "settings": {
            "shape": "tiny",
            "layers": 36,
            "vision_blocks": 32,
            "retention": RETENTION,
            "frames_of_shares": frames[0],
        },
        "frames": by_frames,
        "retentions": by_share,
    }
    return write_result(out / "waits.json", document, page(document))


def page(document: dict[str, Any]) -> str:
    """Everything as Markdown."""
    by_frames, by_share = document["frames"], document["retentions"]
    lines = [
        "# Waits for the host",
        "",
        "A narrow model with the layers of Qwen2.5-VL-3B (36, and 32 of vision).",
        "Each cell: waits, and kernels in brackets. Made by `python -m benchmarks waits`.",
        "Another question starts from stored features. Stock has no methods and stores nothing: it does its prefill.",
        "",
        *_table([f"{count} frames" for count in by_frames], list(by_frames.values())),
        "",
        *_table([f"{float(share):.0%} kept" for share in by_share], list(by_share.values())),
    ]
    return "\n".join(lines) + "\n"


def _table(heads: list[str], columns: list[Counts]) -> list[str]:
    rows = []
    for step, sides in columns[0].items():
        for side in sides:
            cells = ["{} ({:,})".format(*column[step][side]) for column in columns]
            rows.append([step, side, *cells])
    return markdown_table(["step", "model", *heads], rows, texts=2)


@contextmanager
def counting(counted: Counts, step: str, side: str) -> Iterator[None]:
    """Notes what happens inside as a step of one side."""
    pretend_device.counts.reset()
    yield
    counted.setdefault(step, {})[side] = (pretend_device.counts.total_waits, pretend_device.counts.kernels)


def count_waits(frames: int, retention: float) -> Counts:
    """Both models do each step once on the pretend device; run it in a process of its own."""
    torch.manual_seed(0)
    shape = replace(find_shape("tiny"), frames=frames, text=DEEP_TEXT, vision=DEEP_VISION)
    pair = build_pair(shape, "cpu", torch.float32)
    pretend_device.start()
    counted: Counts = {}
    for side in SIDES:
        model = pretend_device.to_device(pair[side])
        inputs = pretend_device.inputs_to_device(fill_pixels(video_inputs(shape, side)))
        choice = {"retention": retention} if side == "ours" else {}
        _count_side(counted, side, model, inputs, choice)
    return counted


def _count_side(counted: Counts, side: str, model: Any, inputs: dict[str, Any], choice: dict[str, float]) -> None:
    pixels = inputs["pixel_values_videos"]
    grid = inputs["video_grid_thw"]
    step = _second_step(model, inputs, choice)
    with torch.no_grad():
        with counting(counted, "prefill", side):
            model(**inputs, **choice, logits_to_keep=1)
        with counting(counted, "decoding step", side):
            model(**step)
        with counting(counted, "vision", side):
            if side == "ours":
                features = model.encode_videos(pixels, grid)
            else:
                model.get_video_features(pixels, grid)
        if side == "ours":
            later = {name: value for name, value in inputs.items() if name != "pixel_values_videos"}
            for method in METHODS:
                if method != "all":
                    with counting(counted, f"another question, {method}", side):
                        model(**later, video_features=features, **choice, selection=method, logits_to_keep=1)
    model.train()
    with counting(counted, "training step", side):
        model(**inputs, labels=inputs["input_ids"], **choice).loss.backward()


def _second_step(model: Any, inputs: dict[str, Any], choice: dict[str, float]) -> dict[str, Any]:
    """What `generate` gives the model for the second new token."""
    calls: list[dict[str, Any]] = []
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    model.generate(**inputs, **choice, max_new_tokens=2, min_new_tokens=2)
    hook.remove()
    return calls[-1]
