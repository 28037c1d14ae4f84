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

from qtsplus.model.layout_qtsplus import lay_out
from qtsplus.model.prompt_qtsplus import take_inputs
from qtsplus.training.attention import attention_modules, attention_rows, noting
from qtsplus.training.dataset import IGNORED

from .naming import TokenWords

# How much of the attention on what is to be looked at is enough; the rest may read the question.
LOOKS = {"looking": 0.5, "following": 0.5, "sparing": 0.9}


@dataclass
class _Look:
    """
    What one layer is to look at in one row of the batch, in places among its real tokens.

    Args:
        layer: of the language model.
        places: `[n]`, that are looked from.
        wanted: `[n, S_b]` bool, the tokens that each of them is to look at.
        shares: `[n]`, of the attention from there the wanted tokens' part, the mean over heads.
    """

    layer: int
    places: torch.Tensor
    wanted: torch.Tensor
    shares: torch.Tensor | None = None


@dataclass
class Looks:
    """
    One row of the batch.

    Args:
        by_kind: what there is to look at, by the names in [`LOOKS`].
        columns: `[S_b]`, where the language model has the row's real tokens.
    """

    by_kind: dict[str, _Look] = field(default_factory=dict)
    columns: torch.Tensor | None = None

    @property
    def taught(self) -> bool:
        return bool(self.by_kind)

    def add(self, kind: str, layer: int, places: torch.Tensor, wanted: torch.Tensor) -> None:
        """Those of places `[n]` from which there is something to look at, by `wanted` `[n, S_b]`."""
        rests = wanted.any(1)
        if rests.any():
            self.by_kind[kind] = _Look(layer, places[rests], wanted[rests])

    def note(
        self,
        layer: int,
        heads: list[int] | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        scaling: float,
    ) -> None:
        """Of queries `[heads, S, head_dim]` and keys `[kv_heads, S, head_dim]`."""
        assert self.columns is not None
        for look in self.by_kind.values():
            if look.layer == layer:
                columns, places, wanted = (part.to(keys.device) for part in (self.columns, look.places, look.wanted))
                found = attention_rows(queries[:, columns[places]], keys[:, columns], places, scaling)
                look.shares = (found * wanted).sum(-1).mean(0)


@contextmanager
def watching(
    model: Any,
    inputs: Mapping[str, Any],
    labels: torch.Tensor,
    needles: Sequence[Sequence[Sequence[torch.Tensor]]],
    layer: int,
    token_words: Sequence[TokenWords | None] | None = None,
) -> Iterator[list[Looks]]:
    """
    While it lasts, a pass over these inputs with all tokens notes in the rows how far each answer looks at its needles;
    and in the layer before, how far each visual token looks at the one before it that shows the same. Of an answer
    without needles it notes how far it looks at the text.

    Args:
        model: a QTSplus model.
        inputs: with `input_ids` `[B, S]`.
        labels: `[B, S]`.
        needles: per row and answer, for its first words in turn, the visual tokens `[k]` that each rests on, as places
            among the row's; a row may have none, and a word `[0]`.
        layer: of the language model, counted from 0.
        token_words: per row, of its video.

    Raises:
        ValueError: a needle that is not among the row's visual tokens, or a layer without attention.
    """
    known = attention_modules(model.model.language_model)
    layers = (layer,) if token_words is None else (layer - 1, layer)
    if not set(layers) <= set(known):
        raise ValueError(f"looking_layer={layer}: expected layers {list(layers)} to have attention, of {list(known)}.")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    visual, _ = take_inputs(dict(inputs))
    candidates = [row.candidates.to(ids.device) for row in lay_out(model.model, visual, ids, mask).rows]
    rows = [Looks() for _ in ids]
    for row, own, tokens, real, row_labels in zip(rows, needles, candidates, mask.bool(), labels, strict=True):
        supervised = row_labels[real] != IGNORED
        starts = (supervised[1:] & ~supervised[:-1]).nonzero()[:, 0].tolist()
        # A long text may have been cut before its last answers.
        answers = zip(starts, own, strict=False)
        said = [(start + number, word) for start, answer in answers for number, word in enumerate(answer)]
        places = torch.tensor([place for place, _ in said], dtype=torch.int64, device=ids.device)
        wanted = torch.zeros(len(said), int(real.sum()), dtype=torch.bool, device=ids.device)
        for looks, (_, found) in zip(wanted, said, strict=True):
            if len(found) and int(found.max()) >= len(tokens):
                raise ValueError(f"needles name the visual token {int(found.max())}; the video has {len(tokens)}.")
            looks[tokens[found.to(tokens.device)]] = True
        row.add("looking", layer, places, wanted)
        text = torch.ones_like(wanted) & ~wanted.any(1, keepdim=True)
        text[:, tokens] = False
        row.add("sparing", layer, places, text)
    named = [(index, words) for index, words in enumerate(token_words or ()) if words is not None]
    grids = model.model.merged_grid(inputs["video_grid_thw"]) if named else ()
    for (index, words), grid in zip(named, grids, strict=True):
        row, tokens, real = rows[index], candidates[index], mask[index].bool()
        earlier = words.earlier(tuple(grid)).to(ids.device)
        followed = earlier.any(1).nonzero()[:, 0]
        wanted = torch.zeros(len(followed), int(real.sum()), dtype=torch.bool, device=ids.device)
        wanted[:, tokens] = earlier[followed]
        row.add("following", layer - 1, tokens[followed], wanted)
    with noting(model.model.language_model, rows, dict.fromkeys(layers)):
        yield rows


def looking_losses(rows: Sequence[Looks], kind: str, enough: float | None = None) -> torch.Tensor:
    """
    Of each row that has something of a kind, one of [`LOOKS`], to look at: the mean of -log of the share of the
    attention that is there, up to the one that is `enough`, `[such rows]`.
    """
    enough = LOOKS[kind] if enough is None else enough
    shares = [row.by_kind[kind].shares for row in rows if kind in row.by_kind]
    losses = [-(share / enough).clamp(1e-4, 1).log().mean() for share in shares if share is not None]
    return torch.stack(losses) if losses else torch.zeros(0)
