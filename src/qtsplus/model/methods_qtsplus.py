"""The methods that choose which visual tokens are kept: functions `method(candidates, n) -> kept indices`.

A call's `selection=` takes such a function, or its name in [`METHODS`]. The configuration takes a name. If tokens are
equally good, the earliest are kept; see [`top_n`].
"""

import inspect
import math
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from pkgutil import resolve_name
from traceback import walk_tb

import torch
import torch.nn.functional as F
from torch import Tensor

from .numbers_qtsplus import is_number, require_count

# Scores that differ by at most this are a tie. The float32 features of equal frames differ by 1e-6 if they were encoded
# in batches of different sizes, and their log-relevance by hardly more. In log-relevance, TIE is a ten-thousandth of a
# token's relevance.
TIE = 1e-4
WINDOW = 8  # about how many kept tokens [`coverage`] compares a token with
BLOCK = 512  # tokens that [`temporal_redundancy`] compares at a time
# A round of [`add_farthest`] adds one token for every KEPT_PER_NEW kept ones, at most ROUND. It takes them from a pool
# of 16 times as many tokens and POOL more, at most LARGEST_POOL.
KEPT_PER_NEW = 16
ROUND = 512
POOL = 128
LARGEST_POOL = 4096
# The devices on which `torch.mm` multiplies 16-bit values many times faster than float32 values and adds the products
# in float32. Older PyTorch has no such `mm`, nor have some builds for AMD, whose device is also called "cuda".
FAST_16_BITS = {"cuda"} if torch.version.cuda and hasattr(torch.ops.aten.mm, "dtype") else set()

Grid = tuple[int, int, int]  # (time, height, width)
TensorSequence = Sequence[Tensor]


@dataclass
class Candidates:
    """
    The `M` visual tokens of one sample that compete for its budget. Expensive properties are computed when read. A
    method must not write into the tensors, since other questions about the same video share them.
    """

    visual: TensorSequence  # one [k, d] for each video or image, in turn; the k sum to M
    query: Tensor  # [L, d], raw embeddings of the question's words; empty if the prompt has no question
    positions: Tensor  # [3, M], absolute (time, height, width) in the prompt
    # (time, height, width) of each video in tokens; its k tokens are ordered frame by frame, row by row. If only parts
    # of a video compete, each part has a grid.
    grids: Sequence[Grid]
    score: Callable[[Tensor], Tensor]  # computes `log_relevance` from `query_states`
    contextualise: Callable[[], Tensor] | None = None  # computes `query_states`, which are `query` if `None`
    attend: Callable[[], Tensor] | None = None  # computes `log_attention`
    # The scores that the method has read: `log_attention` if it has read that, or else `log_relevance`.
    scores: Tensor | None = field(default=None, init=False)

    @cached_property
    def query_states(self) -> Tensor:
        """`[L, d]`, the states of the question's words that the selector compares with the visual tokens."""
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
        """`[M]` float32, at most 0: how relevant each token is to the question, as the selector scores it."""
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
        relevance = vars(self).get("_relevance")  # `None` if nobody has computed it
        return self.scores is not None and self.scores is relevance

    @cached_property
    def num_tokens(self) -> int:
        """M."""
        return sum(len(part) for part in self.visual)

    @property
    def device(self) -> torch.device:
        return self.visual[0].device


# Takes the candidates and n, from 1 to M. Returns the indices of the n tokens to keep: `[n]` int64, ascending.
Method = Callable[[Candidates, int], Tensor]
MethodOrName = str | Method  # a name in [`METHODS`], or a function like theirs


# --- The methods ---


def most_relevant(candidates: Candidates, n: int) -> Tensor:
    """The n tokens that matter most for the question (the paper, at inference)."""
    return top_n(candidates.log_relevance, n)


def lm_attention(candidates: Candidates, n: int) -> Tensor:
    """The n tokens that the language model itself attends to most in a first, shallow pass; needs no training."""
    return top_n(candidates.log_attention, n)


def uniform(candidates: Candidates, n: int) -> Tensor:
    """n evenly spaced tokens, the middle of each of n equal parts: the paper's UNIF."""
    halves = torch.arange(n, device=candidates.device) * 2 + 1  # the middle of part i lies i parts and a half on
    return (halves * candidates.num_tokens) // (2 * n)


def random(candidates: Candidates, n: int) -> Tensor:
    """n different tokens drawn with torch's global generator."""
    return torch.randperm(candidates.num_tokens, device=candidates.device)[:n].sort().values


def everything(candidates: Candidates, n: int) -> Tensor:
    """All tokens; the selector asks for `n = M`."""
    return torch.arange(n, device=candidates.device)


