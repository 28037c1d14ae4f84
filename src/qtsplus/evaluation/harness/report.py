"""`qtsplus eval report`: what runs found, side by side, as Markdown, HTML and JSON."""

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..intervals import clustered_interval, paired_test
from .catalogue import PublishedTable, published
from .run import failures

# Runs are compared where the other one keeps this many times our tokens: as many, or the few more of whole frames.
SAME_TOKENS = (0.95, 1.3)


@dataclass(frozen=True)
class Run:
    """
    A folder that `qtsplus eval --tasks` has finished.

    Args:
        folder: where it is.
        label: its model, and how that selected.
        document: its `run.json`.
    """

    folder: Path
    label: str
    document: Mapping[str, Any]

    @property
    def tasks(self) -> Mapping[str, Any]:
        return self.document["tasks"]

    @property
    def selects(self) -> bool:
        """Whether the model chose by its own selector."""
        return self.document["settings"]["options"].get("selection") in (None, "qtsplus")


@dataclass(frozen=True)
class Table:
    """
    One table of a report.

    Args:
        title: above it.
        head: titles of the columns; the first is that of the rows.
        rows: cells as text, `None` where there is nothing.
        ranked: how many of the columns behind the first are compared with each other: the best of a row is bold, the
            second underlined.
        note: a paragraph below it.
    """

    title: str
    head: list[str]
    rows: list[list[str | None]]
    ranked: int = 0
    note: str = ""


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """
    Raises:
        ValueError: a folder without a finished run.
    """
    runs = []
    for folder in folders:
        path = folder / "run.json"
        if not path.exists():
            raise ValueError(
                f"There is no run.json in {folder}; expected the folder of a finished `qtsplus eval --tasks`."
            )
        document = json.loads(path.read_text(encoding="utf-8"))
        if not {"settings", "versions", "tasks"} <= set(document):
            raise ValueError(f"{path} is no result of `qtsplus eval --tasks`.")
        runs.append(Run(folder, _label(document["settings"]), document))
    repeated = {run.label for run in runs if sum(other.label == run.label for other in runs) > 1}
    return [
        Run(run.folder, f"{run.label} ({run.folder.name})", run.document) if run.label in repeated else run
        for run in runs
    ]


def _label(settings: Mapping[str, Any]) -> str:
    options = settings["options"]
    name = Path(settings["model"]).name
    parts = [options["selection"].replace("_", " ")] if options.get("selection") else []
    if options.get("retention"):
        parts.append(f"{options['retention']:.0%}")
    if options.get("max_visual_tokens"):
        parts.append(f"{options['max_visual_tokens']} tokens")
    if not options.get("reencode", True):
        parts.append("no re-encoder")
    return f"{name}, {' '.join(parts)}" if parts else name


# --------------------------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------------------------


def tables(runs: Sequence[Run]) -> list[Table]:
    """All that the runs say, and what is published of the same tasks."""
    return [
        _accuracy(runs),
        *([found] if (found := _gains(runs)).rows else []),
        *(table for each in published() if (table := _published(runs, each)).rows),
        _tokens(runs),
        *([found] if (found := _clues(runs)).rows else []),
        _settings(runs),
    ]


def _accuracy(runs: Sequence[Run]) -> Table:
    rows: list[list[str | None]] = []
    for name in _row_names(runs):
        task, metric = name.split("/")
        cells = []
        for run in runs:
            value = run.tasks.get(task, {}).get("metrics", {}).get(metric)
            interval = _interval(run, task, metric)
            cells.append(None if value is None else f"{value:.2f}" + (f" ({interval})" if interval else ""))
        rows.append([name, *cells])
    note = "Percent, as lmms-eval gives it. In brackets the 95% interval of the mean over questions, by videos."
    return Table("Accuracy", ["task", *(run.label for run in runs)], rows, ranked=len(runs), note=note)


def _row_names(runs: Sequence[Run]) -> list[str]:
    names = (f"{task}/{metric}" for run in runs for task, found in run.tasks.items() for metric in found["metrics"])
    return list(dict.fromkeys(names))


def _interval(run: Run, task: str, metric: str) -> str:
    samples = run.tasks[task]["samples"] if task in run.tasks else []
    scored = [sample for sample in samples if metric in sample["scores"]]
    videos = np.array([sample["video"] for sample in scored])
    found = clustered_interval(np.array([sample["scores"][metric] for sample in scored]), videos) if scored else {}
    return f"{max(0.0, 100 * found['low']):.1f} to {min(100.0, 100 * found['high']):.1f}" if found else ""


