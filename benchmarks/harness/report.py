"""`python -m benchmarks report`: what runs found, side by side, as Markdown."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
from pydantic import Field, with_config
from typing_extensions import TypedDict

from qtsplus.common.files import check_output, whole_file
from qtsplus.common.journals import STORED
from qtsplus.common.validation import validated

from ..intervals import paired_gain, share_interval
from ..tables import markdown_table
from .run import failures, samples_log, scored

# Runs are compared where the other one keeps this many times our tokens: as many, or the few more of whole frames.
SAME_TOKENS = (0.95, 1.3)
TITLE = "# Evaluation"


@with_config(STORED)
class _Sample(TypedDict):
    doc_id: int | str
    video: str
    visual_tokens: int
    kept_visual_tokens: int
    failed: str | None
    scores: dict[str, float]


@with_config(STORED)
class _Task(TypedDict):
    metrics: dict[str, float]
    samples: Annotated[list[_Sample], Field(min_length=1)]


@with_config({**STORED, "extra": "allow"})
class _Settings(TypedDict):
    model: str
    options: dict[str, Any]


@with_config(STORED)
class _Document(TypedDict):
    settings: _Settings
    versions: dict[str, str]
    tasks: dict[str, _Task]


@dataclass(frozen=True)
class Run:
    """A finished `python -m benchmarks evaluate`: its folder, a label of model and selection, and its `run.json`."""

    folder: Path
    label: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    tasks: Mapping[str, Any]

    @property
    def selects(self) -> bool:
        """Whether the model chose by its own selector."""
        return self.settings["options"].get("selection") in (None, "qtsplus")

    def scored(self, task: str, metric: str) -> list[dict[str, Any]]:
        """The questions that a metric is about, where it scores them from 0 to 1."""
        samples = scored(self.tasks[task], metric) if task in self.tasks else []
        return samples if all(0 <= sample["scores"][metric] <= 1 for sample in samples) else []


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in some folders; a `ValueError` for one without a finished run."""
    runs = []
    for folder in folders:
        try:
            document = validated(_Document, json.loads((folder / "run.json").read_text(encoding="utf-8")))
        except (ValueError, RecursionError, OSError) as error:
            raise ValueError(f"{folder} has no run.json of a finished run: {error}") from error
        runs.append(Run(folder, _label(document["settings"]), **document))
    labels = [run.label for run in runs]
    return [
        replace(run, label=f"{run.label} ({run.folder.name})") if labels.count(run.label) > 1 else run for run in runs
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


def write_report(runs: Sequence[Run], out: Path) -> Path:
    """
    Writes the report, which links the logs of every sample.

    Raises:
        ValueError: another name than one that ends with .md, or a file that is there and is no report.
    """
    if out.suffix != ".md":
        raise ValueError(f"The report is to be {out}; expected a name that ends with .md.")
    is_report = out.is_file() and out.read_text(encoding="utf-8", errors="replace").startswith(f"{TITLE}\n")
    check_output(out, overwrite=is_report)
    lines = [TITLE, *_accuracy(runs), *_gains(runs), *_tokens(runs), *_settings(runs, out)]
    with whole_file(out) as file:
        file.write("\n".join(lines) + "\n")
    return out


def _table(title: str, head: list[str], rows: list[list[str]], note: str) -> list[str]:
    return ["", f"## {title}", "", *markdown_table(head, rows, texts=len(head)), "", note] if rows else []


def _metrics(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Every task with every metric."""
    return list(
        dict.fromkeys((task, metric) for run in runs for task in run.tasks for metric in run.tasks[task]["metrics"])
    )


def _counts(runs: Sequence[Run], task: str, metric: str) -> list[str]:
    """How many questions and videos a metric is about; several numbers where the runs differ."""
    samples = [run.scored(task, metric) for run in runs]
    questions = dict.fromkeys(str(len(one)) for one in samples if one)
    videos = dict.fromkeys(str(len({sample["video"] for sample in one})) for one in samples if one)
    return [" / ".join(questions), " / ".join(videos)]


def _accuracy(runs: Sequence[Run]) -> list[str]:
    rows = []
    for task, metric in _metrics(runs):
        cells = []
        for run in runs:
            value, samples = run.tasks.get(task, {"metrics": {}})["metrics"].get(metric), run.scored(task, metric)
            videos = np.array([sample["video"] for sample in samples])
            interval = share_interval(np.array([sample["scores"][metric] for sample in samples]), videos)
            bounds = f" ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})" if interval else ""
            cells.append("" if value is None else f"{value:.2f}{bounds}")
        rows.append([f"{task}/{metric}", *cells, *_counts(runs, task, metric)])
    note = (
        "Percent, as lmms-eval gives it. In brackets the 95% interval of the mean over questions: Student's t over "
        "videos, and Clopper and Pearson's where all videos have the same mean."
    )
    return _table("Accuracy", ["task", *(run.label for run in runs), "questions", "videos"], rows, note)


def _gains(runs: Sequence[Run]) -> list[str]:
    """Of every model's own selection over each other run that keeps as many tokens, on the same questions."""
    rows = []
    for own in runs:
        for other in runs:
            for task, metric in _metrics([own]) if own.selects and not other.selects else []:
                if cells := _gain(own, other, task, metric):
                    rows.append([f"{task}/{metric}", own.label, other.label, *cells, *_counts([own], task, metric)])
    fewest, most = SAME_TOKENS
    note = (
        "Points by which a model's own selection is better than another one on the same questions, where that keeps "
        f"from {fewest:.0%} to {most:.0%} of our tokens. Intervals are 95%, by videos; p is that of no gain, by the "
        "same interval."
    )
    head = ["task", "selection", "over", "gain", "95% interval", "p", "tokens", "its tokens", "questions", "videos"]
    return _table("Gains at equal tokens", head, rows, note)


def _gain(own: Run, other: Run, task: str, metric: str) -> list[str]:
    ours, theirs = ({sample["doc_id"]: sample for sample in run.scored(task, metric)} for run in (own, other))
    if not ours or ours.keys() != theirs.keys():
        return []
    tokens, its_tokens = (_mean(list(samples.values()), "kept_visual_tokens") for samples in (ours, theirs))
    fewest, most = SAME_TOKENS
    if not fewest * tokens <= its_tokens <= most * tokens:
        return []
    gains = np.array([ours[key]["scores"][metric] - theirs[key]["scores"][metric] for key in ours])
    gain = paired_gain(gains, np.array([sample["video"] for sample in ours.values()]))
    interval = f"{100 * gain['low']:+.1f} to {100 * gain['high']:+.1f}" if gain else ""
    p = f"{gain['p']:.4f}" if gain else ""
    return [f"{100 * gains.mean():+.1f}", interval, p, f"{tokens:.0f}", f"{its_tokens:.0f}"]


def _mean(samples: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(sample[name] for sample in samples) / len(samples)


def _tokens(runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        for name, task in run.tasks.items():
            samples = task["samples"]
            total, kept = (_mean(samples, count) for count in ("visual_tokens", "kept_visual_tokens"))
            failed = sum(sample["failed"] is not None for sample in samples)
            counts = str(len(samples)), str(len({sample["video"] for sample in samples}))
            rows.append([name, run.label, *counts, f"{total:.0f}", f"{kept:.0f}", str(failed)])
    head = ["task", "run", "questions", "videos", "visual tokens", "kept", "failed"]
    lines = [f"{line}." for run in runs for line in failures(run.tasks)]
    return _table("Tokens", head, rows, " ".join(["Means per question.", *lines]))


def _settings(runs: Sequence[Run], out: Path) -> list[str]:
    """What each run was, with the logs of its tasks."""
    lines = ["", "## Settings", ""]
    for run in runs:
        named = {**run.settings, **run.settings["options"], **run.versions, "options": None}
        parts = [f"{name} {value}" for name, value in named.items() if value is not None and value is not True]
        for task in run.tasks:
            if (log := samples_log(run.folder, task)).exists():
                parts.append(f"[{task}]({quote(os.path.relpath(log, out.parent))})")
        lines.append(f"- {run.label}: {', '.join(parts)}")
    return lines
