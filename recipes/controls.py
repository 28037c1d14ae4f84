"""Records that select tokens by another question than they ask: the controls of a selector that reads questions.

    python recipes/controls.py test.jsonl

Writes three files beside the first, with the same questions and answers: `test-own.jsonl` as they are,
`test-other-question.jsonl` with another question about the same video as `query`, and `test-other-video.jsonl` with a
question about another video. Questions that no other question about their video, or about another video, differs from
are left out of all three; where both say as `evidence` where their answers can be seen, they must not be seen together.
`qtsplus eval` then shows what is lost: where the question chooses, the two others are right less often.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from qtsplus.common.files import whole_file
from qtsplus.data.formats import iter_rows
from qtsplus.data.records import Sighting, VideoRecord, parse_needles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="JSONL of records with `video`; several about each video")
    path: Path = parser.parse_args().records
    try:
        rows = list(read_questions(path))
    except ValueError as error:
        parser.error(str(error))
    draw = random.Random(0)
    own, other_question, other_video = [], [], []
    for row in rows:
        same = [other for other in rows if other["video"] == row["video"] and is_other(row, other)]
        elsewhere = [other for other in rows if other["video"] != row["video"] and words(other) != words(row)]
        if same and elsewhere:
            own.append(row)
            other_question.append(selecting_by(row, draw.choice(same)))
            other_video.append(selecting_by(row, draw.choice(elsewhere)))
    if not own:
        parser.error(f"{path} needs several different questions about each video, and two videos at least")
    for name, records in (("own", own), ("other-question", other_question), ("other-video", other_video)):
        target = path.with_name(f"{path.stem}-{name}.jsonl")
        with whole_file(target) as out:
            out.writelines(json.dumps(record) + "\n" for record in records)
        print(f"{target}: {len(records)} of {len(rows)} questions")


def read_questions(path: Path) -> Iterator[dict]:
    """The rows of a set; a `ValueError` for one that is no question about a video, or has evidence of another form."""
    for row in iter_rows(path):
        name = f"row {row.number} of {path}"
        if not isinstance(row.record, VideoRecord) or not row.record.video or "question" not in row.content:
            raise ValueError(f"{name} has no `question` about a `video`: {row.problem or row.content}")
        parse_needles(row.content, f"{name}: its evidence")
        yield row.content


def text(row: dict) -> str:
    """What a record selects by."""
    return row.get("query") or row["question"]


def words(row: dict) -> list[str]:
    """What a record selects by, as questions are compared."""
    return text(row).casefold().split()


def is_other(row: dict, other: dict) -> bool:
    """Whether the other record asks for something else, which can be seen elsewhere where both say where."""
    if words(row) == words(other):
        return False
    sightings = sum(parse_needles(row, "evidence"), [])
    others = sum(parse_needles(other, "evidence"), [])
    return not any(overlap(one, another) for one in sightings for another in others)


def overlap(one: Sighting, another: Sighting) -> bool:
    """Whether two things can be seen at the same time and in the same place of the frame."""
    left, top, right, bottom = one.box
    other_left, other_top, other_right, other_bottom = another.box
    return (
        max(one.start, another.start) < min(one.end, another.end)
        and max(left, other_left) < min(right, other_right)
        and max(top, other_top) < min(bottom, other_bottom)
    )


def selecting_by(row: dict, other: dict) -> dict:
    """The record with the tokens of the other's question."""
    return row | {"query": text(other)}


if __name__ == "__main__":
    main()
