"""Which visual tokens stay: methods, functions `select(candidates, n) -> kept indices`.

`selection=` takes such a function in every call, or the name of one of [`METHODS`], which the configuration takes too.
Of tokens that are as good as each other the earliest stay: [`top_n`] says what that means.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from itertools import accumulate
from numbers import Real
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F

# Scores that differ by no more are a tie. Equal frames that are encoded in batches of other sizes differ by 1e-6 in
# their features, in float32, and hardly more in log-relevance, where this is a ten-thousandth of a token's relevance.
TIE = 1e-4
WINDOW = 8  # tokens of a time in which [`coverage`] keeps none that is like another


@dataclass
class Candidates:
    """The `M` visual tokens of one sample that compete for its budget. What costs something is computed when read."""

    visual: Sequence[torch.Tensor]  # [k, d] of each video (or image) in turn; k sum to M
    query: torch.Tensor  # [L, d], raw embeddings of the question's words; empty where a prompt has none
    positions: torch.Tensor  # [3, M], absolute (time, height, width) in the prompt
    # (time, height, width) of each video in tokens, of which row by row, frame by frame, it has k. A video of which a
    # part is there has several in turn.
    grids: Sequence[tuple[int, int, int]]
    score: Callable[[torch.Tensor], torch.Tensor]  # from the states of the question's words to `log_relevance`
    contextualise: Callable[[], torch.Tensor] | None = None  # computes those states; `query` itself if `None`
    attend: Callable[[], torch.Tensor] | None = None  # computes `log_attention`
    # `log_attention` or else `log_relevance`, once the method has read it
    scores: torch.Tensor | None = field(default=None, init=False)

    @cached_property
    def query_states(self) -> torch.Tensor:
        """`[L, d]`, the question's words as the selector scores by them: with `query_states="layer"` in context."""
        return self.query if self.contextualise is None else self.contextualise()

    @cached_property
    def _relevance(self) -> torch.Tensor:
        return self.score(self.query_states)

    @cached_property
    def _attention(self) -> torch.Tensor:
        if self.attend is None:
            raise ValueError("This selection asks the language model: call the whole model, not only the selector.")
        return self.attend()

    @property
    def log_relevance(self) -> torch.Tensor:
        """`[M]` float32, at most 0: what the selector has learned to give each token."""
        if self.scores is None:
            self.scores = self._relevance
        return self._relevance

    @property
    def log_attention(self) -> torch.Tensor:
        """`[M]` float32, at most 0: how much the language model attends to each token, in its first layers."""
        self.scores = self._attention
        return self._attention

    @property
    def scored_by_selector(self) -> bool:
        """Whether `scores` come from the selector, with its null token, and not from the language model."""
        return self.scores is not None and self.scores is vars(self).get("_relevance")

    @cached_property
    def num_tokens(self) -> int:
        """M."""
        return sum(len(part) for part in self.visual)

    @property
    def device(self) -> torch.device:
        return self.visual[0].device


# From candidates and n, 1 to M, to the indices of the n that stay: `[n]` int64, ascending.
Method = Callable[[Candidates, int], torch.Tensor]


# --- The methods ---


def most_relevant(candidates: Candidates, n: int) -> torch.Tensor:
    """The n tokens that matter most for the question (the paper, at inference)."""
    return top_n(candidates.log_relevance, n)


def lm_attention(candidates: Candidates, n: int) -> torch.Tensor:
    """The n tokens that the language model itself attends to most in a first, shallow pass; needs no training."""
    return top_n(candidates.log_attention, n)


def uniform(candidates: Candidates, n: int) -> torch.Tensor:
    """n evenly spaced tokens, the middle of each of n equal parts: the paper's UNIF."""
    middles = torch.arange(n, device=candidates.device) * 2 + 1  # in halves of a part
    return (middles * candidates.num_tokens) // (2 * n)


def random(candidates: Candidates, n: int) -> torch.Tensor:
    """n different tokens drawn with torch's global generator."""
    return torch.randperm(candidates.num_tokens, device=candidates.device)[:n].sort().values


def everything(candidates: Candidates, n: int) -> torch.Tensor:
    """All tokens; the selector asks for `n = M`."""
    return torch.arange(n, device=candidates.device)


def temporal_redundancy(candidates: Candidates, n: int) -> torch.Tensor:
    """
    The n tokens that differ most from the same place one step earlier, by the cosine of their features, as Efficient
    Video Sampling does (arXiv 2510.14624).

    EVS keeps the whole first frame. Here it is compared with its own mean, so that small budgets leave a choice.
    """
    return top_n(changes(candidates), n)


