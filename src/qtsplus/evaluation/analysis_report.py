"""The page and the figures of what a selector does, after the paper's appendix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..figures import save_figure
from .tables import markdown_table, percent

_TITLES = {
    "sq_mean": "mean query embedding s_q",
    "log_m": "log M",
    "r_max": "peak relevance r_max",
    "entropy": "entropy H(p)",
    "threshold": "threshold t on r",
    "log_threshold": "threshold t on log r",
}
# Of QTSplus-3B, in the paper's appendix.
PUBLISHED = {"sq_mean": 0.2868, "log_m": -0.4834, "r_max": -0.0788, "entropy": -0.4911, "threshold": -0.8998}
_POINTS, _LINE = "#0b6e99", "#c0392b"


def write_analysis_report(document: Mapping[str, Any], path: Path) -> None:
    """`path.md`, and the figures `path-budget.png` and `path-tokens.png`."""
    path.with_name(path.name + ".md").write_text("\n".join(_page(document)) + "\n", encoding="utf-8")
    save_figure(_draw_budget(document), path.with_name(path.name + "-budget"))
    save_figure(_draw_tokens(document), path.with_name(path.name + "-tokens"))


def _page(document: Mapping[str, Any]) -> list[str]:
    selector = ", ".join(f"{name} {value}" for name, value in document["selector"].items())
    left_out = f" {document['unreadable']} questions had no video that could be read." if document["unreadable"] else ""
    correlations = [
        [title, _correlation(document["correlations"][name]), str(PUBLISHED.get(name, ""))]
        for name, title in _TITLES.items()
    ]
    budgets = [
        [kind, str(row["questions"]), _share(row["rho"]), f"{row['kept']:.1f}"]
        for kind, row in document["budgets"].items()
    ]
    return [
        f"{document['questions']} questions about {document['videos']} videos, each with the model's own budget; "
        f"{selector}.{left_out} Intervals: 95%, over videos.",
        "",
        f"`{document['command']}`",
        "",
        "Correlation with rho (Pearson's r), beside what the paper published of its QTSplus-3B on other videos:",
        "",
        *markdown_table(["", "r", "published"], correlations),
        "",
        "Budget by kind of question:",
        "",
        *markdown_table(["kind", "questions", "rho", "tokens kept"], budgets),
    ]


def _correlation(found: Mapping[str, float]) -> str:
    return "{r:+.2f} ({low:+.2f} to {high:+.2f})".format(**found) if found else "one value only"


def _share(rho: Mapping[str, float]) -> str:
    return (
        f"{percent(rho['mean'])} ({percent(rho['low'])} to {percent(rho['high'])})"
        if "low" in rho
        else percent(rho["mean"])
    )


def _draw_budget(document: Mapping[str, Any]) -> Figure:
    """The paper's scatters of rho, against what the budget head sees and the threshold, and rho by kind."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    rho = np.array([pair["rho"] for pair in document["pairs"]])
    for axes, name in zip(panels[:5], list(_TITLES)[:5], strict=True):
        x, found = np.array([pair[name] for pair in document["pairs"]]), document["correlations"][name]
        axes.scatter(x, rho, s=6, alpha=0.4, color=_POINTS, linewidths=0, rasterized=True)
        if found:
            ends = np.array([x.min(), x.max()])
            axes.plot(ends, found["slope"] * ends + found["intercept"], "--", color=_LINE)
        axes.set_title(
            f"{_TITLES[name]}: r = {found['r']:.4f}" if found else f"{_TITLES[name]}: one value", fontsize=10
        )
        axes.set_ylabel("rho")
    _draw_kinds(panels[5], document["budgets"])
    return figure


def _draw_kinds(axes: Any, budgets: Mapping[str, Any]) -> None:
    for place, row in enumerate(budgets.values()):
        rho = row["rho"]
        spread = [[rho["mean"] - rho.get("low", rho["mean"])], [rho.get("high", rho["mean"]) - rho["mean"]]]
        axes.bar(place, rho["mean"], yerr=spread, capsize=3, color=_POINTS)
    axes.set_xticks(range(len(budgets)), list(budgets), rotation=45, fontsize=8)
    axes.set_ylabel("rho (mean, 95% interval)")
    axes.set_title("budget by kind of question", fontsize=10)


def _draw_tokens(document: Mapping[str, Any]) -> Figure:
    """How relevance is spread over tokens, and where in time the kept ones are."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    edges = np.array(document["relevance"]["edges"])
    for name, title, colour in (("others", "other tokens", "#8c8c8c"), ("needles", "tokens of the answer", _LINE)):
        counts = np.array(document["relevance"][name], dtype=float)
        if counts.sum():
            left.stairs(counts / counts.sum(), edges, fill=True, alpha=0.5, color=colour, label=title)
    shown = edges[:-1][np.sum([document["relevance"][name] for name in ("others", "needles")], axis=0) > 0]
    left.set_xlim(shown.min() - 0.1, shown.max() + 0.15)
    left.set_xlabel("log10 of relevance over its mean, r M")
    left.set_ylabel("share of the tokens")
    left.legend(frameon=False, fontsize=8)
    for kind, density in document["time"].items():
        middles = (np.arange(len(density)) + 0.5) / len(density)
        style = {"color": "black", "linewidth": 2.0} if kind == "all" else {"linewidth": 0.8}
        right.plot(middles, density, label=kind, **style)
    right.axhline(1, color="#8c8c8c", linestyle=":")
    right.set_ylim(bottom=0)
    right.set_xlabel("time, as a share of the video")
    right.set_ylabel("kept tokens, over the mean")
    right.legend(frameon=False, fontsize=7, ncols=2)
    return figure


__all__ = ["PUBLISHED", "write_analysis_report"]
