"""What each part of a model is worth, on the same questions at the same number of tokens: the command `ablation`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtsplus.common.journals import write_json

from ..intervals import paired_gain, percent, percent_interval, share_interval
from ..machine import environment
from ..tables import markdown_table
from .models import Checkpoint, Models
from .plan import Plan, make_plan
from .policies import ASKED, AXES, DEFAULT, TITLES, Policy, changes_something
from .questions import QuestionSet
from .statistics import Outcomes, means_of
from .work import Work

FULL = "the model as it is"


@dataclass(frozen=True)
class Budget:
    """
    How many tokens every row of a part of the table keeps.

    Args:
        retention: fraction of the visual tokens; `None` is the model's own.
        max_visual_tokens: a cap on it.
    """

    retention: float | None = None
    max_visual_tokens: int | None = None

    @property
    def title(self) -> str:
        share = "own budget" if self.retention is None else f"{100 * self.retention:.3g}% of the tokens"
        return share if self.max_visual_tokens is None else f"{share}, at most {self.max_visual_tokens:,}"


def ablate_checkpoint(
    model: Any,
    processor: Any,
    test: Path,
    out: Path,
    *,
    name: str,
    budgets: Sequence[Budget],
    work: Path,
    batch_size: int = 16,
    command: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """
    What needs no training, of a trained model: `ablation-NAME.json` and `.md`. What is in `work` is not asked again.

    Args:
        model, processor: as `qtsplus.asking.session.load` gives them.
        test: records with videos, whose features are held in memory. Recalls are given for TinyWorld's.
        out: folder of the results.
        name: of the results.
        budgets: numbers of tokens; at each, all is asked.
        work: where answers are kept.
        batch_size: questions at a time.
        command: what was typed, for the record.
        say: hears of each thing that is done.

    Raises:
        ValueError: an unfit test set, or a video that cannot be read.
    """
    questions = QuestionSet.read_any(test)
    asking = Work(Checkpoint(model, processor, work, say), questions, batch_size)
    results = asking.ask(0, _asked(model.config.qtsplus_config, budgets), 0)
    return _write(results, questions, out, name, command, environment(str(model.device)))


def ablate_recipe(
    base: Path,
    test: Path,
    out: Path,
    *,
    recipe: Path,
    overrides: Sequence[str] = (),
    variants: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    name: str,
    budgets: Sequence[Budget],
    work: Path,
    batch_size: int = 64,
    command: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """
    As [`ablate_checkpoint`], of the model that a recipe trains from a base, and beside it variants of the recipe, which
    are trained if `work` does not hold them. The folder may be that of `python -m benchmarks learned`.

    Args:
        base: a trained model that reads all tokens.
        recipe, overrides: as for [`run_learned`].
        variants: names in [`VARIANTS`]; all if empty.
        seeds: of training.

    Raises:
        ValueError: as [`run_learned`]; a budget of the model's own where the recipe teaches none.
    """
    plan = make_plan(recipe, overrides, base, variants)
    if not plan.own_budget and any(budget.retention is None for budget in budgets):
        raise ValueError(
            f"{recipe} teaches no budget of the model's own; expected retentions instead of caps on its budget."
        )
    questions = QuestionSet.read_any(test)
    models = Models(base, recipe, overrides, plan, seeds, work, say)
    asking = Work(models, questions, batch_size)
    results: list[Outcomes] = []
    for seed in seeds:
        results += asking.ask(seed, _asked(_selector_of(models, seed), budgets), seed)
        for variant in plan.variants:
            if variant != DEFAULT:
                results += asking.ask(seed, [_at(budget, variant, variant) for budget in budgets], seed)
    return _write(results, questions, out, name, command, environment(str(models.base_model.device)), plan, seeds)


def _selector_of(models: Models, seed: int) -> Any:
    return models.load(seed, DEFAULT).config.qtsplus_config


def _asked(selector: Any, budgets: Sequence[Budget]) -> list[Policy]:
    """The model as it is and all that is changed of it, at every budget."""
    chosen = {name: changes for name, changes in ASKED.items() if changes_something(changes, selector)}
    return [
        policy
        for budget in budgets
        for policy in (
            _at(budget, DEFAULT, DEFAULT),
            *(_at(budget, name, DEFAULT, **changes) for name, changes in chosen.items()),
        )
    ]


def _at(budget: Budget, name: str, model: str, **changes: Any) -> Policy:
    return Policy(name, model, budget.retention, max_visual_tokens=budget.max_visual_tokens, **changes)


# --------------------------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------------------------


def _write(
    results: list[Outcomes],
    questions: QuestionSet,
    out: Path,
    name: str,
    command: str,
    facts: dict[str, Any],
    plan: Plan | None = None,
    seeds: Sequence[int] = (),
) -> Path:
    document = {
        "command": command,
        "environment": facts,
        "questions": len(questions.records),
        "videos": len(questions.videos),
        "test_sha256": questions.digest,
        "seeds": list(seeds),
        "variants": {} if plan is None else {name: list(changes) for name, changes in plan.variants.items()},
        "rows": ablation_rows(results, questions),
    }
    target = out / f"ablation-{name}.json"
    write_json(target, document)
    target.with_suffix(".md").write_text("\n".join(_page(document)) + "\n", encoding="utf-8")
    return target


def ablation_rows(results: list[Outcomes], questions: QuestionSet) -> list[dict[str, Any]]:
    """
    A row for every policy and budget. `difference` is the accuracy minus that of the model as it is, at the same budget
    on the same questions, with its paired test `p`; `recall_difference` is that of the needle tokens kept. Both are
    over videos, and several seeds count as one.
    """
    correct, kept, recall = (_by_policy(results, name) for name in ("correct", "kept", "token_recall"))
    videos = np.array([str(record.video) for record in questions.records])
    kinds = np.array([record.kind for record in questions.records])
    rows = []
    for policy in sorted(correct, key=_place):
        value = correct[policy]
        asked = ~np.isnan(value)
        if not asked.any():
            continue
        found = recall.get(policy)
        row = {
            "axis": _axis(policy.name),
            "policy": policy.name,
            "trained": policy.model != DEFAULT,
            "retention": policy.retention,
            "max_visual_tokens": policy.max_visual_tokens,
            "questions": int(asked.sum()),
            "accuracy": float(value[asked].mean()),
            "interval": share_interval(value[asked], videos[asked]),
            "kept": float(np.nanmean(kept[policy])),
            "token_recall": None if found is None or np.isnan(found).all() else float(np.nanmean(found)),
            "kinds": {str(kind): float(value[asked & (kinds == kind)].mean()) for kind in np.unique(kinds[asked])},
        }
        if policy.name != DEFAULT:
            full = _at(Budget(policy.retention, policy.max_visual_tokens), DEFAULT, DEFAULT)
            row["difference"] = _difference(correct[full], value, videos)
            if row["token_recall"] is not None:
                row["recall_difference"] = _difference(recall[full], recall[policy], videos)
        rows.append(row)
    return rows


def _by_policy(results: list[Outcomes], name: str) -> dict[Policy, np.ndarray]:
    return means_of(results, name, key=lambda outcomes: outcomes["policy"])


def _difference(full: np.ndarray, value: np.ndarray, videos: np.ndarray) -> dict[str, Any]:
    """On the questions that have both; `gained` and `lost` count those that differ."""
    difference = value - full
    known = ~np.isnan(difference)
    difference, videos = difference[known], videos[known]
    return {
        "mean": float(difference.mean()),
        **paired_gain(difference, videos),
        "gained": int((difference > 0).sum()),
        "lost": int((difference < 0).sum()),
    }


def _axis(name: str) -> str:
    return FULL if name == DEFAULT else next(axis for axis, names in AXES.items() if name in names)


def _place(policy: Policy) -> tuple:
    """Where a policy stands in the table: by budget, and then by axis."""
    names = [DEFAULT, *(name for names in AXES.values() for name in names)]
    caps = policy.max_visual_tokens is None, policy.max_visual_tokens or 0
    return policy.retention is not None, policy.retention or 0, caps, names.index(policy.name)


def _page(document: dict[str, Any]) -> list[str]:
    seeds = f" Training seeds {document['seeds']}." if document["seeds"] else ""
    lines = [
        f"{document['questions']} questions about {document['videos']} videos.{seeds} The difference is to the model "
        "as it is, with as many tokens, on the same questions; p is of a sign-flip test over videos, without a "
        "correction for the number of rows. Intervals: 95%, over videos.",
        "",
        f"`{document['command']}`",
    ]
    parts: dict[Budget, list[list[str]]] = {}
    for row in document["rows"]:
        parts.setdefault(Budget(row["retention"], row["max_visual_tokens"]), []).append(_cells(row))
    compared = ("difference, points", "p")
    columns = ["", "axis", "", "tokens kept", "needle tokens kept", *compared, "right answers", *compared]
    return [
        *lines,
        "",
        *markdown_table(columns, [[budget.title, *cells] for budget, rows in parts.items() for cells in rows], texts=3),
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    title = FULL if row["policy"] == DEFAULT else TITLES[row["policy"]]
    recall = row["token_recall"]
    return [
        "" if row["policy"] == DEFAULT else row["axis"],
        f"{title}; trained" if row["trained"] else title,
        f"{row['kept']:.1f}",
        "" if recall is None else percent(recall),
        *_compared(row.get("recall_difference")),
        percent_interval(row["accuracy"], row["interval"]),
        *_compared(row.get("difference")),
    ]


def _compared(difference: dict[str, float] | None) -> list[str]:
    return ["", ""] if difference is None else [_points(difference), f"{difference['p']:.2g}"]


def _points(difference: dict[str, float]) -> str:
    mean = f"{100 * difference['mean']:+.1f}"
    if "low" not in difference:
        return mean
    return f"{mean} ({100 * difference['low']:+.1f} to {100 * difference['high']:+.1f})"


__all__ = ["Budget", "ablate_checkpoint", "ablate_recipe", "ablation_rows"]
