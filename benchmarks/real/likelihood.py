"""
How often the likelihood of letters says of a model what its graded answers say.

    python -m benchmarks.real.likelihood MODEL RECORDS OUT.json

Each question is asked three times about all tokens: as it is, with four options, and with four options where the most
likely letter is the answer. Of the first answers it is known which are right, without a judge.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from qtsplus.asking import choice
from qtsplus.common.journals import write_json
from qtsplus.data.formats import read_records
from qtsplus.data.records import Choice, VideoRecord, to_video_record
from qtsplus.evaluation.evaluate import evaluate_records
from qtsplus.evaluation.matching import gives_answer
from qtsplus.training.models import load_either

from .words import NAMES

ASKED = 200
KINDS = ("kind", "which", "first")  # whose answers are the name of one thing
LETTERS = "ABCD"


def with_options(record: VideoRecord, rng: np.random.Generator) -> VideoRecord:
    """The question with the right name and three of things that it does not name."""
    right = record.answer.removeprefix("The ")
    others = [name for name in NAMES if name not in record.question.lower() and name != right]
    wrong = rng.choice(others, len(LETTERS) - 1, replace=False)
    texts = rng.permutation([right, *wrong]).tolist()
    row = {
        "vision_id": Path(str(record.video)).name,
        "question": record.question,
        "options": dict(zip(LETTERS, texts, strict=True)),
        "answer": LETTERS[texts.index(right)],
    }
    return to_video_record(Choice.model_validate(row), str(record.video))


def measure(folder: str, path: Path) -> dict[str, int]:
    torch.set_num_threads(1)
    model, processor = load_either(folder)
    rng = np.random.default_rng(0)
    records = [record for record in read_records(path) if record.kind in KINDS][:ASKED]
    choices = [with_options(record, rng) for record in records]

    def ask(asked: list[VideoRecord], by_likelihood: bool) -> np.ndarray:
        outcomes = evaluate_records(
            model,
            processor,
            asked,
            choice=choice.Choice(selection="all"),
            matcher=gives_answer,
            by_likelihood=by_likelihood,
        )
        return np.array([outcome.correct for outcome in outcomes])

    graded = ask(records, False)
    result = {"questions": len(records), "right without options": int(graded.sum())}
    for way, by_likelihood in (("answer", False), ("likelihood", True)):
        right = ask(choices, by_likelihood)
        result |= {f"right by {way}": int(right.sum()), f"agreed by {way}": int((right == graded).sum())}
    return result


if __name__ == "__main__":
    _, model_folder, records_file, out_file = sys.argv
    write_json(Path(out_file), measure(model_folder, Path(records_file)))
