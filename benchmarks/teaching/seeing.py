"""A vision tower learns to name what its tokens show, from clips of one second that are drawn as they are needed.

`python -m benchmarks.teaching.seeing FOLDER --steps 4000` goes on with the model in FOLDER where it was stopped.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.clips import write_mp4
from torch.utils.data import DataLoader, Dataset

from qtsplus.model.modeling_qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.model.processing_qtsplus import Qwen2_5_VLQTSplusProcessor

from ..world.clip import read_video
from ..world.open_tokens import OPEN_ASPECTS, OPEN_WORDS, count_pixels, name_tokens
from ..world.openworld import OPEN_SIZES, OpenWorld, make_open, render_open
from ..world.scene import FPS
from ..world.token_words import UNNAMED
from .muon import MuonBeside, matrix_names

SIZE_SHARES = (0.4, 0.12, 0.12, 0.12, 0.12, 0.12)
STATE = "training.pt"


def patches(frames: np.ndarray, processor: Any) -> torch.Tensor:
    """
    Frames as the vision tower reads them, as the video processor would give them, without its checks.

    Args:
        frames: `[B, T, H, W, 3]` uint8; T of whole steps, H and W of whole tokens.

    Returns:
        `[B * patches, values]` float.
    """
    settings = processor.video_processor
    side, step, merge = settings.patch_size, settings.temporal_patch_size, settings.merge_size
    mean, std = (np.array(values, np.float32) for values in (settings.image_mean, settings.image_std))
    pixels = torch.from_numpy((frames.astype(np.float32) / 255 - mean) / std).movedim(-1, 2)
    batch, time_, channels, height, width = pixels.shape
    parts = pixels.reshape(
        batch, time_ // step, step, channels, height // side // merge, merge, side, width // side // merge, merge, side
    )
    return parts.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(-1, channels * step * side * side)


def compressed(frames: np.ndarray) -> np.ndarray:
    """Frames `[T, H, W, 3]` as an mp4 file gives them back."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        write_mp4(file.name, frames, FPS)
        return read_video(file.name, lambda count, fps: np.arange(count))[0]


