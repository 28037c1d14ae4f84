"""NExT-QA and NExT-GQA as records, with the moments that NExT-GQA annotates as `evidence`.

    python recipes/nextgqa.py val.csv val.jsonl --videos map_vid_vidorID.json --moments gsub_val.json

Each question has five options, and is answered with a letter. `--open` asks without options: the answer is then the
text of the right one. Questions that cannot be used, such as those whose answer is none of the options, are left out
and counted, and moments end with their video. Write the records beside the folders of videos that the map names.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

from typing_extensions import TypedDict

from qtsplus.common.files import whole_file
from qtsplus.common.validation import validated
from qtsplus.data.records import parse_needles, parse_record

LETTERS = "ABCDE"
COLUMNS = ("question", "answer", "qid", "type", *(f"a{number}" for number in range(len(LETTERS))))


class Moments(TypedDict, total=False):
    """What NExT-GQA says of a video."""

    duration: float
    location: dict[str, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, help="train.csv, val.csv or test.csv")
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    parser.add_argument("--videos", type=Path, help="map_vid_vidorID.json; without it videos are named by their ids")
    parser.add_argument("--moments", type=Path, help="gsub_val.json or gsub_test.json; train.csv has none")
    parser.add_argument("--open", action="store_true", help="ask without options")
    given = parser.parse_args()
    try:
        rows = read_questions(given.questions)
        places = read_mapping(given.videos, str)
        moments = read_mapping(given.moments, Moments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    # NExT-GQA has the text of the answer. NExT-QA has its number, which may also be the text of an option.
    has_numbers = all(row["answer"].isdecimal() for row in rows)
    left_out = []
    with_evidence = 0
    with whole_file(given.out) as out:
        # The questions about a video follow each other, so that the first rows are about few videos.
        for row in sorted(rows, key=video_of):
            try:
                record = make_record(row, places, moments, has_numbers, given.open)
                parse_record(record)
                parse_needles(record, "its evidence")
            except ValueError as error:
                left_out.append(f"{row['qid']} about {video_of(row)}: {error}")
            else:
                out.write(json.dumps(record) + "\n")
                with_evidence += "evidence" in record
        if len(left_out) == len(rows):
            parser.error(f"no question of {given.questions} can be used, such as {left_out[0]}")
        if given.moments and with_evidence == 0:
            parser.error(f"{given.moments} has no moment of a question of {given.questions}; is it of another split?")
    print(f"{given.out}: {len(rows) - len(left_out)} of {len(rows)} questions, {with_evidence} with evidence")
    if left_out:
        print(f"Left out: {len(left_out)}, such as {left_out[0]}", file=sys.stderr)
    missing = sorted({video_of(row) for row in rows} - places.keys())
    if given.videos and missing:
        print(f"Videos that are not in {given.videos}: {len(missing)}, such as {missing[0]}", file=sys.stderr)


def read_questions(path: Path) -> list[dict[str, str]]:
    """The rows of a table; a `ValueError` for one that is not NExT-QA's."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, strict=True)
        try:
            rows = list(table)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is not CSV in UTF-8: {error}") from None
    known = table.fieldnames or []
    missing = [name for name in COLUMNS if name not in known]
    if missing or not {"video", "video_id"} & set(known):
        raise ValueError(f"{path} has the columns {known}; expected video or video_id, and {', '.join(COLUMNS)}")
    if not rows:
        raise ValueError(f"{path} has no row")
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            values = list(row.values())
            raise ValueError(f"row {number} of {path} has not as many values as there are columns: {values}")
    return rows


def read_mapping(path: Path | None, kind: type) -> dict:
    """What a JSON file says of each video; nothing without a file, a `ValueError` for something else."""
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON that can be read: {error}") from None
    return validated(dict[str, kind], content, f"{path}: ")


def video_of(row: dict[str, str]) -> str:
    return row.get("video_id") or row["video"]  # NExT-QA's own files call it video


def make_record(
    row: dict[str, str],
    places: dict[str, str],
    moments: dict[str, Moments],
    has_numbers: bool,
    is_open: bool,
) -> dict:
    """
    A row as a record; a `ValueError` for an answer that is none of the options.

    Args:
        places: the path of each video by its id.
        moments: by video its `duration` and the `location` of each question, a list of [start, end] in seconds.
        has_numbers: the answer is the number of an option, and not its text.
        is_open: ask without options.
    """
    video = video_of(row)
    options = [" ".join(row[f"a{number}"].split()) for number in range(len(LETTERS))]
    answer = " ".join(row["answer"].split())
    if has_numbers and int(answer) < len(options):
        right = int(answer)
    elif answer in options:
        right = options.index(answer)
    else:
        raise ValueError(f"its answer {answer!r} is none of its options")
    question = " ".join(row["question"].split()).rstrip("?")
    question = question[:1].upper() + question[1:] + "?"
    record = {"id": f"{video}-{row['qid']}", "video": places.get(video, video), "kind": row["type"]}
    if is_open:
        record |= {"question": question, "answer": options[right]}
    else:
        lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
        asked = "\n".join([question, *lines, "Answer with the letter."])
        record |= {"question": asked, "answer": LETTERS[right], "query": question, "options": options, "source": "mcq"}
    about = moments.get(video, {})
    spans = about.get("location", {}).get(row["qid"], [])
    length = about.get("duration", float("inf"))
    shown = [{"start": start, "end": min(end, length)} for start, end in spans if start < length]
    if shown:
        record["evidence"] = [shown]
    return record


if __name__ == "__main__":
    main()