def temporal_redundancy(candidates: Candidates, n: int) -> Tensor:
    """
    The n tokens that differ most from the token at the same place one step earlier, by the cosine of their features,
    as Efficient Video Sampling does (arXiv 2510.14624).

    EVS keeps the whole first frame, which could fill a small budget. Here its tokens are compared with their mean.
    """
    similarities = []
    for frames in _frames_of_videos(_joined(candidates), candidates):
        first_frame = frames[0].float()
        mean = first_frame.mean(0).expand_as(first_frame)
        similarities.append(F.cosine_similarity(mean, first_frame, dim=-1))
        # In blocks, so that the copies in float32 stay small.
        blocks_before = frames[:-1].flatten(0, 1).split(BLOCK)
        blocks_now = frames[1:].flatten(0, 1).split(BLOCK)
        for before, now in zip(blocks_before, blocks_now, strict=True):
            similarities.append(F.cosine_similarity(before.float(), now.float(), dim=-1))
    return top_n(1 - torch.cat(similarities), n)


def _joined(candidates: Candidates) -> Tensor:
    """`[M, d]`, the features of all videos, detached: a choice has no gradient, and its graph would be large."""
    if len(candidates.visual) == 1:
        return candidates.visual[0].detach()
    return torch.cat(list(candidates.visual)).detach()


def _frames_of_videos(features: Tensor, candidates: Candidates) -> list[Tensor]:
    """`[time, height * width, d]` for each grid, a view of the features `[M, d]` of all videos."""
    sizes = [math.prod(grid) for grid in candidates.grids]
    by_video = zip(features.split(sizes), candidates.grids, strict=True)
    return [tokens.unflatten(0, (time, height * width)) for tokens, (time, height, width) in by_video]


def diversity(candidates: Candidates, n: int) -> Tensor:
    """
    n tokens that are far from each other: again and again the token whose nearest kept token is farthest, by the cosine
    of their features, as DivPrune does (arXiv 2503.02175).

    The first is the token farthest from the mean; DivPrune compares all pairs of tokens for it. [`add_farthest`] says
    how the others are found.
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
    n tokens that cover a video for a summary: again and again the token that differs most from its neighbours in time,
    by the cosine of the features: from their mean, and from those of them that are kept already.

    The neighbours of a token are in the steps around it that hold about [`WINDOW`] of n evenly spread tokens. So a
    thing that comes back later counts again, and a quiet hour gets few tokens. [`add_farthest`] says how the tokens are
    found.
    """
    features = _joined(candidates)
    visual = features.float()
    means = torch.cat([frames.mean(1) for frames in _frames_of_videos(visual, candidates)])
    num_steps = len(means)
    reach = round(WINDOW * num_steps / (2 * n))
    reach = max(1, min(num_steps, reach))
    means_around = F.avg_pool1d(
        means.T,
        kernel_size=2 * reach + 1,
        stride=1,
        padding=reach,
        count_include_pad=False,
    )
    means_around = F.normalize(means_around.T, dim=-1)

    directions = F.normalize(visual, dim=-1)
    steps = torch.arange(num_steps, device=visual.device)
    times = [time for time, _, _ in candidates.grids]
    frames_of_videos = _frames_of_videos(directions, candidates)
    by_video = zip(frames_of_videos, means_around.split(times), steps.split(times), strict=True)
    similarities = []
    steps_of_tokens = []
    with torch.autocast(visual.device.type, enabled=False):
        for frames, means_of_video, steps_of_video in by_video:
            similarity = frames @ means_of_video[:, :, None]
            similarities.append(similarity.flatten())
            steps_of_tokens.append(steps_of_video.repeat_interleave(frames.shape[1]))
        distance = 1 - torch.cat(similarities)
        neighbours = Neighbours(features, directions, torch.cat(steps_of_tokens), reach)
        none_kept = steps[:0]
        return add_farthest(none_kept, distance, n, neighbours)


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
            reach: tokens that are more steps apart are not compared.
        """
        self.step_of_token = step_of_token
        self.reach = reach
        self.features = directions
        self.lengths = None
        if visual.device.type in FAST_16_BITS and visual.dtype.itemsize == 2:
            self.features = visual
            self.lengths = torch.linalg.vector_norm(visual, dim=-1, dtype=torch.float32).clamp(min=1e-12)

    def similarities(self, others: Tensor, tokens: Tensor | slice = slice(None)) -> Tensor:
        """`[k, m]` float32: the cosines of k `tokens`, by default of all, with m `others`; -inf if out of reach."""
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
            is_after = steps > steps_of_others + self.reach
            cosines.masked_fill_(is_before | is_after, -torch.inf)
        return cosines


def add_farthest(
    kept: Tensor,
    distance: Tensor,
    n: int,
    neighbours: Neighbours,
) -> Tensor:
    """
    `[n]` int64, ascending: the kept tokens, and added ones that are far from them and from each other.

    The readable twin, `naive_farthest` in tests/naive.py, adds the token with the largest distance, updates all
    distances, and so on: it reads all features once for each token. Here a round adds several tokens, one for every
    [`KEPT_PER_NEW`] that are kept. It takes a pool of the farthest tokens, computes how far each would be if all better
    tokens of the pool were kept already, and adds the farthest. The host waits for nothing. Time is O(n M d), in matrix
    products, and memory O(M d).

    The first 32 tokens are the twin's. After all n, the largest distance of any token to the kept ones differs from the
    twin's by at most 5% and [`TIE`]. The exception is a video that shows many different things, each in a hundred or
    more nearly equal copies. If as many tokens are kept as there are things, about one thing in ten is missed; if three
    times as many are kept, none is.

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
        similarity_to_nearest = neighbours.similarities(chosen).amax(1)
        distance = torch.minimum(distance, 1 - similarity_to_nearest)
        distance.index_fill_(0, chosen, -torch.inf)
        kept = torch.cat([kept, chosen])
    return kept.sort().values


