"""The learned benchmark's table and plots."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ...data.tinyworld import POINT_KINDS, QUESTION_KINDS
from ..plots import save_figure
from .policies import OF_BASE, TITLES, title_of

_CURVES = {
    "straight_through": "#0b6e99",
    "gumbel": "#d1615d",
    "uniform": "#8c8c8c",
    "random": "#c9a227",
    "temporal_redundancy": "#5f4b8b",
    "diversity": "#2a9d8f",
    "fewer_frames": "#6a9f58",
    "lower_resolution": "#a3789b",
}
_TIME_VARIANTS = ("straight_through", "no_rope", "sequential", "reference_positions", "no_reencoder")
_TIME_RETENTION = 0.1

Rows = list[dict[str, Any]]


def write_report(rows: Rows, details: dict[str, Any], folder: Path) -> None:
    """`learned.md`, `learned.png` and `.svg`, `learned-adaptive.png` and `.svg`."""
    pooled = {(row["policy"], row["retention"]): row for row in rows if row["seed"] is None}
    (folder / "learned.md").write_text(_table(pooled, details), encoding="utf-8")
    save_figure(_draw_accuracy(pooled), folder / "learned")
    save_figure(_draw_adaptive(details["adaptive"]), folder / "learned-adaptive")


def _table(pooled: dict, details: dict[str, Any]) -> str:
    asked = [kind for kind in QUESTION_KINDS if any(kind in row["kinds"] for row in pooled.values())]
    lines = [
        f"{details['questions']} questions on {details['videos']} held-out videos; training seeds {details['seeds']}. "
        "Intervals: 95% Wilson over the questions of all seeds together, which are the same questions for every seed.",
        "",
        f"`{details['command']}`",
        "",
        "| policy | retention | accuracy | 95% interval | needle recall | kept | asked | " + " | ".join(asked) + " |",
        "|---|---|---|---|---|---|---|" + "---|" * len(asked),
    ]
    for (policy, retention), row in sorted(pooled.items(), key=_order):
        recall = "" if row["needle_recall"] is None else f"{row['needle_recall']:.1%}"
        kinds = [f"{row['kinds'][kind]['accuracy']:.1%}" if kind in row["kinds"] else "" for kind in asked]
        cells = [
            title_of(policy),
            "own" if retention is None else f"{retention:.0%}",
            f"{row['accuracy']:.1%}",
            f"{row['low']:.1%} to {row['high']:.1%}",
            recall,
            f"{row['kept']:.1f} ({row['kept_fraction']:.1%})",
            f"{row['asked']:.1f}",
            *kinds,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for layout, reason in details["left_out"].items():
        lines += ["", f"{title_of(layout).capitalize()}: left out, {reason}."]
    lines += _gains(details["differences"])
    lines += [
        "",
        "| gate in training, own budget | seed | asked | kept | off by | same tokens (Jaccard) |",
        "|---|---|---|---|---|---|",
    ]
    for gate in details["agreement"]:
        off = gate["kept_in_training"] / gate["asked"] - 1
        cells = [title_of(gate["policy"]), str(gate["seed"]), f"{gate['asked']:.2f}", f"{gate['kept_in_training']:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{off:+.1%}", f"{gate['jaccard']:.3f}"]) + " |")
    lines += [
        "",
        "| dataset-level budget (tokens) | seed | reached in training | off by | asked for on the test set |",
        "|---|---|---|---|---|",
    ]
    for run in details["dual"]:
        share = f"{run['test_fraction']:.2%} for {run['target_fraction']:.2%}"
        lines.append(f"| {run['target']:g} | {run['seed']} | {run['reached']:.2f} | {run['off']:+.1%} | {share} |")
    lines += [
        "",
        "| rho with the default's own budget | mean (95% interval) | more than for point questions on the same video |",
        "|---|---|---|",
    ]
    for kind, rho in details["adaptive"]["rho"].items():
        gap = details["adaptive"]["wide_minus_point"].get(kind)
        lines.append(f"| {kind} | {_interval(rho)} | {_interval(gap) if gap else ''} |")
    return "\n".join(lines) + "\n"


def _interval(value: dict[str, float]) -> str:
    return f"{value['mean']:.4f} ({value['low']:.4f} to {value['high']:.4f})"


def _gains(differences: Rows) -> list[str]:
    """What the default gains over the others, on the same questions."""
    lines = [
        "",
        "What the default gains on the same questions, in points of accuracy (95% interval over videos):",
        "",
        "| over | retention | all questions | when and order |",
        "|---|---|---|---|",
    ]
    for row in sorted(differences, key=lambda row: _order(((row["policy"], row["default_retention"]), row))):
        cells = []
        for label in ("all", "when_and_order"):
            gain = row["gain"][label]
            bounds = [f"{100 * gain[bound]:+.1f}" for bound in ("mean", "low", "high")] if gain else []
            cells.append(f"{bounds[0]} ({bounds[1]} to {bounds[2]})" if bounds else "")
        share = "own" if row["default_retention"] is None else f"{row['default_retention']:.0%}"
        lines.append(f"| {title_of(row['policy'])} | {share} | {cells[0]} | {cells[1]} |")
    return lines


def _order(item: tuple) -> tuple:
    (policy, retention), _ = item
    own = policy.removeprefix(OF_BASE)
    return own != policy, list(TITLES).index(own), retention or 2.0


def _draw_accuracy(pooled: dict) -> Figure:
    """Left, accuracy over retention; right, what positions buy on questions about time."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for policy, colour in _CURVES.items():
        points = [(row["kept_fraction"], row) for (name, share), row in pooled.items() if name == policy and share]
        if not points:
            continue
        points.sort(key=lambda point: point[0])
        _with_intervals(left, [x for x, _ in points], [row for _, row in points], colour, title_of(policy), "-o")
    for policy, style in (("all", "--"), ("base_all", ":")):
        left.axhline(pooled[policy, 1.0]["accuracy"], color="black", linestyle=style, label=title_of(policy))
    left.set_xlabel("fraction of the visual tokens kept")
    left.set_ylabel("accuracy")
    left.legend(frameon=False, fontsize=7)
    for place, kind in enumerate(("when", "order")):
        for step, policy in enumerate(_TIME_VARIANTS):
            row = pooled.get((policy, _TIME_RETENTION), {"kinds": {}})["kinds"].get(kind)
            if row is not None:
                colour = f"C{step}"
                _with_intervals(
                    right, [place + 0.12 * (step - 2)], [row], colour, title_of(policy) if place == 0 else None, "o"
                )
    right.set_xticks([0, 1], [f'"{kind}" questions' for kind in ("when", "order")])
    right.set_xlim(-0.5, 1.5)
    right.set_title(f"at {_TIME_RETENTION:.0%} of the tokens", fontsize=9)
    right.legend(frameon=False, fontsize=7)
    return figure


def _with_intervals(axes: Any, x: list[float], rows: Rows, colour: str, label: str | None, style: str) -> None:
    y = [row["accuracy"] for row in rows]
    below = [row["accuracy"] - row["low"] for row in rows]
    above = [row["high"] - row["accuracy"] for row in rows]
    axes.errorbar(x, y, yerr=[below, above], fmt=style, color=colour, label=label, capsize=2, markersize=4)


def _draw_adaptive(adaptive: dict[str, Any]) -> Figure:
    """rho by kind, with the default's own budget."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, (kind, rho) in enumerate(adaptive["rho"].items()):
        half = rho["high"] - rho["mean"]
        axes.bar(place, rho["mean"], yerr=half, capsize=3, color="#0b6e99" if kind in POINT_KINDS else "#e49444")
    axes.set_xticks(range(len(adaptive["rho"])), list(adaptive["rho"]))
    axes.set_ylabel("rho (mean, 95% interval)")
    axes.set_title("Own budget by kind of question: point (blue), wide (orange)", fontsize=9)
    return figure


__all__ = ["write_report"]
