"""Which visual tokens stay, and how many: budgets, and methods, functions `select(candidates, n) -> kept indices`.

`selection=` takes such a function in every call, or the name of one of [`METHODS`], which the configuration takes too.
Of tokens that are as good as each other the earliest stay: [`top_n`] says what that means.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from numbers import Real
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# Scores that differ by no more are a tie. Equal frames that are encoded in batches of other sizes differ by 1e-6 in
# their features, in float32, and hardly more in log-relevance, where this is a ten-thousandth of a token's relevance.
TIE = 1e-4
DOUBLINGS = 15  # predicted are 1, 2, 4, ... 16,384 tokens, whatever n_max is; more lose nothing
EPSILON = 1e-8  # inside the normalisation and the logarithm of the entropy
NEAR = 0.2  # of the highest relevance


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

    @cached_property
    def query_states(self) -> torch.Tensor:
        """`[L, d]`, the question's words as the selector scores by them: with `query_states="layer"` in context."""
        return self.query if self.contextualise is None else self.contextualise()

    @cached_property
    def log_relevance(self) -> torch.Tensor:
        """`[M]` float32, at most 0: what the selector has learned to give each token."""
        return self.score(self.query_states)

    @cached_property
    def log_attention(self) -> torch.Tensor:
        """`[M]` float32, at most 0: how much the language model attends to each token, in its first layers."""
        if self.attend is None:
            raise ValueError("This selection asks the language model: call the whole model, not only the selector.")
        return self.attend()

    @property
    def scores(self) -> torch.Tensor:
        """What has been computed of `log_attention`, or else of `log_relevance`; empty where neither was read."""
        read = [vars(self)[name] for name in ("log_attention", "log_relevance") if name in vars(self)]
        return read[0] if read else torch.empty(0, device=self.device)

    @property
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
    return ((torch.arange(n, device=candidates.device) * 2 + 1) * candidates.num_tokens) // (2 * n)


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
    visual = candidates.visual[0] if len(candidates.visual) == 1 else torch.cat(list(candidates.visual))
    parts = visual.split([math.prod(grid) for grid in candidates.grids])
    for features, (time, height, width) in zip(parts, candidates.grids, strict=True):
        frames = features.unflatten(0, (time, height * width))
        mean = frames[0].float().mean(0).expand(height * width, -1)
        steps = [(mean, frames[0]), *pairwise(frames)]
        change += [1 - F.cosine_similarity(before.float(), now.float(), dim=-1) for before, now in steps]
    return torch.cat(change)


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


def top_n(scores: torch.Tensor, n: int) -> torch.Tensor:
    """
    Indices of the n largest scores, ascending: `[n]` int64. Scores within [`TIE`] of the n-th largest count as equal to
    it, and of those the earliest stay: what shows the same is chosen by its place and not by rounding.
    """
    cut = scores.topk(n, sorted=False).values.amin()
    above = scores > cut + TIE
    tied = (scores >= cut - TIE) & ~above
    return (above | (tied & (tied.cumsum(0) <= n - above.sum()))).nonzero()[:, 0]


def first_largest(scores: torch.Tensor) -> torch.Tensor:
    """Index of the first score within [`TIE`] of the largest."""
    return (scores >= scores.amax() - TIE).int().argmax()


METHODS: dict[str, Method] = {
    "qtsplus": most_relevant,
    "lm_attention": lm_attention,
    "uniform": uniform,
    "random": random,
    "all": everything,
    "temporal_redundancy": temporal_redundancy,
    "diversity": diversity,
}


# --- How many (lines 3 and 4) ---


def budget_features(query: torch.Tensor, relevance: torch.Tensor) -> torch.Tensor:
    """
    What the budget head sees: `[s_q, log M, max r, H(p)]`, float32 `[d + 3]`, with `p = r / sum r` and `H` its entropy.

    Args:
        query: `[L, d]`, the states of the question's words.
        relevance: `[M]` float32.
    """
    p = relevance / (relevance.sum() + EPSILON)
    entropy = -(p * (p + EPSILON).log()).sum()
    log_m = torch.full_like(entropy, math.log(len(relevance)))
    return torch.cat([query.float().mean(0), torch.stack([log_m, relevance.max(), entropy])])


