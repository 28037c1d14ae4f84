"""JSONL files of questions about videos as tasks of lmms-eval."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from qtsplus.data.formats import read_records

COMMON = Path(__file__).parent / "tasks" / "_records"  # what tasks made of records have in common


def messages(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One user turn: the video, then the question, with the text to select by."""
    text = {"type": "text", "text": doc["question"], "query": doc["query"] or doc["question"]}
    return [{"role": "user", "content": [{"type": "video", "url": doc["video"]}, text]}]


def matches(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the answer is the record's, letter for letter, as in `qtsplus eval`."""
    return {"exact_match": float(results[0].strip() == doc["answer"])}


def write_task(records: str | os.PathLike, folder: Path) -> str:
    """
    Writes a task for `--include_path`: `<folder>/<name>.yaml`, and its questions about videos beside it. Returns its
    name, the file's. A `ValueError` for a file without such questions, or with a rate of its own.
    """
    chosen = [record for record in read_records(records) if record.video is not None]
    if not chosen:
        raise ValueError(f"{records} holds no question about a video.")
    if any(record.fps is not None for record in chosen):
        raise ValueError(f"{records} names rates; lmms-eval has one for all videos, such as --fps 2. Leave `fps` out.")
    name = Path(records).stem
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
        for record in chosen:
            kept = {field: asdict(record)[field] for field in ("question", "query", "answer", "kind")}
            file.write(json.dumps({"video": os.path.abspath(str(record.video)), **kept}) + "\n")
    task = {
        "include": str(COMMON),
        "task": name,
        "dataset_kwargs": {"data_files": {"test": str((folder / f"{name}.jsonl").resolve())}},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return name