def _farthest(
    distance: Tensor,
    count: int,
    left: int,
    neighbours: Neighbours,
) -> Tensor:
    """One round of [`add_farthest`]: `[count]` indices among the `left` tokens that are not kept yet."""
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
    similarity.masked_fill_(~is_better, -torch.inf)
    similarity_to_better = similarity.amax(0)
    scores_if_better_are_kept = torch.minimum(scores, 1 - similarity_to_better)
    return pool[top_n(scores_if_better_are_kept, count)]


def top_n(scores: Tensor, n: int) -> Tensor:
    """
    Indices of the n largest scores, ascending: `[n]` int64. Scores within [`TIE`] of the n-th largest count as equal to
    it, and the earliest of them are taken, so that rounding does not decide between tokens that show the same.
    """
    cut = scores.topk(n, sorted=False).values.amin()
    is_above = scores > cut + TIE
    is_tied = (scores >= cut - TIE) & ~is_above
    room = n - is_above.sum()
    rank_of_tied = is_tied.cumsum(0)
    is_earliest = is_tied & (rank_of_tied <= room)
    return true_places(is_above | is_earliest, n)


def true_places(mask: Tensor, n: int) -> Tensor:
    """
    The n places where a mask is true, ascending: `[n]` int64; -1 at the end if there are fewer. Unlike
    `mask.nonzero()`, it does not make the host wait for the number of places.
    """
    slots = torch.where(mask, mask.cumsum(0) - 1, n)  # all that are false go to slot n, which is cut off
    places = torch.full((n + 1,), -1, device=mask.device)
    places.scatter_(0, slots, torch.arange(len(mask), device=mask.device))
    return places[:n]


def take_rows(
    parts: TensorSequence,
    indices: Tensor,
    on_host: Tensor,
) -> Tensor:
    """
    `[n, d]`, the rows of `parts` at ascending indices, counted as if the parts were one tensor.

    Args:
        on_host: the same indices on the host, which divides them among the parts.
    """
    if len(parts) == 1:
        if len(indices) == len(parts[0]):
            return parts[0]
        return parts[0][indices]
    starts = list(accumulate(map(len, parts), initial=0))
    bounds = torch.searchsorted(on_host, on_host.new_tensor(starts))
    counts = bounds.diff().tolist()
    by_part = zip(parts, starts[:-1], indices.split(counts), strict=True)
    return torch.cat([part[chosen - start] for part, start, chosen in by_part])


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


def find_method(selection: MethodOrName) -> Method:
    """The function that a `selection` names, or is; `ValueError` for anything else."""
    method = METHODS.get(selection) if isinstance(selection, str) else selection
    if callable(method):
        return method
    message = f"selection={selection!r}; expected one of {tuple(METHODS)}, or a function like theirs."
    if ":" in str(selection):
        message += " A stored name is never imported: give it in the command, the recipe or the call."
    raise ValueError(message)


def add_method(name: MethodOrName | None) -> None:
    """
    Makes a method available under the name that a command, a recipe or a call gives: one of [`METHODS`], or
    `module:function` or `file.py:function`, whose module is run and whose function is added to [`METHODS`]. A method
    that is given as a function needs nothing.

    Raises:
        ValueError: an unknown name; there is no such module, file or function.
    """
    if name is None:
        return
    if isinstance(name, str) and ":" in name and name not in METHODS:
        place, _, function = name.rpartition(":")
        try:
            method = runpy.run_path(place)[function] if place.endswith(".py") else resolve_name(name)
            inspect.signature(method).bind("candidates", "n")
        except Exception as error:  # the module that is run may raise anything
            raise ValueError(
                f"selection={name!r} cannot be imported: {error!r}; expected MODULE:FUNCTION or FILE.py:FUNCTION, a "
                "function of the candidates and a count."
            ) from error
        METHODS[name] = partial(_run_own, name, method)
    find_method(name)


