"""
What follows from the cost model, for the pages.

    python -m benchmarks.speed.cost_figures

writes `benchmarks/results/cost-model.json`: what a question about 600 frames costs, and the memory that it takes.
"""

from pathlib import Path
from typing import Any

from qtsplus import Qwen2_5_VLQTSplusConfig
from qtsplus.common.journals import write_json
from qtsplus.hub.files import hub_configs

from .cost import DATA_SHEETS, least_memory, stage_costs
from .shapes import MODEL_SHAPES, make_config

TARGET = Path("benchmarks/results/cost-model.json")


def question_costs(shape: str, selection: str = "qtsplus") -> dict[str, float]:
    """One question about 180,000 visual tokens, by the data sheet of an H100: seconds, and how many times sooner."""
    config = make_config(MODEL_SHAPES[shape])
    grid = MODEL_SHAPES["3b"].grid
    costs = stage_costs(config, grid, text_tokens=60, question_tokens=40, retention=0.11, selection=selection)
    seconds = DATA_SHEETS[-1].floor
    stock = {stage: seconds(cost) for stage, cost in costs["stock"].items()}
    ours = {stage: seconds(cost) for stage, cost in costs["ours"].items()}
    from_pixels = sum(ours.values()) - ours["per_token"]
    from_features = from_pixels - ours["vision"]
    all_of_stock = stock["vision"] + stock["prefill"]
    return {
        "stock": all_of_stock,
        "ours": from_pixels,
        "ours, vision": ours["vision"],
        "selection over stock's prefill": (from_features - ours["prefill"]) / stock["prefill"],
        "sooner from features": stock["prefill"] / from_features,
        "sooner from pixels": all_of_stock / from_pixels,
        "sooner for a second question": all_of_stock / from_features,
    }


def gigabytes(size: str, frames: int) -> list[float]:
    """Memory for frames of 300 visual tokens: with a tenth of the tokens, and with all."""
    config: Any = Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / f"qtsplus-{size}")
    tokens = 300 * frames
    kept = min(tokens // 10, config.qtsplus_config.n_max)
    return [least_memory(config, tokens, length + 100) / 1e9 for length in (kept, tokens)]


def cost_figures() -> dict:
    """The whole file."""
    questions = {shape: question_costs(shape) for shape in ("3b", "qwen3-vl-8b", "qwen3.5-9b")}
    questions["3b, lm_attention"] = question_costs("3b", "lm_attention")
    memory = {size: {str(frames): gigabytes(size, frames) for frames in (64, 600, 3600)} for size in ("3b", "7b")}
    return {"command": "python -m benchmarks.speed.cost_figures", "questions": questions, "gigabytes": memory}


if __name__ == "__main__":
    write_json(TARGET, cost_figures())
