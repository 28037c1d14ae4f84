"""A stream of one hour with a memory of a few hundred tokens: what each policy still knows, and what appending costs.

Two scenes. In the crowd twenty objects are there at all times and change by the second. In the room a camera looks at
what stands still, and somebody passes every half minute. In both an object of a name that nothing else has appears for
a few seconds in the first ten minutes, and is asked for at once and later. Frames have a camera's noise. Everything is
encoded once, and each policy is given the features: frames of one step see those of no other.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.video_utils import VideoMetadata

from qtsplus.asking import ranking
from qtsplus.common.files import check_output
from qtsplus.common.journals import write_json
from qtsplus.evaluation.labelled import sighting_tokens
from qtsplus.live.stream import Stream
from qtsplus.model.methods_qtsplus import Candidates, changes, most_relevant
from qtsplus.training.models import make_model, make_processor

from .bases import CROWD
from .exact_match import compress
from .intervals import share_interval
from .machine import environment, steps
from .tables import markdown_table
from .world.crowd import MARKS, NAMES, Crowd, CrowdObject, make_crowd, render_crowd
from .world.haystack import HIDDEN, _needle, _without_hidden
from .world.scene import CELL, FPS, GRID, sightings
from .world.tinyworld import split_seed

SECONDS = 8  # of a scene, many of which make an hour
LAGS = (0, 5, 20, 50)  # minutes between the last sight of an object and the question
FIRST = 600  # seconds in which the objects appear that are asked for
NOISE = 2.0  # standard deviation of a pixel, of 255
PASSING = 4  # of so many scenes of the room one has somebody who passes
CELLS = GRID * GRID
READ = 64  # tokens of the memory, for each answer
KINDS = ("crowd", "room")
FRAME = (GRID * CELL, GRID * CELL, 3)
_SCENES, _ROOM = 700_000, 800_000


class Chance(ranking.StandingQuestion):
    """Uniform thinning, in the place of a standing question: each token is rated once, by chance."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def add(self, features: torch.Tensor) -> torch.Tensor:
        """`[k, 1]`, the ratings of new tokens `[k, d]`."""
        return torch.rand(len(features), 1, generator=self.generator)

    def log_relevance(self, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, 0]


