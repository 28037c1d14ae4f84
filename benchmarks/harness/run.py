"""Runs lmms-eval in processes of its own, and keeps what it found, or says what is wrong with it."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from qtsplus import __version__
from qtsplus.common.files import check_folder, whole_file
from qtsplus.common.journals import write_json

from . import record_tasks

# Of lmms-eval 0.7.3. TempCompass is the paper's part with options; its captions need another model as a judge.
PAPER = (
    "tempcompass_multi_choice",
    "videomme",
    "videomme_w_subtitle",
    "videomme_long",
    "video_mmmu",
    "lvbench",
    "mlvu_dev",
    "mlvu_test",
    "mvbench",
    "longvideobench_val_v",
)

# Metrics that are given as a share; the others of these benchmarks are percentages. Reports speak of percentages.
SHARES = frozenset({"exact_match", "lvb_acc", "lvbench_score", "mmmu_acc"})

HARNESS = "lmms-eval"
RECORDS = ".jsonl"  # what a task of one's own records ends with
_WRITTEN = ("run.json", "answers", "samples", "tasks", "harness", "harness.log")  # in the folder of a run
_PACKAGES = (HARNESS, "transformers", "torch", "av")
_MATH_VERIFY = (
    "The math_verify that lmms-eval pins lacks this module; "
    '`pip install --upgrade "math-verify>=0.8"` mends the tasks with it, and breaks mathvision, stare and emma.'
)


class HarnessError(RuntimeError):
    """lmms-eval ended without a result that can be believed."""


@dataclass(frozen=True)
class Settings:
    """
    What decides the answers of a run.

    Args:
        tasks: names of lmms-eval with commas between them, `paper`, or JSONL files of records.
        options: of the plugin, such as `{"retention": 0.1}`; those that are `None` are left out.
        limit: the first questions of each task.
    """

    model: str
    tasks: str
    options: Mapping[str, Any]
    revision: str | None = None
    dtype: str = "auto"
    limit: int | None = None

    def as_dict(self) -> dict[str, Any]:
        chosen = {name: value for name, value in self.options.items() if value is not None}
        return {**asdict(self), "options": chosen}


def run(
    settings: Settings,
    out: Path,
    *,
    processes: int = 1,
    batch_size: int = 1,
    device: str | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """
    Evaluates a model, or goes on with a run that was stopped, and writes `<out>/run.json` with all that it found.

    Args:
        out: a folder; beside the result it holds the answers, the harness's log, and as `samples/TASK.jsonl` what the
            harness logged of every question.
        processes: that share the questions, with `batch_size` prompts at a time in each, on a GPU each where there are
            any and no `device` is named.

    Returns:
        What `run.json` holds: `settings`, `versions` and `tasks`, see [`collect`].

    Raises:
        ValueError: lmms-eval is not installed; another run's folder; a name that the harness could not take.
        HarnessError: the harness failed, or left no result, or not every sample.
    """
    if find_spec("lmms_eval") is None:
        raise ValueError(
            "lmms-eval is not installed. It comes with the extra `eval`: in a clone of this repository, run "
            '`pip install -e ".[eval]"`.'
        )
    tasks, folder = resolve(settings.tasks), out / "tasks"
    command = _command(settings, tasks, out, processes, batch_size, device)
    _claim(out, settings)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for task in tasks:
        if task.endswith(RECORDS):
            record_tasks.write_task(task, folder)
    log = out / "harness.log"
    say(f"lmms-eval is running; its log is {log}.")
    shutil.rmtree(out / "harness", ignore_errors=True)  # of an earlier start
    environment = {**os.environ, "HF_HOME": HF_HOME}  # some of its tasks cannot be read without
    with log.open("w", encoding="utf-8") as lines:
        done = subprocess.run(command, env=environment, stdout=lines, stderr=subprocess.STDOUT, check=False)
    code = done.returncode
    if code:
        raise HarnessError(f"lmms-eval ended with exit code {code}: {_last_error(log)} The log is {log}.")
    result = {"settings": settings.as_dict(), "versions": _versions(), "tasks": collect(out / "harness", log)}
    # Under a name that stays: the harness puts the time into its own, and reports link these.
    for task in result["tasks"]:
        with whole_file(samples_log(out, task)) as file:
            file.write(_left(out / "harness", task).read_text(encoding="utf-8"))
    write_json(out / "run.json", result)
    return result


def resolve(tasks: str) -> list[str]:
    """The tasks of a list with commas, each once; `paper` stands for all of the paper's."""
    names = [name.strip() for name in tasks.split(",")]
    if not all(names):
        raise ValueError(f"--tasks is {tasks!r}; expected names with commas between them, such as videomme,lvbench.")
    return list(dict.fromkeys(task for name in names for task in (PAPER if name == "paper" else (name,))))


def samples_log(out: Path, task: str) -> Path:
    """What the harness logged of every question of a task."""
    return out / "samples" / f"{task}.jsonl"


def _claim(out: Path, settings: Settings) -> None:
    """A folder belongs to the settings of its first run: two would mix their answers."""
    check_folder(out)
    path, wanted = out / "settings.json", json.loads(json.dumps(settings.as_dict()))
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != wanted:
            raise ValueError(f"{path} is of a run with other settings; choose another folder with --out.")
    elif taken := [name for name in _WRITTEN if (out / name).exists()]:
        raise ValueError(f"{out} holds {taken[0]}, which is not of a run; choose another folder with --out.")
    write_json(path, wanted)


