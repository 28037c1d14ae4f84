"""What stays of a stream whose memory is full: policies, and the question that stands while it goes on."""

import math
from typing import Any

import torch

from .answers import check_question
from .methods_qtsplus import METHODS, Candidates, Method, most_relevant
from .ranking import Scores, question_states


def newest(candidates: Candidates, n: int) -> torch.Tensor:
    """The n newest tokens: the oldest go first."""
    return candidates.positions[0].sort(stable=True).indices[-n:].sort().values


# What a token is scored by once, when it comes, and what chooses: `most_relevant` takes those with the highest scores.
POLICIES: dict[str, tuple[str, Method]] = {
    "question": ("relevance", most_relevant),
    "redundancy": ("change", most_relevant),
    "uniform": ("chance", most_relevant),
    "diversity": ("", METHODS["diversity"]),
    "oldest_first": ("", newest),
}


class StandingQuestion:
    """
    How much the tokens of a stream matter for a question. Each is scored once, when it comes.

    A token keeps its scores. They are compared with the log-sum-exp of all scores so far, to which those of new tokens
    are merged: a token's relevance is that among all that ever came, as if none had gone.

    Raises:
        ValueError: an empty question; a selector of several scoring layers, the later ones of which would have to look
            at every token again.
    """

    @torch.no_grad()
    def __init__(self, model: Any, processor: Any, question: str):
        check_question(model, processor, question)
        selector = model.model.qtsplus
        if len(selector.scoring_layers) != 1:
            raise ValueError(
                f"The selector has {len(selector.scoring_layers)} scoring layers; a standing question needs one that "
                "has a single layer: choose another policy."
            )
        ids = torch.tensor(processor.text_ids(question), device=model.device)
        states = question_states(selector, model.get_input_embeddings()(ids))
        self.reduction = selector.config.reduction
        self.scores = Scores(selector.scoring_layers[0], states, self.reduction)
        self.total: torch.Tensor | None = None  # [rows], the log-sum-exp of all scores so far
        for null in selector.null_states():
            self.add(null)

    def add(self, features: torch.Tensor) -> torch.Tensor:
        """`[k, rows]`: the scores of new tokens `[k, d]`; a row for each head and word, or one for all with "sum"."""
        scores = self.scores.of(features).T
        if self.reduction == "sum":
            scores = scores.logsumexp(1, keepdim=True)
        total = scores.logsumexp(0)
        self.total = total if self.total is None else torch.logaddexp(self.total, total)
        return scores

    def log_relevance(self, scores: torch.Tensor) -> torch.Tensor:
        """`[m]` log-relevance of tokens with these scores `[m, rows]`, among all tokens so far."""
        log_attention = scores if self.total is None else scores - self.total
        if self.reduction == "mean":
            return log_attention.logsumexp(1) - math.log(log_attention.shape[1])
        return log_attention.amax(1)


__all__ = ["POLICIES", "StandingQuestion", "newest"]
