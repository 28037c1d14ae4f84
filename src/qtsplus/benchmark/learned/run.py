"""`qtsplus bench learned`: from a trained base and a recipe to the tables."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...training.recipe import load_recipe
from ..results import environment, write_json
from . import policies
from .policies import BASE, FRESH, policies_of
from .questions import QuestionSet
from .report import write_report
from .statistics import adaptive_budgets, differences, table_rows
from .work import Work


def run_learned(
    base: Path,
    test: Path,
    out: Path,
    *,
    recipe: Path = Path("recipes/qtsplus-tiny.yaml"),
    overrides: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    work: Path = Path("runs/learned"),
    batch_size: int = 64,
    command: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """
    Runs the learned benchmark: `learned.json` (rows), `learned-details.json`, `learned.md` and plots. Trains and asks
    only what is not in `work` yet; of an interrupted run everything that was finished stays.

    Args:
        base: a trained model that reads all tokens.
        test: questions of `qtsplus data tinyworld --split test`.
        out: folder of the results.
        recipe: by which every variant is trained from the base; `overrides` as for [`load_recipe`].
        seeds: of training; a seed draws the selector and the order of the data.
        work: where trained models and answers are kept. Processes with different seeds may share it.
        batch_size: questions at a time.
        command: what was typed, for the record.
        say: hears of each thing that is done.

    Raises:
        ValueError: a recipe that trains the vision tower, an unfit test set, a `work` folder of another benchmark.
    """
    if not load_recipe(recipe, overrides).training.freeze_vision_model:
        raise ValueError(f"{recipe} trains the vision tower: the benchmark encodes the videos once for all models.")
    bench = Work(base, recipe, overrides, QuestionSet.read(test), work, batch_size, say)
    for layout, reason in bench.left_out.items():
        say(f"{layout} is left out: {reason}")
    results = bench.ask(None, policies_of(BASE), seeds[0])
    agreement: list[dict[str, Any]] = []
    dual: list[dict[str, float]] = []
    budgets: list[tuple[str, str, float]] = []
    for seed in seeds:
        results += bench.ask(seed, policies_of(FRESH), seed)
        for name in policies.VARIANTS:
            results += bench.ask(seed, policies_of(name), seed)
            agreement.append({"policy": name, "seed": seed, **bench.agreement(seed, name)})
        dual += bench.landed(seed)
        budgets += bench.budgets(seed)

    kinds = [record.kind for record in bench.test.records]
    rows = table_rows(results, kinds)
    details = {
        "command": command,
        "seeds": list(seeds),
        "environment": environment(str(bench.base_model.device)),
        "recipe": recipe.read_text(encoding="utf-8"),
        "overrides": list(overrides),
        "variants": {name: list(changes) for name, changes in policies.VARIANTS.items()},
        "questions": len(kinds),
        "videos": len(bench.test.videos),
        "test_sha256": bench.test.digest,
        "left_out": bench.left_out,
        "differences": differences(results, bench.test.records),
        "agreement": agreement,
        "adaptive": adaptive_budgets(budgets, seeds),
        "dual": dual,
    }
    write_json(out / "learned.json", rows)
    write_json(out / "learned-details.json", details)
    write_report(rows, details, out)
    return out / "learned.json"
