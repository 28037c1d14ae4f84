"""What the answers come to: accuracies, recalls, the default's gains, budgets; each with its 95% interval."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qtsplus.data.records import VideoRecord

from ..intervals import paired_gain
from ..world.tinyworld import POINT_KINDS, QUESTION_KINDS, WIDE_KINDS
from .policies import BASE, DEFAULT, SALIENCE, Policy, name_of
from .questions import DESCRIPTION

# The outcomes of one policy with one seed: "policy", "seed", and a value for every question by name, `None` where a
# policy has none.
Outcomes = dict[str, Any]
Key = tuple[str, float | None]

# What rows say beside the accuracy, and the outcome that it is the mean of.
_MEANS = {"needle_recall": "recall", "token_recall": "token_recall", "distractor_recall": "distractors"}


def groups_of(kinds: Sequence[str], crowd: bool) -> dict[str, np.ndarray]:
    """Kinds that tables put together: by name a mask `[questions]` of each that has any."""
    point = ("attribute", "existence", "direction")
    groups = {
        "all": QUESTION_KINDS,
        "point": point,
        "two_word": point[:2] if crowd else (),  # a name is one word in the sparse world
        "relation": ("relation",),
        "when_and_order": ("when", "order"),
    }
    masks = {name: np.isin(kinds, group) for name, group in groups.items()}
    return {name: mask for name, mask in masks.items() if mask.any()}


# --------------------------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------------------------


def table_rows(results: list[Outcomes], kinds: list[str], crowd: bool) -> list[dict[str, Any]]:
    """A row for every policy, retention and seed, and one (seed `null`) for all seeds together."""
    together: dict[Key, list[Outcomes]] = {}
    for outcomes in results:
        together.setdefault(_key(outcomes), []).append(outcomes)
    by_kind = {kind: np.equal(kinds, kind) for kind in QUESTION_KINDS if kind in kinds}
    masks = {"groups": groups_of(kinds, crowd), "kinds": by_kind}
    rows = []
    for (name, retention), group in together.items():
        model = group[0]["policy"].model
        parts = [(None, group), *((outcomes["seed"], [outcomes]) for outcomes in group if outcomes["seed"] is not None)]
        for seed, chosen in parts:
            row = {"policy": name, "model": model, "retention": retention, "seed": seed, "crowd": crowd}
            rows.append({**row, **_row(chosen, masks)})
    return rows


def _key(outcomes: Outcomes) -> Key:
    return outcomes["policy"].name, outcomes["policy"].retention


def _row(chosen: list[Outcomes], masks: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    def values(name: str, mask: np.ndarray | None = None) -> list:
        found = [np.array(outcomes[name], dtype=object) for outcomes in chosen if name in outcomes]
        return [value for part in found for value in (part if mask is None else part[mask]) if value is not None]

    def share(mask: np.ndarray | None = None) -> dict[str, Any]:
        correct = values("correct", mask)
        value, low, high = _accuracy(correct)
        means = {title: values(name, mask) for title, name in _MEANS.items()}
        return {
            "questions": len(correct),
            "accuracy": value,
            "low": low,
            "high": high,
            **{title: float(np.mean(found)) if found else None for title, found in means.items()},
        }

    return {
        **share(),
        "kept": float(np.mean(values("kept"))),
        "asked": float(np.mean(values("asked"))),
        "kept_fraction": sum(values("kept")) / sum(values("visual")),
        # Only two passes say what the vision tower made.
        **{
            f"{which}_fraction": sum(values(which)) / sum(values("visual"))
            for which in ("first_pass", "second_pass")
            if values(which)
        },
        **{
            part: {name: share(mask) for name, mask in named.items() if values("correct", mask)}
            for part, named in masks.items()
        },
    }


def _accuracy(correct: Sequence[bool]) -> tuple[float, float, float]:
    """Share of correct answers with the bounds of its 95% Wilson interval, as if all answers were independent."""
    n, z = len(correct), 1.96
    share = sum(correct) / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding leaves none out


# --------------------------------------------------------------------------------------------------------------------
# On the same questions
# --------------------------------------------------------------------------------------------------------------------


def means_of(results: list[Outcomes], name: str, key: Callable[[Outcomes], Any] = _key) -> dict[Any, np.ndarray]:
    """
    Of every policy the mean over the seeds, for each question; nan where it was not asked. So seeds count as one
    experiment.
    """
    found: dict[Any, list[np.ndarray]] = {}
    for outcomes in results:
        if name in outcomes:
            found.setdefault(key(outcomes), []).append(np.array(outcomes[name], dtype=float))
    means = {}
    for key, parts in found.items():
        known = ~np.isnan(parts)
        total = np.where(known, parts, 0.0).sum(0)
        means[key] = np.divide(total, known.sum(0), out=np.full(total.shape, np.nan), where=known.any(0))
    return means


def differences(results: list[Outcomes], records: list[VideoRecord], crowd: bool) -> list[dict[str, Any]]:
    """
    By how much the default is better than each other policy at the same retention, on the same questions. Intervals are
    over videos, whose questions are not independent.
    """
    correct = means_of(results, "correct")
    videos = np.array([str(record.video) for record in records])
    masks = groups_of([record.kind for record in records], crowd)
    shares = sorted(share for name, share in correct if name == DEFAULT and share is not None)
    rows = []
    for (name, retention), other in sorted(correct.items(), key=str):
        # What keeps everything is compared with the default at every retention.
        for share in shares if retention == 1.0 else (retention,):
            if name == DEFAULT or (DEFAULT, share) not in correct:
                continue
            gain = correct[DEFAULT, share] - other
            asked = ~np.isnan(gain)
            found = {label: paired_gain(gain[mask & asked], videos[mask & asked]) for label, mask in masks.items()}
            rows.append({"policy": name, "default_retention": share, "retention": retention, "gain": found})
    return rows


def question_driven(results: list[Outcomes], records: list[VideoRecord], crowd: bool) -> list[dict[str, Any]]:
    """
    What a choice owes to the question, for every chooser (as `model`), retention, group and wrong question: `share` is
    (own - wrong) / (own - uniform) in accuracy, with an interval over videos; `disagreement` is 1 - Jaccard of what is
    kept for the own question and for the wrong one; `salience` is the accuracy of the oracle that knows the objects.
    Only questions that have a wrong one count.
    """
    correct, overlap = means_of(results, "correct"), means_of(results, "jaccard")
    videos = np.array([str(record.video) for record in records])
    masks = groups_of([record.kind for record in records], crowd)
    wrong_policies: dict[Key, Policy] = {
        _key(outcomes): outcomes["policy"] for outcomes in results if outcomes["policy"].wrong_question is not None
    }
    rows = []
    for key, policy in wrong_policies.items():
        own, wrong = correct[policy.chooser, policy.retention], correct[key]
        # Of the default, for other variants too; a base may have its own.
        names = [name_of("uniform", model) for model in (policy.model, DEFAULT, BASE)]
        uniform = next(correct[name, policy.retention] for name in names if (name, policy.retention) in correct)
        salience = correct.get((SALIENCE, policy.retention))
        for label, mask in masks.items():
            chosen = mask & ~np.isnan(wrong)
            if not chosen.any():
                continue
            row = {"model": policy.chooser, "retention": policy.retention, "group": label}
            values = {"own": own, "wrong": wrong, "uniform": uniform}
            values |= {} if salience is None else {"salience": salience}
            rows.append(
                {
                    **row,
                    "wrong_question": policy.wrong_question,
                    "questions": int(chosen.sum()),
                    **{name: float(np.mean(value[chosen])) for name, value in values.items()},
                    "share": _ratio_interval((own - wrong)[chosen], (own - uniform)[chosen], videos[chosen]),
                    "disagreement": 1 - float(np.mean(overlap[key][chosen])),
                }
            )
    return rows


def _ratio_interval(above: np.ndarray, below: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """
    sum(above) / sum(below) with the bounds of its 95% interval, by a bootstrap over clusters. Nothing where `below` is
    not positive for certain: such a ratio says nothing.
    """
    names, index = np.unique(clusters, return_inverse=True)
    sums = np.stack([np.bincount(index, weights=values) for values in (above, below)])
    drawn = np.random.default_rng(0).integers(len(names), size=(2000, len(names)))
    over, under = sums[:, drawn].sum(-1)
    if len(names) < 2 or np.quantile(under, 0.025) <= 0:
        return {}
    low, high = np.quantile(over[under > 0] / under[under > 0], (0.025, 0.975))
    return {"mean": float(sums[0].sum() / sums[1].sum()), "low": float(low), "high": float(high)}


# --------------------------------------------------------------------------------------------------------------------
# Budgets
# --------------------------------------------------------------------------------------------------------------------


def adaptive_budgets(budgets: list[tuple[str, str, float]], seeds: Sequence[int]) -> dict[str, Any]:
    """rho by kind, and by how much it is larger for each wide kind than for the point questions of the same videos."""
    by_kind: dict[str, list[float]] = {}
    by_video: dict[str, dict[str, list[float]]] = {}
    for kind, video, rho in budgets:
        by_kind.setdefault(kind, []).append(rho)
        by_video.setdefault(video, {}).setdefault("point" if kind in POINT_KINDS else kind, []).append(rho)
    gaps = {
        kind: _mean_interval(
            [np.mean(rho[kind]) - np.mean(rho["point"]) for rho in by_video.values() if kind in rho and "point" in rho]
        )
        for kind in (*WIDE_KINDS, DESCRIPTION)
    }
    return {
        "rho": {kind: _mean_interval(by_kind[kind]) for kind in (*QUESTION_KINDS, DESCRIPTION) if kind in by_kind},
        "wide_minus_point": {kind: gap for kind, gap in gaps.items() if gap},
        "seeds": list(seeds),
    }


def _mean_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean with the bounds of its 95% interval."""
    if not values:
        return {}
    mean = float(np.mean(values))
    half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": mean, "low": mean - half, "high": mean + half, "count": len(values)}
