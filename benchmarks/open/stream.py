"""
What a stream of an hour still knows of its first ten minutes, by what stays in its memory.

`python -m benchmarks.open.stream MODEL` asks for four things of each stream at once and 50 minutes later, with a memory
of 512 tokens, and writes `stream.json` and `stream.md` to `benchmarks/results`. The scenes last 8 s and belong to the
world without a grid. The four things have names that nothing else in the stream ever has.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtsplus.hub.loading import load
from qtsplus.live.stream import Stream
from qtsplus.model.methods_qtsplus import Candidates

from ..files import run_from_command_line, write_result
from ..machine import environment
from ..tables import markdown_table
from ..world.open_questions import LEAST_SEEN
from ..world.open_sets import VARIANTS
from ..world.open_tokens import count_pixels
from ..world.openworld import OpenWorld, render_open
from ..world.scene import CELL
from ..world.splits import split_seed
from .measures import interval

FIRST = 400_000  # worlds of the test split that no other set begins with
SECONDS = 8  # of a scene
CELLS = 36  # visual tokens of a second
FRAME = (6 * CELL, 6 * CELL, 3)
NAMES = ("red ring", "green cross", "blue triangle", "yellow square")  # nothing else in a stream is called so
EARLY = 600  # seconds in which the things appear
LAGS = (0, 50)  # minutes from when a thing is seen last to the question
STREAMS = 10
HOUR = 3600
MEMORY = 512  # tokens
READ = 64  # tokens of the memory that are read for an answer

OLDEST_FIRST = "oldest first"
DIVERSITY = "diversity"
STANDING = "the standing question"
ANOTHER = "another standing question"
POLICIES = (OLDEST_FIRST, DIVERSITY, STANDING, ANOTHER)


@dataclass(frozen=True)
class Scene:
    """
    Eight seconds in which a thing appears that is asked for.

    Attributes:
        features: `[SECONDS * CELLS, d]`.
        question, answer: about the mark of the thing.
        gone: the second of the scene in which the thing is not seen any more.
    """

    features: torch.Tensor
    question: str
    answer: str
    gone: int


def newest(candidates: Candidates, n: int) -> torch.Tensor:
    """The n newest tokens: the oldest go first."""
    return candidates.positions[0].sort(stable=True).indices[-n:].sort().values


class Camera:
    """Makes scenes and encodes them."""

    def __init__(self, model: Any, processor: Any):
        self.model = model
        self.processor = processor
        self.seeds = count(FIRST)

    def worlds(self) -> Iterator[tuple[OpenWorld, set[str]]]:
        """Worlds that were not seen before, each with those of [`NAMES`] that its things have at any time."""
        for number in self.seeds:
            world = VARIANTS["plain"](split_seed("test", number), SECONDS)
            names = {f"{colour} {thing.shape}" for thing in world.things for colour in thing.colours}
            yield world, names & set(NAMES)

    def encode(self, world: OpenWorld) -> torch.Tensor:
        frames = render_open(world)
        pixels, grid = self.processor.preprocess_frames(frames, self.processor.grid_of(*frames.shape[:3]))
        return self.model.encode_videos(pixels, grid)[0]

    def background(self, seconds: int) -> torch.Tensor:
        """`[seconds * CELLS, d]` of scenes in which nothing has one of [`NAMES`]."""
        scenes: list[torch.Tensor] = []
        for world, names in self.worlds():
            if not names:
                scenes.append(self.encode(world))
            if len(scenes) * SECONDS >= seconds:
                break
        return torch.cat(scenes)

    def scene(self, name: str) -> Scene:
        """A scene in which a marked thing has this name, and nothing has another one of [`NAMES`]."""
        for world, names in self.worlds():
            if names != {name}:
                continue
            shown = count_pixels(world)
            for number, thing in enumerate(world.things):
                seen_well = shown.bodies[number].sum() >= LEAST_SEEN
                if thing.name == name and thing.mark is not None and seen_well:
                    last = int(shown.needle(number).max()) // CELLS
                    return Scene(self.encode(world), f"What is in the {name}?", thing.mark, last + 1)
        raise AssertionError("worlds never end")


@dataclass
class Recording:
    """An hour of features `[steps * CELLS, d]`, with the scenes that are asked for and the seconds where they begin."""

    features: torch.Tensor
    scenes: list[Scene]
    begins: list[int]

    def last_seen(self, number: int) -> int:
        """The second in which a thing is not seen any more."""
        return self.begins[number] + self.scenes[number].gone


def record(background: torch.Tensor, camera: Camera, number: int) -> Recording:
    """The background, with a scene for each of [`NAMES`] somewhere in its first ten minutes."""
    rng = np.random.default_rng([3, number])
    early = np.arange(2, min(EARLY, len(background) // CELLS) // SECONDS)
    places = sorted(rng.choice(early, len(NAMES), replace=False).tolist())
    scenes = [camera.scene(NAMES[index]) for index in rng.permutation(len(NAMES))]
    features = background.clone()
    for place, scene in zip(places, scenes, strict=True):
        features[place * SECONDS * CELLS : (place + 1) * SECONDS * CELLS] = scene.features
    return Recording(features, scenes, [place * SECONDS for place in places])


def replay(stream: Stream, features: torch.Tensor, stops: set[int]) -> Iterator[int]:
    """Gives a stream the features, scene by scene, and stops after some seconds."""
    camera = stream.camera("video", FRAME)
    total = len(features) // CELLS
    edges = sorted({*range(0, total, SECONDS), *stops, total})
    for first, last in pairwise(edge for edge in edges if edge <= total):
        stream.remember(camera, features[first * CELLS : last * CELLS], range(first, last))
        if last in stops:
            yield last


def ask_recording(model: Any, processor: Any, recording: Recording, policy: str) -> list[dict[str, Any]]:
    """Whether each question is answered right at each lag."""
    numbers = list(range(len(recording.scenes)))
    groups = [[number] for number in numbers] if policy in (STANDING, ANOTHER) else [numbers]
    answers = []
    for group in groups:
        question = None
        if policy == STANDING:
            question = recording.scenes[group[0]].question
        elif policy == ANOTHER:
            question = recording.scenes[(group[0] + 1) % len(numbers)].question
        stream = Stream(model, processor, memory_tokens=MEMORY, question=question)
        if policy == OLDEST_FIRST:
            stream.policy = newest
        asks = [(recording.last_seen(number) + 60 * lag, number, lag) for number in group for lag in LAGS]
        for second in replay(stream, recording.features, {second for second, _, _ in asks}):
            for _, number, lag in [ask for ask in asks if ask[0] == second]:
                scene = recording.scenes[number]
                said = stream.ask(scene.question, retention=1.0, max_visual_tokens=READ, max_new_tokens=4).answer
                answers.append({"policy": policy, "lag": lag, "right": said.rstrip(".") == scene.answer})
    return answers


def append_cost(model: Any, processor: Any, features: torch.Tensor, policy: str) -> list[float]:
    """Median milliseconds of remembering a second, by ten minutes of the stream; encoding is not counted."""
    question = f"What is in the {NAMES[0]}?" if policy == STANDING else None
    stream = Stream(model, processor, memory_tokens=MEMORY, question=question)
    camera = stream.camera("video", FRAME)
    spent = []
    for second in range(len(features) // CELLS):
        started = time.perf_counter()
        stream.remember(camera, features[second * CELLS : (second + 1) * CELLS], [second])
        spent.append(1000 * (time.perf_counter() - started))
    return [round(float(np.median(spent[first : first + 600])), 2) for first in range(0, len(spent), 600)]


def run_stream(folder: Path, out: Path, streams: int = STREAMS, seconds: int = HOUR) -> Path:
    """
    Asks every question with every policy, and times what remembering costs.

    Args:
        folder: a trained model.
        out: the folder of the results.
        streams: how many, of four questions each.
        seconds: of each; questions that would come later are left out.
    """
    model, processor = load(folder)
    camera = Camera(model, processor)
    background = camera.background(seconds)
    answers: list[dict[str, Any]] = []
    for number in range(streams):
        recording = record(background, camera, number)
        for policy in POLICIES:
            for answer in ask_recording(model, processor, recording, policy):
                answers.append({"stream": number, **answer})
        print(f"stream {number + 1} of {streams}", flush=True)
    document = {
        "environment": environment("cpu"),
        "model": folder.name,
        "streams": streams,
        "seconds": seconds,
        "rows": [_summed(answers, policy, lag) for policy in POLICIES for lag in LAGS],
        "milliseconds": {policy: append_cost(model, processor, background, policy) for policy in (DIVERSITY, STANDING)},
    }
    target = write_result(out / "stream.json", document, page(document))
    return target


def _summed(answers: list[dict[str, Any]], policy: str, lag: int) -> dict[str, Any]:
    """Right answers in percent, with their interval over streams."""
    chosen = [answer for answer in answers if (answer["policy"], answer["lag"]) == (policy, lag)]
    right = np.array([answer["right"] for answer in chosen], dtype=float)
    row: dict[str, Any] = {"policy": policy, "lag": lag, "questions": len(chosen)}
    if chosen:
        low, high = interval(right, np.array([answer["stream"] for answer in chosen]))
        row["right"] = [round(100 * float(value), 1) for value in (right.mean(), low, high)]
    return row


def page(document: dict[str, Any]) -> str:
    """Everything as Markdown."""
    rows = []
    for policy in POLICIES:
        shares = [row.get("right") for row in document["rows"] if row["policy"] == policy]
        rows.append([policy, *("{}% [{}, {}]".format(*share) if share else "" for share in shares)])
    questions = max(row["questions"] for row in document["rows"])
    costs = [[policy, *map(str, medians)] for policy, medians in document["milliseconds"].items()]
    blocks = len(costs[0]) - 1
    lines = [
        "# A stream",
        "",
        f"{document['streams']} streams of {document['seconds'] / 60:g} minutes with {CELLS} tokens a second, of which "
        f"{MEMORY} are remembered. {questions} questions for each figure, asked of {document['model']}: what is in a "
        "thing that was seen in the first ten minutes; a quarter is right by chance. For each answer the model reads "
        f"{READ} tokens of the memory. The name of the thing is that of nothing else in the stream, which helps what "
        "keeps unlike tokens. Intervals are 95%, with streams drawn again. This page is made by "
        "`python -m benchmarks.open.stream`.",
        "",
        *markdown_table(["what stays", *(f"{lag} minutes later" if lag else "at once" for lag in LAGS)], rows),
        "",
        "Milliseconds to remember a second that is encoded already, medians by ten minutes:",
        "",
        *markdown_table(["what stays", *(f"{10 * number} to {10 * number + 10}" for number in range(blocks))], costs),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_from_command_line(run_stream, __doc__, "folder")
