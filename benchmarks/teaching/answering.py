"""How often a base answers the questions of a set right, all tokens read, by kind.

`python -m benchmarks.teaching.answering MODEL SET.jsonl [SET.jsonl ...]`.
"""

import argparse
import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from qtsplus.training.dataset import IGNORED
from qtsplus.training.features import encode_files
from qtsplus.training.models import make_config, make_model, make_processor

from .dataset import TinyWorldCollator, TinyWorldDataset, read_tinyworld


@torch.no_grad()
def answer_all(model: Any, processor: Any, path: Path, batch: int = 16, blind: bool = False) -> dict[str, float]:
    """
    Percent of the answers that are right to their last word, by kind and of all.

    Args:
        path: a set of `build_open`, one question a record.
        batch: questions read at a time.
        blind: every question is asked about the same video: what the question alone tells. All are of one size.
    """
    records = read_tinyworld(path)
    kinds = [json.loads(line)["kind"] for line in path.read_text(encoding="utf-8").splitlines()]
    dataset, collate = TinyWorldDataset(records, processor), TinyWorldCollator(processor)
    right: dict[str, list[bool]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        dataset.features = encode_files(model, processor, [(str(record.video), None) for record in records], folder)
        any_video = dataset.features.load(str(records[0].video))
        for first in range(0, len(records), batch):
            rows: list[Any] = [dataset.example(record) for record in records[first : first + batch]]
            hits = _are_right(model, collate([{**row, **(any_video or {})} for row in rows] if blind else rows))
            for kind, hit in zip(kinds[first:], hits, strict=False):
                right[kind].append(hit)
    shares = {kind: round(100 * sum(hits) / len(hits), 1) for kind, hits in sorted(right.items())}
    every = [hit for hits in right.values() for hit in hits]
    return {**shares, "all": round(100 * sum(every) / len(every), 1), "questions": len(every)}


def _are_right(model: Any, inputs: dict[str, Any]) -> list[bool]:
    """Of each row whether every word of its answer is the likeliest."""
    labels = inputs.pop("labels")
    for name in ("source_ids", "skipped"):
        inputs.pop(name, None)
    said = model(**inputs, selection="all", use_cache=False)
    labels = model.compact_labels(labels, input_ids=None, columns=said.qtsplus.columns)
    return ((said.logits[:, :-1].argmax(-1) == labels[:, 1:]) | (labels[:, 1:] == IGNORED)).all(1).tolist()


def constant_answers(path: Path) -> dict[str, float]:
    """Percent that is right where each kind's most frequent answer is always given."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        answers[record["kind"]][record["answer"]] += 1
    return {kind: round(100 * max(own.values()) / own.total(), 1) for kind, own in sorted(answers.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("sets", type=Path, nargs="+")
    parser.add_argument("--blind", action="store_true")
    given = parser.parse_args()
    config = make_config(None, given.model, {"selection": "all"})
    model = make_model(None, given.model, {"selection": "all"}).eval()
    processor = make_processor(None, given.model, config)
    for path in given.sets:
        shares = answer_all(model, processor, path, blind=given.blind)
        print(json.dumps({"set": str(path), **shares, "constant": constant_answers(path)}), flush=True)


if __name__ == "__main__":
    main()
