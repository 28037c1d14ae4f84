"""The seeds of rendered worlds: those of one split are never those of another."""

SPLITS = {
    "train": range(0, 10_000_000),
    "validation": range(10_000_000, 11_000_000),
    "test": range(11_000_000, 12_000_000),
    "harness": range(12_000_000, 13_000_000),  # questions of lmms-eval; nothing was chosen by it
}


def split_seed(split: str, index: int) -> int:
    """
    The seed of the `index`-th world of a split.

    Raises:
        ValueError: an unknown split, or more worlds than it has seeds.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: expected one of {sorted(SPLITS)}.")
    if not 0 <= index < len(SPLITS[split]):
        raise ValueError(f"world {index} of {split!r}: expected an index from 0 to {len(SPLITS[split]) - 1}.")
    return SPLITS[split][index]
