"""Which visual tokens stay: methods, functions `select(candidates, n) -> kept indices`.

`selection=` takes such a function in every call, or the name of one of [`METHODS`], which the configuration takes too.
Of tokens that are as good as each other the earliest stay: [`top_n`] says what that means.
"""

import inspect
import math
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pkgutil import resolve_name

import torch
import torch.nn.functional as F
from torch import Tensor

from .numbers_qtsplus import is_number, require_count

# Scores that differ by at most this are a tie. In float32, features of equal frames in batches of different sizes
# differ by 1e-6, and log-relevance hardly more; there, a tie is a ten-thousandth of a token's relevance.
TIE = 1e-4
WINDOW = 8  # tokens that [`coverage`] keeps from a neighbourhood in time, in which it avoids similar ones
BLOCK = 512  # tokens that [`temporal_redundancy`] compares at a time
# A round of [`add_farthest`] adds one token for so many that are kept, but at most [`ROUND`]. They come from a pool of
# 16 times as many tokens and [`POOL`] more.
KEPT_PER_NEW = 16
ROUND = 512
POOL = 128
LARGEST_POOL = 4096
# Devices that multiply values of 16 bits many times faster than float32, and add the products in float32. Earlier
# PyTorch does not offer it, nor do some builds for AMD, whose device is called "cuda" too.
FAST_16_BITS = {"cuda"} if torch.version.cuda and hasattr(torch.ops.aten.mm, "dtype") else set()


@dataclass
class Candidates:
    """The `M` visual tokens of one sample that compete for its budget. Expensive properties are computed when read."""

    visual: Sequence[Tensor]  # [k, d] of each video (or image) in turn; k sum to M
    query: Tensor  # [L, d], raw embeddings of the question's words; empty where a prompt has none
    positions: Tensor  # [3, M], absolute (time, height, width) in the prompt
    # (time, height, width) of each video in tokens; its k tokens are ordered frame by frame, row by row. A video with
    # only a part of its tokens has several grids in turn.
    grids: Sequence[tuple[int, int, int]]
    score: Callable[[Tensor], Tensor]  # from the states of the question's words to `log_relevance`
    contextualise: Callable[[], Tensor] | None = None  # computes those states; `query` itself if `None`
    attend: Callable[[], Tensor] | None = None  # computes `log_attention`
    # `log_attention`, or else `log_relevance`, once the method has read it
    scores: Tensor | None = field(default=None, init=False)

    @cached_property
    def query_states(self) -> Tensor:
        """`[L, d]`, the question's words as the selector scores by them: with `query_states="layer"` in context."""
        if self.contextualise is None:
            return self.query
        return self.contextualise()

    @cached_property
    def _relevance(self) -> Tensor:
        return self.score(self.query_states)

    @cached_property
    def _attention(self) -> Tensor:
        if self.attend is None:
            raise ValueError("This selection asks the language model: call the whole model, not only the selector.")
        return self.attend()

    @property
    def log_relevance(self) -> Tensor:
        """`[M]` float32, at most 0: how relevant each token is to the question by the selector."""
        if self.scores is None:
            self.scores = self._relevance
        return self._relevance

    @property
    def log_attention(self) -> Tensor:
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
Method = Callable[[Candidates, int], Tensor]


# --- The methods ---


def most_relevant(candidates: Candidates, n: int) -> Tensor:
    """The n tokens that matter most for the question (the paper, at inference)."""
    return top_n(candidates.log_relevance, n)


def lm_attention(candidates: Candidates, n: int) -> Tensor:
    """The n tokens that the language model itself attends to most in a first, shallow pass; needs no training."""
    return top_n(candidates.log_attention, n)


def uniform(candidates: Candidates, n: int) -> Tensor:
    """n evenly spaced tokens, the middle of each of n equal parts: the paper's UNIF."""
    halves = torch.arange(n, device=candidates.device) * 2 + 1  # up to the middle of each part
    return (halves * candidates.num_tokens) // (2 * n)