def kept_count(rho: float, num_tokens: int, n_max: int) -> int:
    """`n = min(ceil(rho M), n_max)`, at least 1."""
    # A product such as 0.07 * 100 = 7.000000000000001 must not cost a token more.
    return max(1, min(math.ceil(round(rho * num_tokens, 6)), n_max))


class Float32Linear(nn.Linear):
    """Computes in float32 whatever its parameters' dtype; a module of its own, so that offloading finds its weights."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states.float(), self.weight.float(), self.bias.float())


class QTSplusBudgetHead(nn.Module):
    """`rho = rho_min + (rho_max - rho_min) sigmoid(MLP(features))`, in float32 whatever the parameters' dtype."""

    def __init__(self, hidden_size: int, budget_hidden_size: int):
        super().__init__()
        self.mlp = nn.Sequential(
            Float32Linear(hidden_size + 3, budget_hidden_size), nn.GELU(), Float32Linear(budget_hidden_size, 1)
        )

    def forward(self, features: torch.Tensor, rho_min: float, rho_max: float) -> torch.Tensor:
        logit = self.mlp(features)
        return rho_min + (rho_max - rho_min) * torch.sigmoid(logit[0])


class QTSplusLossHead(nn.Module):
    """
    What an answer loses with only 1, 2, 4, ... of the most relevant tokens, `[K]` nats that fall towards 0: in float32
    whatever the parameters' dtype.
    """

    def __init__(self, hidden_size: int, budget_hidden_size: int):
        super().__init__()
        self.mlp = nn.Sequential(
            Float32Linear(hidden_size + 7, budget_hidden_size),
            nn.GELU(),
            Float32Linear(budget_hidden_size, DOUBLINGS),
        )

    def forward(self, query: torch.Tensor, log_relevance: torch.Tensor) -> torch.Tensor:
        """
        Args:
            query: `[L, d]`, the states of the question's words.
            log_relevance: `[M]` float32.
        """
        falls = F.softplus(self.mlp(self._features(query, log_relevance)) - 4)  # few at first
        return falls.flip(0).cumsum(0).flip(0)

    @staticmethod
    def _features(query: torch.Tensor, log_relevance: torch.Tensor) -> torch.Tensor:
        """
        The query, what the tokens have of all relevance, and how it is spread among those that come [`NEAR`] the most
        relevant: the thousands of weak ones that a long video adds say nothing about how many an answer needs.
        """
        relevance = log_relevance.exp()
        seen = relevance.sum()
        near = relevance[relevance >= NEAR * relevance.max()].sort(descending=True).values
        shares = near / (near.sum() + EPSILON)
        entropy = torch.special.entr(shares).sum()
        held = torch.searchsorted(shares.cumsum(0), shares.new_tensor([0.5, 0.8, 0.95])) + 1
        parts = torch.stack([shares[0], seen, 1 - seen]).clamp(min=1e-4).log()
        return torch.cat([query.float().mean(0), parts, entropy[None], held.float().log()])


def cheapest_count(losses: torch.Tensor, config: Any, least: int, most: int) -> int:
    """
    The count, `least` to `most`, at which what [`QTSplusLossHead`] predicts and the price of the tokens are least
    together: Equation 5 of one question. Between the predictions a line is drawn over the logarithm.
    """
    predicted, steps = losses.tolist(), math.ceil(4 * math.log2(most))
    n_max, price, lambda_m, lambda_t = config.n_max, config.token_price, config.lambda_m, config.lambda_t
    counts = [max(least, round(2 ** min(step / 4, math.log2(most)))) for step in range(steps + 1)]

    def cost(count: int) -> float:
        doubling, share = math.log2(count), count / n_max
        below = min(int(doubling), len(predicted) - 1)
        above = min(below + 1, len(predicted) - 1)
        answer = predicted[below] + (predicted[above] - predicted[below]) * (doubling - below)
        return answer + price * count + lambda_m * share + lambda_t * share**2

    return min(counts, key=cost)


