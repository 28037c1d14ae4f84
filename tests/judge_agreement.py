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


def agreement(judge: Matcher) -> dict[str, int]:
    """How many answers were graded, how many of them the judge grades alike, and how many it does not decide."""
    found = {"of": 0, "agreed": 0, "neither yes nor no": 0}
    for record, said, right in graded_answers():
        found["of"] += 1
        try:
            found["agreed"] += judge(record, said) == right
        except ValueError as error:
            if "expected yes or no" not in str(error):
                raise
            found["neither yes nor no"] += 1
    return found


if __name__ == "__main__":
    print(json.dumps(agreement(judge_at(*sys.argv[1:]))))