def changes(candidates: Candidates) -> torch.Tensor:
    """`[M]` float32, 0 to 2: how much each token differs from the same place one step earlier."""
    change = []
    for features, (time, height, width) in zip(_by_grid(candidates), candidates.grids, strict=True):
        frames = features.unflatten(0, (time, height * width))
        before = frames[0].float().mean(0).expand(height * width, -1)
        for frame in frames:
            now = frame.float()
            change.append(1 - F.cosine_similarity(before, now, dim=-1))
            before = now
    return torch.cat(change)


def _by_grid(candidates: Candidates) -> Sequence[torch.Tensor]:
    """`[time * height * width, d]`: the features of each grid in turn."""
    visual = candidates.visual[0]
    if len(candidates.visual) > 1:
        visual = torch.cat(list(candidates.visual))
    return visual.split([math.prod(grid) for grid in candidates.grids])


def diversity(candidates: Candidates, n: int) -> torch.Tensor:
    """
    n tokens that are far from each other: greedily, the one whose nearest kept token is farthest by the cosine of their
    features, as DivPrune does (arXiv 2503.02175).

    The first is the one farthest from the mean, where DivPrune needs all pairs of tokens. Time is O(n M d), memory
    O(M d).
    """
    features = F.normalize(torch.cat(list(candidates.visual)).float(), dim=-1)
    distance = 1 - features @ F.normalize(features.mean(0), dim=0)
    nearest = torch.full_like(distance, torch.inf)
    kept = torch.empty(n, dtype=torch.long, device=candidates.device)
    for step in range(n):
        chosen = first_largest(distance)
        kept[step] = chosen
        nearest = torch.minimum(nearest, 1 - features @ features[chosen])
        nearest[chosen] = -torch.inf
        distance = nearest
    return kept.sort().values


def coverage(candidates: Candidates, n: int) -> torch.Tensor:
    """
    n tokens that cover what happens, for a summary: greedily the one that differs most, by the cosine of the features,
    from the mean of its time and from the kept tokens of its time.

    Its time are the steps around it that hold about [`WINDOW`] of n evenly spread tokens. So what comes again later
    counts anew, and a quiet hour takes nothing from a busy minute. Time is O(M d + n M), memory O(M d).
    """
    raw = []
    means = []
    cells: list[int] = []  # tokens of each step in time
    for part, (time, height, width) in zip(_by_grid(candidates), candidates.grids, strict=True):
        raw.append(part.float())
        means.append(part.float().unflatten(0, (time, -1)).mean(1))
        cells += [height * width] * time
    steps = len(cells)
    reach = max(1, min(steps, round(WINDOW * steps / (2 * n))))
    around = F.avg_pool1d(torch.cat(means).T, 2 * reach + 1, 1, reach, count_include_pad=False).T
    features = F.normalize(torch.cat(raw), dim=-1)
    own_time = F.normalize(around, dim=-1).repeat_interleave(torch.tensor(cells, device=features.device), 0)
    away = 1 - (features * own_time).sum(1)
    edges = list(accumulate(cells, initial=0))
    kept = torch.empty(n, dtype=torch.long, device=candidates.device)
    for number in range(n):
        chosen = int(first_largest(away))
        step = bisect_right(edges, chosen) - 1
        first = edges[max(0, step - reach)]
        last = edges[min(steps, step + reach + 1)]
        away[first:last] = torch.minimum(away[first:last], 1 - features[first:last] @ features[chosen])
        away[chosen] = -torch.inf
        kept[number] = chosen
    return kept.sort().values


def top_n(scores: torch.Tensor, n: int) -> torch.Tensor:
    """
    Indices of the n largest scores, ascending: `[n]` int64. Scores within [`TIE`] of the n-th largest count as equal to
    it, and of those the earliest stay: what shows the same is chosen by its place and not by rounding.
    """
    cut = scores.topk(n, sorted=False).values.amin()
    is_above = scores > cut + TIE
    is_tied = (scores >= cut - TIE) & ~is_above
    room = n - is_above.sum()
    is_earliest = is_tied & (is_tied.cumsum(0) <= room)
    return (is_above | is_earliest).nonzero()[:, 0]


def first_largest(scores: torch.Tensor) -> torch.Tensor:
    """Index of the first score within [`TIE`] of the largest."""
    is_largest = scores >= scores.amax() - TIE
    return is_largest.int().argmax()


