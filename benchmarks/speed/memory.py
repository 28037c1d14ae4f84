"""Peak memory of a first token on either side, and of relevance beside its readable twin: the command `memory`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.naive import naive_log_relevance

from qtsplus.model.relevance_qtsplus import log_relevance

from ..files import begin, finish
from ..machine import environment
from .cost import faster_dtype
from .peak import extra_memory, in_own_process, measure_missing
from .results import label, spread, summarise
from .shapes import SIDES, best_attention, build, fill_pixels, find_device, find_shape, video_inputs

# The paper's longest videos; a question of 64 tokens and the 3B model's heads.
RELEVANCE = {"tokens": 180_000, "heads": 16, "key_value_heads": 2, "head_dim": 128, "question_tokens": 64}

WAYS: dict[str, Callable[..., torch.Tensor]] = {"ours": log_relevance, "naive": naive_log_relevance}


def run_memory(
    shape_name: str,
    out: Path,
    *,
    device: str | None = None,
    dtype: str = "auto",
    repeats: int = 5,
    retention: float = 0.11,
    relevance: dict[str, int] | None = None,
    progress: bool = True,
) -> Path:
    """
    Measures each side and each way in a process of its own, and writes `memory-LABEL.json`. An interrupted run goes on
    with what is missing.

    Args:
        shape_name: of [`MODEL_SHAPES`].
        device: the shape's own when `None`.
        repeats: of each measurement.
        relevance: sizes in place of [`RELEVANCE`].

    Raises:
        ValueError: no such shape or device, or a number out of its range.
    """
    device = find_device(find_shape(shape_name), device)
    if repeats < 1 or not 0 < retention <= 1:
        raise ValueError(f"repeats={repeats}, retention={retention}: expected at least 1, and a fraction in (0, 1].")
    sizes = relevance or RELEVANCE
    settings = {
        "shape": shape_name,
        "device": device,
        "dtype": str(faster_dtype(device)).removeprefix("torch.") if dtype == "auto" else dtype,
        "attention": best_attention(device),
        "retention": retention,
        "relevance": sizes,
        "repeats": repeats,
    }
    name = f"memory-{label(shape_name)}"
    journal = begin(out / f".{name}.jsonl", settings)
    model = {key: settings[key] for key in ("shape", "device", "dtype", "attention", "retention")}
    measure = partial(partial, in_own_process, repeats=repeats)
    tasks = {side: measure(measure_first_token, side=side, **model) for side in SIDES}
    tasks |= {f"relevance {way}": measure(measure_relevance, way=way, device=device, **sizes) for way in WAYS}
    measure_missing(journal, name, tasks, lambda run: f"{spread(run['extra_mb'])['median']:.0f} MB", progress)

    extra = {task: spread(journal.done[task]["extra_mb"]) for task in tasks}
    whole = {side: journal.done[side]["weights_mb"] + extra[side]["median"] for side in SIDES}
    document = {
        "command": f"python -m benchmarks memory --shape {shape_name} --device {device} --dtype {settings['dtype']} "
        f"--retention {retention:g} --repeats {repeats}",
        "environment": environment(device),
        "settings": settings,
        "figures": {
            "peak_memory_ratio": whole["ours"] / whole["stock"],
            "peak_memory_ratio_without_weights": extra["ours"]["median"] / extra["stock"]["median"],
            "relevance_extra_mb": extra["relevance ours"]["median"],
            "relevance_naive_extra_mb": extra["relevance naive"]["median"],
        },
        "whole_mb": whole,
        "extra_mb": extra,
        "repeats": {task: journal.done[task] for task in tasks},
    }
    target = finish(journal, out / f"{name}.json", document)
    summarise(out, shape_name)
    return target


def measure_first_token(
    side: str, shape: str, device: str, dtype: str, attention: str | None, retention: float, repeats: int
) -> dict[str, Any]:
    """
    Generates one token about random pixels, `repeats` times.

    Returns:
        `weights_mb`; `extra_mb`, for every repeat the peak beyond the loaded model, the inputs included; `peak_by`, how
        it was measured.
    """
    measured = find_shape(shape)
    model = build(measured, side, device, getattr(torch, dtype), attention)
    inputs = video_inputs(measured, side)
    extra = []
    for _ in range(repeats):
        with extra_memory(device) as peak:
            _generate_first_token(model, inputs, side, retention)
        extra.append(peak.mb)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {"weights_mb": weights / 1e6, "extra_mb": extra, "peak_by": peak.by}


def _generate_first_token(model, inputs: dict[str, torch.Tensor], side: str, retention: float) -> None:
    filled = fill_pixels(inputs)
    call: dict[str, Any] = {"max_new_tokens": 1}
    if side == "ours":
        # As a session does: pixels wait on the CPU.
        pixels = filled.pop("pixel_values_videos")
        call.update(video_features=model.encode_videos(pixels, filled["video_grid_thw"]), retention=retention)
    model.generate(**{name: value.to(model.device) for name, value in filled.items()}, **call)


def measure_relevance(
    way: str,
    device: str,
    tokens: int,
    heads: int,
    key_value_heads: int,
    head_dim: int,
    question_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """
    Relevance without gradients, `repeats` times, as the selector calls it ("ours") or by its readable twin ("naive").

    Returns:
        `extra_mb`, for every repeat the peak beyond the inputs and the result; `peak_by`, how it was measured.
    """
    torch.manual_seed(0)
    query_states = torch.randn(heads, question_tokens, head_dim, device=device)
    key_states = torch.randn(key_value_heads, tokens, head_dim, device=device)
    function = WAYS[way]
    extra = []
    with torch.inference_mode():
        function(query_states[:, :2], key_states[:, :64])  # libraries load what they need
        for _ in range(repeats):
            with extra_memory(device) as peak:
                result = function(query_states, key_states)
            extra.append(peak.mb - result.nbytes / 1e6)
            del result
    return {"extra_mb": extra, "peak_by": peak.by}
