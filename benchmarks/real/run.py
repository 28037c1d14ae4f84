"""Makes the base with real words: what it is made of, both stages, its folder."""

import time
from collections.abc import Callable
from pathlib import Path

from .base import save_base, save_parts
from .clips import SECONDS
from .fetch import ATTRIBUTION, fetch
from .reading import train_reading
from .records import write_records
from .tower import train_tower

RECORDS = {"train": 400, "validation": 24, "test": 100}  # clips


def make_real(work: Path, minutes: float, say: Callable[[str], None] = print) -> Path:
    """
    Goes on where the last call stopped, for about so many minutes of training.

    Returns:
        `work/base`, a stock Qwen2.5-VL; beside it `work/records`, what to train and to ask it with.
    """
    start = time.monotonic()
    say(ATTRIBUTION)
    fetch(work)
    train_tower(work, minutes)
    train_reading(work, minutes - (time.monotonic() - start) / 60)
    save_parts(work, work / "parts.safetensors")
    save_base(work, work / "parts.safetensors", work / "base")
    for split, clips in RECORDS.items():
        write_records(work, work / "records", split, clips, max(SECONDS))
    return work / "base"
