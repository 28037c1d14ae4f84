"""Dense supervision of a small base: every visual token says in words what it shows, and where and when it stands.

An answer says a word or two about a whole video, so a small model takes long to find out what its tokens are for. No
parameters are added: a word's score is the product of its embedding with the normalised token, as the merger gives it.
Its second, row and column, which are a digit and two letters, are scored with the token behind the language model's
first layer. As the layer that looks things up finds them, a token names what it shows only beside earlier ones, such as
where its object has moved, and the place where an answer begins the words of its question that a token could be said
to show.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from qtsplus.model.encoding_qtsplus import encode_modality
from qtsplus.model.layout_qtsplus import lay_out
from qtsplus.model.prompt_qtsplus import VIDEO, take_inputs

from ..world.token_words import UNNAMED, read_token_words

CONTEXT_WEIGHT, QUESTION_WEIGHT = 0.5, 0.5  # beside the words'
SECONDS, ROWS, COLUMNS = "0123456789", "abcdefghijklm", "nopqrstuvwxyz"


@dataclass(frozen=True)
class TokenWords:
    """
    What the visual tokens of a video show, in a language model's words.

    Args:
        labels: `[T, H, W, k + c]` int64, of each of k aspects (such as colour and shape), and of each of c that a token
            has beside earlier ones, an index into `words`, or -100.
        words: `[n]` int64, the language model's token of each word, with a space before it.
        aspects: `[k, n]` bool, which words an aspect can be; the first of them stands for nothing.
        context: `[c, n]` bool, the same.
        things: `[T, H, W]` int64, which thing a token names, or -1; `None` where its words tell.
        places: the tokens of [`SECONDS`], [`ROWS`] and [`COLUMNS`], int64 each.
    """

    labels: torch.Tensor
    words: torch.Tensor
    aspects: torch.Tensor
    context: torch.Tensor
    places: tuple[torch.Tensor, ...]
    things: torch.Tensor | None = None

    def labels_on(self, grid: Sequence[int]) -> torch.Tensor:
        """
        The labels of a model's tokens, `[M, k + c]`.

        Args:
            grid: (T, h, w) of the model's tokens.

        Raises:
            ValueError: another grid than that of the labels.
        """
        named = tuple(self.labels.shape[:3])
        if named != tuple(grid):
            raise ValueError(f"token_words name a grid of {named} tokens; the model has {tuple(grid)}.")
        return self.labels.flatten(0, 2)

    def earlier(self, grid: Sequence[int]) -> torch.Tensor:
        """
        For each of a model's tokens, the tokens in the step before that show the same thing, `[M, M]` bool; none for a
        token that shows nothing.
        """
        if self.things is None:
            shown = self.labels_on(grid)[:, : len(self.aspects)]
            nothing = self.aspects.int().argmax(1)
        else:
            shown = self.things.reshape(-1, 1)
            nothing = torch.tensor([-1])
        something = ((shown != UNNAMED) & (shown != nothing)).all(-1)
        step = torch.arange(len(shown)) // (grid[1] * grid[2])
        same = (shown[:, None] == shown[None]).all(-1) & (step[:, None] == step[None] + 1)
        return same & something[:, None]

    def told(
        self, labels: torch.Tensor, grid: Sequence[int], duration: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """
        What the tokens of a model say inside of it: of their second, row and column, and of each aspect that they have
        beside earlier ones, the words `[m]` it can be and of every token an index into those, or -100, `[M]`.

        Args:
            labels: `[M, k + c]`, of [`labels_on`].
            grid: (T, h, w) of the model's tokens.
            duration: of a step, in seconds.
        """
        steps, *squares = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
        found = []
        for place, signs in zip(((steps * duration).long(), *squares), self.places, strict=True):
            found.append((signs, place.where(place < len(signs), UNNAMED).flatten()))
        for aspect, own in zip(self.context, labels[..., len(self.aspects) :].unbind(-1), strict=True):
            index = (aspect.cumsum(0) - 1)[own.clamp(min=0)].where(own != UNNAMED, UNNAMED)
            found.append((self.words[aspect], index))
        return found


def load_token_words(path: str | os.PathLike, tokenizer: Any) -> TokenWords:
    """
    Reads what `write_token_words` wrote.

    Args:
        tokenizer: has every word, with a space before it, as one token.

    Raises:
        ValueError: no such file, or a word of several tokens.
    """
    named = read_token_words(path)
    own, beside = (
        torch.tensor([[word in aspect for word in named.words] for aspect in aspects], dtype=torch.bool)
        for aspects in (named.aspects, named.context)
    )
    return TokenWords(
        torch.from_numpy(named.labels),
        torch.tensor([_only_token(tokenizer, f" {word}") for word in named.words]),
        own,
        beside,
        tuple(torch.tensor([_only_token(tokenizer, sign) for sign in signs]) for signs in (SECONDS, ROWS, COLUMNS)),
        None if named.things is None else torch.from_numpy(named.things),
    )


def _only_token(tokenizer: Any, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"{text!r} is {len(ids)} tokens: expected words of one token each.")
    return ids[0]


def with_features(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A model's inputs with the videos encoded, with gradients, and with the states of all layers asked for."""
    inputs = {**inputs, "output_hidden_states": True}
    if "video_features" not in inputs:
        pixels = inputs.pop("pixel_values_videos")
        inputs["video_features"] = encode_modality(model.model, VIDEO, pixels, inputs["video_grid_thw"])
    return inputs


