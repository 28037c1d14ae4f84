"""Second stage: the language model learns to read visual tokens and to answer from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from .base import IDS, TOWER, TURN, TURN_END
from .questions import Question

RANK = 16
LORA = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
IGNORED = -100


@dataclass(frozen=True)
class Clip:
    """
    Visual tokens and what is asked about them.

    Attributes:
        tokens: `[n, 576]`.
        places: `[n, 3]` int64, their (time, row, column).
        side: the larger of the grid's height and width, in tokens.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    side: int
    questions: tuple[Question, ...]


class Packer:
    """
    Lays clips with all their questions out as one row each: a video once, then every question with its answer, which
    see the video and themselves. Positions and visible tokens of a question are those of it alone with the video.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.before = [*self._ids(f"{TURN}user\n"), IDS["<|vision_start|>"]]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def pack(self, clips: Sequence[Clip]) -> dict[str, Any]:
        """
        Returns:
            `input_ids`, `labels` `[B, L]` (`IGNORED` where nothing is said), `positions` `[3, B, L]`, `visible`
            `[B, 1, L, L]` bool, `visual` `[B, L]` bool, `tokens` `[all visual tokens, 576]`, `owner` `[B, L]`: of which
            of its row's questions a token is, -1 for the video's.
        """
        rows = [self._row(clip) for clip in clips]
        length = max(len(row["ids"]) for row in rows)
        ids = torch.full((len(rows), length), IDS["<|vision_pad|>"])
        labels, owner = torch.full_like(ids, IGNORED), torch.full_like(ids, -2)
        positions = torch.zeros((3, len(rows), length), dtype=torch.long)
        for number, row in enumerate(rows):
            filled = slice(len(row["ids"]))
            ids[number, filled] = torch.tensor(row["ids"])
            labels[number, filled] = torch.tensor(row["labels"])
            owner[number, filled] = torch.tensor(row["owner"])
            positions[:, number, filled] = row["positions"]
        earlier = torch.ones(length, length, dtype=torch.bool).tril()
        own = owner[:, :, None] == owner[:, None, :]
        visible = earlier & (own | (owner == -1)[:, None, :])
        return {
            **{"input_ids": ids, "labels": labels, "positions": positions, "visible": visible[:, None]},
            **{"visual": ids == IDS["<|video_pad|>"], "owner": owner},
            "tokens": torch.cat([clip.tokens for clip in clips]),
        }

    def _row(self, clip: Clip) -> dict[str, Any]:
        start, count = len(self.before), len(clip.tokens)
        ids = [*self.before, *[IDS["<|video_pad|>"]] * count]
        labels, owner = [IGNORED] * len(ids), [-1] * len(ids)
        seconds = torch.tensor([TOWER["tokens_per_second"], 1, 1])
        positions = [torch.arange(start).expand(3, -1), (clip.places * seconds).T + start]
        after = start + clip.side
        for number, question in enumerate(clip.questions):
            asked = [
                IDS["<|vision_end|>"],
                *self._ids(f"{question.question}{TURN_END}\n{TURN}assistant\n"),
            ]
            said = self._ids(f"{question.answer}{TURN_END}")
            ids += asked + said
            labels += [IGNORED] * len(asked) + said
            owner += [number] * len(asked + said)
            positions.append(torch.arange(len(asked + said)).expand(3, -1) + after)
        return {"ids": ids, "labels": labels, "owner": owner, "positions": torch.cat(positions, 1)}


class Reader(nn.Module):
    """The language model with LoRA in every layer's attention, on packed rows."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.language_model = base.model.language_model.requires_grad_(False)
        inject_adapter_in_model(LORA, self.language_model)

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self.language_model.named_parameters() if "lora_" in name}

    def forward(self, packed: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores `[said, vocabulary]` and what is said, `[said]`, of every word of every answer in turn."""
        embeddings = self.language_model.embed_tokens(packed["input_ids"])
        embeddings = embeddings.masked_scatter(packed["visual"][..., None], packed["tokens"].to(embeddings.dtype))
        hidden = self.language_model(
            inputs_embeds=embeddings,
            attention_mask={"full_attention": packed["visible"]},
            position_ids=packed["positions"],
            use_cache=False,
        ).last_hidden_state
        labels = packed["labels"][:, 1:]
        says = labels != IGNORED
        return F.linear(hidden[:, :-1][says], self.language_model.embed_tokens.weight), labels[says]


def right_answers(reader: Reader, packed: dict[str, Any]) -> list[list[bool]]:
    """Of each row's questions whether every word of the answer is the likeliest."""
    with torch.no_grad():
        scores, labels = reader(packed)
    hits = torch.ones(packed["labels"][:, 1:].shape, dtype=torch.bool)
    hits[packed["labels"][:, 1:] != IGNORED] = scores.argmax(1) == labels
    owner = packed["owner"][:, 1:]
    return [
        [bool(hits[row][owner[row] == number].all()) for number in range(int(owner[row].max()) + 1)]
        for row in range(len(owner))
    ]


class IdealEyes:
    """
    Visual tokens as a tower that names things would make them, with a tower's doubts: no picture is looked at.

    Args:
        words: `[names + 1, 576]`, the embedding of every name and, last, of the background.
        doubt: the share of a token that other names have, at most.
    """

    def __init__(self, words: torch.Tensor, doubt: float = 0.6, noise: float = 0.4):
        self.mean = words.mean(0)
        self.directions = F.normalize(words - self.mean, dim=1)
        self.length = float((words - self.mean).norm(dim=1).mean())
        self.doubt, self.noise = doubt, noise

    def tokens(self, labels: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
        """`[n, 576]` for `labels` `[n]`, places among the words."""
        count = len(labels)
        others = torch.from_numpy(rng.integers(0, len(self.directions), (count, 2)))
        share = torch.from_numpy(rng.uniform(0, self.doubt, (count, 2)).astype(np.float32))
        mixed = self.directions[torch.from_numpy(labels)] + (share[..., None] * self.directions[others]).sum(1)
        spread = torch.from_numpy(rng.standard_normal(mixed.shape).astype(np.float32))
        return F.normalize(mixed + self.noise * F.normalize(spread, dim=1), dim=1) * self.length + self.mean

    def __call__(self, frames: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
        """As [`Eyes`]. What is unclear shows anything."""
        flat = labels.ravel()
        return self.tokens(np.where(flat >= 0, flat, rng.integers(0, len(self.directions), len(flat))), rng)
