"""The same thing in a longer video: how many tokens the model's own budget keeps of it."""

from typing import Any

import numpy as np
import torch

from ..world.open_sets import VARIANTS
from .asking import OpenTest

LENGTHS = (8, 30, 600)  # seconds
ASKED = 80


def counts_by_length(model: Any, test: OpenTest) -> dict[str, Any]:
    """
    Counts for questions about a thing of 8 seconds, among other videos that have no such thing at any time.

    Only the selector reads: the language model has no use for ten minutes here. What crosses the middle is not asked,
    since in every video something does, nor which colours a shape takes, since every video has such a shape.
    """
    features: dict[str, torch.Tensor] = {}
    names: dict[str, set[str]] = {}
    for record, row in zip(test.records, test.rows, strict=True):
        if row["video"] not in features:
            features[row["video"]] = test.features(record)
            things = VARIANTS["plain"](row["seed"], row["seconds"]).things
            names[row["video"]] = {f"{colour} {thing.shape}" for thing in things for colour in thing.colours}
    asked = [row for row in test.rows if row["kind"] not in ("crossing", "colours", "order") and row["needles"][0]]
    fillers = {
        row["id"]: [
            features[video] for video, known in names.items() if not any(name in row["question"] for name in known)
        ]
        for row in asked
    }
    asked = [row for row in asked if fillers[row["id"]]][:ASKED]
    kept = {
        seconds: [_keep(model, test, row, seconds, features[row["video"]], fillers[row["id"]]) for row in asked]
        for seconds in LENGTHS
    }
    counts = {seconds: [count for count, _ in found] for seconds, found in kept.items()}
    needles = [len(row["needles"][0]) for row in asked]
    return {
        "questions": len(asked),
        "tokens": {str(seconds): round(float(np.mean(found)), 1) for seconds, found in counts.items()},
        "found": {
            str(seconds): round(100 * float(np.mean([hit for _, hit in rows])), 1) for seconds, rows in kept.items()
        },
        "change": {
            str(seconds): round(float(np.median(np.array(found) / np.array(counts[8]))), 2)
            for seconds, found in counts.items()
        },
        "needles": round(float(np.mean(needles)), 1),
    }


@torch.no_grad()
def _keep(
    model: Any,
    test: OpenTest,
    row: dict[str, Any],
    seconds: int,
    own: torch.Tensor,
    others: list[torch.Tensor],
) -> tuple[int, bool]:
    """Of so many seconds, amid which the question's video stands: how many tokens are kept, and is one a needle?"""
    rng = np.random.default_rng(row["seed"])
    wanted = -(-(seconds - row["seconds"]) // row["seconds"])
    filler = [others[int(index)] for index in rng.integers(len(others), size=wanted)]
    needles = torch.tensor(row["needles"][0]) + sum(map(len, filler[: wanted // 2]))
    visual = torch.cat([*filler[: wanted // 2], own, *filler[wanted // 2 :]])[: seconds * len(own) // row["seconds"]]
    ids = torch.tensor(test.processor.tokenizer(row["question"], add_special_tokens=False)["input_ids"])
    query = model.get_input_embeddings()(ids)
    _, chosen = model.model.qtsplus([visual], [query], [torch.zeros(3, len(visual))], reencode=False)
    return int(chosen.n[0]), bool(torch.isin(chosen.kept_indices[0], needles).any())
