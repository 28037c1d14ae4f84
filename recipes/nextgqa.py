"""NExT-QA and NExT-GQA as records, with the moments that NExT-GQA annotates as `evidence`.

    python recipes/nextgqa.py val.csv val.jsonl --videos map_vid_vidorID.json --moments gsub_val.json

Each question has five options, and its answer is a letter. With `--open` it is asked without options, and its answer is
the text of the right option. Questions that cannot be used are left out and counted, such as those whose answer is none
of the options. A moment that extends past its video is cut at the end. Records name their videos relative to the JSONL
file, so write it into the folder that holds the folders of the map.
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
    """The moments of one video, as NExT-GQA annotates them."""

    duration: float  # of the video, in seconds
    location: dict[str, list[tuple[float, float]]]  # by the question's `qid`: start and end of each moment, in seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, help="train.csv, val.csv or test.csv")
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    parser.add_argument("--videos", type=Path, help="map_vid_vidorID.json; without it videos are named by their ids")
    parser.add_argument("--moments", type=Path, help="gsub_val.json or gsub_test.json; train.csv has none")
    parser.add_argument("--open", action="store_true", help="ask without options")
    arguments = parser.parse_args()
    try:
        rows = read_questions(arguments.questions)
        video_paths = read_mapping(arguments.videos, str)
        moments = read_mapping(arguments.moments, Moments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    # In NExT-GQA an answer is the text of an option, in NExT-QA the number of an option. Texts may be numbers too, so
    # the answers are numbers of options only if all of them are numbers.
    has_numbers = all(row["answer"].isdecimal() for row in rows)
    left_out = []
    with_evidence = 0
    with whole_file(arguments.out) as out:
        # Questions about the same video follow each other. So the first few hundred rows need only a few dozen videos.
        for row in sorted(rows, key=video_of):
            try:
                record = make_record(row, video_paths, moments, has_numbers, arguments.open)
                parse_record(record)
                parse_needles(record, "its evidence")
            except ValueError as error:
                left_out.append(f"{row['qid']} about {video_of(row)}: {error}")
            else:
                out.write(json.dumps(record) + "\n")
                with_evidence += "evidence" in record
        if len(left_out) == len(rows):
            parser.error(f"no question of {arguments.questions} can be used, such as {left_out[0]}")
        if arguments.moments and with_evidence == 0:
            parser.error(
                f"{arguments.moments} has no moment of a question of {arguments.questions}; is it of another split?"
            )
    print(f"{arguments.out}: {len(rows) - len(left_out)} of {len(rows)} questions, {with_evidence} with evidence")
    if left_out:
        print(f"Left out: {len(left_out)}, such as {left_out[0]}", file=sys.stderr)
    missing = sorted({video_of(row) for row in rows} - video_paths.keys())
    if arguments.videos and missing:
        print(f"Videos that are not in {arguments.videos}: {len(missing)}, such as {missing[0]}", file=sys.stderr)


def read_questions(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; a `ValueError` if it lacks a column or value that NExT-QA's files have, or has no row."""
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


def read_mapping(path: Path | None, value_type: type) -> dict:
    """
    A JSON file's values of `value_type` by the id of their video, empty without a path. A `ValueError` for a file with
    other content.
    """
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON that can be read: {error}") from None
    return validated(dict[str, value_type], content, f"{path}: ")


def video_of(row: dict[str, str]) -> str:
    # The column with the video's id is `video` in NExT-QA's files, and `video_id` in NExT-GQA's.
    return row.get("video_id") or row["video"]


def make_record(
    row: dict[str, str],
    video_paths: dict[str, str],
    moments: dict[str, Moments],
    has_numbers: bool,
    is_open: bool,
) -> dict:
    """
    A row as a record; a `ValueError` for an answer that is none of the options.

    Args:
        video_paths: the path of each video by its id; a video that is not there keeps its id as its path.
        moments: the moments of each video by its id.
        has_numbers: the row's answer is the number of an option, counted from 0, and not its text.
        is_open: the record's question does not name the options.
    """
    video = video_of(row)
    options = [" ".join(row[f"a{number}"].split()) for number in range(len(LETTERS))]
    answer = " ".join(row["answer"].split())
    if has_numbers and int(answer) < len(options):
        right_index = int(answer)
    elif answer in options:
        right_index = options.index(answer)
    else:
        raise ValueError(f"its answer {answer!r} is none of its options")
    question = " ".join(row["question"].split()).rstrip("?")
    question = question[:1].upper() + question[1:] + "?"
    record = {"id": f"{video}-{row['qid']}", "video": video_paths.get(video, video), "kind": row["type"]}
    if is_open:
        record |= {"question": question, "answer": options[right_index]}
    else:
        lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
        prompt = "\n".join([question, *lines, "Answer with the letter."])
        record |= {
            "question": prompt,
            "answer": LETTERS[right_index],
            "query": question,
            "options": options,
            "source": "mcq",
        }
    video_moments = moments.get(video, {})
    spans = video_moments.get("location", {}).get(row["qid"], [])
    duration = video_moments.get("duration", float("inf"))
    sightings = [{"start": start, "end": min(end, duration)} for start, end in spans if start < duration]
    if sightings:
        record["evidence"] = [sightings]  # one thing must be seen, in any of these moments
    return record


if __name__ == "__main__":
    main()
