"""Dense supervision of a small base: every visual token says in words what it shows, and the second it stands in.

An answer says a word or two about a whole video, so a small model takes long to find out what its tokens are for. No
parameters are added: a word's score is the product of its embedding with the normalised token, as the merger gives it;
a second's, with the token as the last layer of the language model finds it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..data.token_words import UNNAMED, read_token_words
from ..inputs_qtsplus import take_inputs
from ..prompt_qtsplus import VIDEO

SECOND_WEIGHT = 0.5  # beside the words'


@dataclass(frozen=True)
class TokenWords:
    """
    What the visual tokens of a video show, in a language model's words.

    Args:
        labels: `[T, H, W, k]` int64, of each of k aspects (such as colour and shape) an index into `words`, or -100.
        words: `[n]` int64, the language model's token of each word.
        aspects: `[k, n]` bool, which words an aspect can be.
        digits: `[10]` int64, the tokens of the digits.
    """

    labels: torch.Tensor
    words: torch.Tensor
    aspects: torch.Tensor
    digits: torch.Tensor


def load_token_words(path: str | os.PathLike, tokenizer: Any) -> TokenWords:
    """
    Reads what `write_token_words` wrote.

    Args:
        tokenizer: has every word, with a space before it, as one token.

    Raises:
        ValueError: no such file, or a word of several tokens.
    """
    named = read_token_words(path)
    return TokenWords(
        torch.from_numpy(named.labels),
        torch.tensor([_only_token(tokenizer, f" {word}") for word in named.words]),
        torch.tensor([[word in aspect for word in named.words] for aspect in named.aspects]),
        torch.tensor([_only_token(tokenizer, str(digit)) for digit in range(10)]),
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
        inputs["video_features"] = model.model.encode(VIDEO, pixels, inputs["video_grid_thw"])
    return inputs


def naming_losses(
    model: Any, inputs: Mapping[str, Any], outputs: Any, token_words: Sequence[TokenWords | None]
) -> torch.Tensor:
    """
    Cross-entropy of what each row's visual tokens show, and of the seconds they stand in.

    Args:
        model: a QTSplus model.
        inputs: of [`with_features`], one video for each named row.
        outputs: what the model made of them.
        token_words: per row, or `None`.

    Returns:
        `[named rows]`: the mean over aspects and tokens, and half the mean over tokens of the second's.

    Raises:
        ValueError: labels for another grid than the model's.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    named = [(row, words) for row, words in enumerate(token_words) if words is not None]
    features, grids = inputs["video_features"], model.model.merged_grid(inputs["video_grid_thw"])
    if len(features) != len(named):
        raise ValueError(f"{len(named)} rows have token_words, but there are {len(features)} videos.")
    embeddings = model.get_input_embeddings().weight
    places = model.model.candidates(ids, mask, take_inputs(dict(inputs))[0])
    losses, seconds = [], torch.full_like(ids, UNNAMED)
    durations = inputs["second_per_grid_ts"].tolist()
    for (row, words), tokens, grid, duration in zip(named, features, grids, durations, strict=True):
        if tuple(words.labels.shape[:-1]) != tuple(grid):
            raise ValueError(
                f"token_words name a grid of {tuple(words.labels.shape[:-1])} tokens; the model has {tuple(grid)}."
            )
        losses.append(naming_loss(tokens[:, : embeddings.shape[-1]], words, embeddings))
        starts = (torch.arange(grid[0]) * duration).long().repeat_interleave(grid[1] * grid[2])
        starts = starts.where(starts < len(words.digits), UNNAMED)
        seconds[row, mask[row].nonzero()[places[row], 0]] = starts.to(seconds.device)
    seconds = model.compact_labels(seconds, None, outputs.qtsplus.columns)
    states = F.rms_norm(outputs.hidden_states[-2].float(), embeddings.shape[-1:])
    told = [
        _cross_entropy(states[row] @ embeddings[words.digits.to(states.device)].float().T, seconds[row])
        for row, words in named
    ]
    return torch.stack(losses) + SECOND_WEIGHT * torch.stack(told)


def naming_loss(features: torch.Tensor, named: TokenWords, embeddings: torch.Tensor) -> torch.Tensor:
    """
    Cross-entropy of what a video's tokens show, the mean over aspects of the means over tokens that have a word.

    Args:
        features: `[M, d]`, of the video's tokens.
        embeddings: `[V, d]`, of the language model's tokens.
    """
    normalised = F.rms_norm(features.float(), features.shape[-1:])
    scores = normalised @ embeddings[named.words.to(embeddings.device)].float().T
    losses = []
    for aspect, labels in zip(named.aspects.cpu(), named.labels.cpu().flatten(0, 2).T, strict=True):
        place = (aspect.cumsum(0) - 1)[labels.clamp(min=0)]  # among the aspect's own words
        losses.append(_cross_entropy(scores[:, aspect], place.where(labels != UNNAMED, UNNAMED)))
    return torch.stack(losses).mean()


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels = labels.to(logits.device)
    total = F.cross_entropy(logits, labels, ignore_index=UNNAMED, reduction="sum")
    return total / (labels != UNNAMED).sum().clamp(min=1)


__all__ = ["TokenWords", "load_token_words", "naming_loss", "naming_losses", "with_features"]
