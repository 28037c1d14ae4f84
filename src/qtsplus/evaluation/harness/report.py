"""`qtsplus eval report`: what runs found, side by side, as Markdown and JSON."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ...output import check_output, markdown_table, whole_file
from ..intervals import paired_gain, share_interval
from .run import failures, samples_log, scored

# Runs are compared where the other one keeps this many times our tokens: as many, or the few more of whole frames.
SAME_TOKENS = (0.95, 1.3)
TITLE = "# Evaluation"
_SAMPLE = {"doc_id", "video", "visual_tokens", "kept_visual_tokens", "failed", "scores"}


@dataclass(frozen=True)
class Run:
    """A folder that `qtsplus eval --tasks` has finished: a label of its model and selection, and its `run.json`."""

    folder: Path
    label: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    tasks: Mapping[str, Any]

    @property
    def selects(self) -> bool:
        """Whether the model chose by its own selector."""
        return self.settings["options"].get("selection") in (None, "qtsplus")

    def value(self, task: str, metric: str) -> float | None:
        return self.tasks.get(task, {}).get("metrics", {}).get(metric)

    def scored(self, task: str, metric: str) -> list[dict[str, Any]]:
        """The questions that a metric is about, where it scores them from 0 to 1."""
        samples = scored(self.tasks[task], metric) if task in self.tasks else []
        return samples if all(0 <= sample["scores"][metric] <= 1 for sample in samples) else []


@dataclass(frozen=True)
class Table:
    """
    One table of a report.

    Args:
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
    """The runs in some folders; a `ValueError` for one without a finished run."""
    runs = []
    for folder in folders:
        path = folder / "run.json"
        if not path.exists():
            raise ValueError(
                f"There is no run.json in {folder}; expected the folder of a finished `qtsplus eval --tasks`."
            )
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as JSON: {error}") from error
        if not _is_run(document):
            raise ValueError(f"{path} is no result of `qtsplus eval --tasks`.")
        runs.append(Run(folder, _label(document["settings"]), **document))
    labels = [run.label for run in runs]
    return [
        replace(run, label=f"{run.label} ({run.folder.name})") if labels.count(run.label) > 1 else run for run in runs
    ]


def _is_run(document: Any) -> bool:
    """Whether a run.json is one of ours."""
    if not isinstance(document, dict) or document.keys() != {"settings", "versions", "tasks"}:
        return False
    if not all(isinstance(part, dict) for part in (*document.values(), document["settings"].get("options"))):
        return False
    tasks = document["tasks"].values()
    return isinstance(document["settings"].get("model"), str) and all(
        isinstance(task, dict)
        and isinstance(task.get("metrics"), dict)
        and isinstance(samples := task.get("samples"), list)
        and len(samples) > 0
        and all(isinstance(sample, dict) and sample.keys() >= _SAMPLE for sample in samples)
        for task in tasks
    )


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


# --- Tables ---


def tables(runs: Sequence[Run]) -> list[Table]:
    """All that the runs say."""
    gains = _gains(runs)
    return [_accuracy(runs), *([gains] if gains.rows else []), _tokens(runs), _settings(runs)]


