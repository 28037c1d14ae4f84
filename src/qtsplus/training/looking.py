"""Where a small base looks: from an answer at the visual tokens that it rests on, and in the layer before from every
visual token at the one of the step before that shows the same.

From the answers alone a model of a million parameters takes tens of thousands of questions to find out that a question
names something in the video, and again for every form of a question. Told where to look it takes a few hundred.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..inputs_qtsplus import take_inputs
from .attention import AttentionChoice, attention_modules, attention_rows, noting
from .dataset import IGNORED
from .naming import TokenWords

ENOUGH = 0.5  # of the attention on what is to be looked at; the rest may read the question


@dataclass
class _Look:
    """
    What one layer is to look at in one row of the batch, in places among its real tokens.

    Args:
        places: `[n]`, that are looked from.
        wanted: `[n, S_b]` bool, the tokens that each of them is to look at.
        shares: `[n]`, of the attention from there the wanted tokens' part, the mean over heads.
    """

    places: torch.Tensor
    wanted: torch.Tensor
    shares: torch.Tensor | None = None


@dataclass
class _Looks:
    """
    One row of the batch.

    Args:
        by_layer: what there is to look at.
        columns: `[S_b]`, where the language model has the row's real tokens.
    """

    by_layer: dict[int, _Look] = field(default_factory=dict)
    columns: torch.Tensor | None = None

    @property
    def taught(self) -> bool:
        return bool(self.by_layer)

    def add(self, layer: int, places: torch.Tensor, wanted: torch.Tensor) -> None:
        if len(places):
            self.by_layer[layer] = _Look(places, wanted)

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
        look = self.by_layer.get(layer)
        if look is None:
            return
        assert self.columns is not None
        columns, places, wanted = (part.to(keys.device) for part in (self.columns, look.places, look.wanted))
        found = attention_rows(queries[:, columns[places]], keys[:, columns], places, scaling, window)
        look.shares = (found * wanted).sum(-1).mean(0)


@contextmanager
def watching(
    model: Any,
    inputs: Mapping[str, Any],
    labels: torch.Tensor,
    needles: Sequence[Sequence[torch.Tensor]],
    layer: int,
    token_words: Sequence[TokenWords | None] | None = None,
) -> Iterator[list[_Looks]]:
    """
    While it lasts, a pass over these inputs with all tokens notes in the rows how far each answer looks at its needles;
    and in the layer before, how far each visual token looks at the one before it that shows the same.

    Args:
        model: a QTSplus model.
        inputs: with `input_ids` `[B, S]`.
        labels: `[B, S]`.
        needles: per row and answer the visual tokens `[k]` that it rests on, as places among the row's; a row may have
            none, and an answer `[0]`.
        layer: of the language model, counted from 0.
        token_words: per row, of its video.

    Raises:
        ValueError: a needle that is not among the row's visual tokens, or a layer without attention.
    """
    known = attention_modules(model.model.language_model)
    layers = (layer,) if token_words is None else (layer - 1, layer)
    if not set(layers) <= set(known):
        raise ValueError(
            f"looking_layer={layer}: expected a layer with attention, and another before it, of {list(known)}."
        )
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    visual, _ = take_inputs(dict(inputs))
    candidates = model.model.candidates(ids, mask, visual)
    rows = [_Looks() for _ in ids]
    for row, own, tokens, real, row_labels in zip(rows, needles, candidates, mask.bool(), labels, strict=True):
        supervised = row_labels[real] != IGNORED
        starts = (supervised[1:] & ~supervised[:-1]).nonzero()[:, 0]
        wanted = torch.zeros(len(starts), int(real.sum()), dtype=torch.bool, device=ids.device)
        for answer, found in zip(wanted, own, strict=False):  # a long text may have been cut before its last answers
            if len(found) and int(found.max()) >= len(tokens):
                raise ValueError(f"needles name the visual token {int(found.max())}; the video has {len(tokens)}.")
            answer[tokens[found.to(tokens.device)]] = True
        rests = wanted.any(1)
        row.add(layer, starts[rests], wanted[rests])
    named = [(index, words) for index, words in enumerate(token_words or ()) if words is not None]
    grids = model.model.merged_grid(inputs["video_grid_thw"]) if named else ()
    for (index, words), grid in zip(named, grids, strict=True):
        earlier = words.earlier(tuple(grid)).to(ids.device)
        followed, tokens = (earlier >= 0).nonzero()[:, 0], candidates[index]
        wanted = torch.zeros(len(followed), int(mask[index].sum()), dtype=torch.bool, device=ids.device)
        wanted.scatter_(1, tokens[earlier[followed]][:, None], True)
        rows[index].add(layer - 1, tokens[followed], wanted)
    with noting(model.model.language_model, rows, AttentionChoice(layers=layers)):
        yield rows


def looking_losses(rows: Sequence[_Looks], layer: int) -> torch.Tensor:
    """
    Of each row that has something to look at in a layer: the mean of -log of the share of the attention that is there,
    where [`ENOUGH`] is all that is asked for, `[such rows]`.
    """
    shares = [row.by_layer[layer].shares for row in rows if layer in row.by_layer]
    losses = [-(share / ENOUGH).clamp(1e-4, 1).log().mean() for share in shares if share is not None]
    return torch.stack(losses) if losses else torch.zeros(0)


__all__ = ["ENOUGH", "looking_losses", "watching"]
