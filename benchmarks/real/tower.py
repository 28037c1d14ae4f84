"""First stage: tower and merger learn to say, among the language model's word embeddings, what a token shows."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from ..teaching.muon import MuonBeside, MuonSingle
from .base import TOWER, load_language_model
from .words import NAMES
from .work import half_precision, log, save
from .world import NOTHING, SIZES, Pictures, make_scene, render, token_things

MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
DEVIATION = torch.tensor([0.26862954, 0.26130258, 0.27577711])
PATCH, MERGE, STEP = 14, 2, 2
BATCH = 32
RATE = 1e-3
BACKGROUND = 0.15  # the weight of a token that shows no thing
NEARNESS = 1.0  # the weight of the distance to the word
IMAGES = 24_000  # what the rate's fall is planned for


def make_tower() -> Qwen2_5_VisionTransformerPretrainedModel:
    """Its patches by a matrix: a CPU takes the gradients of a convolution slowly in half precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(Qwen2_5_VLVisionConfig(**TOWER)).float()
    with torch.no_grad():
        tower.merger.mlp[2].weight /= 30  # about as long as words
    embed: Any = tower.patch_embed
    embed.forward = lambda pixels: F.linear(pixels, embed.proj.weight.flatten(1))
    read_float32(tower)
    return tower


def read_float32(model: Any) -> None:
    """Attention in float32, whose gradients a CPU takes slowly in half precision."""
    ALL_ATTENTION_FUNCTIONS.register("float32", _attend)
    model.config._attn_implementation = "float32"


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    with torch.autocast("cpu", enabled=False):
        attended = F.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attention_mask, enable_gqa=query.shape[1] != key.shape[1]
        )
    return attended.transpose(1, 2), None


