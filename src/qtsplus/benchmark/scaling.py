"""`qtsplus bench scaling`: time and memory of selection (relevance, budget and gate) over the visual tokens M."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..configuration_qtsplus import QTSplusConfig
from ..hub.files import hub_configs
from ..results import Journal, environment, spread, steps
from ..selector_qtsplus import QTSplusSelector
from .clock import now
from .peak import extra_memory, in_own_process
from .plots import draw_scaling
from .results import label, summarise
from .shapes import TINY, find_device, find_shape

SIZES = (62_500, 125_000, 250_000, 500_000, 1_000_000)
QUESTION_TOKENS = 64


def run_scaling(
    shape_name: str,
    out: Path,
    *,
    device: str | None = None,
    sizes: Sequence[int] | None = None,
    repeats: int = 5,
    progress: bool = True,
) -> Path:
    """
    Measures each size in a process of its own, fits power laws, and writes `scaling-LABEL.json` with its figure. An
    interrupted run goes on with the sizes that are missing.

    Args:
        shape_name: of [`MODEL_SHAPES`]; a whole model takes its width and bfloat16, others qtsplus-tiny's and float32.
        device: the shape's own when `None`.
        sizes: numbers of visual tokens, at least two; [`SIZES`] when `None`.

    Raises:
        ValueError: no such shape or device, fewer than two sizes, or numbers below 1.
    """
    shape = find_shape(shape_name)
    device = find_device(shape, device)
    sizes = sorted(set(SIZES if sizes is None else sizes))
    if len(sizes) < 2 or sizes[0] < 1 or repeats < 1:
        raise ValueError(f"sizes={sizes}, repeats={repeats}: expected two different sizes or more, all at least 1.")
    variant, dtype = (shape.variant, "bfloat16") if shape.whole else (TINY, "float32")
    settings = {"variant": variant, "dtype": dtype, "device": device, "sizes": sizes, "repeats": repeats}
    name = f"scaling-{label(shape_name)}"
    journal = Journal(out / f".{name}.jsonl", settings)
    with steps(name, len(sizes), progress) as step:
        for size in sizes:
            if str(size) not in journal.done:
                call = {"tokens": size, "variant": variant, "dtype": dtype, "device": device, "repeats": repeats}
                journal.add(str(size), in_own_process(measure_selection, **call))
            seconds, extra = (spread(journal.done[str(size)][field])["median"] for field in ("seconds", "extra_mb"))
            step(f"{size} tokens: {seconds:.3f} s, {extra:.0f} MB beyond the inputs")

    points = [
        {
            "tokens": size,
            "kept": journal.done[str(size)]["kept"],
            "seconds": spread(journal.done[str(size)]["seconds"]),
            "extra_mb": spread(journal.done[str(size)]["extra_mb"]),
            "repeats": journal.done[str(size)],
        }
        for size in sizes
    ]
    fits = {
        "time": fit_power_law(sizes, [point["seconds"]["median"] for point in points]),
        "memory": fit_power_law(sizes, [point["extra_mb"]["median"] for point in points]),
    }
    document = {
        "command": f"qtsplus bench scaling --shape {shape_name} --device {device} --repeats {repeats} "
        + " ".join(f"--size {size}" for size in sizes),
        "environment": environment(device),
        "settings": {**settings, "question_tokens": QUESTION_TOKENS},
        "figures": {
            "growth_exponent_time": fits["time"]["exponent"],
            "growth_exponent_memory": fits["memory"]["exponent"],
        },
        "fits": fits,
        "sizes": points,
    }
    target = journal.finish(out / f"{name}.json", document)
    summarise(out, shape_name)
    draw_scaling(document, target.with_suffix(""))
    return target


def fit_power_law(sizes: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """`value = factor * size ** exponent` by least squares between the logarithms; a value of 0 counts as 1e-6."""
    logs = np.log(np.asarray(sizes, dtype=float)), np.log(np.maximum(np.asarray(values, dtype=float), 1e-6))
    exponent, intercept = np.polyfit(*logs, 1)
    return {"exponent": float(exponent), "factor": float(math.exp(intercept))}


def measure_selection(tokens: int, variant: str, dtype: str, device: str, repeats: int) -> dict[str, Any]:
    """
    Selects among `tokens` random visual tokens, without re-encoding; once to warm up, then `repeats` times.

    Returns:
        `seconds` and `extra_mb` (peak memory beyond the model and its inputs) of every repeat, `kept` tokens, and
        `peak_by`, how the memory was measured.
    """
    text = json.loads((hub_configs() / variant / "config.json").read_text())["text_config"]
    torch.manual_seed(0)
    shape = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
    selector = QTSplusSelector(QTSplusConfig(reencode_layers=0), *shape).to(device, getattr(torch, dtype)).eval()
    visual = torch.randn(tokens, text["hidden_size"], device=device, dtype=getattr(torch, dtype))
    query = torch.randn(QUESTION_TOKENS, text["hidden_size"], device=device, dtype=getattr(torch, dtype))
    positions = torch.zeros(3, tokens, dtype=torch.long, device=device)
    seconds, extra = [], []
    with torch.inference_mode():
        _, warm = selector([visual], [query], [positions])
        kept = int(warm.n[0])
        del warm, _
        for _ in range(repeats):
            with extra_memory(device) as peak:
                began = now(device)
                selector([visual], [query], [positions])
                seconds.append(now(device) - began)
            extra.append(peak.mb)
    return {"seconds": seconds, "extra_mb": extra, "kept": kept, "peak_by": peak.by}