def naming_losses(
    model: Any,
    inputs: Mapping[str, Any],
    labels: torch.Tensor,
    outputs: Any,
    token_words: Sequence[TokenWords | None],
    layer: int,
) -> torch.Tensor:
    """
    Cross-entropy of what each row's visual tokens show, of the seconds, rows and columns that they stand in and what
    they show beside others, and of what its questions name.

    Args:
        model: a QTSplus model.
        inputs: of [`with_features`], one video for each named row.
        labels: `[B, S]` of the full prompt.
        outputs: what the model made of them.
        token_words: per row, or `None`.
        layer: of the language model, the one that looks things up.

    Returns:
        `[named rows]`: the mean over aspects and tokens, half of the sum over what is told inside the language model,
        and half of the questions'.

    Raises:
        ValueError: labels for another grid than the model's, or a layer that is not there or is the first.
    """
    if not 0 < layer < len(outputs.hidden_states):
        raise ValueError(f"looking_layer={layer}: expected a layer from 1 to {len(outputs.hidden_states) - 1}.")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    named = [(row, words) for row, words in enumerate(token_words) if words is not None]
    features, grids = inputs["video_features"], model.model.merged_grid(inputs["video_grid_thw"])
    if len(features) != len(named):
        raise ValueError(f"{len(named)} rows have token_words, but there are {len(features)} videos.")
    embeddings = model.get_input_embeddings().weight
    layout = lay_out(model.model, take_inputs(dict(inputs))[0], ids, mask)
    candidates = [row.candidates for row in layout.rows]
    most = max((len(words.places) + len(words.context) for _, words in named), default=0)
    losses, targets = [], [torch.full_like(ids, UNNAMED) for _ in range(most)]
    signs: dict[int, list[torch.Tensor]] = {}
    durations = inputs["second_per_grid_ts"].tolist()
    for (row, words), tokens, grid, duration in zip(named, features, grids, durations, strict=True):
        shown = words.labels_on(tuple(grid))
        losses.append(naming_loss(tokens[:, : embeddings.shape[-1]], shown, words, embeddings))
        columns = mask[row].nonzero()[candidates[row], 0]
        told = words.told(shown, tuple(grid), duration)
        signs[row] = [known for known, _ in told]
        for target, (_, own) in zip(targets, told, strict=False):  # other rows may have more
            target[row, columns] = own.to(target.device)
    compact = partial(model.compact_labels, input_ids=None, columns=outputs.qtsplus.columns)
    targets, asked = [compact(target) for target in targets], compact(turns_of(labels))
    early, states = (F.rms_norm(outputs.hidden_states[at].float(), embeddings.shape[-1:]) for at in (1, layer))
    beside, carried = [], []
    for row, words in named:
        of_kinds = []
        for kind, (known, target) in enumerate(zip(signs[row], targets, strict=False)):
            found = (early if kind < len(words.places) else states)[row]
            of_kinds.append(_cross_entropy(found @ embeddings[known.to(found.device)].float().T, target[row]))
        beside.append(torch.stack(of_kinds).sum())
        carried.append(_question_loss(states[row], asked[row], _named(ids[row], labels[row], words), embeddings, words))
    return torch.stack(losses) + CONTEXT_WEIGHT * torch.stack(beside) + QUESTION_WEIGHT * torch.stack(carried)