def patches(frames: torch.Tensor) -> torch.Tensor:
    """
    Frames as Qwen's processor hands them to the tower.

    Args:
        frames: `[B, T, H, W, 3]` uint8, T even, H and W of whole tokens.

    Returns:
        `[B * T/2 * H/14 * W/14, 1176]` float.
    """
    videos, time_, height, width, _ = frames.shape
    pixels = ((frames.float() / 255 - MEAN) / DEVIATION).permute(0, 1, 4, 2, 3)
    down, across = height // PATCH // MERGE, width // PATCH // MERGE
    pixels = pixels.reshape(videos, time_ // STEP, STEP, 3, down, MERGE, PATCH, across, MERGE, PATCH)
    return pixels.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(-1, 3 * STEP * PATCH * PATCH)


def see(tower: nn.Module, frames: torch.Tensor) -> torch.Tensor:
    """`[tokens, 576]`: what the tower makes of frames `[B, T, H, W, 3]`."""
    videos, time_, height, width, _ = frames.shape
    grid = torch.tensor([[time_ // STEP, height // PATCH, width // PATCH]] * videos)
    with half_precision():
        return tower(patches(frames), grid_thw=grid).pooler_output.float()


def word_directions(embeddings: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """`[len(NAMES) + 1, 576]`: the embedding of every name, and of " nothing" for the background."""
    ids = [tokenizer(f" {name}", add_special_tokens=False)["input_ids"] for name in (*NAMES, "nothing")]
    return torch.stack([embeddings[of].mean(0) for of in ids])


def draw_batch(pictures: Pictures, first: int, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """Frames `[BATCH, 2, H, W, 3]`, and each token's place of its name: `len(NAMES)` for none, -100 if unclear."""
    places = {name: place for place, name in enumerate(NAMES)}
    size = SIZES[0] if first % (2 * BATCH) else SIZES[first // (2 * BATCH) % len(SIZES)]
    shown, labels = [], []
    for seed in range(first, first + BATCH):
        scene = make_scene(pictures, seed, split=split, most=10, size=size)
        frames, owners = render(scene, pictures)
        lookup = np.array([*(places[thing.name] for thing in scene.things), -100, len(NAMES)])
        shown.append(frames)
        labels.append(lookup[token_things(owners, len(scene.things))])  # -1 and -2 are its last two
    assert NOTHING == -1
    return torch.from_numpy(np.stack(shown)), torch.from_numpy(np.stack(labels)).flatten()


class Namer(nn.Module):
    """Scores of names by the cosine between what a token is and what a word is, both from the words' mean."""

    def __init__(self, words: torch.Tensor):
        super().__init__()
        self.words: torch.Tensor
        self.register_buffer("words", words.clone())
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mean = self.words.mean(0)
        return F.normalize(tokens - mean, dim=1) @ F.normalize(self.words - mean, dim=1).T * self.scale.exp()


def naming_loss(namer: Namer, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """
    How badly tokens name what they show, and how far they are from its word (a language model reads no direction
    alone); and how many of the tokens that show a thing name it.
    """
    weights = torch.ones(len(NAMES) + 1)
    weights[-1] = BACKGROUND
    scores, clear = namer(tokens), labels >= 0
    loss = F.cross_entropy(scores, labels, weight=weights, ignore_index=-100)
    far = (tokens[clear] - namer.words[labels[clear]]).square().mean(1) / namer.words.var(0).mean()
    shows = clear & (labels < len(NAMES))
    hits = scores.argmax(1)[shows] == labels[shows]
    weight = weights[labels[clear]]
    return loss + NEARNESS * (far * weight).sum() / weight.sum(), float(hits.float().mean())


def make_optimizer(tower: nn.Module, namer: Namer, rate: float = RATE) -> MuonBeside:
    matrices = [weight for name, weight in tower.named_parameters() if weight.ndim == 2 and "blocks" in name]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in (*tower.parameters(), *namer.parameters()) if id(weight) not in chosen]
    muon = MuonSingle(matrices, lr=3 * rate, weight_decay=0.02)
    return MuonBeside(muon, torch.optim.AdamW(others, lr=rate, weight_decay=0.02, betas=(0.9, 0.98)))


def train_tower(work: Path, minutes: float, images: int = IMAGES) -> None:
    """
    Goes on where the last run stopped, for so many minutes; writes `tower.pt` every three and a log.

    Args:
        images: after how many the learning rate has fallen to a twentieth; it falls over the last two fifths.
    """

    weights, tokenizer = load_language_model(work)
    pictures, tower = Pictures(work), make_tower()
    namer = Namer(word_directions(weights["model.embed_tokens.weight"], tokenizer))
    optimizer, seen, target = make_optimizer(tower, namer), 0, work / "tower.pt"
    if target.is_file():
        stored = torch.load(target)
        tower.load_state_dict(stored["tower"])
        namer.load_state_dict(stored["namer"])
        optimizer.load_state_dict(stored["optimizer"])
        seen = stored["images"]

    def keep() -> None:
        states = {"tower": tower.state_dict(), "namer": namer.state_dict(), "optimizer": optimizer.state_dict()}
        save(target, **states, images=seen)

    rates = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
    start = saved = time.monotonic()
    busy, hits = time.process_time(), []
    while (now := time.monotonic()) - start < 60 * minutes and seen < images:
        fall = min(1.0, max(0.05, (images - seen) / (0.4 * images)))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * fall * min(1.0, (seen + BATCH) / (100 * BATCH))
        frames, labels = draw_batch(pictures, seen)
        loss, hit = naming_loss(namer, see(tower, frames), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*tower.parameters()], 1.0)
        optimizer.step()
        seen += BATCH
        hits.append(hit)
        if len(hits) == 25:
            line = {"images": seen, "loss": round(loss.item(), 3), "named": round(float(np.mean(hits)), 3)}
            line |= {
                "minutes": round((now - start) / 60, 1),
                "cpu_minutes": round((time.process_time() - busy) / 60, 2),
            }
            log(work / "tower.jsonl", line)
            hits = []
        if now - saved > 180:
            keep()
            saved = now
    keep()


def load_tower(work: Path) -> Any:
    """What [`train_tower`] left."""
    tower: Any = make_tower().eval()
    tower.load_state_dict(torch.load(work / "tower.pt")["tower"])
    return tower
