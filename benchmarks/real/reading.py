"""Second stage: the language model learns to read visual tokens and to answer from them."""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from .base import IDS, TOWER, TURN, TURN_END, load_language_model, make_base
from .clips import PARTS, Clip, join, look
from .tower import load_tower, read_float32
from .work import half_precision, keep_halves, log, save
from .world import Pictures

RANK = 16
LORA = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
IGNORED = -100
BATCH = 6  # clips
RATE, TOWER_RATE = 1e-3, 1e-4
CLIPS = 4_500
# The second part, in which long prompts are learned: clips a step by how many crowds follow each other in them, of the
# last one to so many in turn; and texts that are joined.
JOINED = -1
LONGER, CROWD_STEPS, CROWD_RATE = ((0, 3), (1, 2), (PARTS, 1), (JOINED, 1)), 210, 5e-4


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
        count, after = len(clip.tokens), [IDS["<|vision_end|>"]] if len(clip.tokens) else []
        before = self.before[: len(self.before) - (not count)]
        start = len(before)
        ids = [*before, *[IDS["<|video_pad|>"]] * count]
        labels, owner = [IGNORED] * len(ids), [-1] * len(ids)
        seconds = torch.tensor([TOWER["tokens_per_second"], 1, 1])
        positions = [torch.arange(start).expand(3, -1), (clip.places * seconds).T + start]
        begin = start + clip.side
        for number, question in enumerate(clip.questions):
            asked = [
                *after,
                *self._ids(f"{question.question}{TURN_END}\n{TURN}assistant\n"),
            ]
            said = self._ids(f"{question.answer}{TURN_END}")
            ids += asked + said
            labels += [IGNORED] * len(asked) + said
            owner += [number] * len(asked + said)
            positions.append(torch.arange(len(asked + said)).expand(3, -1) + begin)
        return {"ids": ids, "labels": labels, "owner": owner, "positions": torch.cat(positions, 1)}


class Reader(nn.Module):
    """The language model with LoRA in every layer's attention, on packed rows."""

    def __init__(self, base: Any):
        super().__init__()
        self.language_model: Any = base.model.language_model.requires_grad_(False)
        read_float32(self.language_model)
        keep_halves(self.language_model)
        inject_adapter_in_model(LORA, self.language_model)
        for weight in self.trained().values():
            weight.data = weight.data.float()

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self.language_model.named_parameters() if "lora_" in name}

    def forward(self, packed: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores `[said, vocabulary]` and what is said, `[said]`, of every word of every answer in turn."""
        embeddings = self.language_model.embed_tokens(packed["input_ids"])
        embeddings = embeddings.masked_scatter(packed["visual"][..., None], packed["tokens"].to(embeddings.dtype))
        labels = packed["labels"][:, 1:]
        says = labels != IGNORED
        with half_precision():
            hidden = self.language_model(
                inputs_embeds=embeddings,
                attention_mask={"full_attention": packed["visible"]},
                position_ids=packed["positions"],
                use_cache=False,
            ).last_hidden_state
            scores = F.linear(hidden[:, :-1][says], self.language_model.embed_tokens.weight)
        return scores.float(), labels[says]


def answer_loss(
    answered: tuple[torch.Tensor, torch.Tensor], packed: dict[str, Any]
) -> tuple[torch.Tensor, list[list[bool]]]:
    """The mean over answers of their words' loss; of each row's questions whether every word was the likeliest."""
    scores, said = answered
    says = packed["labels"][:, 1:] != IGNORED
    rows = torch.arange(len(says))[:, None].expand_as(says)[says]
    answers = rows * 1000 + packed["owner"][:, 1:][says]
    _, which, lengths = answers.unique(return_inverse=True, return_counts=True)
    loss = (F.cross_entropy(scores, said, reduction="none") / lengths[which]).sum() / len(lengths)
    right = torch.ones(len(lengths), dtype=torch.bool)
    right[which[scores.argmax(1) != said]] = False
    hits: list[list[bool]] = [[] for _ in says]
    for answer, hit in zip(answers.unique().tolist(), right.tolist(), strict=True):
        hits[answer // 1000].append(hit)
    return loss, hits


def train_reading(work: Path, minutes: float, clips: int = CLIPS, steps: int = CROWD_STEPS) -> None:
    """
    Goes on where the last run stopped, for so many minutes; writes `reading.pt` every three, and a log. Language model
    and tower learn together, the tower from where `train_tower` left it; then the language model learns from [`LONGER`]
    clips too, the tower from those of few things alone.

    Args:
        clips, steps: of the first and of the second part. Over the last two fifths of each the learning rate falls to a
            twentieth.
    """
    weights, tokenizer = load_language_model(work)
    pictures, packer, reader = Pictures(work), Packer(tokenizer), Reader(make_base(weights))
    trained, tower, target = reader.trained(), load_tower(work), work / "reading.pt"
    groups = [{"params": [*trained.values()]}, {"params": [*tower.parameters()]}]
    optimizer, seen, step = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0), 0, 0
    if target.is_file():
        stored = torch.load(target)
        seen, step = stored["clips"], stored["steps"]
        optimizer.load_state_dict(stored["optimizer"])
        tower.load_state_dict(stored["tower"])
        for name, weight in trained.items():
            weight.data.copy_(stored["lora"][name])

    def keep() -> None:
        state = {"tower": tower.state_dict(), "optimizer": optimizer.state_dict()}
        save(target, lora={**trained}, **state, clips=seen, steps=step)

    start = saved = time.monotonic()
    hits: dict[str, list[bool]] = defaultdict(list)
    losses: list[float] = []
    while (now := time.monotonic()) - start < 60 * minutes and step < steps:
        first = seen < clips
        done, whole, warm = (seen, clips, BATCH * 30) if first else (step, steps, 30)
        fall = min(1.0, max(0.05, (whole - done) / (0.4 * whole))) * min(1.0, (done + 1) / warm)
        for group, rate in zip(optimizer.param_groups, (RATE if first else CROWD_RATE, TOWER_RATE), strict=True):
            group["lr"] = rate * fall
        optimizer.zero_grad()
        for parts, count in ((0, BATCH),) if first else LONGER:
            parts = step % PARTS + 1 if parts == PARTS else parts
            seeds = range(seen, seen + count)
            with torch.set_grad_enabled(not parts):
                batch = [join(seed) if parts == JOINED else look(pictures, tower, seed, parts) for seed in seeds]
            packed = packer.pack(batch)
            loss, right = answer_loss(reader(packed), packed)
            loss.backward()
            seen += count
            losses.append(loss.item())
            for clip, answers in zip(batch, right, strict=True):
                for question, hit in zip(clip.questions, answers, strict=True):
                    hits[f"{parts} {question.kind}"].append(hit)
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        optimizer.step()
        step += not first
        if len(losses) >= 60:
            line = {"clips": seen, "steps": step, "loss": round(float(np.mean(losses)), 3)}
            line |= {kind: round(100 * float(np.mean(of))) for kind, of in sorted(hits.items())}
            log(work / "reading.jsonl", {**line, "minutes": round((now - start) / 60, 1)})
            hits.clear()
            losses.clear()
        if now - saved > 180:
            keep()
            saved = now
    keep()
