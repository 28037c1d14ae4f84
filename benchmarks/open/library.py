"""
Which video of a library answers a question about a thing that only one of its videos shows.

`python -m benchmarks.open.library MODEL WORK` indexes the videos of `benchmarks.open.choice`, asks 300 questions among
2, 20 and 50 of them, and writes `library.json` and `library.md` to `benchmarks/results`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtsplus.hub.loading import load
from qtsplus.library.indexing import index
from qtsplus.library.library import Library

from ..files import run_from_command_line, write_result
from ..machine import environment
from ..tables import markdown_table
from ..world.open_sets import VARIANTS
from .choice import SECONDS, VIDEOS, make_test_set
from .measures import interval

SIZES = (2, 20, 50)  # videos, of which one shows what is asked for
QUESTIONS = 300
PIECES = 4  # the answer is also read from so many of the best videos
READ_TOGETHER = 20  # in libraries of this size


@dataclass(frozen=True)
class Sought:
    """
    A question about a thing of one video.

    Attributes:
        video: the name of the video that shows the thing.
        question, answer: what is asked, and what is to be said.
        others: the names of the videos that never show such a thing.
    """

    video: str
    question: str
    answer: str
    others: list[str]


def seek_things(path: Path, count: int, least: int) -> list[Sought]:
    """
    Questions of a test set that name a thing which is there.

    Args:
        path: the JSONL file of a set of the variant "plain".
        count: how many, drawn by chance.
        least: how many of the other videos must not show the thing.
    """
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    shown = {Path(row["video"]).name: names_of(row["seed"]) for row in rows}
    sought = []
    for row in rows:
        video = Path(row["video"]).name
        named = [name for name in shown[video] if name in row["question"]]
        if not named:
            continue
        others = [other for other, names in shown.items() if not names & set(named)]
        if len(others) >= least:
            sought.append(Sought(video, row["question"], row["answer"], others))
    order = np.random.default_rng(0).permutation(len(sought))[:count]
    return [sought[place] for place in sorted(order)]


def names_of(seed: int) -> set[str]:
    """The names that the things of a world have at any time, such as "red circle"."""
    things = VARIANTS["plain"](seed, SECONDS).things
    return {f"{colour} {thing.shape}" for thing in things for colour in thing.colours}


def ask_library(library: Library, sought: list[Sought], size: int, pieces: int = 1) -> dict[str, Any]:
    """
    How often the right video is found and the question answered.

    Args:
        size: how many videos are asked about.
        pieces: how many of the best are read for the answer.
    """
    rng = np.random.default_rng(size)
    found = []
    right = []
    for one in sought:
        others = rng.choice(one.others, size - 1, replace=False).tolist()
        answer = library.ask(one.question, pieces=pieces, names=[one.video, *others], max_new_tokens=8)
        found.append(one.video in answer.video.split(", "))
        right.append(answer.answer.rstrip(".") == one.answer)
    videos = np.array([one.video for one in sought])
    return {"videos": size, "read": pieces, "found": _share(found, videos), "right": _share(right, videos)}


def _share(hits: list[bool], videos: np.ndarray) -> list[float]:
    """The percentage of hits with its interval over videos."""
    values = np.array(hits, dtype=float)
    return [round(100 * float(value), 1) for value in (values.mean(), *interval(values, videos))]


def run_library(folder: Path, work: Path, out: Path, videos: int = VIDEOS, sizes: tuple[int, ...] = SIZES) -> Path:
    """
    Indexes the videos, asks everything and writes the results.

    Args:
        folder: a trained model.
        work: the folder of the rendered videos and of the library.
        out: the folder of the results.
        videos: how many are rendered.
        sizes: of the libraries that are asked.
    """
    path = make_test_set(work, videos)
    model, processor = load(folder)
    place = work / f"library-{videos}"
    index(path.with_suffix(""), place, model, processor, name=str(folder.resolve()))
    library = Library(place, model, processor)
    sought = seek_things(path, QUESTIONS, max(sizes) - 1)
    rows = [ask_library(library, sought, size) for size in sizes]
    if READ_TOGETHER in sizes:
        rows.append(ask_library(library, sought, READ_TOGETHER, PIECES))
    document = {
        "environment": environment("cpu"),
        "model": folder.name,
        "questions": len(sought),
        "rows": rows,
    }
    target = write_result(out / "library.json", document, page(document))
    return target


def page(document: dict[str, Any]) -> str:
    """Everything as Markdown."""
    rows = []
    for row in document["rows"]:
        shares = ["{}% [{}, {}]".format(*row[name]) for name in ("found", "right")]
        rows.append([str(row["videos"]), str(row["read"]), f"{100 / row['videos']:.0f}%", *shares])
    head = ["videos", "read for the answer", "found by chance", "the right one is read", "right answers"]
    lines = [
        "# A library",
        "",
        f"{document['questions']} questions, each about a thing that one video of {SECONDS} s of the world without a "
        f"grid shows and the others never do, asked of {document['model']}. Intervals are 95%, with videos drawn "
        "again. This page is made by `python -m benchmarks.open.library`.",
        "",
        *markdown_table(head, rows, texts=0),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_from_command_line(run_library, __doc__, "folder", "work")
