"""The paper's efficiency figure, from what `speed` measured: the command `efficiency`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qtsplus.common.journals import write_json

from ..intervals import percent
from ..tables import markdown_table
from .plots import draw_frames
from .results import device_name

PUBLISHED = (
    "Published for QTSplus-3B-FT beside Qwen2.5-VL-3B at about 600 frames on one A100: 89% fewer embeddings (180k to "
    "20k), 28% less latency (83 s to 60 s, to the first complete output)."
)


def run_efficiency(files: Sequence[Path], out: Path, *, name: str, command: str = "") -> Path:
    """
    Visual embeddings to the language model and end-to-end latency against the number of frames: `efficiency-NAME.json`,
    `.md` and `.png`.

    Args:
        files: of `python -m benchmarks speed --sweep`, from one machine or several; each is named by what it ran on.
        out: folder of the results.
        name: of the results.
        command: what was typed, for the record.

    Raises:
        ValueError: no file, or one that holds no measurements over the number of frames.
    """
    if not files:
        raise ValueError("Got no file; expected one or more of `python -m benchmarks speed`.")
    documents: dict[str, dict[str, Any]] = {}
    for file in files:
        document = _read(file)
        shapes = " and ".join(dict.fromkeys(point["shape"] for point in document["frames"]))
        title = f"{shapes} on {device_name(document)}"
        documents[title if title not in documents else f"{title}, {file.name}"] = document
    curves = {title: [_point(point) for point in document["frames"]] for title, document in documents.items()}
    target = out / f"efficiency-{name}.json"
    write_json(target, {"command": command, "files": [file.name for file in files], "curves": curves})
    target.with_suffix(".md").write_text("\n".join(_page(curves, command)) + "\n", encoding="utf-8")
    draw_frames(documents, target.with_suffix(""))
    return target


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: expected a file of `python -m benchmarks speed`.") from error
    if not isinstance(document, dict) or not document.get("frames") or "environment" not in document:
        raise ValueError(
            f"{file} holds no measurements over the number of frames: expected a file of `python -m benchmarks speed "
            "--sweep`."
        )
    return document


def _point(point: dict[str, Any]) -> dict[str, Any]:
    """One number of frames: both sides, and what ours saves."""
    embeddings = {side: point[side]["visual_tokens_to_lm"] for side in ("stock", "ours")}
    seconds = {side: point[side]["file_to_first_token"]["median"] for side in ("stock", "ours")}
    return {
        "frames": point["frames"],
        "embeddings": {**embeddings, "saved": 1 - embeddings["ours"] / embeddings["stock"]},
        "seconds": {**seconds, "saved": 1 - seconds["ours"] / seconds["stock"]},
    }


def _page(curves: dict[str, list[dict[str, Any]]], command: str) -> list[str]:
    rows = [
        [
            title,
            str(point["frames"]),
            *(f"{point['embeddings'][side]:,}" for side in ("stock", "ours")),
            percent(point["embeddings"]["saved"]),
            *(f"{point['seconds'][side]:.3g}" for side in ("stock", "ours")),
            percent(point["seconds"]["saved"]),
        ]
        for title, points in curves.items()
        for point in points
    ]
    columns = ["measured", "frames", "embeddings, stock", "QTSplus", "saved", "seconds, stock", "QTSplus", "saved"]
    head = "Embeddings that the language model reads, and seconds from the file to the first token (medians)."
    return [head, "", f"`{command}`", "", *markdown_table(columns, rows), "", PUBLISHED]
