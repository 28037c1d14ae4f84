"""From trained bases and a recipe to the tables: the command `learned`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qtsplus.common.journals import write_json

from ..machine import environment
from .models import Models
from .plan import Plan, make_plan
from .policies import BASE, DEFAULT, FRESH, policies_of
from .questions import QuestionSet
from .report import write_report
from .statistics import adaptive_budgets, differences, question_driven, table_rows
from .work import Work


def run_learned(
    bases: Sequence[Path],
    test: Path,
    out: Path,
    *,
    recipe: Path = Path("benchmarks/recipes/crowd.yaml"),
    overrides: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    variants: Sequence[str] = (),
    work: Path = Path("runs/learned"),
    batch_size: int = 64,
    command: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """
    Runs the learned benchmark: `learned.json` (rows), `learned-details.json`, `learned.md` and plots. Trains and asks
    only what is not in `work` yet; of an interrupted run everything that was finished stays.

    Args:
        bases: trained models that read all tokens: one for all seeds, or one for each.
        test: questions of `python -m benchmarks tinyworld --split test`.
        out: folder of the results.
        recipe: by which every variant is trained from its base; `overrides` as for [`load_stages`].
        seeds: of training; a seed draws the selector and the order of the data.
        variants: what to train beside the recipe as it is, see [`VARIANTS`]; all if empty.
        work: where trained models and answers are kept. Processes with different seeds may share it, and runs with
            different questions.
        batch_size: questions at a time.
        command: what was typed, for the record.
        say: hears of each thing that is done.

    Raises:
        ValueError: a recipe that trains the vision tower, an unfit test set, an unknown variant, another number of
            bases than of seeds, a `work` folder of another base or recipe.
    """
    if len(bases) not in (1, len(seeds)):
        raise ValueError(f"{len(bases)} bases for {len(seeds)} seeds: expected one base, or one for each seed.")
    plans = [make_plan(recipe, overrides, base, variants) for base in bases]
    if any(plan != plans[0] for plan in plans):
        raise ValueError("The bases have different selectors: expected bases that one recipe made.")
    questions = QuestionSet.read(test)
    seeds_of_base = [list(seeds)] if len(bases) == 1 else [[seed] for seed in seeds]
    gathered = _Gathered()
    for base, its_seeds in zip(bases, seeds_of_base, strict=True):
        models = Models(base, recipe, overrides, plans[0], its_seeds, work, say)
        _ask(Work(models, questions, batch_size), plans[0], its_seeds, len(bases) == 1, gathered)

    kinds = [record.kind for record in questions.records]
    rows = table_rows(gathered.results, kinds, questions.crowd)
    details = {
        "command": command,
        "seeds": list(seeds),
        "bases": len({base.resolve() for base in bases}),
        "environment": gathered.environment,
        "recipe": recipe.read_text(encoding="utf-8"),
        "overrides": list(overrides),
        "variants": {name: list(changes) for name, changes in plans[0].variants.items()},
        "selector": plans[0].selector,
        "crowd": questions.crowd,
        "questions": len(kinds),
        "videos": len(questions.videos),
        "test_sha256": questions.digest,
        "left_out": gathered.left_out,
        "question_driven": question_driven(gathered.results, questions.records, questions.crowd),
        "differences": differences(gathered.results, questions.records, questions.crowd),
        "agreement": gathered.agreement,
        "adaptive": adaptive_budgets(gathered.budgets, seeds) if plans[0].own_budget else None,
        "dual": gathered.dual,
    }
    write_json(out / "learned.json", rows)
    write_json(out / "learned-details.json", details)
    write_report(rows, details, out)
    return out / "learned.json"


class _Gathered:
    """What all bases and seeds answered."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []
        self.agreement: list[dict[str, Any]] = []
        self.dual: list[dict[str, float]] = []
        self.budgets: list[tuple[str, str, float]] = []
        self.left_out: dict[str, str] = {}
        self.environment: dict[str, Any] = {}


def _ask(work: Work, plan: Plan, seeds: Sequence[int], is_only: bool, gathered: _Gathered) -> None:
    """Everything of one base, which a seed has to itself unless it is the only one."""
    for layout, reason in work.left_out.items():
        if layout not in gathered.left_out:
            work.say(f"{layout} is left out: {reason}")
    gathered.left_out |= work.left_out
    gathered.environment = environment(str(work.base_model.device))

    def policies(model: str) -> list:
        return policies_of(model, plan.own_budget, plan.adapted)

    gathered.results += work.ask(None if is_only else seeds[0], policies(BASE), seeds[0])
    for seed in seeds:
        gathered.results += work.ask(seed, policies(FRESH), seed)
        for name in plan.variants:
            answers = work.ask(seed, policies(name), seed)
            gathered.results += answers
            gathered.agreement.append({"policy": name, "seed": seed, **work.agreement(seed, name)})
            if name == DEFAULT and plan.own_budget:
                own = next(found for found in answers if found["policy"].retention is None)
                gathered.dual += work.landed(seed, own)
        gathered.budgets += work.budgets(seed) if plan.own_budget else []
