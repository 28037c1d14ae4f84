"""A selection that is told from outside what to keep."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ..selection_qtsplus import METHODS, Candidates

_NAME = "given_order"


@contextmanager
def given_order(orders: Sequence[np.ndarray]) -> Iterator[str]:
    """
    The name of a selection that keeps of each row of one batch the first n of its tokens in a given order. It is known
    to models of this package for as long as the context lasts.

    Args:
        orders: per row `[M]`, all its visual tokens.
    """
    rows = iter(orders)

    def keep_first(candidates: Candidates, n: int) -> torch.Tensor:
        return torch.as_tensor(next(rows)[:n], device=candidates.device).sort().values

    METHODS[_NAME] = keep_first
    try:
        yield _NAME
    finally:
        del METHODS[_NAME]


__all__ = ["given_order"]