def _metrics(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Every task with every metric."""
    return list(
        dict.fromkeys((task, metric) for run in runs for task in run.tasks for metric in run.tasks[task]["metrics"])
    )


def _counts(runs: Sequence[Run], task: str, metric: str) -> list[str | None]:
    """How many questions and videos a metric is about; several numbers where the runs differ."""
    samples = [run.scored(task, metric) for run in runs if task in run.tasks]
    questions = dict.fromkeys(str(len(one)) for one in samples if one)
    videos = dict.fromkeys(str(len({sample["video"] for sample in one})) for one in samples if one)
    return [" / ".join(questions) or None, " / ".join(videos) or None]


def _accuracy(runs: Sequence[Run]) -> Table:
    rows: list[list[str | None]] = []
    for task, metric in _metrics(runs):
        cells = []
        for run in runs:
            value, samples = run.value(task, metric), run.scored(task, metric)
            videos = np.array([sample["video"] for sample in samples])
            interval = share_interval(np.array([sample["scores"][metric] for sample in samples]), videos)
            bounds = f" ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})" if interval else ""
            cells.append(None if value is None else f"{value:.2f}{bounds}")
        rows.append([f"{task}/{metric}", *cells, *_counts(runs, task, metric)])
    note = (
        "Percent, as lmms-eval gives it. In brackets the 95% interval of the mean over questions: Student's t over "
        "videos, and Clopper and Pearson's where all videos have the same mean."
    )
    head = ["task", *(run.label for run in runs), "questions", "videos"]
    return Table("Accuracy", head, rows, ranked=len(runs), note=note)


def _gains(runs: Sequence[Run]) -> Table:
    """Of every model's own selection over each other run that keeps as many tokens, on the same questions."""
    rows: list[list[str | None]] = []
    for own in runs:
        for other in runs:
            for task, metric in _metrics([own]) if own.selects and not other.selects else []:
                if (cells := _gain(own, other, task, metric)) is not None:
                    rows.append([f"{task}/{metric}", own.label, other.label, *cells, *_counts([own], task, metric)])
    fewest, most = SAME_TOKENS
    note = (
        "Points by which a model's own selection is better than another one on the same questions, where that keeps "
        f"from {fewest:.0%} to {most:.0%} of our tokens. Intervals are 95%, by videos; p is that of no gain, by the "
        "same interval."
    )
    head = ["task", "selection", "over", "gain", "95% interval", "p", "tokens", "its tokens", "questions", "videos"]
    return Table("Gains at equal tokens", head, rows, note=note)


def _gain(own: Run, other: Run, task: str, metric: str) -> list[str] | None:
    ours, theirs = ({sample["doc_id"]: sample for sample in run.scored(task, metric)} for run in (own, other))
    if not ours or ours.keys() != theirs.keys():
        return None
    tokens, its_tokens = (_mean(list(samples.values()), "kept_visual_tokens") for samples in (ours, theirs))
    fewest, most = SAME_TOKENS
    if not fewest * tokens <= its_tokens <= most * tokens:
        return None
    gains = np.array([ours[key]["scores"][metric] - theirs[key]["scores"][metric] for key in ours])
    gain = paired_gain(gains, np.array([sample["video"] for sample in ours.values()]))
    interval = f"{100 * gain['low']:+.1f} to {100 * gain['high']:+.1f}" if gain else ""
    p = f"{gain['p']:.4f}" if gain else ""
    return [f"{100 * gains.mean():+.1f}", interval, p, f"{tokens:.0f}", f"{its_tokens:.0f}"]


def _mean(samples: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(sample[name] for sample in samples) / len(samples)


def _tokens(runs: Sequence[Run]) -> Table:
    rows: list[list[str | None]] = []
    for run in runs:
        for name, task in run.tasks.items():
            samples = task["samples"]
            total, kept = (_mean(samples, count) for count in ("visual_tokens", "kept_visual_tokens"))
            share = f"{kept / total:.1%}" if total else None
            failed = sum(sample["failed"] is not None for sample in samples)
            counts = str(len(samples)), str(len({sample["video"] for sample in samples}))
            rows.append([name, run.label, *counts, f"{total:.0f}", f"{kept:.0f}", share, str(failed)])
    head = ["task", "run", "questions", "videos", "visual tokens", "kept", "share", "failed"]
    lines = [f"{line}." for run in runs for line in failures(run.tasks)]
    return Table("Tokens", head, rows, note=" ".join(["Means per question.", *lines]))


def _settings(runs: Sequence[Run]) -> Table:
    rows: list[list[str | None]] = []
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if value is not None and name != "options"}
        options = {name: value for name, value in run.settings["options"].items() if value is not True}
        cells = [", ".join(f"{name} {value}" for name, value in part.items()) for part in (settings, options)]
        versions = ", ".join(f"{name} {value}" for name, value in run.versions.items())
        rows.append([run.label, ", ".join(filter(None, cells)), versions])
    return Table("Settings", ["run", "settings", "versions"], rows)


# --- On paper ---


def write_report(runs: Sequence[Run], out: Path) -> list[Path]:
    """
    Writes the report as Markdown, and its tables as JSON.

    Args:
        out: the Markdown file, which links the logs of every sample; JSON stands beside it.

    Returns:
        The two files.

    Raises:
        ValueError: another name than one that ends with .md, or a file that is there and is no report.
    """
    if out.suffix != ".md":
        raise ValueError(f"The report is to be {out}; expected a name that ends with .md.")
    is_report = out.is_file() and out.read_text(encoding="utf-8", errors="replace").startswith(f"{TITLE}\n")
    paths = [check_output(out.with_suffix(suffix), overwrite=is_report) for suffix in (".md", ".json")]
    made = tables(runs)
    logs = [
        (f"{run.label}: {task}", quote(os.path.relpath(samples_log(run.folder, task), out.parent)))
        for run in runs
        for task in run.tasks
        if samples_log(run.folder, task).exists()
    ]
    texts = (_markdown(made, logs), json.dumps([asdict(table) for table in made], indent=1) + "\n")
    for path, text in zip(paths, texts, strict=True):
        with whole_file(path) as file:
            file.write(text)
    return paths


def _marked(table: Table) -> list[list[str]]:
    """Cells as text, with the best of a row in bold and the next underlined; equal figures share a mark."""
    marked = []
    for row in table.rows:
        cells = [cell or "" for cell in row]
        values = {place: float(cells[place].split()[0]) for place in range(1, 1 + table.ranked) if cells[place]}
        best = sorted(set(values.values()), reverse=True)
        for place, value in values.items() if len(values) > 1 else ():
            if value in best[:2]:
                cells[place] = f"**{cells[place]}**" if value == best[0] else f"<u>{cells[place]}</u>"
        marked.append(cells)
    return marked


def _markdown(made: Sequence[Table], logs: Sequence[tuple[str, str]]) -> str:
    lines = [TITLE]
    for table in made:
        lines += ["", f"## {table.title}", "", *markdown_table(table.head, _marked(table), texts=len(table.head))]
        lines += ["", table.note] if table.note else []
    lines += ["", "## Logs", "", *(f"- [{name}]({address})" for name, address in logs)] if logs else []
    return "\n".join(lines) + "\n"
