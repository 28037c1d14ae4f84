"""Which visual tokens show what a question asks for: what was kept of them, and how an oracle would choose."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.labelled import sighting_tokens
from qtsplus.model.methods_qtsplus import Candidates, Method

from ..world.scene import World, sightings
from ..world.tinyworld import needle_recall
from .policies import NEEDLES, SALIENCE


def object_tokens(world: World, grid: tuple[int, int, int], seconds_per_grid: float) -> np.ndarray:
    """`[k]` int64, ascending: the tokens that show any object."""
    return _union([sighting_tokens(sightings(item), grid, seconds_per_grid) for item in world.objects])


def recalls(kept: Sequence[int], needles: Sequence[np.ndarray], objects: np.ndarray) -> dict[str, float | None]:
    """
    What was kept of the needles, and of the other objects.

    Args:
        kept: indices of the kept tokens.
        needles: the tokens of each of a question's needles.
        objects: the tokens that show any object.

    Returns:
        `recall`, the share of the needles of which a token was kept; `token_recall`, the share of their tokens;
        `distractors`, the share of the other objects' tokens. `None` where there are none of them.
    """
    wanted = _union(needles)
    return {
        "recall": needle_recall(kept, needles),
        "token_recall": _share(wanted, kept),
        "distractors": _share(np.setdiff1d(objects, wanted), kept),
    }


def oracle_order(
    oracle: str, needles: Sequence[np.ndarray], objects: np.ndarray, total: int, rng: np.random.Generator
) -> np.ndarray:
    """
    `[total]` int64: all tokens in the order in which an oracle keeps them. First come those of any object
    ([`SALIENCE`]) or of the needles ([`NEEDLES`]), then the others, each in random order.
    """
    first = {SALIENCE: objects, NEEDLES: _union(needles)}[oracle]
    return np.concatenate([rng.permutation(first), rng.permutation(np.setdiff1d(np.arange(total), first))])


def keep_first(processor: Any, records: Sequence[VideoRecord], orders: Sequence[np.ndarray]) -> Method:
    """
    A selection that keeps of each record's visual tokens the first n in a given order, for one call of `exact_match`,
    which asks for the records in the order of the lengths of their answers.
    """
    lengths = [len(processor.text_ids(record.answer)) for record in records]
    rows = (orders[index] for index in sorted(range(len(records)), key=lengths.__getitem__))

    def first_tokens(candidates: Candidates, n: int) -> torch.Tensor:
        return torch.as_tensor(next(rows)[:n], device=candidates.device).sort().values

    return first_tokens


def _union(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(parts)) if len(parts) else np.empty(0, dtype=np.int64)


def _share(tokens: np.ndarray, kept: Sequence[int]) -> float | None:
    return float(np.isin(tokens, np.asarray(kept)).mean()) if len(tokens) else None


__all__ = ["keep_first", "object_tokens", "oracle_order", "recalls"]