def draw_batch(first: int, count: int, few: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """
    Clips of one second and of one size, of the worlds from a seed on; half of them as mp4 gives them back.

    Returns:
        frames `[B, T, H, W, 3]` and labels `[B * tokens, aspects]`.
    """
    rng = np.random.default_rng([first, 13])
    size = OPEN_SIZES[rng.choice(len(OPEN_SIZES), p=SIZE_SHARES)]
    worlds = [make_open(first + index, 1, few, size) for index in range(count)]
    frames = np.stack([render_open(world) for world in worlds])
    film = frames[::2]  # one file for all of them, which is opened once
    frames[::2] = compressed(film.reshape(-1, *film.shape[2:])).reshape(film.shape)
    return frames, np.concatenate([_labels(world) for world in worlds])


def _labels(world: OpenWorld) -> np.ndarray:
    return name_tokens(world, count_pixels(world)).labels.reshape(-1, 6)[:, : len(OPEN_ASPECTS)]


class Namer:
    """The words of the aspects, scored with what a model's vision tower makes of patches."""

    def __init__(self, model: Any, processor: Any):
        self.model, self.processor = model, processor
        ids = [processor.tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0] for word in OPEN_WORDS]
        self.words = torch.tensor(ids)
        self.aspects = [[OPEN_WORDS.index(word) for word in aspect] for aspect in OPEN_ASPECTS]

    def scores(self, frames: np.ndarray) -> list[torch.Tensor]:
        """Of each aspect `[B * tokens, words of it]`."""
        settings = self.processor.video_processor
        grid = (
            frames.shape[1] // settings.temporal_patch_size,
            *(side // settings.patch_size for side in frames.shape[2:4]),
        )
        grids = torch.tensor([grid] * len(frames))
        tokens = self.model.model.visual(patches(frames, self.processor), grid_thw=grids).pooler_output
        tokens = torch.cat(list(tokens)) if isinstance(tokens, (tuple, list)) else tokens
        words = self.model.get_input_embeddings().weight[self.words]
        found = F.rms_norm(tokens, tokens.shape[-1:]) @ words.T
        return [found[:, aspect] for aspect in self.aspects]

    def targets(self, labels: np.ndarray) -> list[torch.Tensor]:
        """Of each aspect `[B * tokens]`, an index into its words or -100."""
        columns = []
        for aspect, own in zip(self.aspects, labels.T, strict=True):
            place = np.full(len(OPEN_WORDS), UNNAMED)
            place[aspect] = np.arange(len(aspect))
            columns.append(torch.from_numpy(np.where(own == UNNAMED, UNNAMED, place[np.maximum(own, 0)])))
        return columns


def naming_surprise(scores: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy, the mean over aspects; a word that is n times as rare counts sqrt(n) times as much."""
    losses = []
    for own, target in zip(scores, targets, strict=True):
        weights = target[target >= 0].bincount(minlength=own.shape[1]).clamp(min=1).float().rsqrt()
        losses.append(F.cross_entropy(own, target, weights, ignore_index=UNNAMED))
    return torch.stack(losses).mean()


@torch.no_grad()
def name_accuracy(namer: Namer, first: int = 10_000_000, batches: int = 12, count: int = 16) -> dict[str, float]:
    """Of held-out clips, the share of the tokens with a thing that say each aspect of it, and of the empty ones."""
    hits: dict[str, list[torch.Tensor]] = {}
    for batch in range(batches):
        frames, labels = draw_batch(first + batch * count, count)
        for name, own, target in zip(
            ("colour", "shape", "mark", "motion"), namer.scores(frames), namer.targets(labels), strict=True
        ):
            right = own.argmax(-1) == target
            hits.setdefault(name, []).append(right[target > 0].float())
            hits.setdefault(f"no {name}", []).append(right[target == 0].float())
    return {name: round(100 * float(torch.cat(parts).mean()), 1) for name, parts in hits.items()}


class _Batches(Dataset):
    """The batch of every step."""

    def __init__(self, count: int, few: int):
        self.count, self.few = count, few

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return draw_batch(step * self.count, self.count, step < self.few)


def teach_to_see(
    folder: Path, steps: int, rate: float = 1e-3, count: int = 32, every: int = 200, few: int = 300
) -> None:
    """
    Trains the tower of the model in a folder, and the embeddings of its words.

    Args:
        steps: in all; the rate falls to nothing over the last fifth.
        rate: of AdamW; Muon's is three times that.
        count: clips a step.
        every: so many steps the model is written, and what it names right.
        few: so many steps see few things.
    """
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(folder)
    processor = Qwen2_5_VLQTSplusProcessor.from_pretrained(folder, trust_remote_code=False)
    trained = [*model.model.visual.named_parameters(prefix="visual"), ("words", model.get_input_embeddings().weight)]
    names = {f"visual.{name}" for name in matrix_names(model.model.visual)}
    matrices = [weight for name, weight in trained if name in names]
    others = [weight for name, weight in trained if name not in names]
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.02)
    optimizer = MuonBeside([{"params": matrices, "lr": 3 * rate, "weight_decay": 0.02}], adam)
    full, done = [group["lr"] for group in optimizer.param_groups], 0
    if (folder / STATE).exists():
        state = torch.load(folder / STATE, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    namer, began, losses = Namer(model, processor), time.perf_counter(), []
    batches = DataLoader(
        _Batches(count, few), batch_size=None, sampler=range(done, steps), collate_fn=tuple, num_workers=1
    )
    for step, (frames, labels) in enumerate(batches, start=done):
        factor = min(1.0, (step + 1) / 50, (steps - step) / (0.2 * steps))
        for group, own in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = own * factor
        loss = naming_surprise(namer.scores(frames), namer.targets(labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weight for _, weight in trained], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % every == 0 or step + 1 == steps:
            model.save_pretrained(folder)
            torch.save({"optimizer": optimizer.state_dict(), "step": step + 1}, folder / STATE)
            said = {"step": step + 1, "loss": round(sum(losses) / len(losses), 3), **name_accuracy(namer)}
            said["seconds"] = round(time.perf_counter() - began)
            print(json.dumps(said), flush=True)
            losses = []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--count", type=int, default=32)
    given = parser.parse_args()
    teach_to_see(given.folder, given.steps, given.rate, given.count)
