"""The card of a set, as the Hub reads it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData

from ..data.statistics import Statistics, count_set
from ..output import whole_file

CARD = "README.md"
TABLES = (".jsonl", ".json", ".parquet")
SPLITS = ("train", "validation", "test")
_SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}


def set_files(folder: str | os.PathLike) -> list[Path]:
    """The files of records in a folder; a `ValueError` where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; expected one with the files of a set.")
    files = sorted(path for path in folder.iterdir() if path.suffix in TABLES and path.is_file())
    if not files:
        raise ValueError(f"{folder} holds no set; expected files that end in {', '.join(TABLES)}.")
    return files


def write_card(
    folder: str | os.PathLike,
    name: str | None = None,
    license: str | None = None,
    sources: Sequence[str] = (),
    overwrite: bool = False,
) -> tuple[Path, Statistics]:
    """
    Writes the card of a set into its folder, and gives its path and what was counted. A file is a split where it is
    called after one, such as train.jsonl.

    Args:
        name: the set's; the folder's when absent.
        license, sources: as the Hub names licences and datasets.
        overwrite: replace a card that stands there.

    Raises:
        ValueError: no set in the folder, or a row that is not a record.
        FileExistsError: there is a card.
    """
    folder = Path(folder).resolve()
    files = set_files(folder)
    path = folder / CARD
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} is there already; give --overwrite to replace it.")
    statistics = count_set(files)
    data = _card_data(statistics, name or folder.name, license, sources, files)
    lines = [f"# {data.pretty_name}", "", *statistics.lines(), _USE]
    with whole_file(path) as file:
        file.write(str(DatasetCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n")))
    return path, statistics


_USE = """## How to use it

Each row names its video by `vision_id`, a file or a folder of frames under a media root of your own; the videos
themselves are not in this repository. Check a copy with `qtsplus data check FILE --media-root DIR`, and train on it
with `qtsplus train`."""


def _card_data(
    statistics: Statistics, name: str, license: str | None, sources: Sequence[str], files: Sequence[Path]
) -> DatasetCardData:
    size = next((text for limit, text in _SIZES.items() if statistics.records < limit), "n>10M")
    asked = "single choice" in statistics.kinds or "free answer" in statistics.kinds
    return DatasetCardData(
        pretty_name=name,
        license=license,
        language=["en"],
        source_datasets=list(sources) or None,
        task_categories=["video-text-to-text"] if asked else ["video-to-text"],
        size_categories=[size],
        tags=["qtsplus", "video"],
        configs=_configs(files),
        ignore_metadata_errors=False,
    )


def _configs(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Files of one name before the split are one configuration: rows of one make are loaded together."""
    configs: dict[str, list[dict[str, str]]] = {}
    for path in files:
        split = next((split for split in SPLITS if path.stem == split or path.stem.endswith(f"-{split}")), None)
        config = path.stem if split is None else path.stem.removesuffix(split).rstrip("-") or "default"
        configs.setdefault(config, []).append({"split": split or "train", "path": path.name})
    return [{"config_name": name, "data_files": entries} for name, entries in configs.items()]
