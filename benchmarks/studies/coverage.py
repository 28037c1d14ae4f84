"""What is kept for a summary: of the events of a film how many, and whether their order shows, by ways and budgets.

`python -m benchmarks.studies.coverage MODEL OUT.json`. No language model reads. Films are scenes of eight seconds of
the world without a grid, one after another. In `cuts` each is a scene of its own; `camera` looks at one place, where
one scene in eight has something. An event is a thing that comes, or takes another colour.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtsplus.common.journals import write_json
from qtsplus.hub.loading import load
from qtsplus.model.methods_qtsplus import Candidates, diversity, top_n
from qtsplus.video.encoded import encode

from ..intervals import share_interval
from ..machine import environment
from ..tables import markdown_table
from ..world.open_tokens import OPEN_WORDS, count_pixels, name_tokens
from ..world.openworld import SQUARE, OpenWorld, make_open, render_open
from ..world.scene import FPS
from ..world.tinyworld import split_seed

PROMPT = "Summarise the video."
SECONDS = 8
SCENES = 910_000  # of the test split; those from 900,000 on are what the ways were made with
FILMS = {"32 s": (4, 40), "10 min": (75, 6), "60 min": (450, 1)}  # scenes of a film, and how many films
BUDGETS = (64, 256, 1024)
PAIRS = 20_000  # of events, at most, whose order is looked at
Scene = tuple[torch.Tensor, list[np.ndarray]]


def _part(candidates: Candidates, low: int, high: int, _: torch.Tensor) -> torch.Tensor:
    return candidates.log_relevance[low:high]


def spread(choose: Callable[[Candidates, int], torch.Tensor], tokens: int) -> Callable[[Candidates, int], torch.Tensor]:
    """A method in each of so many equal parts of the time that each keeps about `tokens`."""

    def method(candidates: Candidates, n: int) -> torch.Tensor:
        ((steps, *cells),) = candidates.grids
        parts = max(1, min(n // tokens, steps))
        edges = [part * steps // parts * int(np.prod(cells)) for part in range(parts + 1)]
        kept = []
        for part, (low, high) in enumerate(zip(edges, edges[1:], strict=False)):
            visual, relevance = [candidates.visual[0][low:high]], partial(_part, candidates, low, high)
            own = Candidates(visual, candidates.query, candidates.positions, [], relevance)
            kept.append(low + choose(own, (part + 1) * n // parts - part * n // parts))
        return torch.cat(kept)

    return method


WAYS: dict[str, Any] = {
    "relevance": "qtsplus",
    "relevance, spread": spread(lambda own, n: top_n(own.log_relevance, n), 1),
    "temporal redundancy": "temporal_redundancy",
    "uniform": "uniform",
    "diversity": "diversity",
    "diversity, spread": spread(diversity, 16),
    "coverage": "coverage",
}


def scenes(model: Any, processor: Any, kind: str, count: int) -> Iterator[Scene]:
    """Features of each scene, and of each of its events the tokens that name it."""
    place = replace(_world(0), drift=(0, 0))
    for index in range(count):
        world = _world(index)
        if kind == "camera":
            happens = np.random.default_rng([index, 5]).random() < 1 / 8
            world = replace(place, things=world.things if happens else ())
        named = name_tokens(world, count_pixels(world))
        things, colours = np.asarray(named.things).ravel(), named.labels[..., 0].ravel()
        shown = [
            np.flatnonzero((things == number) & (colours == OPEN_WORDS.index(colour)))
            for number, thing in enumerate(world.things)
            for colour in thing.colours
        ]
        features = encode(model, processor, render_open(world), fps=FPS).features
        yield features, [tokens for tokens in shown if len(tokens)]


def _world(index: int) -> OpenWorld:
    return replace(make_open(split_seed("test", SCENES + index), SECONDS, size=SQUARE, bars=(0, 0)), light=1.0)


def seen_events(kept: torch.Tensor, events: list[np.ndarray], cells: int) -> tuple[float, float]:
    """The part of the events of which a token is kept; of pairs of events the part whose order the first ones show."""
    chosen, rng = kept.numpy(), np.random.default_rng(0)
    first = np.array([next(iter(np.intersect1d(tokens, chosen)), -cells) // cells for tokens in events])
    begins = np.array([tokens[0] // cells for tokens in events])
    one, other = np.triu_indices(len(events), 1)
    if len(one) > PAIRS:
        one, other = rng.integers(len(events), size=(2, PAIRS))
    one, other = one[begins[one] != begins[other]], other[begins[one] != begins[other]]
    told = (first[one] >= 0) & (first[other] >= 0)
    right = told & (np.sign(first[one] - first[other]) == np.sign(begins[one] - begins[other]))
    return float((first >= 0).mean()), float(right.mean()) if len(right) else float("nan")


@torch.no_grad()
def run_coverage(folder: str, out: Path, films: dict[str, tuple[int, int]] = FILMS) -> Path:
    """Writes a JSON file and the table beside it; figures are means over films, with their 95% interval."""
    model, processor = load(folder)
    ids = torch.tensor(processor.text_ids(PROMPT))
    query, rows, results = model.get_input_embeddings()(ids), [], {}
    for kind in ("cuts", "camera"):
        made = list(scenes(model, processor, kind, max(size * count for size, count in films.values())))
        size, cells = len(made[0][0]), len(made[0][0]) // SECONDS
        for length, (parts, count) in films.items():
            pieces = [made[start * parts : (start + 1) * parts] for start in range(count)]
            pieces = [piece for piece in pieces if sum(len(events) for _, events in piece) > 1]
            figures: dict[str, dict[int, list[tuple[float, float]]]] = {}
            for piece in pieces:
                visual = torch.cat([features for features, _ in piece])
                events = [tokens + number * size for number, (_, own) in enumerate(piece) for tokens in own]
                grid = (parts * SECONDS, round(cells**0.5), round(cells**0.5))
                given = [visual], [query], [torch.zeros(3, len(visual))], [[grid]]
                for budget in (count for count in BUDGETS if count < len(visual) / 2):
                    for name, selection in WAYS.items():
                        fixed: dict[str, Any] = {"retention": 1.0, "max_visual_tokens": budget, "selection": selection}
                        kept = model.model.qtsplus(*given, **fixed, reencode=False)[1].kept_indices[0]
                        figures.setdefault(name, {}).setdefault(budget, []).append(seen_events(kept, events, cells))
            happened = float(np.mean([sum(len(own) for _, own in piece) for piece in pieces]))
            results[f"{kind}, {length}"] = {"films": len(pieces), "events": happened, "ways": figures}
            for name, by_budget in figures.items():
                cells_of = [_cell(by_budget.get(budget)) for budget in BUDGETS]
                rows.append([kind, length, f"{happened:.0f}", name, *cells_of])
            print(kind, length, flush=True)
    write_json(out, {"environment": environment("cpu"), "prompt": PROMPT, "results": results})
    header = ["film", "length", "events", "kept by", *(f"{budget} tokens" for budget in BUDGETS)]
    out.with_suffix(".md").write_text("\n".join([*_TEXT, *markdown_table(header, rows, 4)]) + "\n", encoding="utf-8")
    return out


_TEXT = [
    "# What is kept for a summary",
    "",
    f"{__doc__}".splitlines()[0]
    + " `python -m benchmarks.studies.coverage`, whose first lines say what the films are.",
    "Events of which a token is kept, with the 95% interval over films; behind the comma pairs of events whose order",
    "the kept tokens show. All tokens show 100% of both.",
    "",
]


def _cell(values: list[tuple[float, float]] | None) -> str:
    if not values:
        return ""
    seen, order = np.array(values).T
    interval = share_interval(seen, np.arange(len(seen)))
    spread = f" ({interval['low']:.0%} to {interval['high']:.0%})" if interval else ""
    return f"{seen.mean():.1%}{spread}, {np.nanmean(order):.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    run_coverage(given.model, given.out)


if __name__ == "__main__":
    main()