def _gains(runs: Sequence[Run]) -> Table:
    """Of every model's own selection over each other run that keeps as many tokens, on the same questions."""
    rows: list[list[str | None]] = []
    for own in runs:
        for other in runs:
            for name in _row_names([own]) if own.selects and not other.selects else []:
                task, metric = name.split("/")
                if (cells := _gain(own, other, task, metric)) is not None:
                    rows.append([name, own.label, other.label, *cells])
    fewest, most = SAME_TOKENS
    note = (
        "Points by which a model's own selection is better than another one on the same questions, where that keeps "
        f"from {fewest:.0%} to {most:.0%} of our tokens. Intervals are 95%, by videos; p is that of no gain, by signs "
        "drawn for each video."
    )
    head = ["task", "selection", "over", "gain", "95% interval", "p", "tokens", "its tokens"]
    return Table("Gains at equal tokens", head, rows, note=note)


def _gain(own: Run, other: Run, task: str, metric: str) -> list[str] | None:
    if task not in other.tasks:
        return None
    ours, theirs = (
        {sample["doc_id"]: sample for sample in run.tasks[task]["samples"] if metric in sample["scores"]}
        for run in (own, other)
    )
    if not ours or ours.keys() != theirs.keys():
        return None
    tokens, its_tokens = (_mean(samples.values(), "kept_visual_tokens") for samples in (ours, theirs))
    fewest, most = SAME_TOKENS
    if not fewest * tokens <= its_tokens <= most * tokens:
        return None
    gains = np.array([ours[key]["scores"][metric] - theirs[key]["scores"][metric] for key in ours])
    videos = np.array([sample["video"] for sample in ours.values()])
    found = clustered_interval(gains, videos)
    interval = f"{100 * found['low']:+.1f} to {100 * found['high']:+.1f}" if found else ""
    p = f"{paired_test(gains, videos):.4f}"
    return [f"{100 * gains.mean():+.1f}", interval, p, f"{tokens:.0f}", f"{its_tokens:.0f}"]


def _mean(samples: Any, name: str) -> float:
    values = [sample[name] for sample in samples]
    return sum(values) / len(values)


def _published(runs: Sequence[Run], table: PublishedTable) -> Table:
    rows: list[list[str | None]] = []
    for name, values in table.rows.items():
        task, metric = name.split("/")
        ours = [run.tasks.get(task, {}).get("metrics", {}).get(metric) for run in runs]
        if any(value is not None for value in ours):
            cells = [None if value is None else f"{value:.2f}" for value in ours]
            rows.append([name, *cells, *(f"{value:.2f}" for value in values)])
    note = (
        f"Published columns are copied from the QTSplus paper (arXiv 2511.11910, “{table.title}”; {table.settings}); "
        "they were not measured here. Bold and underlined are ours only."
    )
    head = ["task", *(run.label for run in runs), *(f"{name} (published)" for name in table.columns)]
    return Table(f"Beside the paper: {table.title}", head, rows, ranked=len(runs), note=note)


def _tokens(runs: Sequence[Run]) -> Table:
    rows: list[list[str | None]] = []
    for run in runs:
        for task, found in run.tasks.items():
            samples = found["samples"]
            total, kept = (_mean(samples, name) for name in ("visual_tokens", "kept_visual_tokens"))
            share = f"{kept / total:.1%}" if total else None
            failed = sum(sample["failed"] is not None for sample in samples)
            rows.append([task, run.label, str(len(samples)), f"{total:.0f}", f"{kept:.0f}", share, str(failed)])
    head = ["task", "run", "questions", "visual tokens", "kept", "share", "failed"]
    lines = [f"{line}." for run in runs for line in failures(run.tasks)]
    return Table("Tokens", head, rows, note=" ".join(["Means per question.", *lines]))


