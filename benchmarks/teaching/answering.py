"""How often a base answers the questions of a set right, all tokens read, by kind.

`python -m benchmarks.teaching.answering MODEL SET.jsonl [SET.jsonl ...]`.
"""

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from qtsplus.training.models import load_config, load_model, load_processor

from .dataset import TinyWorldCollator, TinyWorldDataset, read_tinyworld


@torch.no_grad()
def answer_all(model: Any, processor: Any, path: Path, batch: int = 16, blind: bool = False) -> dict[str, float]:
    """
    Percent of the answers that are right to their last word, by kind and of all.

    Args:
        path: a set of `build_open`, one question a record.
        batch: questions read at a time.
        blind: of another video each, the same one for all: what the question alone tells.
    """
    records = read_tinyworld(path)
    kinds = [json.loads(line)["kind"] for line in path.read_text(encoding="utf-8").splitlines()]
    dataset, collate = TinyWorldDataset(records, processor), TinyWorldCollator(processor)
    features: dict[str, torch.Tensor] = {}
    right: dict[str, list[bool]] = defaultdict(list)
    for first in range(0, len(records), batch):
        rows = [_row(dataset, model, record, features, blind) for record in records[first : first + batch]]
        inputs = collate(rows)
        labels = inputs.pop("labels")
        for name in ("source_ids", "skipped"):
            inputs.pop(name, None)
        said = model(**inputs, selection="all", use_cache=False)
        labels = model.compact_labels(labels, input_ids=None, columns=said.qtsplus.columns)
        hits = (said.logits[:, :-1].argmax(-1) == labels[:, 1:]) | (labels[:, 1:] == -100)
        for kind, hit in zip(kinds[first:], hits.all(1).tolist(), strict=False):
            right[kind].append(hit)
    shares = {kind: round(100 * sum(hits) / len(hits), 1) for kind, hits in sorted(right.items())}
    every = [hit for hits in right.values() for hit in hits]
    return {**shares, "all": round(100 * sum(every) / len(every), 1), "questions": len(every)}


def _row(dataset: TinyWorldDataset, model: Any, record: Any, features: dict[str, torch.Tensor], blind: bool) -> Any:
    """An example with its video encoded, once for all of its questions."""
    example: Any = dataset.example(record)
    name = "any" if blind else str(record.video)
    pixels = example.pop("pixel_values_videos")
    if name not in features:
        features[name] = model.encode_videos(pixels, example["video_grid_thw"])[0]
    return {**example, "video_features": features[name]}


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
    config = load_config(None, given.model, {"selection": "all"})
    model = load_model(None, given.model, {"selection": "all"}).eval()
    processor = load_processor(None, given.model, config)
    for path in given.sets:
        shares = answer_all(model, processor, path, blind=given.blind)
        print(json.dumps({"set": str(path), **shares, "constant": constant_answers(path)}), flush=True)


if __name__ == "__main__":
    main()