def _run_own(name: str, method: Method, candidates: Candidates, n: int) -> Tensor:
    """
    What a method of one's own returns. An error that is not about memory becomes a `ValueError` that names the method
    and the innermost line of its own module, so it costs only the question that asked for it.
    """
    try:
        return method(candidates, n)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # it may raise anything
        place = repr(method)
        for frame, line in walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__") == method.__module__:
                place = f"line {line} of {frame.f_code.co_filename}"
        raise ValueError(f"selection={name!r} failed in {place}: {type(error).__name__}: {error}") from error


def no_question(row: int, num_tokens: int) -> ValueError:
    """The error of a method that compares tokens with a question, where a prompt has none."""
    return ValueError(
        f"Row {row} has {num_tokens} visual tokens but no question to select them by. Write one in the user's last "
        "turn, as the processor's chat template writes turns, or pass query_mask= or query_input_ids=."
    )


def is_finite(values: Tensor) -> Tensor:
    """
    Scalar bool, whether a tensor holds neither NaN nor infinity. If it does, its smallest or largest value is one. A
    sum would show it too, but for 16-bit values a sum in float32 is slow or needs a copy.
    """
    if not values.is_floating_point() or values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    if values.dtype.itemsize == 1:  # float8 has no extremes
        values = values.to(torch.bfloat16)
    lowest, highest = values.detach().aminmax()
    return lowest * 0 == highest * 0  # zero times NaN or infinity is NaN, which equals nothing


def check_kept(
    choices: Sequence[tuple[Tensor, int, int]],
    selection: MethodOrName,
    video_features: TensorSequence = (),
) -> TensorSequence:
    """
    The indices of each row on the host, which waits once for all of them and for what the checks need.

    Args:
        choices: for each row, what the method chose, n and M.
        video_features: features that the caller gave.

    Raises:
        ValueError: what a method chose is not `[n]` ascending indices of tokens; features hold NaN or infinity.
    """
    parts = []
    for kept, n, _ in choices:
        if not isinstance(kept, Tensor) or kept.shape != (n,) or kept.dtype != torch.int64:
            raise _wrong_choice(selection)
        parts.append(kept)
    parts += [is_finite(tokens)[None] for tokens in video_features]
    joined = torch.cat(parts).cpu()
    on_host = joined.split([len(part) for part in parts])
    kept_indices = on_host[: len(choices)]
    are_finite = on_host[len(choices) :]
    if not all(map(torch.all, are_finite)):
        raise ValueError(
            "NaN or infinity in the features of a video: expected finite values, as encoding it returns them."
        )
    for (_, _, num_tokens), indices in zip(choices, kept_indices, strict=True):
        is_outside = (indices < 0) | (indices >= num_tokens)
        is_ascending = indices.diff() > 0
        if is_outside.any() or not is_ascending.all():
            raise _wrong_choice(selection)
    return kept_indices


def _wrong_choice(selection: MethodOrName) -> ValueError:
    name = getattr(selection, "__name__", selection)
    return ValueError(
        f"selection={name!r} gave something else than indices; expected a tensor of n ascending int64 indices for each "
        "row, from 0 on and below the number of its tokens."
    )


def check_budget(
    selection: MethodOrName,
    retentions: Sequence[float | None],
    max_visual_tokens: int | None,
) -> list[float | None]:
    """
    Checks how many tokens a call asks for, see `QTSplusSelector.forward`. Returns the retentions as Python numbers.
    """
    for retention in retentions:
        if retention is None:
            continue
        if not is_number(retention) or not 0 < retention <= 1:
            raise ValueError(f"retention={retention!r}: expected a fraction of the visual tokens, a number in (0, 1].")
    if max_visual_tokens is not None:
        require_count("max_visual_tokens", max_visual_tokens)
    smaller_fractions = set(retentions) - {None, 1.0}
    if selection == "all" and (smaller_fractions or max_visual_tokens is not None):
        raise ValueError(
            'selection="all" keeps every visual token: choose another selection, in this call or in qtsplus_config, or '
            "leave retention and max_visual_tokens out."
        )
    # A NumPy fraction becomes the Python number that it is printed as: its products would overflow in float16 and be
    # inexact in float32.
    return [None if fraction is None else float(str(fraction)) for fraction in retentions]