def _command(
    settings: Settings, tasks: Sequence[str], out: Path, processes: int, batch_size: int, device: str | None
) -> list[str]:
    given = {
        "pretrained": settings.model,
        "revision": settings.revision,
        "dtype": settings.dtype,
        **settings.as_dict()["options"],
        "answers": out / "answers",
    }
    for name, value in given.items():
        if set(str(value)) & set(",=\"'{}[]"):
            raise ValueError(f"{name} is {str(value)!r}; lmms-eval takes no comma, equals sign, quote or bracket.")
    names = [Path(task).stem if task.endswith(RECORDS) else task for task in tasks]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"Two files of records are named {repeated[0]}; rename one, since its task has that name.")
    many = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m"]
    return [
        *(sys.executable, "-m", *(many if processes > 1 else []), "benchmarks.harness", "--model", "qtsplus"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in given.items() if value is not None)),
        *("--tasks", ",".join(names), "--include_path", str(out / "tasks")),
        *("--batch_size", str(batch_size)),
        *("--output_path", str(out / "harness"), "--log_samples"),
        # Else it prints a failure and ends with exit code 0.
        *("--verbosity", "DEBUG"),
        *([] if settings.limit is None else ["--limit", str(settings.limit)]),
        *([] if device is None else ["--device", device]),
    ]


def _last_error(log: Path) -> str:
    """The last line of the log that names an error."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and not line.startswith(("torch.distributed", "raise"))]
    error = (named or lines or ["it said nothing."])[-1][:500]
    return f"{error}. {_MATH_VERIFY}" if "latex2sympy2_extended" in error else error


def _versions() -> dict[str, str]:
    return {"qtsplus": __version__, **{name: version(name) for name in _PACKAGES}, "python": platform.python_version()}


# --- What the harness left ---


def collect(folder: Path, log: Path) -> dict[str, Any]:
    """
    The tasks of a run.

    Returns:
        Per task `metrics` by name, in percent where we know the harness's unit; `samples`, what every question came to:
        its `doc_id`, `video`, `visual_tokens`, `kept_visual_tokens`, `failed` and its `scores` by metric, from 0 to 1,
        where the harness logs them in a form that we know.

    Raises:
        HarnessError: there is no result, or not one of every question.
    """
    results = sorted(folder.glob("**/*_results.json"))
    if len(results) != 1:
        raise HarnessError(f"lmms-eval left {len(results)} results; expected one. The log is {log}.")
    document = json.loads(results[0].read_text(encoding="utf-8"))
    tasks: dict[str, Any] = {}
    for task, counts in document["n-samples"].items():
        metrics = document["higher_is_better"][task]
        path = _left(folder, task)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
        if not lines or len({line["doc_id"] for line in lines}) != int(counts["effective"]):
            raise HarnessError(
                f"lmms-eval logged {len(lines)} of {int(counts['effective'])} samples of {task}. The log is {log}."
            )
        tasks[task] = {
            "metrics": _metrics(document["results"][task], metrics),
            "samples": [_sample(line, metrics) for line in sorted(lines, key=lambda line: line["doc_id"])],
        }
    return tasks


def _left(folder: Path, task: str) -> Path:
    """Where the harness logged the samples of a task."""
    return next(folder.glob(f"**/*_samples_{task}.jsonl"), folder / f"no_samples_{task}.jsonl")


def scored(task: Mapping[str, Any], metric: str) -> list[dict[str, Any]]:
    """The questions of a task that a metric is about, as far as the harness logs that."""
    return [sample for sample in task["samples"] if metric in sample["scores"]]


def _metrics(results: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, float]:
    values = {}
    for name, value in results.items():
        metric = name.split(",")[0]
        if metric in metrics and isinstance(value, (int, float)):
            values[metric] = value * 100 if metric in SHARES else value
    return values


def _sample(line: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    (counts,) = line["token_counts"]
    kept = {name: counts[name] for name in ("video", "visual_tokens", "kept_visual_tokens", "failed")}
    scores = {metric: _score(line[metric]) for metric in metrics if metric in line}
    scores = {metric: score for metric, score in scores.items() if score is not None}
    return {"doc_id": line["doc_id"], **kept, "scores": scores}


def _score(logged: Any) -> float | None:
    """What a task made of one answer, from 0 to 1; each benchmark logs it in its own way."""
    if isinstance(logged, (bool, int, float)):
        return float(logged)
    if not isinstance(logged, Mapping):
        return None
    for name in ("score", "rating"):
        if isinstance(logged.get(name), (bool, int, float)):
            return float(logged[name])
    for name in ("pred_answer", "parsed_pred"):
        if name in logged and "answer" in logged and isinstance(logged["answer"], str):
            return float(logged[name] == logged["answer"])
    return None


def failures(tasks: Mapping[str, Any]) -> list[str]:
    """One line per video that failed: how many questions of it count as wrong, and why."""
    reasons = Counter(
        (task, sample["video"], sample["failed"])
        for task, result in tasks.items()
        for sample in result["samples"]
        if sample["failed"] is not None
    )
    return [
        f"{task}: {count} question{'s' if count > 1 else ''} about {video} failed and count as wrong: {reason}"
        for (task, video, reason), count in reasons.items()
    ]
