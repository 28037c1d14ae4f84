"""Seconds and peak memory of a training step, stock with all tokens and ours: the command `training-step`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..files import begin, finish
from ..machine import environment
from .clock import now
from .cost import faster_dtype
from .peak import extra_memory, in_own_process, measure_missing
from .results import label, spread, summarise
from .shapes import SIDES, best_attention, build, fill_pixels, find_device, find_shape, video_inputs

# Stock's logits of every visual token have to fit beside its gradients: 9,600 tokens of the 3B model are 17 GB of them.
MOST_FRAMES = 32
ANSWER_TOKENS = 8  # that the loss is taken over


def run_train(
    shape_name: str,
    out: Path,
    *,
    device: str | None = None,
    dtype: str = "auto",
    frames: int | None = None,
    repeats: int = 5,
    retention: float = 0.11,
    progress: bool = True,
) -> Path:
    """
    Measures each side in a process of its own, and writes `train-LABEL.json`. An interrupted run goes on with the side
    that is missing.

    Args:
        shape_name: of [`MODEL_SHAPES`].
        out: folder of the results.
        device: the shape's own when `None`.
        dtype: of weights, gradients and optimizer; "auto" is what the device multiplies faster, as for [`run_speed`].
        frames: of the video; the shape's, at most [`MOST_FRAMES`], when `None`.
        repeats: steps of each side, behind one to warm up.
        retention: fraction of the visual tokens that our side aims at.

    Raises:
        ValueError: no such shape or device, or a number out of its range.
    """
    shape = find_shape(shape_name)
    device = find_device(shape, device)
    frames = min(shape.frames, MOST_FRAMES) if frames is None else frames
    if frames < 1 or repeats < 1 or not 0 < retention <= 1:
        raise ValueError(
            f"frames={frames}, repeats={repeats}, retention={retention}: expected at least 1, at least 1 and a "
            "fraction in (0, 1]."
        )
    settings = {
        "shape": shape_name,
        "device": device,
        "dtype": str(faster_dtype(device)).removeprefix("torch.") if dtype == "auto" else dtype,
        "attention": best_attention(device),
        "frames": frames,
        "retention": retention,
        "repeats": repeats,
    }
    name = f"train-{label(shape_name)}"
    journal = begin(out / f".{name}.jsonl", settings)
    calls = {side: partial(in_own_process, measure_step, side=side, **settings) for side in SIDES}
    measure_missing(journal, name, calls, lambda run: f"{spread(run['seconds'])['median']:.2f} s a step", progress)

    runs = {side: journal.done[side] for side in SIDES}
    seconds, extra = ({side: spread(runs[side][field]) for side in SIDES} for field in ("seconds", "extra_mb"))
    whole = {side: runs[side]["resting_mb"] + extra[side]["median"] for side in SIDES}
    document = {
        "command": f"python -m benchmarks training-step --shape {shape_name} --device {device} "
        f"--dtype {settings['dtype']} --frames {frames} --retention {retention:g} --repeats {repeats}",
        "environment": environment(device),
        "settings": {**settings, "gradient_checkpointing": True, "optimizer": "AdamW", "frozen": "the vision tower"},
        "figures": {
            "train_step_speedup": seconds["stock"]["median"] / seconds["ours"]["median"],
            "train_memory_ratio": whole["ours"] / whole["stock"],
        },
        "seconds": seconds,
        "whole_mb": whole,
        "extra_mb": extra,
        "repeats": runs,
    }
    target = finish(journal, out / f"{name}.json", document)
    summarise(out, shape_name)
    return target


def measure_step(
    side: str,
    shape: str,
    device: str,
    dtype: str,
    attention: str | None,
    frames: int,
    retention: float,
    repeats: int,
) -> dict[str, Any]:
    """
    Trains on one question about a grey video: once to warm up, then `repeats` times.

    A step goes from the pixels to the updated weights, with gradient checkpointing and AdamW. The language model is
    trained, and on our side the selector too; the vision tower is frozen.

    Returns:
        `seconds` of every step; `resting_mb`, weights and the optimizer's state; `extra_mb`, for every step the peak
        beyond them; `trained_parameters`; `tokens`, that the language model read; `peak_by`, how memory was measured.
    """
    measured = replace(find_shape(shape), frames=frames)
    model = build(measured, side, device, getattr(torch, dtype), attention).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = _trained_parameters(model)
    # Fused: the default on a GPU holds copies of all gradients for a moment.
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    inputs = {name: value.to(device) for name, value in fill_pixels(video_inputs(measured, side)).items()}
    labels = inputs["input_ids"].clone()
    labels[:, :-ANSWER_TOKENS] = -100
    call = {"retention": retention} if side == "ours" else {}

    def step() -> int:
        output = model(**inputs, labels=labels, use_cache=False, **call)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return output.logits.shape[1]

    torch.manual_seed(0)
    tokens, seconds, extra = step(), [], []
    for _ in range(repeats):
        with extra_memory(device) as peak:
            began = now(device)
            step()
            seconds.append(now(device) - began)
        extra.append(peak.mb)
    state = [value for values in optimizer.state.values() for value in values.values()]
    return {
        "seconds": seconds,
        "resting_mb": sum(tensor.nbytes for tensor in (*model.parameters(), *state)) / 1e6,
        "extra_mb": extra,
        "trained_parameters": sum(parameter.numel() for parameter in trained),
        "tokens": tokens,
        "peak_by": peak.by,
    }


def _trained_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Freezes all but the language model, its head and the selector; what is left to train."""
    model.requires_grad_(False)
    model.get_decoder().requires_grad_(True)
    model.get_output_embeddings().requires_grad_(True)
    selector = getattr(model.model, "qtsplus", None)
    if selector is not None:
        selector.requires_grad_(True)
        selector.freeze_unused()
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
