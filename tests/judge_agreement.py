"""
How often a judge decides like a person, on 200 answers that were graded by hand:

    python tests/judge_agreement.py ADDRESS MODEL

The judge is that of `qtsplus eval --match judge`: a model behind an OpenAI-compatible address.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.matching import Matcher, judge_at

GRADED = Path(__file__).parent / "evaluation" / "graded_answers.jsonl"


def graded_answers() -> Iterator[tuple[VideoRecord, str, bool]]:
    """Records, what somebody said, and whether it is right."""
    for line in GRADED.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        options = tuple(row.get("options", ())) or None
        yield VideoRecord(None, row["question"], row["answer"], options=options), row["said"], row["right"]


def kind_of(record: VideoRecord) -> str:
    """What kind of answer is asked for."""
    if record.options:
        return "choices"
    if record.answer in ("yes", "no"):
        return "yes or no"
    return "others"


def agreement(judge: Matcher) -> dict[str, dict[str, int]]:
    """By kind: how many answers were graded, and how many the judge grades alike."""
    found: dict[str, dict[str, int]] = {}
    for record, said, right in graded_answers():
        counts = found.setdefault(kind_of(record), {"of": 0, "agreed": 0})
        counts["of"] += 1
        counts["agreed"] += judge(record, said) == right
    return found


if __name__ == "__main__":
    print(json.dumps(agreement(judge_at(*sys.argv[1:]))))