class Change(Chance):
    """Redundancy: a token is rated by how much it differs from the same place one step earlier."""

    def __init__(self) -> None:
        self.before = torch.empty(0)

    def add(self, features: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.before, features]) if len(self.before) else features
        grid, nowhere = (len(joined) // CELLS, 1, CELLS), torch.empty(3, 0)
        change = changes(Candidates([joined], joined[:0], nowhere, [grid], lambda states: states))
        new = change[len(self.before) :, None]
        self.before = features[-CELLS:].clone()
        return new


def newest(candidates: Candidates, n: int) -> torch.Tensor:
    """The n newest tokens: the oldest go first."""
    return candidates.positions[0].sort(stable=True).indices[-n:].sort().values


RATINGS = {"uniform": Chance, "redundancy": Change}


class Rival(NamedTuple):
    """A row of the table; `tokens` in place of the memory's, `another` question stands than the one that is asked."""

    name: str
    policy: str  # "question", "diversity" or "oldest_first", or one of the `RATINGS`
    tokens: int | None = None
    another: bool = False
    lags: tuple[int, ...] = LAGS


RIVALS = (
    Rival("the last four frames", "oldest_first", 2 * CELLS),
    Rival("oldest first", "oldest_first"),
    Rival("uniform thinning", "uniform"),
    Rival("redundancy", "redundancy"),
    Rival("diversity", "diversity"),
    Rival("standing question", "question"),
    Rival("another standing question", "question", another=True),
    Rival("everything, without a bound", "oldest_first", 10**9, lags=LAGS[-1:]),  # asking takes seconds
)


@dataclass(frozen=True)
class Asked:
    """An object that passes: the features `[8 * CELLS, d]` of its scene, question and answer, when and where."""

    features: torch.Tensor
    question: str
    answer: str
    tokens: np.ndarray  # that show it, counted from the scene's first
    gone: int  # the step of the scene in which it is not seen any more


def room() -> Crowd:
    """What stands in front of the camera all the time."""
    world = _without_hidden(make_crowd(split_seed("test", _ROOM), SECONDS, max_objects=12))
    standing = [item for item in world.objects if item.is_visible(0)]
    kept = [replace(item, appears_at=0, vanishes_at=SECONDS, direction=None, distance=0) for item in standing]
    return replace(world, objects=tuple(kept), drift=(0, 0))


def passing(world: Crowd, rng: np.random.Generator, name: tuple[str, str] | None = None) -> tuple[Crowd, CrowdObject]:
    """The room with one object more, of this name or of one that nothing in it has, for two to seven seconds."""
    taken = {(int(item.start[1]) // CELL, int(item.start[0]) // CELL) for item in world.objects}
    free = [cell for cell in np.ndindex(GRID, GRID) if cell not in taken]
    row, column = free[rng.integers(len(free))]
    used = {(item.colour, item.shape) for item in world.objects} | set(HIDDEN)
    others = [one for one in NAMES if one not in used]
    colour, shape = name or others[rng.integers(len(others))]
    begin = int(rng.integers(0, 3))
    place = (column * CELL + CELL / 2, row * CELL + CELL / 2)
    mark = MARKS[rng.integers(len(MARKS))]
    end = begin + int(rng.integers(2, 6))
    item = CrowdObject(colour, shape, begin, end, start=place, side=26, mark=mark)
    return replace(world, objects=(*world.objects, item)), item


class Scenes:
    """The scenes of one kind of stream, encoded."""

    def __init__(self, model: Any, processor: Any, kind: str):
        self.model, self.processor, self.kind = model, processor, kind
        self.room = room()
        self.noise = np.random.default_rng(0)

    def world(self, index: int) -> Crowd:
        """A scene in which nothing has a hidden name."""
        if self.kind == "crowd":
            return _without_hidden(make_crowd(split_seed("test", _SCENES + index), SECONDS))
        return self.room if index % PASSING else passing(self.room, np.random.default_rng([1, index]))[0]

    def asked(self, index: int) -> Asked:
        """A scene with an object to ask for."""
        rng, name = np.random.default_rng([2, index]), HIDDEN[index % len(HIDDEN)]
        world, item = _needle(index, SECONDS) if self.kind == "crowd" else passing(self.room, rng, name)
        tokens = sighting_tokens(sightings(item), (SECONDS, GRID, GRID))
        return Asked(self.encode(world), f"What is in the {item.name}?", item.mark, tokens, item.vanishes_at)

    def frames(self, world: Crowd) -> np.ndarray:
        frames = render_crowd(world)
        noisy = frames + self.noise.normal(0, NOISE, frames.shape).astype(np.float32)
        return np.clip(noisy, 0, 255).astype(np.uint8)

    def encode(self, world: Crowd) -> torch.Tensor:
        frames = self.frames(world)
        grid = self.processor.grid_of(*frames.shape[:3])
        pixels, grid = self.processor.preprocess_frames(frames, grid)
        return self.model.encode_videos(pixels, grid)[0]


@dataclass
class Film:
    """An hour of features `[steps * CELLS, d]`, with four objects to ask for and the step where each scene begins."""

    features: torch.Tensor
    asked: list[Asked]
    begins: list[int]


def film(background: torch.Tensor, scenes: Scenes, number: int) -> Film:
    """The background with four scenes in its first ten minutes replaced."""
    rng = np.random.default_rng([3, number])
    places = sorted(rng.choice(np.arange(2, FIRST // SECONDS), len(HIDDEN), replace=False).tolist())
    asked = [scenes.asked(number * len(HIDDEN) + index) for index in range(len(HIDDEN))]
    features = background.clone()
    for place, one in zip(places, asked, strict=True):
        features[place * SECONDS * CELLS : (place + 1) * SECONDS * CELLS] = one.features
    return Film(features, asked, [place * SECONDS for place in places])


def replay(stream: Stream, features: torch.Tensor, stops: Iterable[int]) -> Iterator[int]:
    """Gives a stream features, scene by scene, and stops in front of some steps."""
    camera, total = stream.camera("video", (GRID * CELL, GRID * CELL, 3)), len(features) // CELLS
    wanted = {step for step in stops if step <= total}
    for first, last in pairwise(sorted({*range(0, total, SECONDS), *wanted, total})):
        stream.remember(camera, features[first * CELLS : last * CELLS], range(first, last))
        if last in wanted:
            yield last


def ask_film(model: Any, processor: Any, shown: Film, rival: Rival, tokens: int) -> list[dict[str, Any]]:
    """Every question of a film at every lag, with one policy and a memory of so many tokens."""
    numbers, answers = list(range(len(shown.asked))), []
    for group in [[number] for number in numbers] if rival.policy == "question" else [numbers]:
        other = (group[0] + rival.another) % len(numbers)
        question = shown.asked[other].question if rival.policy == "question" else None
        memory = rival.tokens or tokens
        policy = {"oldest_first": newest, **dict.fromkeys(RATINGS, most_relevant)}.get(rival.policy)
        stream = Stream(model, processor, memory_tokens=memory, policy=policy, question=question)
        if rival.policy in RATINGS:
            stream.question = RATINGS[rival.policy]()
        gone = {number: shown.begins[number] + shown.asked[number].gone for number in group}
        asks = [(gone[number] + 60 * lag, number, lag) for number in group for lag in rival.lags]
        for step in replay(stream, shown.features, [step for step, _, _ in asks]):
            for number, lag in [(number, lag) for at, number, lag in asks if at == step]:
                answers.append({"question": number, "lag": lag, **_ask(stream, shown, number)})
    return answers


def _ask(stream: Stream, shown: Film, number: int) -> dict[str, Any]:
    one = shown.asked[number]
    answer = stream.ask(one.question, retention=1.0, max_visual_tokens=READ, max_new_tokens=4)
    tokens = stream.cameras["video"].tokens
    places = tokens.steps.numpy() * CELLS + tokens.cells.numpy()
    there = np.isin(one.tokens + shown.begins[number] * CELLS, places)
    return {"correct": answer.answer == one.answer, "remembered": bool(there.any())}


# --------------------------------------------------------------------------------------------------------------------
# What it costs
# --------------------------------------------------------------------------------------------------------------------


def append_cost(model: Any, processor: Any, scenes: Scenes, policy: str, tokens: int, seconds: int) -> dict[str, Any]:
    """Milliseconds of each append of two frames, and megabytes of the process, by ten minutes of the stream."""
    question = f"What is in the {' '.join(HIDDEN[0])}?" if policy == "question" else None
    stream = Stream(model, processor, memory_tokens=tokens, question=question)
    blocks: list[dict[str, float]] = []
    spent: list[float] = []
    for index in range(seconds // SECONDS):
        for second, frames in enumerate(scenes.frames(scenes.world(index)).reshape(SECONDS, FPS, *FRAME)):
            started = time.perf_counter()
            stream.append(frames)
            spent.append(1000 * (time.perf_counter() - started))
            if (index * SECONDS + second + 1) % 600 == 0:
                ends = {"milliseconds": float(np.median(spent)), "tokens": stream.num_tokens}
                blocks.append({**ends, "resident_mb": _resident_mb()})
                spent.clear()
    return {"policy": policy, "blocks": blocks}


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def drift(model: Any, processor: Any, features: torch.Tensor, tokens: int) -> dict[str, float]:
    """How far relevance that was merged for an hour is from that of the whole hour, and which tokens it left."""
    question = f"What is in the {' '.join(HIDDEN[0])}?"
    stream = Stream(model, processor, memory_tokens=tokens, question=question)
    list(replay(stream, features, []))
    held = stream.cameras["video"].tokens
    places = held.steps * CELLS + held.cells
    steps = len(features) // CELLS
    grid = torch.tensor([[steps, 2 * GRID, 2 * GRID]])
    metadata = VideoMetadata(total_num_frames=FPS * steps, fps=FPS, frames_indices=list(range(FPS * steps)))
    asked = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]
    inputs = processor.conversation_inputs([asked], video_grid_thw=grid, video_metadata=[metadata])
    call = {"video_features": [features], "second_per_grid_ts": [1.0], "retention": 1.0, "max_visual_tokens": tokens}
    with torch.no_grad():
        chosen = compress(model.model, **inputs, **call, reencode=False).qtsplus
    assert stream.question is not None
    merged = stream.question.log_relevance(held.scores)
    return {
        "largest_difference": float((merged - chosen.log_relevance[0][places]).abs().max()),
        "same_tokens": float(np.isin(places.numpy(), chosen.kept_indices[0].numpy()).mean()),
    }


# --------------------------------------------------------------------------------------------------------------------
# The whole
# --------------------------------------------------------------------------------------------------------------------


def run_stream(
    out: Path, *, films: int, seconds: int = 3600, tokens: Sequence[int] = (512, 128), command: str = ""
) -> Path:
    """
    Asks every question with every policy, and times what appending costs: `stream.json` and `stream.md`.

    Args:
        films: how many, of four questions each.
        seconds: of each; the questions that would be later are left out.
        tokens: sizes of the memory.
    """
    out.mkdir(parents=True, exist_ok=True)
    target = check_output(out / "stream.json")
    model = make_model(None, str(CROWD)).eval()
    processor = make_processor(None, str(CROWD), model.config)
    answers, costs, drifts = [], [], {}
    with steps("stream", len(KINDS) * films) as step:
        for kind in KINDS:
            scenes = Scenes(model, processor, kind)
            background = torch.cat([scenes.encode(scenes.world(index)) for index in range(seconds // SECONDS)])
            drifts[kind] = drift(model, processor, background, tokens[0])
            for number in range(films):
                shown = film(background, scenes, number)
                for size, rival in product(tokens, RIVALS):
                    if rival.tokens and size != tokens[0]:
                        continue  # the same again
                    place = {"kind": kind, "film": number, "tokens": size, "rival": rival.name}
                    answers += [{**place, **one} for one in ask_film(model, processor, shown, rival, size)]
                step(f"{kind}, film {number + 1} of {films}")
        costs = [
            append_cost(model, processor, scenes, policy, tokens[0], seconds) for policy in ("question", "diversity")
        ]
    document = {
        "command": command,
        "environment": environment("cpu"),
        "settings": {"films": films, "seconds": seconds, "tokens": list(tokens), "read": READ, "noise": NOISE},
        "rows": _rows(answers),
        "costs": costs,
        "drift": drifts,
    }
    target.with_suffix(".md").write_text("\n".join(_page(document)) + "\n", encoding="utf-8")
    write_json(target, document)
    return target


def _rows(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means by kind, size, rival and lag, with intervals over films."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for one in answers:
        groups.setdefault((one["kind"], one["tokens"], one["rival"], one["lag"]), []).append(one)
    rows = []
    for (kind, tokens, rival, lag), group in groups.items():
        clusters = np.array([one["film"] for one in group])
        values = {name: np.array([one[name] for one in group], float) for name in ("correct", "remembered")}
        rows.append(
            {
                **{"kind": kind, "tokens": tokens, "rival": rival, "lag": lag, "questions": len(group)},
                **{name: float(shares.mean()) for name, shares in values.items()},
                "by_film": [float(values["correct"][clusters == number].mean()) for number in np.unique(clusters)],
                "interval": share_interval(values["correct"], clusters),
            }
        )
    return rows


def _page(document: Mapping[str, Any]) -> list[str]:
    settings, rows = document["settings"], document["rows"]
    count = max(row["questions"] for row in rows)
    lines = [
        f"`{document['command']}`",
        "",
        f"A stream of {settings['seconds'] / 60:g} minutes with {CELLS} tokens a second, and {count} questions for "
        "each figure. Right answers, of which a fifth are right by chance. In brackets: how often some token of the "
        f"object was still in memory. For each answer the model reads {settings['read']} tokens of the memory. The "
        "JSON has 95% intervals over films.",
        "",
        "What is asked for has a name that nothing else in the stream has: policies that keep what is unlike the rest "
        f"are at their best there. The crowd has {len(NAMES) * len(MARKS)} kinds of objects in all.",
    ]
    for kind, tokens in product(KINDS, settings["tokens"]):
        chosen = [row for row in rows if (row["kind"], row["tokens"]) == (kind, tokens)]
        lags = sorted({row["lag"] for row in chosen})
        cells = {(row["rival"], row["lag"]): f"{row['correct']:.0%} ({row['remembered']:.0%})" for row in chosen}
        titles = ["present" if lag == 0 else f"past: {lag} min" for lag in lags]
        names = list(dict.fromkeys(row["rival"] for row in chosen))
        table = [[name, *(cells.get((name, lag), "") for lag in lags)] for name in names]
        lines += ["", f"## The {kind}, {tokens} tokens", "", *markdown_table(["what stays", *titles], table)]
    lines += ["", "## What an append of two frames costs", ""]
    header = ["policy", "minutes", "median ms", "tokens", "resident MB"]
    table = [
        [
            cost["policy"],
            f"{10 * n} to {10 * n + 10}",
            f"{b['milliseconds']:.1f}",
            f"{b['tokens']}",
            f"{b['resident_mb']:.0f}",
        ]
        for cost in document["costs"]
        for n, b in enumerate(cost["blocks"])
    ]
    lines += markdown_table(header, table)
    for kind, found in document["drift"].items():
        lines += [
            "",
            f"The {kind}: relevance that was merged for the whole stream differs by {found['largest_difference']:.1e} "
            f"at most (natural logarithm) from that of all tokens at once; {found['same_tokens']:.1%} of the memory's "
            "tokens are those that the whole stream's selection keeps.",
        ]
    return lines


__all__ = ["run_stream"]
