"""Where a small base looks while it answers: at the visual tokens that the answer rests on.

From the answers alone a model of a million parameters takes tens of thousands of questions to find out that a question
names something in the video, and again for every form of a question. Told where to look it takes a few hundred.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..inputs_qtsplus import take_inputs
from .attention import AttentionChoice, attention_modules, attention_rows, noting
from .dataset import IGNORED

ENOUGH = 0.5  # of the attention on the needles; the rest may read the question


@dataclass
class _Answers:
    """
    The answers of one row of the batch, in places among its real tokens.

    Args:
        places: `[n]`, where each answer's first token is predicted.
        needles: `[n, S_b]` bool, the visual tokens that each of them rests on.
        columns: `[S_b]`, where the language model has the row's real tokens.
        shares: `[n]`, of the attention from there the needles' part, the mean over heads.
    """

    places: torch.Tensor
    needles: torch.Tensor
    columns: torch.Tensor | None = None
    shares: torch.Tensor | None = None

    @property
    def taught(self) -> bool:
        return len(self.places) > 0

    def note(
        self,
        layer: int,
        heads: list[int] | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> None:
        """Of queries `[heads, S, head_dim]` and keys `[kv_heads, S, head_dim]`."""
        assert self.columns is not None
        columns, places, needles = (part.to(keys.device) for part in (self.columns, self.places, self.needles))
        found = attention_rows(queries[:, columns[places]], keys[:, columns], places, scaling, window)
        self.shares = (found * needles).sum(-1).mean(0)


@contextmanager
def watching(
    model: Any, inputs: Mapping[str, Any], labels: torch.Tensor, needles: Sequence[Sequence[torch.Tensor]], layer: int
) -> Iterator[list[_Answers]]:
    """
    While it lasts, a pass over these inputs with all tokens notes in the rows how far each answer looks at its needles.

    Args:
        model: a QTSplus model.
        inputs: with `input_ids` `[B, S]`.
        labels: `[B, S]`.
        needles: per row and answer the visual tokens `[k]` that it rests on, as places among the row's; a row may have
            none, and an answer `[0]`.
        layer: of the language model, counted from 0.

    Raises:
        ValueError: a needle that is not among the row's visual tokens, or a layer without attention.
    """
    known = attention_modules(model.model.language_model)
    if layer not in known:
        raise ValueError(f"looking_layer={layer}: expected a layer with attention, of {list(known)}.")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    visual, _ = take_inputs(dict(inputs))
    candidates = model.model.candidates(ids, mask, visual)
    rows = []
    for own, tokens, real, row_labels in zip(needles, candidates, mask.bool(), labels, strict=True):
        supervised = row_labels[real] != IGNORED
        starts = (supervised[1:] & ~supervised[:-1]).nonzero()[:, 0]
        wanted = torch.zeros(len(starts), int(real.sum()), dtype=torch.bool, device=ids.device)
        for answer, found in zip(wanted, own, strict=False):  # a long text may have been cut before its last answers
            if len(found) and int(found.max()) >= len(tokens):
                raise ValueError(f"needles name the visual token {int(found.max())}; the video has {len(tokens)}.")
            answer[tokens[found.to(tokens.device)]] = True
        rests = wanted.any(1)
        rows.append(_Answers(starts[rests], wanted[rests]))
    with noting(model.model.language_model, rows, AttentionChoice(layers=(layer,))):
        yield rows


def looking_losses(rows: Sequence[_Answers]) -> torch.Tensor:
    """
    Of each row whose answers rest on something: the mean of -log of the share of the attention that is there, where
    [`ENOUGH`] is all that is asked for, `[such rows]`.
    """
    losses = [-(row.shares / ENOUGH).clamp(1e-4, 1).log().mean() for row in rows if row.shares is not None]
    return torch.stack(losses) if losses else torch.zeros(0)


__all__ = ["ENOUGH", "looking_losses", "watching"]