def random(candidates: Candidates, n: int) -> Tensor:
    """n different tokens drawn with torch's global generator."""
    return torch.randperm(candidates.num_tokens, device=candidates.device)[:n].sort().values


def everything(candidates: Candidates, n: int) -> Tensor:
    """All tokens; the selector asks for `n = M`."""
    return torch.arange(n, device=candidates.device)


def temporal_redundancy(candidates: Candidates, n: int) -> Tensor:
    """
    The n tokens that differ most from the same place one step earlier, by the cosine of their features, as Efficient
    Video Sampling does (arXiv 2510.14624).

    EVS keeps the whole first frame. Here it is compared with its own mean, so that small budgets leave a choice.
    """
    similarities = []
    features_by_grid = _joined(candidates).split([math.prod(grid) for grid in candidates.grids])
    for features, (_, height, width) in zip(features_by_grid, candidates.grids, strict=True):
        places = height * width
        first_frame = features[:places].float()
        mean = first_frame.mean(0).expand(places, -1)
        similarities.append(F.cosine_similarity(mean, first_frame, dim=-1))
        # In blocks, so that the copies in float32 stay small.
        blocks_before = features[:-places].split(BLOCK)
        blocks_now = features[places:].split(BLOCK)
        for before, now in zip(blocks_before, blocks_now, strict=True):
            similarities.append(F.cosine_similarity(before.float(), now.float(), dim=-1))
    return top_n(1 - torch.cat(similarities), n)


def _joined(candidates: Candidates) -> Tensor:
    """`[M, d]`, the features of all videos, without a gradient: a choice has none, and its graph would be large."""
    if len(candidates.visual) == 1:
        return candidates.visual[0].detach()
    return torch.cat(list(candidates.visual)).detach()


def diversity(candidates: Candidates, n: int) -> Tensor:
    """
    n tokens that are far from each other: again and again the token whose nearest kept token is farthest, by the cosine
    of their features, as DivPrune does (arXiv 2503.02175).

    The first is the one farthest from the mean, where DivPrune needs all pairs of tokens. [`add_farthest`] says how the
    others are found.
    """
    visual = _joined(candidates)
    with torch.autocast(visual.device.type, enabled=False):
        directions = F.normalize(visual.float(), dim=-1)
        neighbours = Neighbours(visual, directions)
        mean = F.normalize(directions.mean(0), dim=0)
        first = top_n(1 - directions @ mean, 1)
        distance = 1 - neighbours.similarities(first).flatten()
        return add_farthest(first, distance, n, neighbours)


