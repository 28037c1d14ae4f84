"""How many tokens a question needs: the heads that predict it, and the rules that read what they predict."""

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fields_qtsplus import QTSplusConfig
from .methods_qtsplus import TIE, Candidates, true_places

if TYPE_CHECKING:
    from .selector_qtsplus import Call, QTSplusSelector

DOUBLINGS = 15  # losses are predicted for 1, 2, 4, ... 16,384 tokens, whatever n_max is; more tokens lose nothing
EPSILON = 1e-8  # inside the normalisation and the logarithm of the entropy
NEAR_SHARE = 0.2  # of the highest relevance

# --- The heads ---


class Linear(nn.Linear):
    """
    Computes in float32 whatever its parameters' dtype. It is a module so that offloading finds its weights.

    It has the name of its base because llm-compressor lists the modules that it did not quantize by that name.
    """

    def forward(self, states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states.float(), self.weight.float(), self.bias.float())


def float32_mlp(
    inputs: int,
    hidden_size: int,
    outputs: int,
) -> nn.Sequential:
    return nn.Sequential(
        Linear(inputs, hidden_size),
        nn.GELU(),
        Linear(hidden_size, outputs),
    )


class QTSplusBudgetHead(nn.Module):
    """`rho = rho_min + (rho_max - rho_min) sigmoid(MLP(features))`, in float32 whatever the parameters' dtype."""

    def __init__(self, hidden_size: int, budget_hidden_size: int):
        super().__init__()
        self.mlp = float32_mlp(hidden_size + 3, budget_hidden_size, 1)

    def forward(
        self,
        features: Tensor,
        rho_min: float,
        rho_max: float,
    ) -> Tensor:
        logit = self.mlp(features).flatten()[0]
        return rho_min + (rho_max - rho_min) * torch.sigmoid(logit)


def budget_features(query: Tensor, relevance: Tensor) -> Tensor:
    """
    Line 3: `[s_q, log M, max r, H(p)]`, float32 `[d + 3]`, with `p = r / sum r` and `H` its entropy.

    Args:
        query: `[L, d]`, the states of the question's words.
        relevance: `[M]` float32.
    """
    p = relevance / (relevance.sum() + EPSILON)
    log_p = (p + EPSILON).log()
    entropy = -(p * log_p).sum()
    log_m = torch.full_like(entropy, math.log(len(relevance)))
    of_relevance = torch.stack([log_m, relevance.max(), entropy])
    return torch.cat([query.float().mean(0), of_relevance])


class QTSplusLossHead(nn.Module):
    """
    Predicts how much an answer loses with only 1, 2, 4, ... of the most relevant tokens: `[K]` nats that fall towards
    0, in float32 whatever the parameters' dtype.
    """

    def __init__(self, hidden_size: int, budget_hidden_size: int):
        super().__init__()
        self.mlp = float32_mlp(hidden_size + 7, budget_hidden_size, DOUBLINGS)

    def forward(self, query: Tensor, log_relevance: Tensor, near: Tensor) -> Tensor:
        """
        The features are the query, the tokens' part of all relevance, and how relevance is spread among the tokens with
        at least [`NEAR_SHARE`] of the highest. The thousands of weak tokens that a long video adds do not change how
        many tokens an answer needs.

        Args:
            query: `[L, d]`, the states of the question's words.
            log_relevance: `[M]` float32.
            near: where [`is_near`] is true.
        """
        relevance = log_relevance.exp()
        total = relevance.sum()
        near = relevance[near].sort(descending=True).values
        shares = near / (near.sum() + EPSILON)
        entropy = torch.special.entr(shares).sum()
        fractions = shares.new_tensor([0.5, 0.8, 0.95])
        counts = torch.searchsorted(shares.cumsum(0), fractions) + 1
        log_counts = counts.float().log()
        parts = torch.stack([shares[0], total, 1 - total])
        log_parts = parts.clamp(min=1e-4).log()
        mean_query = query.float().mean(0)
        features = torch.cat([mean_query, log_parts, entropy[None], log_counts])
        logits = self.mlp(features).flatten()
        falls = F.softplus(logits - 4)  # small before training
        return falls.flip(0).cumsum(0).flip(0)


def is_near(log_relevance: Tensor) -> Tensor:
    """`[M]` bool, which tokens have at least [`NEAR_SHARE`] of the highest relevance."""
    relevance = log_relevance.exp()
    is_far = relevance < NEAR_SHARE * relevance.max()
    return ~is_far  # all of them if there is a NaN, which is refused later


# --- From a prediction to a count ---


def kept_count(
    rho: float,
    num_tokens: int,
    n_max: int,
) -> int:
    """Line 4: `n = min(ceil(rho M), n_max)`, at least 1."""
    if math.isnan(rho):
        raise ValueError("The predicted budget is NaN: expected finite features, and weights that do not overflow.")
    # A product such as 0.07 * 100 = 7.000000000000001 must not cost a token more.
    wanted = math.ceil(round(rho * num_tokens, 6))
    return max(1, min(wanted, n_max))