def share_of_mass(log_shares: torch.Tensor, mass: float) -> float:
    """
    The smallest share of the tokens that leaves at most `1 - mass` of their shares out, up to [`TIE`].

    Args:
        log_shares: `[M]`; their shares sum to 1, or to less where something else took the rest, which counts as kept.
            Those of the reduction `"max"`, which sum to more, are made to sum to 1.
    """
    shares = log_shares.exp().sort(descending=True).values
    shares = shares / shares.sum().clamp(min=1)
    left_out = shares.sum() - shares.cumsum(0)
    return min(int((left_out > 1 - mass + TIE).sum()) + 1, len(shares)) / len(shares)


class Budget(NamedTuple):
    """Of one sample: rho, a scalar tensor; the count n; what [`QTSplusLossHead`] predicts, `[K]` or `[0]`."""

    rho: torch.Tensor
    n: int
    losses: torch.Tensor


# --- What a call may ask for ---


def find_method(selection: str | Method) -> Method:
    """The function that a `selection` names or is; `ValueError` for anything else."""
    method = METHODS.get(selection) if isinstance(selection, str) else selection
    if not callable(method):
        hint = " What is stored imports nothing: name it in the command, the recipe or the call."
        raise ValueError(
            f"selection={selection!r}; expected one of {tuple(METHODS)}, or a function like theirs."
            + (hint if ":" in str(selection) else "")
        )
    return method


def add_method(name: str | None) -> None:
    """
    Takes a name that somebody types in a command, a recipe or a call: one of [`METHODS`], or `module:function` or
    `file.py:function`, which runs the module and becomes one of them.

    Raises:
        ValueError: it is neither; there is no such module, file or function.
    """
    if name is None:
        return
    place, colon, function = name.rpartition(":")
    if colon and name not in METHODS:
        try:
            if place.endswith(".py"):
                spec: Any = spec_from_file_location(Path(place).stem, place)
                module = module_from_spec(spec)
                spec.loader.exec_module(module)
                found = getattr(module, function)
            else:
                found = resolve_name(name)
            if not callable(found):
                raise ValueError("it is no function")
            METHODS[name] = found
        except (ImportError, AttributeError, OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"selection={name!r} cannot be imported: {error}") from error
    find_method(name)


def check_kept(kept: Any, n: int, num_tokens: int, selection: str | Method) -> None:
    """Raises `ValueError` for what a method must not return."""
    fits = isinstance(kept, torch.Tensor) and kept.shape == (n,) and kept.dtype == torch.int64
    if not fits or bool((kept.diff() < 1).any() | (kept[0] < 0) | (kept[-1] >= num_tokens)):
        name = selection if isinstance(selection, str) else getattr(selection, "__name__", selection)
        result = f"{kept.dtype} of shape {tuple(kept.shape)}" if isinstance(kept, torch.Tensor) else type(kept).__name__
        raise ValueError(
            f"selection={name!r} returned {result}; expected {n} ascending int64 indices below {num_tokens}."
        )


def check_budget(
    selection: str | Method, retentions: Sequence[float | None], rows: int, max_visual_tokens: int | None
) -> None:
    """Validates how many tokens a call asks for; see `QTSplusSelector.forward`."""
    if len(retentions) != rows:
        raise ValueError(f"{len(retentions)} retentions for {rows} rows: expected one for all, or one for each.")
    for retention in retentions:
        if retention is not None and not (is_number(retention) and 0 < retention <= 1):
            raise ValueError(f"retention={retention!r}: expected a fraction of the visual tokens, a number in (0, 1].")
    count = max_visual_tokens
    if count is not None and not (is_number(count) and count >= 1 and count % 1 == 0):
        raise ValueError(f"max_visual_tokens={max_visual_tokens!r}: expected a whole number of tokens, at least 1.")
    fixed = any(retention not in (None, 1.0) for retention in retentions)
    if selection == "all" and (fixed or max_visual_tokens is not None):
        raise ValueError(
            'selection="all" keeps every visual token: choose another selection, in this call or in qtsplus_config, or '
            "leave retention and max_visual_tokens out."
        )


def is_number(value: Any) -> bool:
    """Whether a caller gave a number that tensors take, which neither a truth value nor a `Fraction` is."""
    return isinstance(value, Real) and not isinstance(value, (bool, Fraction))
