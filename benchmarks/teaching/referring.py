"""The names in a question, of several words each, such as "the red circle", and the answers that say one of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .naming import UNNAMED, TokenWords, turns_of


@dataclass(frozen=True)
class Name:
    """
    Args:
        place: of its last word, among a row's tokens.
        turn: of the question.
        words: as indices into the words of [`TokenWords`].
    """

    place: int
    turn: int
    words: tuple[int, ...]


def find_names(ids: torch.Tensor, labels: torch.Tensor, words: TokenWords) -> list[Name]:
    """
    Where questions have several words for what a visual token shows, one behind the other.

    Args:
        ids, labels: `[S]`, of one row; the labels of answers alone are not -100.
    """
    own = words.aspects[:, 1:].any(0).nonzero()[:, 0] + 1  # the first stands for nothing
    known = dict(zip(words.words[own].tolist(), own.tolist(), strict=True))
    begins = (turns_of(labels[None])[0] != UNNAMED).nonzero()[:, 0].tolist()
    names: list[Name] = []
    run: list[int] = []
    for place, (token, label) in enumerate(zip([*ids.tolist(), -1], [*labels.tolist(), UNNAMED], strict=True)):
        if label == UNNAMED and token in known:
            run.append(known[token])
            continue
        if len(run) > 1:
            names.append(Name(place - 1, sum(begin < place - 1 for begin in begins), tuple(run)))
        run = []
    return names


def said_names(labels: torch.Tensor, names: Sequence[Name], words: TokenWords) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The places `[n]` from which the words of answers are predicted that begin with a name of their question, and of each
    of them the name's place, `[n]`.

    Args:
        labels, names: of one row, as in [`find_names`].
    """
    turns = turns_of(labels[None])[0]
    places: list[int] = []
    said: list[int] = []
    for name in names:
        tokens = [words.first_words[name.words[0]], *words.words[list(name.words[1:])]]
        for begin in (turns == name.turn).nonzero()[:, 0].tolist():
            if labels[begin + 1 : begin + 1 + len(tokens)].tolist() == [int(token) for token in tokens]:
                places += range(begin, begin + len(tokens))
                said += [name.place] * len(tokens)
    return labels.new_tensor(places), labels.new_tensor(said)


__all__ = ["Name", "find_names", "said_names"]