def turns_of(labels: torch.Tensor) -> torch.Tensor:
    """`[B, S]`, where an answer's first token is predicted the number of its turn, else [`UNNAMED`]."""
    begins = F.pad((labels[:, 1:] != UNNAMED) & (labels[:, :-1] == UNNAMED), (0, 1))
    return (begins.cumsum(1) - 1).masked_fill(~begins, UNNAMED)


def _named(ids: torch.Tensor, labels: torch.Tensor, words: TokenWords) -> torch.Tensor:
    """`[turns, n]` bool, which of the words the question of each turn names; not "nothing"."""
    starts = (turns_of(labels[None])[0] != UNNAMED).nonzero()[:, 0]
    turns = torch.searchsorted(starts, torch.arange(len(ids), device=ids.device))  # an answer counts to the next turn
    said = (ids[:, None] == words.words.to(ids.device)) & (labels == UNNAMED)[:, None]
    found = torch.zeros(len(starts) + 1, len(words.words), device=ids.device)
    found = found.index_add(0, turns, said.float())[:-1] > 0
    found[:, 0] = False
    return found


def _question_loss(
    states: torch.Tensor, turns: torch.Tensor, named: torch.Tensor, embeddings: torch.Tensor, words: TokenWords
) -> torch.Tensor:
    """The mean over the turns whose question names something, at the places where their answers begin."""
    begins = (turns != UNNAMED).nonzero()[:, 0]
    named = named[turns[begins]].to(states.device)
    scores = states[begins] @ embeddings[words.words.to(states.device)].float().T
    counts = named.sum(1)
    surprise = -(scores.log_softmax(-1) * named).sum(1) / counts.clamp(min=1)
    return surprise.sum() / (counts > 0).sum().clamp(min=1)


def naming_loss(
    features: torch.Tensor, labels: torch.Tensor, named: TokenWords, embeddings: torch.Tensor
) -> torch.Tensor:
    """
    Cross-entropy of what a video's tokens show, the mean over aspects of the means over tokens that have a word.

    Args:
        features: `[M, d]`, of the video's tokens.
        labels: `[M, k + c]`, of [`TokenWords.labels_on`]; the first k count.
        embeddings: `[V, d]`, of the language model's tokens.
    """
    normalised = F.rms_norm(features.float(), features.shape[-1:])
    scores = normalised @ embeddings[named.words.to(embeddings.device)].float().T
    labels = labels[:, : len(named.aspects)].to(scores.device)
    losses = []
    for aspect, own in zip(named.aspects.to(scores.device), labels.unbind(-1), strict=True):
        known = own != UNNAMED
        place = (aspect.cumsum(0) - 1)[own.clamp(min=0)]  # among the aspect's own words
        surprise = -scores[:, aspect].log_softmax(-1).gather(1, place[:, None])[:, 0]
        losses.append((surprise * known).sum() / known.sum().clamp(min=1))
    return torch.stack(losses).mean()


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the words that occur of the means over the tokens that have them: most objects stand still."""
    labels = labels.to(logits.device)
    known = labels != UNNAMED
    losses, labels = F.cross_entropy(logits[known], labels[known], reduction="none"), labels[known]
    counts = labels.bincount(minlength=1)
    return (losses / counts[labels]).sum() / (counts > 0).sum().clamp(min=1)