def take_rows(parts: Sequence[torch.Tensor], indices: torch.Tensor) -> torch.Tensor:
    """`[n, d]`, the rows that ascending indices name among those of `parts`, as if they were one tensor."""
    if len(parts) == 1:
        return parts[0][indices]
    starts = list(accumulate((len(part) for part in parts), initial=0))
    bounds = torch.searchsorted(indices, torch.tensor(starts, device=indices.device)).tolist()
    pieces = []
    for number, part in enumerate(parts):
        own = indices[bounds[number] : bounds[number + 1]]
        pieces.append(part[own - starts[number]])
    return torch.cat(pieces)


METHODS: dict[str, Method] = {
    "qtsplus": most_relevant,
    "lm_attention": lm_attention,
    "uniform": uniform,
    "random": random,
    "all": everything,
    "temporal_redundancy": temporal_redundancy,
    "diversity": diversity,
    "coverage": coverage,
}


# --- What a call may ask for ---


def find_method(selection: str | Method) -> Method:
    """The function that a `selection` names or is; `ValueError` for anything else."""
    method = METHODS.get(selection) if isinstance(selection, str) else selection
    if callable(method):
        return method
    message = f"selection={selection!r}; expected one of {tuple(METHODS)}, or a function like theirs."
    if ":" in str(selection):
        message += " What is stored imports nothing: name it in the command, the recipe or the call."
    raise ValueError(message)


def add_method(name: str | Method | None) -> None:
    """
    Takes a name that somebody types in a command, a recipe or a call: one of [`METHODS`], or `module:function` or
    `file.py:function`, which runs the module and becomes one of them. A function needs no name.

    Raises:
        ValueError: it is neither; there is no such module, file or function.
    """
    if name is None or callable(name):
        return
    place, colon, _ = name.rpartition(":")
    if colon and name not in METHODS:
        try:
            METHODS[name] = _import_method(name)
        except (ImportError, AttributeError, OSError, SyntaxError, TypeError, ValueError) as error:
            hint = "" if place.endswith(".py") else "; a file is named as FILE.py:FUNCTION"
            raise ValueError(f"selection={name!r} cannot be imported: {error}{hint}") from error
    find_method(name)


def _import_method(name: str) -> Method:
    """Runs the module or the file that a name begins with, and gives its function."""
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        spec: Any = spec_from_file_location(f"qtsplus_method_{Path(place).stem}", place)
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        method = getattr(module, function)
    else:
        method = resolve_name(name)
    if not callable(method):
        raise ValueError("it is no function")
    signature(method).bind("candidates", 1)
    return method


def no_question(row: int, num_tokens: int) -> ValueError:
    """What is said where a method asks how tokens fit a question that is not there."""
    return ValueError(
        f"Row {row} has {num_tokens} visual tokens but no question to select them by. Format the prompt with the "
        "processor's chat template, or pass query_mask= or query_input_ids=."
    )


def check_kept(kept: Any, n: int, num_tokens: int, selection: str | Method) -> None:
    """Raises `ValueError` for what a method must not return."""
    if not isinstance(kept, torch.Tensor):
        result = type(kept).__name__
    elif kept.shape != (n,) or kept.dtype != torch.int64:
        result = f"{kept.dtype} of shape {tuple(kept.shape)}"
    elif bool((kept.diff() < 1).any() | (kept[0] < 0) | (kept[-1] >= num_tokens)):
        result = "some that do not ascend, or are not there"
    else:
        return
    name = selection if isinstance(selection, str) else getattr(selection, "__name__", selection)
    raise ValueError(f"selection={name!r} gave {result}; expected {n} ascending int64 indices below {num_tokens}.")


def check_budget(selection: str | Method, retentions: Sequence[float | None], rows: int, count: int | None) -> None:
    """Validates how many tokens a call asks for; see `QTSplusSelector.forward`."""
    if len(retentions) != rows:
        raise ValueError(f"{len(retentions)} retentions for {rows} rows: expected one for all, or one for each.")
    for retention in retentions:
        if retention is not None and not (is_number(retention) and 0 < retention <= 1):
            raise ValueError(f"retention={retention!r}: expected a fraction of the visual tokens, a number in (0, 1].")
    if count is not None and not (is_number(count) and count >= 1 and count % 1 == 0):
        raise ValueError(f"max_visual_tokens={count!r}: expected a whole number of tokens, at least 1.")
    fixed = any(retention not in (None, 1.0) for retention in retentions)
    if selection == "all" and (fixed or count is not None):
        raise ValueError(
            'selection="all" keeps every visual token: choose another selection, in this call or in qtsplus_config, or '
            "leave retention and max_visual_tokens out."
        )


def is_number(value: Any) -> bool:
    """Whether a caller gave a number that tensors take, which neither a truth value nor a `Fraction` is."""
    return isinstance(value, Real) and not isinstance(value, (bool, Fraction))