def _clues(runs: Sequence[Run]) -> Table:
    rows: list[list[str | None]] = []
    for run in runs:
        for task, found in run.tasks.items():
            samples = [sample for sample in found["samples"] if sample.get("clue_tokens")]
            if not samples:
                continue
            recall = sum(s["kept_clue_tokens"] / s["clue_tokens"] for s in samples) / len(samples)
            share = sum(s["kept_visual_tokens"] / s["visual_tokens"] for s in samples) / len(samples)
            rows.append([task, run.label, str(len(samples)), f"{recall:.1%}", f"{share:.1%}", f"{recall / share:.2f}"])
    head = ["task", "run", "questions", "clue recall", "kept of all tokens", "recall over chance"]
    note = "Clue recall is the share kept of the tokens in the seconds that the benchmark marks as clues."
    return Table("Clues", head, rows, note=note)


def _settings(runs: Sequence[Run]) -> Table:
    rows: list[list[str | None]] = []
    for run in runs:
        settings = {name: value for name, value in run.document["settings"].items() if value not in (None, {})}
        options = {name: value for name, value in settings.pop("options", {}).items() if value is not True}
        said = ", ".join(f"{name} {value}" for name, value in {**settings, **options}.items())
        versions = ", ".join(f"{name} {value}" for name, value in run.document["versions"].items())
        rows.append([run.label, said, versions, None])
    return Table("Settings", ["run", "settings", "versions", "logs"], rows)


# --------------------------------------------------------------------------------------------------------------------
# On paper
# --------------------------------------------------------------------------------------------------------------------


def write_report(runs: Sequence[Run], out: Path) -> list[Path]:
    """
    Writes the report as Markdown, as HTML, and its tables as JSON.

    Args:
        out: the Markdown file; the others stand beside it. All link the logs of every sample.

    Returns:
        The three files.
    """
    made = tables(runs)
    for row, run in zip(made[-1].rows, runs, strict=True):
        row[-1] = " ".join(
            f"[{path.stem.partition('_samples_')[2]}]({os.path.relpath(path, out.parent)})"
            for path in sorted((run.folder / "harness").glob("**/*_samples_*.jsonl"))
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    page, data = out.with_suffix(".html"), out.with_suffix(".json")
    out.write_text("\n".join(["# Evaluation", "", *map(_markdown, made)]), encoding="utf-8")
    page.write_text(_page(made), encoding="utf-8")
    data.write_text(
        json.dumps([asdict(table) for table in made], indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return [out, page, data]


def _ranks(table: Table) -> list[list[int | None]]:
    """Per cell 1 for the best of its row, 2 for the second; equal figures share a rank."""
    ranks: list[list[int | None]] = []
    for row in table.rows:
        values = [_number(cell) for cell in row[1 : 1 + table.ranked]]
        order = sorted({value for value in values if value is not None}, reverse=True)[:2]
        compared = sum(value is not None for value in values) > 1
        found = [order.index(value) + 1 if compared and value in order else None for value in values]
        ranks.append([None, *found, *[None] * (len(row) - 1 - len(found))])
    return ranks


def _number(cell: str | None) -> float | None:
    return None if cell is None else float(cell.split()[0])


def _markdown(table: Table) -> str:
    marks = {1: "**{}**", 2: "<u>{}</u>", None: "{}"}
    rows = [
        [marks[rank].format(cell) if cell else "" for cell, rank in zip(row, ranks, strict=True)]
        for row, ranks in zip(table.rows, _ranks(table), strict=True)
    ]
    lines = [table.head, ["---"] * len(table.head), *rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"## {table.title}\n\n{body}\n" + (f"\n{table.note}\n" if table.note else "")


def _page(made: Sequence[Table]) -> str:
    style = "body{font:15px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:3px 9px;text-align:left}"
    style += "tr{border-bottom:1px solid #ddd}th{border-bottom:2px solid}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Evaluation</title><style>{style}</style>'
        f"<h1>Evaluation</h1>{''.join(map(_html, made))}</html>\n"
    )


def _html(table: Table) -> str:
    marks = {1: "<b>{}</b>", 2: "<u>{}</u>", None: "{}"}
    head = "".join(f"<th>{html.escape(title)}</th>" for title in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{marks[rank].format(_cell(cell))}</td>" for cell, rank in zip(row, ranks, strict=True))
        for row, ranks in zip(table.rows, _ranks(table), strict=True)
    )
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return f"<h2>{html.escape(table.title)}</h2><table><tr>{head}</tr>{rows}</table>{note}"


def _cell(cell: str | None) -> str:
    """Text, in which `[name](address)` is a link."""
    return re.sub(r"\[([^]]*)\]\(([^)]*)\)", r'<a href="\2">\1</a>', html.escape(cell or ""))