def coverage(candidates: Candidates, n: int) -> Tensor:
    """
    n tokens that cover a video for a summary: again and again the token that differs most, by the cosine of the
    features, from the mean of its time and from the kept tokens of its time.

    The time of a token is the steps around it that hold about [`WINDOW`] of n evenly spread tokens. So a thing that
    comes back later counts again, and a quiet hour takes nothing from a busy minute. [`add_farthest`] says how the
    tokens are found.
    """
    features = _joined(candidates)
    visual = features.float()
    sizes = [math.prod(grid) for grid in candidates.grids]
    times = [time for time, _, _ in candidates.grids]
    means = []
    steps = []
    num_steps = 0
    for part, time in zip(visual.split(sizes), times, strict=True):
        means.append(part.unflatten(0, (time, -1)).mean(1))
        steps_of_part = torch.arange(num_steps, num_steps + time, device=part.device)
        steps.append(steps_of_part.repeat_interleave(len(part) // time))
        num_steps += time

    reach = round(WINDOW * num_steps / (2 * n))
    reach = max(1, min(num_steps, reach))
    means_around = F.avg_pool1d(
        torch.cat(means).T,
        kernel_size=2 * reach + 1,
        stride=1,
        padding=reach,
        count_include_pad=False,
    )
    own_times = F.normalize(means_around.T, dim=-1)
    directions = F.normalize(visual, dim=-1)
    to_own_time = []
    with torch.autocast(visual.device.type, enabled=False):
        for part, own_time in zip(directions.split(sizes), own_times.split(times), strict=True):
            frames = part.unflatten(0, (len(own_time), -1))
            to_own_time.append((frames @ own_time[:, :, None]).flatten())
        distance = 1 - torch.cat(to_own_time)
        step_of_token = torch.cat(steps)
        nothing = step_of_token[:0]
        return add_farthest(nothing, distance, n, Neighbours(features, directions, step_of_token, reach))


class Neighbours:
    """The tokens of a sample as [`add_farthest`] compares them."""

    def __init__(
        self,
        visual: Tensor,
        directions: Tensor,
        step_of_token: Tensor | None = None,
        reach: int = 0,
    ):
        """
        Args:
            visual: `[M, d]`, the features.
            directions: `[M, d]` float32, the features with length 1.
            step_of_token: `[M]`, the step in time of each token; `None` compares all tokens.
            reach: how many steps away tokens still count.
        """
        self.step_of_token = step_of_token
        self.reach = reach
        self.features = directions
        self.lengths = None
        if visual.device.type in FAST_16_BITS and visual.dtype.itemsize == 2:
            self.features = visual
            self.lengths = torch.linalg.vector_norm(visual, dim=-1, dtype=torch.float32).clamp(min=1e-12)

    def similarities(self, others: Tensor, tokens: Tensor | slice = slice(None)) -> Tensor:
        """`[k, m]` float32: the cosines of `tokens`, or of all, with m others; -inf out of reach."""
        features = self.features[tokens]
        features_of_others = self.features[others].T
        if self.lengths is None:
            cosines = features @ features_of_others
        else:
            cosines = torch.mm(features, features_of_others, out_dtype=torch.float32)
            cosines /= self.lengths[tokens, None]
            cosines /= self.lengths[others]
        if self.step_of_token is not None:
            steps = self.step_of_token[tokens, None]
            steps_of_others = self.step_of_token[others]
            is_before = steps < steps_of_others - self.reach
            is_behind = steps > steps_of_others + self.reach
            cosines.masked_fill_(is_before | is_behind, -torch.inf)
        return cosines


def add_farthest(
    kept: Tensor,
    distance: Tensor,
    n: int,
    neighbours: Neighbours,
) -> Tensor:
    """
    `[n]` int64, ascending: the kept tokens and those that are far from them and from each other.

    The readable twin, `naive_farthest` in tests/naive.py, adds the token with the largest distance, updates all
    distances, and so on: it reads all features for each token. Here a round adds several, one for every
    [`KEPT_PER_NEW`] that are kept. They are those of a pool of the farthest tokens that remain the farthest as if all
    better tokens of the pool were kept already. Nothing waits for the host. Time is O(n M d), in matrix products, and
    memory O(M d).

    The first 32 tokens are the twin's. Behind them, the largest distance that any token has in the end is the twin's
    within 5% and [`TIE`]. The exception is a video that shows many different things, each in a hundred or more nearly
    equal copies. If as many tokens are kept as there are things, about one thing in ten is missed; if three times as
    many are kept, none is.

    Args:
        kept: `[k]` indices of the tokens that are kept already.
        distance: `[M]` of each token to the kept ones.
    """
    distance = distance.index_fill(0, kept, -torch.inf)
    while len(kept) < n:
        missing = n - len(kept)
        left = len(distance) - len(kept)
        count = max(1, len(kept) // KEPT_PER_NEW)
        count = min(count, ROUND, missing)
        chosen = _farthest(distance, count, left, neighbours)
        distance = torch.minimum(distance, 1 - neighbours.similarities(chosen).amax(1))
        distance.index_fill_(0, chosen, -torch.inf)
        kept = torch.cat([kept, chosen])
    return kept.sort().values


def _farthest(
    distance: Tensor,
    count: int,
    left: int,
    neighbours: Neighbours,
) -> Tensor:
    """`[count]` of the tokens that are left: a round of [`add_farthest`]."""
    if count == 1:
        is_farthest = distance >= distance.amax() - TIE
        return is_farthest.int().argmax()[None]
    size = min(left, LARGEST_POOL, POOL + 16 * count)
    pool = top_n(distance, size)
    scores = distance[pool]
    # [i, j]: whether token i of the pool is better than token j, or as good and earlier.
    lead = scores[:, None] - scores
    is_above = lead > TIE
    is_tied = lead >= -TIE
    is_earlier = pool[:, None] < pool
    is_better = is_above | (is_tied & is_earlier)
    similarity = neighbours.similarities(pool, pool)
    to_better = similarity.masked_fill(~is_better, -torch.inf).amax(0)
    scores_if_better_are_kept = torch.minimum(scores, 1 - to_better)
    return pool[top_n(scores_if_better_are_kept, count)]


def top_n(scores: Tensor, n: int) -> Tensor:
    """
    Indices of the n largest scores, ascending: `[n]` int64. Scores within [`TIE`] of the n-th largest count as equal to
    it, and of those the earliest stay: rounding does not decide between tokens that show the same.
    """
    cut = scores.topk(n, sorted=False).values.amin()
    is_above = scores > cut + TIE
    is_tied = (scores >= cut - TIE) & ~is_above
    room = n - is_above.sum()
    is_earliest = is_tied & (is_tied.cumsum(0) <= room)
    return true_places(is_above | is_earliest, n)


def true_places(mask: Tensor, n: int) -> Tensor:
    """
    `[n]` int64, ascending: where a mask is true, as `mask.nonzero()[:, 0]`, but without a wait of the host for their
    number. -1 stands for each that is missing.
    """
    behind_the_end = torch.where(mask, mask.cumsum(0) - 1, n)
    places = torch.full((n + 1,), -1, device=mask.device)
    return places.scatter_(0, behind_the_end, torch.arange(len(mask), device=mask.device))[:n]


def to_host(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, `[k]` each, on the host, which waits once for all of them."""
    return torch.cat(list(rows)).cpu().split(list(map(len, rows)))


def take_from_all(samples: Sequence[Sequence[Tensor]], indices: Sequence[Tensor]) -> list[Tensor]:
    """As [`take_rows`] from each of several samples."""
    if any(len(parts) > 1 for parts in samples):
        indices = to_host(indices)
    return list(map(take_rows, samples, indices))


def take_rows(parts: Sequence[Tensor], indices: Tensor) -> Tensor:
    """`[n, d]`, the rows that ascending indices name among those of `parts`, as if they were one tensor."""
    if len(parts) == 1:
        return parts[0] if len(indices) == len(parts[0]) else parts[0][indices]
    starts = list(accumulate([len(part) for part in parts], initial=0))
    bounds = torch.searchsorted(indices, torch.tensor(starts, device=indices.device))
    counts = bounds.diff().tolist()
    chosen_of_parts = zip(parts, starts, indices.split(counts), strict=False)
    return torch.cat([part[chosen - start] for part, start, chosen in chosen_of_parts])


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
    """The function of a `selection`, which is its name or the function itself; `ValueError` for anything else."""
    method = METHODS.get(selection) if isinstance(selection, str) else selection
    if callable(method):
        return method
    message = f"selection={selection!r}; expected one of {tuple(METHODS)}, or a function like theirs."
    if ":" in str(selection):
        message += " What is stored imports nothing: name it in the command, the recipe or the call."
    raise ValueError(message)


def add_method(name: str | Method | None) -> None:
    """
    Makes a method available by the name that a command, a recipe or a call gives: one of [`METHODS`], or
    `module:function` or `file.py:function`. These run the module and add the function to [`METHODS`]. A function itself
    needs no name.

    Raises:
        ValueError: an unknown name; there is no such module, file or function.
    """
    if name is None or callable(name):
        return
    place, colon, function = str(name).rpartition(":")
    if colon and name not in METHODS:
        try:
            method = runpy.run_path(place)[function] if place.endswith(".py") else resolve_name(name)
            inspect.signature(method).bind("candidates", "n")
        except (ImportError, AttributeError, KeyError, OSError, SyntaxError, TypeError, ValueError) as error:
            raise ValueError(
                f"selection={name!r} cannot be imported: {error!r}; expected MODULE:FUNCTION or FILE.py:FUNCTION, a "
                "function of the candidates and a count."
            ) from error
        METHODS[name] = method
    find_method(name)


def no_question(row: int, num_tokens: int) -> ValueError:
    """The error of a method that compares tokens with a question, where a prompt has none."""
    return ValueError(
        f"Row {row} has {num_tokens} visual tokens but no question to select them by. Write one in the user's last "
        "turn, as the processor's chat template writes turns, or pass query_mask= or query_input_ids=."
    )


def is_finite(values: Tensor) -> Tensor:
    """
    Scalar bool, whether a tensor holds neither NaN nor infinity. Its extremes tell: a sum in float32 is slow, or needs
    a copy, for values of 16 bits.
    """
    if not values.is_floating_point() or values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    if values.dtype.itemsize == 1:  # float8 has no extremes
        values = values.to(torch.bfloat16)
    lowest, highest = values.detach().aminmax()
    return torch.stack([lowest, highest]).isfinite().all()


def check_kept(
    choices: Sequence[tuple[Tensor, int, int]],
    selection: str | Method,
    video_features: Sequence[Tensor] = (),
) -> None:
    """
    Raises `ValueError` for a result of a method that is not `[n]` ascending indices of the tokens, and for features of
    the caller that are not finite. All are read in one transfer to the host.

    Args:
        choices: the result of each row, with n and M.
    """
    are_wrong = []
    for kept, n, num_tokens in choices:
        if not isinstance(kept, Tensor) or kept.shape != (n,) or kept.dtype != torch.int64:
            raise _wrong_choice(selection)
        descends = (kept.diff() < 1).any()
        is_outside = (kept[0] < 0) | (kept[-1] >= num_tokens)
        are_wrong.append(descends | is_outside)
    are_broken = [~is_finite(tokens) for tokens in video_features]
    flaws = are_wrong + are_broken
    if not flaws or not torch.stack(flaws).any():
        return
    if any(are_broken):
        raise ValueError(
            "NaN or infinity in the features of a video: expected finite values, as encoding it returns them."
        )
    raise _wrong_choice(selection)


def _wrong_choice(selection: str | Method) -> ValueError:
    name = getattr(selection, "__name__", selection)
    return ValueError(
        f"selection={name!r} gave something else than indices; expected a tensor of n ascending int64 indices for each "
        "row, from 0 on and below the number of its tokens."
    )


def check_budget(
    selection: str | Method,
    retentions: Sequence[float | None],
    max_visual_tokens: int | None,
) -> list[float | None]:
    """Checks how many tokens a call asks for, see `QTSplusSelector.forward`; the fractions as Python's numbers."""
    for retention in retentions:
        if retention is not None and not (is_number(retention) and 0 < retention <= 1):
            raise ValueError(f"retention={retention!r}: expected a fraction of the visual tokens, a number in (0, 1].")
    if max_visual_tokens is not None:
        require_count("max_visual_tokens", max_visual_tokens)
    if selection == "all" and (max_visual_tokens is not None or set(retentions) - {None, 1.0}):
        raise ValueError(
            'selection="all" keeps every visual token: choose another selection, in this call or in qtsplus_config, or '
            "leave retention and max_visual_tokens out."
        )
    # NumPy's fractions as the decimals they are written as: products overflow in float16, and are off in float32.
    return [None if fraction is None else float(str(fraction)) for fraction in retentions]
