"""The learned benchmark's tables and plots."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..files import save_figure
from ..tables import markdown_table
from ..world.tinyworld import POINT_KINDS, QUESTION_KINDS
from .policies import (
    ATTENTION,
    BASE,
    DEFAULT,
    NEEDLES,
    ORACLES,
    OTHER_VIDEO,
    SALIENCE,
    SAME_VIDEO,
    TITLES,
    TWO_PASSES,
    VARIANTS,
    WRONG_QUESTIONS,
    name_of,
    parts_of,
    title_of,
)

_CURVES = {
    DEFAULT: "#0b6e99",
    "gumbel": "#d1615d",
    "uniform": "#8c8c8c",
    "random": "#c9a227",
    "temporal_redundancy": "#5f4b8b",
    "diversity": "#2a9d8f",
    "fewer_frames": "#6a9f58",
    "lower_resolution": "#a3789b",
    TWO_PASSES: "#1b998b",
    OTHER_VIDEO: "#6fb3d2",
    SAME_VIDEO: "#94c9e0",
    "untrained_selector": "#b0b0b0",
    SALIENCE: "#7a5230",
    NEEDLES: "#444444",
}
_CURVES[name_of(ATTENTION, BASE)] = "#d45087"
_DASHED = (*WRONG_QUESTIONS, "untrained_selector", *ORACLES)  # no ways to spend tokens that anyone could choose
_GROUPS = {
    "all": "all questions",
    "point": "point questions",
    "two_word": "two-word names",
    "relation": "relations",
    "when_and_order": "when and order",
}

Rows = list[dict[str, Any]]
Pooled = dict[tuple[str, float | None], dict[str, Any]]


def write_report(rows: Rows, details: dict[str, Any], folder: Path) -> None:
    """`learned.md` and `learned.png`; with an own budget `learned-adaptive.png`."""
    pooled = {(row["policy"], row["retention"]): row for row in rows if row["seed"] is None}
    sections = [
        _heading(details),
        _accuracy_by_tokens(pooled),
        _shares(details["question_driven"]),
        _variants(pooled),
        _two_passes(pooled),
        _gains(details["differences"]),
        _everything(pooled),
        _gates(details["agreement"]),
        _budgets(details),
    ]
    lines = [line for section in sections if section for line in [*section, ""]]
    (folder / "learned.md").write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    save_figure(_draw_accuracy(pooled), folder / "learned")
    if details["adaptive"]:
        save_figure(_draw_adaptive(details["adaptive"]), folder / "learned-adaptive")


# --------------------------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------------------------


def _heading(details: dict[str, Any]) -> list[str]:
    world = "crowded" if details["crowd"] else "sparse"
    own = details["bases"] == len(details["seeds"])
    bases = "one base" if details["bases"] == 1 else "a base for each seed" if own else f"{details['bases']} bases"
    lines = [
        f"{details['questions']} questions on {details['videos']} held-out videos of the {world} world; training seeds "
        f"{details['seeds']}, {bases}. Point questions ask for an attribute, existence or a direction. The recipe has "
        + ", ".join(f"{name} {value}" for name, value in details["selector"].items())
        + ".",
        "",
        f"`{details['command']}`",
    ]
    for layout, reason in details["left_out"].items():
        lines += ["", f"{title_of(layout).capitalize()}: left out, {reason}."]
    return lines


def _accuracy_by_tokens(pooled: Pooled) -> list[str]:
    """Accuracy for each policy and retention, a table for each group."""
    names = sorted({name for name, _ in pooled if not _is_control_of_variant(name)}, key=_place)
    shares = sorted({share for _, share in pooled}, key=lambda share: share or 2.0)
    lines = ["## Right answers by tokens kept"]
    for group in _asked_groups(pooled):
        rows = [[title_of(name), *(_accuracy(pooled.get((name, share)), group) for share in shares)] for name in names]
        lines += ["", f"{_GROUPS[group].capitalize()}:", "", *markdown_table(["", *map(_kept, shares)], rows)]
    return lines


def _kept(share: float | None) -> str:
    return "own budget" if share is None else f"{100 * share:.3g}%"


def _asked_groups(pooled: Pooled) -> list[str]:
    return [group for group in _GROUPS if any(group in row["groups"] for row in pooled.values())]


def _accuracy(row: dict[str, Any] | None, group: str) -> str:
    return f"{row['groups'][group]['accuracy']:.1%}" if row is not None and group in row["groups"] else ""


def _shares(found: Rows) -> list[str]:
    """What selecting by a wrong question costs, a table for each of the two."""
    lines = [
        "## What the choice owes to the question",
        "",
        "The share is (own - wrong) / (own - uniform) in right answers, with a 95% interval over videos. It stays "
        "empty where the model is not certain to beat uniform tokens. Another choice: 1 - Jaccard of the kept tokens.",
    ]
    for wrong in WRONG_QUESTIONS:
        by_place = {
            (row["model"], row["retention"], row["group"]): row for row in found if row["wrong_question"] == wrong
        }
        groups = [group for group in ("point", "all") if any(place[2] == group for place in by_place)]
        heads = sorted({place[:2] for place in by_place}, key=lambda head: (_place(head[0]), head[1]))
        rows = [
            [
                title_of(model),
                _kept(share),
                *(cell for group in groups for cell in _share_cells(by_place, model, share, group)),
            ]
            for model, share in heads
        ]
        names = ("own", "wrong", "uniform", "any object", "share", "another choice")
        columns = ["", "kept", *(f"{name}, {group}" for group in groups for name in names)]
        lines += ["", f"{title_of(wrong).capitalize()}:", "", *markdown_table(columns, rows)]
    return lines


def _share_cells(by_place: dict[tuple, dict[str, Any]], model: str, share: float, group: str) -> list[str]:
    row = by_place.get((model, share, group))
    if row is None:
        return [""] * 6
    ratio = row["share"]
    cells = [f"{row[name]:.1%}" for name in ("own", "wrong", "uniform", "salience")]
    cells.append(f"{ratio['mean']:.0%} ({ratio['low']:.0%} to {ratio['high']:.0%})" if ratio else "")
    return [*cells, f"{row['disagreement']:.1%}"]


def _variants(pooled: Pooled) -> list[str]:
    """Reductions, layers and query states, where they should differ."""
    groups = [group for group in ("point", "two_word", "relation") if group in _asked_groups(pooled)]
    shares = [share for share in (0.05, 0.1) if (DEFAULT, share) in pooled]
    names = [name for name in VARIANTS if any((name, share) in pooled for share in shares)]
    if not groups or len(names) < 2:
        return []
    columns = [
        "",
        *(f"{_GROUPS[group]}, {share:.0%}" for group in groups for share in shares),
        "needle tokens kept, 10%",
    ]
    rows = []
    for name in names:
        cells = [_accuracy(pooled.get((name, share)), group) for group in groups for share in shares]
        recall = pooled.get((name, 0.1), {}).get("token_recall")
        rows.append([title_of(name), *cells, "" if recall is None else f"{recall:.1%}"])
    return ["## Variants", "", *markdown_table(columns, rows)]


def _two_passes(pooled: Pooled) -> list[str]:
    """What of a video two passes encode, and what it costs."""
    shares = sorted(share for name, share in pooled if name == TWO_PASSES and share is not None)
    if not shares:
        return []
    groups = [group for group in ("point", "all") if group in _asked_groups(pooled)]
    columns = ["kept", "encoded small", "encoded at full size", "needle tokens kept"]
    columns += [f"{group}, {passes}" for group in groups for passes in ("one pass", "two passes")]
    rows = []
    for share in shares:
        twice = pooled[TWO_PASSES, share]
        cells = [_kept(share), *(f"{twice[f'{which}_pass_fraction']:.1%}" for which in ("first", "second"))]
        cells.append("" if twice["token_recall"] is None else f"{twice['token_recall']:.1%}")
        for group in groups:
            cells += [_accuracy(pooled.get((DEFAULT, share)), group), _accuracy(twice, group)]
        rows.append(cells)
    head = "Of the tokens of a whole video, how many the vision tower made in each pass:"
    return ["## Two passes", "", head, "", *markdown_table(columns, rows)]


def _gains(differences: Rows) -> list[str]:
    """What the default gains over the others, on the same questions."""
    groups = [group for group in _GROUPS if any(row["gain"].get(group) for row in differences)]
    rows = []
    for row in sorted(differences, key=lambda row: (_place(row["policy"]), row["default_retention"] or 2.0)):
        if not _is_control_of_variant(row["policy"]):
            gains = [_points(row["gain"].get(group)) for group in groups]
            rows.append([title_of(row["policy"]), _kept(row["default_retention"]), *gains])
    head = "What the recipe as it is gains on the same questions, in points of accuracy (95% interval over videos):"
    return ["## Gains", "", head, "", *markdown_table(["over", "kept", *(_GROUPS[group] for group in groups)], rows)]


def _points(gain: dict[str, float] | None) -> str:
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * gain[end] for end in ("mean", "low", "high"))) if gain else ""


def _everything(pooled: Pooled) -> list[str]:
    kinds = [kind for kind in QUESTION_KINDS if any(kind in row["kinds"] for row in pooled.values())]
    columns = ["", "kept", "accuracy", "95% interval", "needles kept", "of their tokens", "of other objects", "tokens"]
    rows = []
    for (policy, retention), row in sorted(pooled.items(), key=lambda item: (_place(item[0][0]), item[0][1] or 2.0)):
        recalls = [row[name] for name in ("needle_recall", "token_recall", "distractor_recall")]
        cells = [
            title_of(policy),
            _kept(retention),
            f"{row['accuracy']:.1%}",
            f"{row['low']:.1%} to {row['high']:.1%}",
            *("" if recall is None else f"{recall:.1%}" for recall in recalls),
            f"{row['kept']:.1f} of {row['asked']:.1f}",
        ]
        rows.append(
            [*cells, *(f"{row['kinds'][kind]['accuracy']:.1%}" if kind in row["kinds"] else "" for kind in kinds)]
        )
    head = (
        "Intervals: 95% Wilson over the questions of all seeds together, which are the same questions for every seed."
    )
    return ["## Everything", "", head, "", *markdown_table([*columns, *kinds], rows)]


def _gates(agreement: Rows) -> list[str]:
    rows = []
    for gate in agreement:
        counts = [f"{gate[name]:.2f}" for name in ("asked", "kept_in_training")]
        off = gate["kept_in_training"] / gate["asked"] - 1
        rows.append([title_of(gate["policy"]), str(gate["seed"]), *counts, f"{off:+.1%}", f"{gate['jaccard']:.3f}"])
    columns = ["gate in training, a tenth asked for", "seed", "asked", "kept", "off by", "same tokens (Jaccard)"]
    return ["## Gates and budgets", "", *markdown_table(columns, rows)]


def _budgets(details: dict[str, Any]) -> list[str]:
    """Where own budgets land, if the recipe teaches them."""
    lines: list[str] = []
    if details["dual"]:
        rows = []
        for run in details["dual"]:
            share = f"{run['test_fraction']:.2%} for {run['target_fraction']:.2%}"
            rows.append([f"{run['target']:g}", str(run["seed"]), f"{run['reached']:.2f}", f"{run['off']:+.1%}", share])
        columns = [
            "dataset-level budget (tokens)",
            "seed",
            "reached in training",
            "off by",
            "asked for on the test set",
        ]
        lines += [*markdown_table(columns, rows), ""]
    if details["adaptive"]:
        rows = []
        for kind, rho in details["adaptive"]["rho"].items():
            gap = details["adaptive"]["wide_minus_point"].get(kind)
            rows.append([kind, _interval(rho), _interval(gap) if gap else ""])
        columns = ["rho with the own budget", "mean (95% interval)", "more than for point questions on the same video"]
        lines += markdown_table(columns, rows)
    return lines


def _interval(value: dict[str, float]) -> str:
    return f"{value['mean']:.4f} ({value['low']:.4f} to {value['high']:.4f})"


def _place(name: str) -> tuple:
    """Where a policy stands in a table: the default's first, then the base's, then those of the other variants."""
    policy, model = parts_of(name)
    return _is_control_of_variant(name), model == BASE, list(TITLES).index(policy), model


def _is_control_of_variant(name: str) -> bool:
    policy, model = parts_of(name)
    return model not in (DEFAULT, BASE) and policy != model


# --------------------------------------------------------------------------------------------------------------------
# Plots
# --------------------------------------------------------------------------------------------------------------------


def _draw_accuracy(pooled: Pooled) -> Figure:
    """Right answers by tokens kept: all questions, and point questions."""
    groups = [group for group in ("all", "point") if group in _asked_groups(pooled)]
    figure = Figure(figsize=(5 * len(groups) + 3, 4.6), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, group in zip(panels, groups, strict=True):
        for policy, colour in _CURVES.items():
            rows = [row for (name, share), row in pooled.items() if name == policy and share and group in row["groups"]]
            rows.sort(key=lambda row: row["kept_fraction"])
            if rows:
                _draw_line(axes, rows, group, colour, policy)
        for policy, style in (("all", "--"), (name_of("all", BASE), ":")):
            if (policy, 1.0) in pooled:
                height = pooled[policy, 1.0]["groups"][group]["accuracy"]
                axes.axhline(height, color="black", linestyle=style, label=title_of(policy))
        axes.set_xscale("log")
        axes.set_xticks([0.025, 0.05, 0.1, 0.25], ["2.5%", "5%", "10%", "25%"])
        axes.minorticks_off()
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel("visual tokens kept")
        axes.set_title(_GROUPS[group], fontsize=10)
    panels[0].set_ylabel("right answers")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=7)
    return figure


def _draw_line(axes: Any, rows: Rows, group: str, colour: str, policy: str) -> None:
    found = [row["groups"][group] for row in rows]
    y = [row["accuracy"] for row in found]
    spread = [[row["accuracy"] - row["low"] for row in found], [row["high"] - row["accuracy"] for row in found]]
    style = "--o" if policy in _DASHED else "-o"
    x = [row["kept_fraction"] for row in rows]
    axes.errorbar(x, y, yerr=spread, fmt=style, color=colour, label=title_of(policy), capsize=2, markersize=4)


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
