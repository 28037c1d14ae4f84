"""Recipes for the tiny variant, written to a folder with their records."""

import json
from pathlib import Path


def write_records(path: Path, *records: dict) -> None:
    path.write_text("\n".join(map(json.dumps, records)))


def write_recipe(
    folder: Path,
    records: list[dict],
    model: dict | None = None,
    data: dict | None = None,
    stages: dict | None = None,
    **training,
) -> Path:
    """A recipe that saves no checkpoint, from the fields in which it differs; JSON is YAML too."""
    write_records(folder / "train.jsonl", *records)
    sections = {
        "model": {"variant": "qtsplus-tiny", **(model or {})},
        "data": {"train_files": [f"{folder}/train.jsonl"], **(data or {})},
        "training": {
            "output_dir": f"{folder}/run",
            "max_steps": 1,
            "learning_rate": 1e-3,
            "use_cpu": True,
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": "none",
            **training,
        },
    }
    if stages is not None:
        sections["stages"] = stages
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(sections))
    return path
