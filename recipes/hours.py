"""Hours of the two stages of recipes/qtsplus-3b.yaml on one H100, by the cost model: nothing has run on a GPU.

    python -m recipes.hours benchmarks/results/hours-3b.json

Counted is the arithmetic of 10,000 questions, at 40% of the data sheet's speed. Reading videos is not counted. The
gigabytes are those of `--dry-run`, with a step's.
"""

import json
import math
import sys
from pathlib import Path

from benchmarks.speed.cost import DATA_SHEETS, stage_costs
from qtsplus.hub.files import hub_configs
from qtsplus.hub.loading import load_config
from qtsplus.training.plan import make_plan
from qtsplus.training.recipe import load_stages

QUESTIONS = 10_000
USED = 0.4  # of the device's speed
RETENTION = 0.12  # the mean of what is drawn from 0.05 to 0.3
TEXT_TOKENS = 100
# Grids of (time, height, width) in visual tokens.
SETS = {
    "NExT-QA": (20, 16, 24),  # 40 s at one frame a second
    "ShareGPTVideo": (12, 9, 15),  # 24 frames
}


def main(out: Path) -> None:
    config = load_config(str(hub_configs() / "qtsplus-3b"))
    speed = DATA_SHEETS[1].flops * USED
    hours = {}
    for name, grid in SETS.items():
        costs = stage_costs(config, grid, TEXT_TOKENS, 20, RETENTION)
        vision = costs["stock"]["vision"].flops
        teacher = costs["stock"]["prefill"].flops
        kept = costs["ours"]["prefill"].flops
        selector = costs["ours"]["relevance"].flops + costs["ours"]["re-encode"].flops
        # Forward, forward again with gradient checkpointing, and back through frozen weights; the selector's learn.
        step = 3 * kept + 4 * selector
        # In half of the steps of the second stage the budget's losses are measured in two more passes.
        flops = {"relevance": vision + teacher + step, "answers": vision + step + kept}
        of_stages = {stage: round(QUESTIONS * count / speed / 3600, 1) for stage, count in flops.items()}
        hours[name] = {"visual tokens": math.prod(grid), **of_stages}
    recipe = Path(__file__).with_name("qtsplus-3b.yaml")
    heads = "training.relevance_heads=[[0, 0]]"
    memory = {}
    for stage in load_stages(recipe, ["training.use_cpu=true", "model.weights=null", heads]):
        stage.model.weights = None
        _, line, _ = make_plan(stage).lines  # such as: 9.73 GB of memory for ... about 6.18 GB
        numbers = line.split()
        memory[stage.stage] = round(float(numbers[0]) + float(numbers[-2]), 1)
    document = {
        "command": f"python -m recipes.hours {out}",
        "settings": {"questions": QUESTIONS, "device": DATA_SHEETS[1].name, "share of its speed": USED},
        "hours": hours,
        "gigabytes": memory,
    }
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
