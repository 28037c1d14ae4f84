"""Time and memory of selection over the visual tokens M, by the selector or by attention: the command `scaling`."""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from qtsplus.hub.files import hub_configs
from qtsplus.model import mixin_qtsplus
from qtsplus.model.configuration_qtsplus import QTSplusConfig
from qtsplus.model.selector_qtsplus import QTSplusSelector

from ..files import begin, finish
from ..machine import environment
from ..prompts import compress
from .clock import busy, now
from .peak import extra_memory, in_own_process, measure_missing
from .plots import draw_scaling
from .results import label, spread, summarise
from .shapes import QUESTION, TINY, build, find_device, find_shape, make_processor, prompt_text

SIZES = (62_500, 125_000, 250_000, 500_000, 1_000_000)
QUESTION_TOKENS = 64
SELECTIONS = ("qtsplus", "lm_attention")
TINY_GROUP = 1024  # visual tokens that the tiny model reads together; a whole model takes its configuration's


def run_scaling(
    shape_name: str,
    out: Path,
    *,
    device: str | None = None,
    selection: str = "qtsplus",
    sizes: Sequence[int] | None = None,
    repeats: int = 5,
    progress: bool = True,
) -> Path:
    """
    Measures each size in a process of its own, fits power laws, and writes `scaling-LABEL.json` with its figure, or
    `scaling-lm-attention-LABEL.json`. An interrupted run goes on with the sizes that are missing.

    Args:
        shape_name: of [`MODEL_SHAPES`]; a whole model takes its width and bfloat16, others qtsplus-tiny's and float32.
        device: the shape's own when `None`.
        selection: `"qtsplus"` measures the whole selector (relevance, budget and gate), `"lm_attention"` the scores of
            the language model's attention.
        sizes: numbers of visual tokens, at least two; [`SIZES`] when `None`.

    Raises:
        ValueError: no such shape, device or selection, fewer than two sizes, or numbers below 1.
    """
    shape = find_shape(shape_name)
    if selection not in SELECTIONS:
        raise ValueError(f"selection={selection!r}: expected one of {SELECTIONS}.")
    by_selector = selection == "qtsplus"
    device = find_device(shape, device)
    sizes = sorted(set(SIZES if sizes is None else sizes))
    if len(sizes) < 2 or sizes[0] < 1 or repeats < 1:
        raise ValueError(f"sizes={sizes}, repeats={repeats}: expected two different sizes or more, all at least 1.")
    variant, dtype = (shape.variant, "bfloat16") if shape.whole else (TINY, "float32")
    settings = {"variant": variant, "dtype": dtype, "device": device, "sizes": sizes, "repeats": repeats}
    name = f"scaling-{label(shape_name)}"
    if not by_selector:
        name = f"scaling-lm-attention-{label(shape_name)}"
        settings |= {"selection": selection, "group": None if shape.whole else TINY_GROUP}
    journal = begin(out / f".{name}.jsonl", settings)
    measure = partial(in_own_process, measure_selection, variant=variant)
    if not by_selector:
        shaped = {"shape_name": shape_name if shape.whole else "tiny", "group": settings["group"]}
        measure = partial(in_own_process, measure_lm_attention, **shaped)
    call = {"dtype": dtype, "device": device, "repeats": repeats}
    calls = {str(size): partial(measure, tokens=size, **call) for size in sizes}

    def told(run: dict[str, Any]) -> str:
        seconds, extra = (spread(run[field])["median"] for field in ("seconds", "extra_mb"))
        return f"{seconds:.3f} s, {extra:.0f} MB beyond the inputs"

    measure_missing(journal, name, calls, told, progress)
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
        "command": f"python -m benchmarks scaling --shape {shape_name} --device {device} "
        + ("" if by_selector else f"--selection {selection} ")
        + f"--repeats {repeats} "
        + " ".join(f"--size {size}" for size in sizes),
        "environment": environment(device),
        "settings": {**settings, **({"question_tokens": QUESTION_TOKENS} if by_selector else {})},
        "figures": {
            "growth_exponent_time": fits["time"]["exponent"],
            "growth_exponent_memory": fits["memory"]["exponent"],
        },
        "fits": fits,
        "sizes": points,
    }
    target = finish(journal, out / f"{name}.json", document)
    if by_selector:
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
    paper = QTSplusConfig(reencode_layers=0, reduction="max", query_states="embeddings")
    selector = QTSplusSelector(paper, *shape).to(device, getattr(torch, dtype)).eval()
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


def measure_lm_attention(
    tokens: int, shape_name: str, dtype: str, device: str, repeats: int, group: int | None
) -> dict[str, Any]:
    """
    Has the language model's attention score `tokens` random visual tokens, `repeats` times, once it has read a few.

    Args:
        group: visual tokens read together; the configuration's if `None`.

    Returns:
        as [`measure_selection`], but on a CPU the processor's seconds. The layout of the inputs counts as theirs.
    """
    shape = find_shape(shape_name)
    model, processor = build(shape, "ours", device, getattr(torch, dtype)), make_processor(shape)
    selector = model.config.qtsplus_config
    selector.attention_layer = selector.attention_heads = None  # as in a model that was not calibrated
    selector.attention_group = selector.attention_group if group is None else group
    seconds, extra, by, base = [], [], [], model.model
    attend = mixin_qtsplus.log_attention

    def measured(*arguments: Any) -> torch.Tensor:
        with extra_memory(device) as peak:
            began = busy(device)
            relevance = attend(*arguments)
            seconds.append(busy(device) - began)
        extra.append(peak.mb)
        by.append(peak.by)
        return relevance

    merge, call = processor.video_processor.merge_size, {"selection": "lm_attention", "retention": 1 / tokens}
    with patch.object(mixin_qtsplus, "log_attention", measured), torch.inference_mode():
        for size, times in ((min(tokens, 2048), 1), (tokens, repeats)):
            frame = math.gcd(size, 500)
            grid = torch.tensor([[size // frame, merge, frame * merge]])
            inputs = processor(
                text=[prompt_text(processor, QUESTION)],
                video_grid_thw=grid,
                second_per_grid_ts=[1.0],
                return_tensors="pt",
            )
            inputs.pop("mm_token_type_ids", None)
            inputs["second_per_grid_ts"] = [1.0]
            features = torch.randn(size, base.token_width, device=device, dtype=getattr(torch, dtype))
            for _ in range(times):
                chosen = compress(base, **inputs.to(device), video_features=[features], **call)
    return {"seconds": seconds[1:], "extra_mb": extra[1:], "kept": int(chosen.qtsplus.n[0]), "peak_by": by[0]}
