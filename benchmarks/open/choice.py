"""
How well each way of choosing does on fresh videos, and what the parts of a model are worth.

`python -m benchmarks.open.choice MODEL WORK` renders 100 videos of 8 s into WORK, asks the model 750 questions about
them in every way, and writes `choice.json`, `choice.md` and `choice.png` to `benchmarks/results`.
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..files import run_from_command_line, save_figure, write_result
from ..machine import environment
from ..tables import markdown_table
from ..world.open_sets import build_open
from .asking import Answers, OpenTest, load, of_other_videos, of_the_same_video, open_test
from .measures import interval

FIRST = 300_000  # worlds of the test split that no other set begins with
VIDEOS = 100
SECONDS = 8
QUESTIONS = 750
SHARES = (0.0125, 0.025, 0.05, 0.1, 0.25)
POINTS = ("mark", "existence")  # kinds of question that one thing at one place answers
LOOKING_LAYER = 2  # its attention taught the scores
PARTS_SHARE = 0.1

OWN = "qtsplus"
ATTENTION = "lm_attention"
BLIND = ("diversity", "temporal_redundancy", "random", "uniform")  # methods that do not see the question
OTHER_VIDEO = "qtsplus, by the question about another video"
SAME_VIDEO = "qtsplus, by another question about the same video"

FULL = "the model as it is"
PARTS: dict[str, dict[str, Any]] = {
    FULL: {},
    "uniform tokens (the paper's UNIF, with a re-encoder)": {"selection": "uniform"},
    "uniform tokens as they are (the paper's UNIF)": {"selection": "uniform", "reencode": False},
    "kept tokens as they are (the paper's nREENC)": {"reencode": False},
    "a re-encoder without absolute times": {"settings": {"reencode_rope": False}},
    "positions renumbered after the selection": {"settings": {"position_ids": "sequential"}},
    "the paper's maximum over heads and words": {"settings": {"reduction": "max"}},
}


def make_test_set(work: Path, videos: int = VIDEOS) -> Path:
    """Renders the videos and writes their questions; what is there is kept."""
    return build_open(work / f"choice-{videos}", "test", videos, SECONDS, variant="plain", first=FIRST)


def run_choice(folder: Path, work: Path, out: Path, videos: int = VIDEOS, questions: int = QUESTIONS) -> Path:
    """
    Asks all questions in all ways, and writes the results.

    Args:
        folder: a trained model.
        work: the folder of the rendered videos.
        out: the folder of the results.
        videos: how many to render.
        questions: how many to ask, drawn by chance.

    Returns:
        The path of the JSON file.
    """
    test = open_test(folder, make_test_set(work, videos), questions)
    document = {
        "environment": environment("cpu"),
        "model": folder.name,
        "videos": len(np.unique(test.videos)),
        "questions": len(test),
        "points": int(np.isin(test.kinds, POINTS).sum()),
        "tokens": round(float(test.totals.mean())),
        "all tokens": _figures(test, test.ask(load(folder), selection="all")),
        "ways": compare_ways(folder, test),
        "parts": compare_parts(folder, test, PARTS, PARTS_SHARE),
    }
    target = write_result(out / "choice.json", document, page(document))
    draw(document, target.with_suffix(""))
    return target


# --- Asking ---


def compare_ways(folder: Path, test: OpenTest) -> dict[str, dict[str, Any]]:
    """By the way of choosing and the share of the tokens that it keeps, the figures of its answers."""
    model = load(folder)
    attending = load(folder, attention_layer=LOOKING_LAYER)
    ways: dict[str, dict[str, Any]] = {}
    for share in SHARES:
        asked = {
            OWN: test.ask(model, retention=share),
            ATTENTION: test.ask(attending, retention=share, selection=ATTENTION),
        }
        for method in BLIND:
            asked[method] = test.ask(model, retention=share, selection=method)
        asked[OTHER_VIDEO] = test.ask(model, retention=share, queries=of_other_videos(test))
        asked[SAME_VIDEO] = test.ask(model, retention=share, queries=of_the_same_video(test))
        for name, answers in asked.items():
            ways.setdefault(name, {})[f"{share:g}"] = _figures(test, answers)
        print(f"{share:.2%} of the tokens", flush=True)
    return ways


def compare_parts(
    folder: Path,
    test: OpenTest,
    changes: dict[str, dict[str, Any]],
    share: float,
) -> dict[str, dict[str, Any]]:
    """How the answers differ from those without a change, the first of `changes`; with intervals over videos."""
    parts: dict[str, dict[str, Any]] = {}
    right_of_first = None
    for name, change in changes.items():
        call = dict(change)
        model = load(folder, **call.pop("settings", {}))
        answers = test.ask(model, retention=share, **call)
        right = np.array(answers.right, dtype=float)
        if right_of_first is None:
            right_of_first = right
        difference = right - right_of_first
        low, high = interval(difference, test.videos)
        parts[name] = _figures(test, answers)
        parts[name]["difference"] = [_percent(difference), round(100 * low, 1), round(100 * high, 1)]
    return parts


def _figures(test: OpenTest, answers: Answers) -> dict[str, Any]:
    """Shares in percent: of right answers with their interval, of those to point questions, of needle tokens kept."""
    right = np.array(answers.right, dtype=float)
    points = np.isin(test.kinds, POINTS)
    low, high = interval(right, test.videos)
    shares = np.array(answers.share)
    return {
        "right": _percent(right),
        "interval": [round(100 * low, 1), round(100 * high, 1)],
        "right, points": _percent(right[points]),
        "needle tokens": _percent(shares[~np.isnan(shares)]),
        "tokens": round(float(np.mean(answers.kept)), 1),
    }


def _percent(values: np.ndarray) -> float:
    return round(100 * float(np.mean(values)), 1)


# --- The page and the figure ---


def page(document: dict[str, Any]) -> str:
    """Everything as Markdown."""
    head = ["chosen by", *(f"{share:.4g}%" for share in 100 * np.array(SHARES))]
    lines = [
        "# How well each way chooses",
        "",
        f"{document['questions']} questions about {document['videos']} fresh videos of {SECONDS} s in the world "
        f"without a grid, {document['tokens']} visual tokens each, asked of {document['model']}. "
        f"{document['points']} of them are point questions (a mark, existence). An answer is right if it is right to "
        "its last word. Intervals are 95%, with videos drawn again. This page is made by "
        "`python -m benchmarks.open.choice`.",
        "",
        f"With all tokens {document['all tokens']['right']}% are right ({document['all tokens']['right, points']}% of "
        "the point questions).",
    ]
    for title, name in (("all questions", "right"), ("point questions", "right, points")):
        rows = [[way, *(f"{figures[name]}%" for figures in row.values())] for way, row in document["ways"].items()]
        lines += ["", f"## Right answers to {title}, by the share of the tokens", "", *markdown_table(head, rows)]
    rows = [[way, *(f"{one['needle tokens']}%" for one in row.values())] for way, row in document["ways"].items()]
    lines += ["", "## Needle tokens kept, of as many as fit", "", *markdown_table(head, rows)]
    lines += ["", f"## What the parts are worth, with {PARTS_SHARE:.0%} of the tokens", "", *_part_lines(document)]
    return "\n".join(lines) + "\n"


def _part_lines(document: dict[str, Any]) -> list[str]:
    rows = []
    for name, figures in document["parts"].items():
        mean, low, high = figures["difference"]
        difference = "" if name == FULL else f"{mean:+} [{low:+}, {high:+}]"
        rows.append([name, f"{figures['right']}%", difference, f"{figures['needle tokens']}%"])
    return markdown_table(["", "right", "difference, points", "needle tokens kept"], rows)


def draw(document: dict[str, Any], path: Path) -> None:
    """Right answers against the share of the tokens, a line for each way."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, row) in enumerate(document["ways"].items()):
        right = [figures["right"] for figures in row.values()]
        low = [figures["interval"][0] for figures in row.values()]
        high = [figures["interval"][1] for figures in row.values()]
        style = {OWN: "-o", ATTENTION: "-s"}.get(name, "--" if name in BLIND else ":")
        axes.plot(SHARES, right, style, color=f"C{number}", label=name)
        axes.fill_between(SHARES, low, high, color=f"C{number}", alpha=0.12, linewidth=0)
    axes.axhline(document["all tokens"]["right"], color="black", linewidth=0.8, label="all tokens")
    axes.set_xscale("log")
    axes.set_xticks(SHARES, [f"{share:.4g}%" for share in 100 * np.array(SHARES)])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.set_ylim(0, 100)
    axes.set_xlabel("visual tokens kept")
    axes.set_ylabel("right answers")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    run_from_command_line(run_choice, __doc__, "folder", "work")
