"""What each method takes of the prefill that it saves, measured and by the cost model: the command `methods`."""

import math
from pathlib import Path
from typing import Any

import torch

from qtsplus.model.budget_qtsplus import kept_count
from qtsplus.model.lm_attention_qtsplus import attention_layer
from qtsplus.model.methods_qtsplus import KEPT_PER_NEW, LARGEST_POOL, METHODS, POOL, ROUND

from ..files import write_result
from ..machine import environment
from ..tables import markdown_table
from .clock import busy
from .cost import DATA_SHEETS, Cost, stage_costs
from .peak import in_own_process
from .scaling import QUESTION_TOKENS, measure_lm_attention
from .shapes import build, find_shape, make_config

TOKENS = 20_000
RETENTION = 0.1
PAPER_TOKENS = 180_000
TEXT_TOKENS = 100
PLACES = 500  # tokens of a frame
# Bytes of each cosine in float32: the product is written, divided by two lengths, masked, and read for the largest.
COSINE = 32


def run_methods(out: Path, *, tokens: int = TOKENS, shape_name: str = "layers", whole: str = "3b") -> Path:
    """
    Measures each method among `tokens` random visual tokens on the CPU, in the processor's seconds, beside some layers
    of the language model over them; the prefill and `lm_attention` are scaled from these to all layers. Writes
    `methods-cpu.json` and `methods-cpu.md`.

    Args:
        shape_name: of [`MODEL_SHAPES`], with the widths of `whole` and two layers.
    """
    measured = in_own_process(measure_methods, tokens=tokens, shape_name=shape_name, whole=whole)
    config = make_config(find_shape(whole))
    costs = method_costs(config, PAPER_TOKENS)
    shares = {name: {"measured": seconds / measured["saved"]} for name, seconds in measured["seconds"].items()}
    for device in DATA_SHEETS:
        saved = device.floor(costs["stock prefill"]) - device.floor(costs["prefill"])
        for name, share in shares.items():
            share[device.name] = device.floor(costs[name]) / saved
    document = {
        "command": "python -m benchmarks methods",
        "environment": environment("cpu"),
        "settings": {
            "shape": shape_name,
            "tokens": tokens,
            "retention": RETENTION,
            "dtype": "bfloat16",
            "paper_tokens": PAPER_TOKENS,
            "attention_layer": attention_layer(config.text_config),
        },
        "measured": measured,
        "shares": shares,
    }
    return write_result(out / "methods-cpu.json", document, page(document))


def page(document: dict[str, Any]) -> str:
    """Everything as Markdown."""
    measured = document["measured"]
    tokens = document["settings"]["tokens"]
    devices = [device.name for device in DATA_SHEETS]
    rows = []
    for name, share in document["shares"].items():
        cells = [f"{share[device]:.2%}" for device in devices]
        rows.append([name, f"{measured['seconds'][name]:.2f}", f"{share['measured']:.2%}", *cells])
    lines = [
        "# What each method takes of the prefill that it saves",
        "",
        f"Measured: {tokens:,} tokens, {RETENTION:.0%} kept, seconds of one core. Stock's prefill of a 3B takes "
        f"{measured['prefill']:.0f} s, scaled from two layers; `lm_attention` is scaled from one. By the cost model: "
        f"{PAPER_TOKENS:,} tokens at full speed. Made by `python -m benchmarks methods`.",
        "",
        *markdown_table(["method", "s", "measured", *devices], rows),
    ]
    return "\n".join(lines) + "\n"


def measure_methods(tokens: int, shape_name: str, whole: str) -> dict[str, Any]:
    """The processor's `seconds` of each method and of stock's `prefill`, and what of the prefill is `saved`."""
    torch.set_num_threads(1)
    shape = find_shape(shape_name)
    text = make_config(find_shape(whole)).text_config
    model = build(shape, "ours", "cpu", torch.bfloat16).model
    width = text.hidden_size
    kept = kept_count(RETENTION, tokens, model.config.qtsplus_config.n_max)
    with torch.inference_mode():

        def prefill(length: int) -> float:
            embeds = torch.randn(1, length + TEXT_TOKENS, width, dtype=torch.bfloat16)
            began = busy("cpu")
            model.language_model(inputs_embeds=embeds, use_cache=False)
            return (busy("cpu") - began) * text.num_hidden_layers / len(model.language_model.layers)

        prefill(100)  # to warm up
        whole_prefill = prefill(tokens)
        saved = whole_prefill - prefill(kept)

        visual = torch.randn(tokens, width, dtype=torch.bfloat16)
        query = torch.randn(QUESTION_TOKENS, width, dtype=torch.bfloat16)
        positions = torch.zeros(3, tokens, dtype=torch.long)
        places = math.gcd(tokens, PLACES)
        grids = [[(tokens // places, 1, places)]]
        seconds = {}
        for name in METHODS:
            if name in ("all", "lm_attention"):
                continue
            began = busy("cpu")
            model.qtsplus([visual], [query], [positions], grids, retention=RETENTION, selection=name, reencode=False)
            seconds[name] = busy("cpu") - began
    attention = measure_lm_attention(tokens, shape_name, "bfloat16", "cpu", 1, None)
    seconds["lm_attention"] = attention["seconds"][0] * attention_layer(text)
    return {
        "seconds": seconds,
        "prefill": whole_prefill,
        "saved": saved,
    }


def method_costs(config: Any, tokens: int) -> dict[str, Cost]:
    """The costs of each method and of the prefill with and without it; of a few passes over numbers, only the bytes."""
    width = config.text_config.hidden_size
    grid = (tokens // PLACES, 1, PLACES)
    kept = kept_count(RETENTION, tokens, config.qtsplus_config.n_max)
    call = (config, grid, TEXT_TOKENS, QUESTION_TOKENS, RETENTION)
    by_selector = stage_costs(*call)
    by_attention = stage_costs(*call, selection="lm_attention")
    greedy = _greedy_cost(tokens, kept, width)
    return {
        "stock prefill": by_selector["stock"]["prefill"],
        "prefill": by_selector["ours"]["prefill"],
        "qtsplus": by_selector["ours"]["relevance"],
        "lm_attention": by_attention["ours"]["relevance"],
        "uniform": Cost(0.0, 8 * kept),
        "random": Cost(0.0, 8 * tokens),
        "temporal_redundancy": Cost(0.0, 4 * tokens * width),
        "diversity": greedy,
        "coverage": greedy,
    }


def _greedy_cost(tokens: int, kept: int, width: int) -> Cost:
    """Of `add_farthest` on a GPU: each round's pool with itself, and its tokens with all, in bfloat16."""
    pairs = 0
    rounds = 0
    done = 0
    while done < kept:
        count = min(max(1, done // KEPT_PER_NEW), ROUND, kept - done)
        pool = min(tokens - done, LARGEST_POOL, POOL + 16 * count)
        pairs += count * tokens + pool**2
        rounds += 1
        done += count
    return Cost(2.0 * pairs * width, 2.0 * rounds * tokens * width + COSINE * pairs)
