"""Records that select tokens by another question than they ask: the controls of a selector that reads questions.

    python recipes/controls.py test.jsonl

Writes three files beside the first, with the same questions and answers: `test-own.jsonl` as they are,
`test-other-question.jsonl` with another question about the same video as `query`, and `test-other-video.jsonl` with a
question about another video. Questions that no other question about their video, or about another video, differs from
are left out of all three.
`qtsplus eval` then shows what is lost: where the question chooses, the two others are right less often.
"""

import argparse
import json
import random
from pathlib import Path

from qtsplus.data.formats import iter_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="JSONL of records with `video`; several about each video")
    path: Path = parser.parse_args().records
    rows = []
    for row in iter_rows(path):
        if row.record is None or not row.content.get("video") or "question" not in row.content:
            parser.error(f"row {row.number} of {path} has no `question` about a `video`: {row.problem or row.content}")
        rows.append(row.content)
    draw = random.Random(0)
    own, other_question, other_video = [], [], []
    for row in rows:
        same = [other for other in rows if other["video"] == row["video"] and is_other(row, other)]
        elsewhere = [other for other in rows if other["video"] != row["video"] and text(other) != text(row)]
        if same and elsewhere:
            own.append(row)
            other_question.append(selecting_by(row, draw.choice(same)))
            other_video.append(selecting_by(row, draw.choice(elsewhere)))
    if not own:
        parser.error(f"{path} needs several different questions about each video, and two videos at least")
    for name, records in (("own", own), ("other-question", other_question), ("other-video", other_video)):
        target = path.with_name(f"{path.stem}-{name}.jsonl")
        target.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        print(f"{target}: {len(records)} of {len(rows)} questions")


def text(row: dict) -> str:
    """What a record selects by."""
    return row.get("query") or row["question"]


def is_other(row: dict, other: dict) -> bool:
    """Whether the other record asks for something else, which can be seen elsewhere where both say where."""
    places = row.get("evidence")
    return text(row) != text(other) and (not places or places != other.get("evidence"))


def selecting_by(row: dict, other: dict) -> dict:
    """The record with the tokens of the other's question."""
    return row | {"query": text(other)}


if __name__ == "__main__":
    main()
