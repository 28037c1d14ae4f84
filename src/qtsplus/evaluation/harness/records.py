"""Our records as tasks of lmms-eval: TinyWorld, which renders its videos on the spot, and JSONL files of one's own."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ...data.clip import write_mp4
from ...data.tinyworld import FPS, ask_world, draw_world, split_world
from ...training.dataset import read_records

TASKS = Path(__file__).parent / "tasks"


# --------------------------------------------------------------------------------------------------------------------
# What the YAML files in `tasks` name
# --------------------------------------------------------------------------------------------------------------------


def tinyworld_questions(worlds: Any) -> Any:
    """
    The questions about crowded worlds.

    Args:
        worlds: `datasets.Dataset` with the `index` of each in the split `harness`.
    """
    from datasets import Dataset

    folder = _video_folder()
    return Dataset.from_list(
        [
            {
                "id": f"harness-{index:06d}-{number:02d}",
                "world": index,
                "video": str(folder / f"{index:06d}.mp4"),
                "question": asked.question,
                "query": asked.query,
                "answer": asked.answer,
                "kind": asked.kind,
            }
            for index in worlds["index"]
            for number, asked in enumerate(ask_world(split_world("harness", index, crowd=True), multiple_choice=0))
        ]
    )


def _video_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "qtsplus" / "harness"


def messages(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One user turn: the video, then the question, with the text to select by. Renders a world's video if need be."""
    if doc.get("world") is not None and not os.path.exists(doc["video"]):
        _render(doc["world"], Path(doc["video"]))
    text = {"type": "text", "text": doc["question"], "query": doc["query"] or doc["question"]}
    return [{"role": "user", "content": [{"type": "video", "url": doc["video"]}, text]}]


def _render(index: int, video: Path) -> None:
    video.parent.mkdir(parents=True, exist_ok=True)
    part = video.with_name(f"{video.stem}.{os.getpid()}.part.mp4")  # another process may render the same one
    write_mp4(part, draw_world(split_world("harness", index, crowd=True)), FPS)
    os.replace(part, video)


def question(doc: Mapping[str, Any]) -> str:
    """What the harness logs as the prompt."""
    return doc["question"]


def matches(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the answer is the record's, letter for letter, as in `qtsplus eval records`."""
    return {"exact_match": float(results[0].strip() == doc["answer"])}


def matches_by_kind(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The same, and once more under the name of the question's kind."""
    found = matches(doc, results)
    return {**found, doc["kind"]: found["exact_match"]}


# --------------------------------------------------------------------------------------------------------------------
# A task of one's own
# --------------------------------------------------------------------------------------------------------------------


def write_task(records: str | os.PathLike, folder: Path) -> str:
    """
    Writes a task for `--include_path`: `<folder>/<name>.yaml`, and its questions beside it.

    Args:
        records: a JSONL file as for `qtsplus eval records`. Those without a video are left out.
        folder: made when it is missing.

    Returns:
        The task's name, which is the file's.

    Raises:
        ValueError: no such file, a line that is not a record, no record with a video, a video with a rate of its own.
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
        "include": str(TASKS / "_records"),
        "task": name,
        "dataset_kwargs": {"data_files": {"test": str((folder / f"{name}.jsonl").resolve())}},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return name


def copy_tasks(folder: Path) -> None:
    """Puts the tasks of this package into a folder for `--include_path`, which lmms-eval takes only one of."""
    shutil.copytree(TASKS, folder, dirs_exist_ok=True)
