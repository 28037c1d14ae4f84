"""How an index of a library fares as it grows: what it finds of what a scan finds, its time, disk and memory."""

import hashlib
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file
from transformers.video_utils import VideoMetadata

from qtsplus import nearest
from qtsplus.evidence import Interval
from qtsplus.indexing import SAMPLING, fingerprint, saved_video
from qtsplus.library import MADE, Index, Library
from qtsplus.nearest import Nearest, _save, _selector, grow
from qtsplus.output import whole_file
from qtsplus.ranking import Scorer
from qtsplus.videos import EncodedVideo, encode

from ..files import begin, finish
from ..machine import environment, steps
from ..tables import markdown_table
from ..world.crowd import make_crowd, render_crowd
from ..world.scene import FPS
from ..world.tinyworld import split_seed
from .world import SECONDS, make_library

STEPS = 384  # of an hour of which 768 frames are looked at, the default
TOP = 10
_HIDING = 200  # films with what the questions are about
_FIRST = 900_000  # of the other films' seeds
_MOVE = 3  # of 255, where codes of keys are moved
_SHARE = 0.02  # of the hours, those that are read whole by the mean of their keys; never fewer than ten


def run_growing(
    model: Any,
    processor: Any,
    out: Path,
    work: Path,
    *,
    hours: Sequence[int] = (1, 100),
    unique: int = 100,
    questions: int = 20,
    command: str = "",
    progress: bool = True,
) -> Path:
    """
    Writes `library-growing.json` and its page.

    Args:
        work: where features and the library are kept.
        hours: the sizes, ascending.
        unique: hours that are rendered. Of more there is the index alone, of these again and again, with moved keys.
        questions: how many are asked at each size.
    """
    worlds, hidden = make_library(_HIDING)
    asked = [one.question for one in hidden[:: max(1, len(hidden) // questions)]]
    made_by = fingerprint(model, processor)
    settings = {"made_by": made_by, "unique": unique, "questions": asked}
    out.mkdir(parents=True, exist_ok=True)
    journal = begin(out / ".library-growing.jsonl", settings)

    def features_of(hour: int) -> torch.Tensor:
        path = work / "hours" / f"{hour:03d}.safetensors"
        if not path.exists():
            films = range(hour * STEPS // SECONDS, (hour + 1) * STEPS // SECONDS)
            crowds = (worlds[n] if n < _HIDING else make_crowd(split_seed("test", _FIRST + n), SECONDS) for n in films)
            parts = [encode(model, processor, render_crowd(one), fps=FPS, device="cpu").features for one in crowds]
            with whole_file(path, "wb") as file:
                save_file({"features": torch.cat(parts)}, file.name)
        return load_file(path)["features"]

    folder = work / "library"
    sampling = {name: getattr(processor.video_processor, name, None) for name in SAMPLING}
    sampling |= {"start": None, "end": None, "max_pixels": None}
    folder.mkdir(parents=True, exist_ok=True)
    index = Index(folder, {"made_by": made_by, "dtype": "auto", **sampling})
    index.add(MADE, {"model": None, "revision": None, "videos": str(folder)})
    with steps("growing", len(hours), progress) as step:
        for size in hours:
            if size not in journal.done and size > unique:
                journal.add(size, _measure_large(Library(folder, model, processor), size, asked, work / str(size)))
            elif size not in journal.done:
                for hour in range(len(index.entries), size):
                    _add(index, hour, features_of(hour), made_by)
                building = _timed(grow, index, model, str)[1]
                row = {"building": building, **_measure(lambda: Library(folder, model, processor), asked)}
                row["bytes"] = {kind: sum(map(_size, folder.glob(f"*.{kind}"))) for kind in ("keys", "safetensors")}
                _add(index, size, features_of(size), made_by)
                row["one hour more"] = _timed(grow, index, model, str)[1]
                journal.add(size, row)
            step(f"{size} hours: {min(journal.done[size]['same'].values()):.1%} of the best {TOP}")
    document = {
        "command": command,
        "environment": environment(str(model.device)),
        "settings": {"steps an hour": STEPS, "unique": unique, "moved": _MOVE, "questions": len(asked)},
        "rows": {str(size): journal.done[size] for size in hours},
    }
    target = out / "library-growing.json"
    target.with_suffix(".md").write_text("\n".join(_page(document)) + "\n", encoding="utf-8")
    return finish(journal, target, document)


def _add(index: Index, hour: int, features: torch.Tensor, made_by: str) -> None:
    """Puts an hour into the library as a film of its own."""
    side = round((len(features) / STEPS) ** 0.5)
    about = VideoMetadata(
        total_num_frames=2 * STEPS, fps=2.0, width=28 * side, height=28 * side, frames_indices=[*range(2 * STEPS)]
    )
    video = EncodedVideo("frames", features, torch.tensor([[STEPS, 2 * side, 2 * side]]), [1.0], about, 0.0)
    content = hashlib.sha256(str(hour).encode()).hexdigest()
    entry: Any = {"size": 1, "modified": 1, "inode": hour, "changed": 1, "content": content, "error": None}
    with saved_video(video, index.file(entry), made_by) as stored:
        index.add(f"{hour:05d}.mp4", {**entry, "features": stored})


def _timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, dict[str, float]]:
    """What a call gives, and its seconds on the clock and of the processor: others may share the machine."""
    wall, processor = time.perf_counter(), time.process_time()
    result = call(*arguments)
    return result, {"clock": time.perf_counter() - wall, "processor": time.process_time() - processor}


def _measure(opened: Callable[[], Library], asked: Sequence[str]) -> dict[str, Any]:
    """Every question in three ways, once all that they read was read before."""
    row: dict[str, Any] = {"memory": {}, "questions": len(asked)}
    moments: dict[str, Sequence[list[Interval]]] = {}
    for way in ("find", "scan", "mean"):
        library, row[f"open {way}"] = _timed(opened)
        row["open index"] = row.get("open index") or _timed(lambda one=library: one.nearest)[1]
        if way != "find":
            library.nearest.files, library.nearest.films = [], set()
        call = _by_means(library) if way == "mean" else lambda question, own=library: own.find(question, TOP)
        row[f"first {way}"] = _timed(call, asked[-1])[1]
        for one in asked if way == "find" else ():
            call(one)  # a scan has read all after its first question
        moments[way], seconds = zip(*(_timed(call, one) for one in asked), strict=True)
        row[way] = {clock: float(np.median([one[clock] for one in seconds])) for clock in seconds[0]}
        row["memory"][way] = _memory()
    row["same"] = {way: float(np.mean([*map(_same, moments[way], moments["scan"])])) for way in ("find", "mean")}
    weights = [one[0].weight / right[0].weight for one, right in zip(moments["find"], moments["scan"], strict=True)]
    return {**row, "weight": [min(weights), max(weights)]}


def _by_means(library: Library) -> Callable[[str], list[Interval]]:
    """`find` in the hours whose mean key scores best."""
    layer = library.model.model.qtsplus.scoring_layers[-1]
    with torch.no_grad():
        width = layer.k_proj.in_features
        keys = (layer.keys(library.stored(name).features[:, :width].float()).mean(1) for name in library.names)
        means = torch.stack([key.flatten() for key in keys])

    def find(question: str) -> list[Interval]:
        scorer = Scorer(library.model, library.processor, question, lambda: ())
        hours = (scorer.scores.rows @ means.T).logsumexp(0)
        best = hours.topk(min(len(hours), max(TOP, round(_SHARE * len(hours))))).indices
        return library.find(question, TOP, [library.names[hour] for hour in best])

    return find


def _measure_large(base: Library, size: int, asked: Sequence[str], folder: Path) -> dict[str, Any]:
    """
    Of a library many times as large, whose index is written without its features: keys of repeated films are moved, and
    what is read of them is what they repeat. Its twin looks at all cells.
    """
    library, indexed = copy(base), [name for name in base.names if base.digests[name] in base.nearest.films]
    turns = range(round(size / len(indexed)))
    names = {f"{turn}/{name}": name for turn in turns for name in indexed}
    library.names = [*names]
    library.digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    library.__dict__["_video"] = lru_cache(lambda name: replace(base.stored(names[name]), video=name))
    named = {digest: name for name, digest in base.digests.items()}

    def write() -> None:
        generator = torch.Generator().manual_seed(size)
        most = max(len(file.keys) for file in base.nearest.files)
        width = base.nearest.files[0].keys.shape[1] - 4
        moves = torch.randint(0, _MOVE + 1, (most, width), dtype=torch.uint8, generator=generator)
        for turn in turns:
            for file in base.nearest.files:
                rows = file.keys.clone()
                rows[:, :-4] ^= moves.roll(1009 * turn, 0)[: len(rows)]
                films = [library.digests[f"{turn}/{named[film]}"] for film in file.films]
                _save(folder, {"selector": _selector(base.model), "films": " ".join(films)}, dict(file.tensors), rows)

    large = size > 1_000
    asked = asked[:3] if large else asked
    row: dict[str, Any] = {"memory": {}, "questions": len(asked), "same": {}, "writing": _timed(write)[1]}
    library.__dict__["nearest"], row["open index"] = _timed(Nearest, folder, base.model)
    row["first find"] = _timed(library.find, asked[-1], TOP)[1]
    for one in asked:
        library.find(one, TOP)
    found, seconds = zip(*(_timed(library.find, one, TOP) for one in asked), strict=True)
    row["find"] = {clock: float(np.median([one[clock] for one in seconds])) for clock in seconds[0]}
    row["memory"]["find"] = _memory()
    nearest.LOOK, few = 1.0, nearest.LOOK
    right, seconds = zip(*(_timed(library.find, one, TOP) for one in (asked[:1] if large else asked)), strict=True)
    nearest.LOOK, row["questions to all cells"] = few, len(right)
    row["all cells"] = {clock: float(np.median([one[clock] for one in seconds])) for clock in seconds[0]}
    row["same"]["all cells"] = float(np.mean([*map(_same, found, right)]))
    weights = [one[0].weight / other[0].weight for one, other in zip(found, right, strict=False)]
    return {**row, "weight": [min(weights), max(weights)], "bytes": {"keys": sum(map(_size, folder.glob("*.keys")))}}


def _same(moments: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Of the right moments, how many are among the others."""
    places = [{(moment.name, moment.start, moment.end) for moment in some} for some in (moments, right)]
    return len(places[0] & places[1]) / len(places[1])


def _memory() -> int:
    """Bytes of the process's own, without what it has mapped of files."""
    held = psutil.Process().memory_info()
    return held.rss - held.shared


def _size(path: Path) -> int:
    return path.stat().st_size


def _page(document: dict[str, Any]) -> list[str]:
    settings, rows = document["settings"], document["rows"]

    def line(name: str, of: Callable[[dict[str, Any]], str]) -> list[str]:
        cells = [name]
        for row in rows.values():
            try:
                cells.append(of(row))
            except KeyError:  # of large libraries not all is measured
                cells.append("")
        return cells

    def seconds(name: str) -> list[str]:
        return line(f"seconds, {name}", lambda row: f"{row[name]['processor']:.3f} ({row[name]['clock']:.2f})")

    def size(name: str, *keys: str) -> list[str]:
        return line(f"{name}, MB", lambda row: f"{row[keys[0]][keys[1]] / 1e6:,.0f}")

    most = max(int(hours) for hours, row in rows.items() if "scan" in row)
    scan = rows[str(most)]["scan"]["processor"] / most
    factors = {hours: scan * int(hours) / row["find"]["processor"] for hours, row in rows.items() if "scan" not in row}
    calculated = [f"{factors[hours]:.1f}" if hours in factors else "" for hours in rows]
    return [
        f"Libraries of crowds, {settings['steps an hour']} steps an hour. Seconds are of one core, and in brackets on "
        "the clock of a machine with other work. `find` asks with the index, `scan` reads all; `mean` reads the "
        f"{_SHARE:.0%} of the hours, and at least {TOP}, whose mean key scores best. Of more than "
        f"{settings['unique']} hours there is the index alone, of these again and again, their keys moved by at most "
        f"{settings['moved']} of 255; `all cells` is the index where it looks at everything. "
        f"Calculated is by the seconds that a scan of {most} hours takes for each.",
        "",
        "It loses below some tens of hours, and where few videos are asked about: these are read whole. A video is "
        "read whole when it is first brought, to find damage, and `index` reads all that is stored, for the same. "
        "Weights are estimates: what was not looked at counts as the middle of its cell.",
        "",
        f"`{document['command']}`",
        "",
        *markdown_table(
            ["hours", *(f"{int(hours):,}" for hours in rows)],
            [
                line("questions", lambda row: str(row["questions"])),
                line("questions to all cells", lambda row: str(row["questions to all cells"])),
                line(f"of the scan's best {TOP} moments, find", lambda row: f"{row['same']['find']:.1%}"),
                line(f"of the scan's best {TOP} moments, mean", lambda row: f"{row['same']['mean']:.1%}"),
                line(f"of the best {TOP} of all cells, find", lambda row: f"{row['same']['all cells']:.1%}"),
                *map(seconds, ("find", "mean", "scan", "all cells")),
                line("scan / find", lambda row: f"{row['scan']['processor'] / row['find']['processor']:.1f}"),
                ["scan / find, calculated", *calculated],
                *map(seconds, ("open find", "open index", "first find", "first scan", "building", "one hour more")),
                size("index on disk", "bytes", "keys"),
                size("features on disk", "bytes", "safetensors"),
                size("own memory after find", "memory", "find"),
                line("the best weight, of the twin's", lambda row: "{:.2f} to {:.2f}".format(*row["weight"])),
            ],
        ),
    ]


__all__ = ["run_growing"]
