"""How often a GPU would wait for the host, and how many kernels it would run, for both models: the command `waits`."""

import json
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

FRAMES = (2, 8, 32, 128, 256)  # the first two for backbones other than Qwen2.5-VL
RETENTIONS = (0.05, 0.1, 0.2, 0.5)  # of 8 frames
RETENTION = 0.1  # at each number of frames
# By shape the layers and blocks of the model that is used: a step's kernels are those of its layers, and a few more.
DEPTHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        {"num_hidden_layers": 36, "max_window_layers": 36},
        {"depth": 32, "fullatt_block_indexes": [7, 15, 23, 31]},
    ),
    "internvl2.5-8b-tiny": ({"num_hidden_layers": 32}, {"num_hidden_layers": 24}),
    "llava-video-7b-tiny": ({"num_hidden_layers": 28}, {"num_hidden_layers": 26}),
    "qwen3-vl-8b-tiny": ({"num_hidden_layers": 36}, {"depth": 27, "deepstack_visual_indexes": [8, 16, 24]}),
}
BEFORE = Path(__file__).parents[1] / "results/waits-before.json"  # counted likewise in commit b00957a
Counts = dict[str, dict[str, tuple[int, int]]]  # (waits, kernels) by step and side


def run_waits(
    out: Path,
    *,
    shapes: Sequence[str] = tuple(DEPTHS),
    frames: Sequence[int] = FRAMES,
    retentions: Sequence[float] = RETENTIONS,
) -> Path:
    """
    Counts with several numbers of frames, and with several fractions kept of a short video; writes `waits.json` and
    `waits.md`. Models with all layers, but narrow, run on a device that is made of CPU memory
    (tests/pretend_device.py).
    """
    by_frames = {}
    for shape in shapes:
        counts = frames if shape == "tiny" else frames[:2]
        by_frames[shape] = {count: in_own_process(count_waits, shape=shape, frames=count) for count in counts}
    document = {
        "command": "python -m benchmarks waits",
        "environment": environment("cpu"),
        "settings": {"retention": RETENTION},
        "frames": by_frames,
        "retentions": {share: in_own_process(count_waits, retention=share) for share in retentions},
    }
    return write_result(out / "waits.json", document, page(document))


def page(document: dict[str, Any]) -> str:
    """Everything as Markdown."""
    before = json.loads(BEFORE.read_text())
    by_share = document["retentions"]
    lines = [
        "# Waits for the host",
        "",
        "Narrow models with the layers of Qwen2.5-VL-3B (`tiny`) and of those that are named.",
        f"Each cell: waits, and kernels in brackets, with {RETENTION:.0%} kept. Made by `python -m benchmarks waits`.",
        "`before` is commit b00957a. Another question starts from stored features. Stock has no methods and stores",
        "nothing: it does its prefill.",
    ]
    for shape, columns in document["frames"].items():
        heads = [f"{count} frames" for count in columns]
        lines += ["", f"## {shape}", "", *_table(heads, columns, before["frames"][shape])]
    heads = [f"{float(share):.0%} kept" for share in by_share]
    lines += ["", "## tiny, 8 frames", "", *_table(heads, by_share, before["retentions"])]
    return "\n".join(lines) + "\n"


def _table(heads: list[str], columns: dict[str, Counts], before: dict[str, Counts]) -> list[str]:
    rows = []
    earlier = [before.get(str(name), {}) for name in columns]
    now = list(columns.values())
    for step, sides in now[0].items():
        rows += [[step, side, *_cells(now, step, side)] for side in sides]
        rows.append([step, "before", *_cells(earlier, step, "ours")])
    return markdown_table(["step", "model", *heads], rows, texts=2)


def _cells(columns: list[Counts], step: str, side: str) -> list[str]:
    return ["{} ({:,})".format(*column[step][side]) if column else "" for column in columns]


@contextmanager
def counting(counted: Counts, step: str, side: str) -> Iterator[None]:
    """Notes what happens inside as a step of one side."""
    pretend_device.counts.reset()
    yield
    counted.setdefault(step, {})[side] = (pretend_device.counts.total_waits, pretend_device.counts.kernels)


def count_waits(shape: str = "tiny", frames: int = 8, retention: float = RETENTION) -> Counts:
    """Both models do each step once on the pretend device; run it in a process of its own."""
    torch.manual_seed(0)
    narrow = find_shape(shape)
    text, vision = DEPTHS[shape]
    deep = replace(narrow, frames=frames, text=narrow.text | text, vision=narrow.vision | vision)
    pair = build_pair(deep, "cpu", torch.float32)
    pretend_device.start()
    counted: Counts = {}
    for side in SIDES:
        model = pretend_device.to_device(pair[side])
        inputs = pretend_device.inputs_to_device(fill_pixels(video_inputs(deep, side)))
        choice = {"retention": retention} if side == "ours" else {}
        _count_side(counted, side, model, inputs, choice)
    return counted


def _count_side(counted: Counts, side: str, model: Any, inputs: dict[str, Any], choice: dict[str, float]) -> None:
    visual = {name: value for name, value in inputs.items() if name.startswith(("pixel", "video_grid"))}
    step = _second_step(model, inputs, choice)
    with torch.no_grad():
        with counting(counted, "prefill", side):
            model(**inputs, **choice, logits_to_keep=1)
        with counting(counted, "decoding step", side):
            model(**step)
        with counting(counted, "vision", side):
            if side == "ours":
                features = model.encode_videos(**visual)
            elif "pixel_values" in visual:  # to stock InternVL frames are images
                model.get_image_features(**visual)
            else:
                model.get_video_features(**visual)
        if side == "ours":
            later = {name: value for name, value in inputs.items() if not name.startswith("pixel")}
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
