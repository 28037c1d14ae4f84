"""What the answers come to: accuracies, the default's gains, budgets; each with its 95% interval."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...data.tinyworld import POINT_KINDS, QUESTION_KINDS, WIDE_KINDS
from ...evaluation.exact_match import accuracy
from ...training.dataset import VideoRecord
from .policies import DEFAULT
from .questions import DESCRIPTION

# The outcomes of one policy with one seed: "policy", "seed", and a value for every question by name.
Outcomes = dict[str, Any]


def table_rows(results: list[Outcomes], kinds: list[str]) -> list[dict[str, Any]]:
    """A row for every policy, retention and seed, and one (seed `null`) for all seeds together."""
    groups: dict[tuple[str, float | None], list[Outcomes]] = {}
    for outcomes in results:
        groups.setdefault(_key(outcomes), []).append(outcomes)
    rows = []
    for (name, retention), group in groups.items():
        parts = [(None, group), *((outcomes["seed"], [outcomes]) for outcomes in group if outcomes["seed"] is not None)]
        for seed, chosen in parts:
            rows.append({"policy": name, "retention": retention, "seed": seed, **_row(chosen, kinds)})
    return rows


def _key(outcomes: Outcomes) -> tuple[str, float | None]:
    return outcomes["policy"].name, outcomes["policy"].retention


def _row(chosen: list[Outcomes], kinds: list[str]) -> dict[str, Any]:
    joined = {
        name: [value for outcomes in chosen for value in outcomes[name]]
        for name in ("correct", "kept", "asked", "visual", "recall")
    }
    kinds = kinds * len(chosen)

    def share(picked: list[int]) -> dict[str, Any]:
        value, low, high = accuracy([joined["correct"][index] for index in picked])
        recalls = [joined["recall"][index] for index in picked if joined["recall"][index] is not None]
        return {
            "questions": len(picked),
            "accuracy": value,
            "low": low,
            "high": high,
            "needle_recall": float(np.mean(recalls)) if recalls else None,
        }

    return {
        **share(list(range(len(kinds)))),
        "kept": float(np.mean(joined["kept"])),
        "asked": float(np.mean(joined["asked"])),
        "kept_fraction": sum(joined["kept"]) / sum(joined["visual"]),
        "kinds": {
            kind: share([index for index, asked in enumerate(kinds) if asked == kind])
            for kind in QUESTION_KINDS
            if kind in kinds
        },
    }


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


def differences(results: list[Outcomes], records: list[VideoRecord]) -> list[dict[str, Any]]:
    """
    By how much the default is better than each other policy at the same retention, on the same questions.

    A question's correctness is its mean over the seeds, so seeds count as one experiment, and the intervals are over
    videos, whose questions are not independent.
    """
    correct: dict[tuple[str, float | None], np.ndarray] = {}
    for key in {_key(outcomes) for outcomes in results}:
        group = [outcomes["correct"] for outcomes in results if _key(outcomes) == key]
        correct[key] = np.mean(np.array(group, dtype=float), axis=0)
    videos = np.array([str(record.video) for record in records])
    kinds = np.array([record.kind for record in records])
    shares = sorted(share for name, share in correct if name == DEFAULT and share is not None)
    rows = []
    for (name, retention), other in sorted(correct.items(), key=str):
        # What keeps everything is compared with the default at every retention.
        for share in shares if retention == 1.0 else (retention,):
            if name == DEFAULT or (DEFAULT, share) not in correct:
                continue
            gain = correct[DEFAULT, share] - other
            row: dict[str, Any] = {"policy": name, "default_retention": share, "retention": retention}
            chosen = {kind: kinds == kind for kind in QUESTION_KINDS if kind in kinds}
            chosen = {"all": np.ones(len(kinds), bool), "when_and_order": np.isin(kinds, ("when", "order")), **chosen}
            row["gain"] = {label: _clustered_interval(gain[mask], videos[mask]) for label, mask in chosen.items()}
            rows.append(row)
    return rows


def _clustered_interval(values: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """Mean with the bounds of its 95% interval, for values that are independent between clusters only."""
    names, index = np.unique(clusters, return_inverse=True)
    if len(names) < 2:
        return {}
    mean = float(np.mean(values))
    sums = np.bincount(index, weights=values - mean)
    error = float(np.sqrt(len(names) / (len(names) - 1) * np.sum(sums**2))) / len(values)
    return {"mean": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}


def _mean_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean with the bounds of its 95% interval."""
    if not values:
        return {}
    mean = float(np.mean(values))
    half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": mean, "low": mean - half, "high": mean + half, "count": len(values)}