def cheapest_count(
    losses: Sequence[float],
    config: QTSplusConfig,
    least: int,
    most: int,
) -> int:
    """
    The count, `least` to `most`, at which the loss that [`QTSplusLossHead`] predicts and the price of the tokens are
    least together: Equation 5 of one question. Predictions are interpolated linearly over the logarithm of the count.
    """
    highest = math.log2(most)
    costs = {}
    for step in range(math.ceil(4 * highest) + 1):
        doublings = min(step / 4, highest)
        count = max(least, round(2**doublings))
        share = count / config.n_max
        cost = np.interp(math.log2(count), range(len(losses)), losses)
        cost += config.token_price * count
        cost += config.lambda_m * share
        cost += config.lambda_t * share**2
        costs[count] = cost
    return min(costs, key=costs.__getitem__)


def count_of_mass(log_shares: Tensor, mass: float) -> Tensor:
    """
    The smallest number of the tokens, a scalar, that leaves at most `1 - mass` of their shares out, up to [`TIE`].

    Args:
        log_shares: `[M]`; the shares sum to 1, or to less where something else took the rest, which counts as kept.
    """
    shares = log_shares.exp().sort(descending=True).values
    shares = shares / shares.sum().clamp(min=1)
    rest = shares.sum() - shares.cumsum(0)
    needed = (rest > 1 - mass + TIE).sum() + 1
    return needed.clamp(max=len(shares))


# --- Lines 3 and 4: the budget ---


class Budget(NamedTuple):
    """The budget of one sample."""

    rho: Tensor  # scalar
    n: int
    losses: Tensor  # [K], the prediction of [`QTSplusLossHead`]; [0] without such a head


BudgetReader = Generator[Tensor, Any, Budget]  # see [`read_together`]


def predict_budget(
    selector: "QTSplusSelector",
    candidates: Candidates,
    retention: float | None,
    call: "Call",
) -> BudgetReader:
    """
    How many tokens stay, by the call, or by the head or the rule that the configuration names: a generator for
    [`read_together`].
    """
    config = selector.config
    num_tokens = candidates.num_tokens
    no_losses = torch.zeros(DOUBLINGS if config.budget == "loss" else 0, device=candidates.device)

    def stated(rho: float, n: int) -> Budget:
        return Budget(no_losses.new_full((), rho), n, no_losses)

    if num_tokens == 0:
        return stated(0, 0)
    if call.selection == "all":
        return stated(1, num_tokens)
    if retention is not None:
        return stated(retention, kept_count(retention, num_tokens, call.cap))
    if call.selection == "lm_attention":
        count = yield count_of_mass(candidates.log_attention.log_softmax(0), config.attention_mass)
        # A share of the tokens is rounded as a predicted rho is.
        rounded = torch.tensor(count / num_tokens, dtype=torch.float32)
        rho_within_bounds = float(rounded.clamp(config.rho_min, config.rho_max))
        return stated(rho_within_bounds, kept_count(rho_within_bounds, num_tokens, call.cap))
    if config.budget == "loss":
        return (yield from predict_by_losses(selector, candidates, call.cap))
    relevance = candidates.log_relevance.exp()
    if config.gate == "detached":  # then only attention teaches the scores
        relevance = relevance.detach()
    features = budget_features(candidates.query_states, relevance)
    rho = selector.budget(features, config.rho_min, config.rho_max)
    n = kept_count((yield rho.detach()), num_tokens, call.cap)
    return Budget(rho, n, no_losses)


def predict_by_losses(
    selector: "QTSplusSelector",
    candidates: Candidates,
    cap: int,
) -> BudgetReader:
    """The count at which the predicted loss of the answer and the price of the tokens are least together."""
    config = selector.config
    num_tokens = candidates.num_tokens
    log_relevance = candidates.log_relevance.detach()
    is_high = is_near(log_relevance)
    near = true_places(is_high, (yield is_high.sum()))
    losses = selector.budget(candidates.query_states.detach(), log_relevance, near)
    least = kept_count(config.rho_min, num_tokens, cap)
    most = kept_count(config.rho_max, num_tokens, cap)
    n = cheapest_count((yield losses.detach()), config, least, most)
    return Budget(losses.new_full((), n / num_tokens), n, losses)


def read_together(readers: Sequence[Generator[Tensor, Any, Any]]) -> list[Any]:
    """What generators return that yield tensors of one shape to have their values; the host waits once for all rows."""
    results = {}
    values = dict.fromkeys(readers)
    while values:
        wanted = {}
        for reader, value in values.items():
            try:
                wanted[reader] = reader.send(value)
            except StopIteration as end:
                results[reader] = end.value
        read = torch.stack(list(wanted.values())).tolist() if wanted else []
        values = dict(zip(wanted, read, strict=True))
    return [results[reader] for reader in readers]
