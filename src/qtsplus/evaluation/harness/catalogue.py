"""The paper's benchmarks by their names in lmms-eval, and the figures that it publishes."""

import json
from dataclasses import dataclass
from pathlib import Path

# Of lmms-eval 0.7.3. TempCompass is the paper's part with options; its captions need another model as a judge.
PAPER = (
    "tempcompass_multi_choice",
    "videomme",
    "videomme_w_subtitle",
    "videomme_long",
    "video_mmmu",
    "lvbench",
    "mlvu_dev",
    "mlvu_test",
    "mvbench",
    "longvideobench_val_v",
)
ALIASES = {"paper": PAPER}

# Metrics that are given as a share; the others of these benchmarks are percentages. Reports speak of percentages.
SHARES = frozenset({"exact_match", "lvb_acc", "lvbench_score", "mmmu_acc"})


@dataclass(frozen=True)
class PublishedTable:
    """
    A table of the paper.

    Args:
        title: its caption.
        settings: what holds for all its columns.
        columns: the models.
        rows: by `task/metric` of lmms-eval the percentages, one per column.
    """

    title: str
    settings: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float, ...]]


def published() -> list[PublishedTable]:
    """The paper's tables (arXiv 2511.11910)."""
    tables = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
    return [
        PublishedTable(
            table["title"],
            table["settings"],
            tuple(table["columns"]),
            {name: tuple(values) for name, values in table["rows"].items()},
        )
        for table in tables
    ]


def resolve(tasks: str) -> list[str]:
    """
    The tasks of a list with commas, each once; `paper` stands for all of the paper's.

    Raises:
        ValueError: no name between two commas.
    """
    names = [name.strip() for name in tasks.split(",")]
    if not all(names):
        raise ValueError(f"--tasks is {tasks!r}; expected names with commas between them, such as videomme,lvbench.")
    return list(dict.fromkeys(task for name in names for task in ALIASES.get(name, (name,))))
