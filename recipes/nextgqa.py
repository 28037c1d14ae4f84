"""NExT-QA and NExT-GQA as records, with the moments that NExT-GQA annotates as `evidence`.

    python recipes/nextgqa.py val.csv val.jsonl --videos map_vid_vidorID.json --moments gsub_val.json

Each question has five options, and is answered with a letter. `--open` asks without options: the answer is then the
text of the right one. Write the records beside the folders of videos that the map names.
"""

import argparse
import csv
import json
from pathlib import Path

LETTERS = "ABCDE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, help="train.csv, val.csv or test.csv")
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    parser.add_argument("--videos", type=Path, help="map_vid_vidorID.json; without it videos are named by their ids")
    parser.add_argument("--moments", type=Path, help="gsub_val.json or gsub_test.json; train.csv has none")
    parser.add_argument("--open", action="store_true", help="ask without options")
    given = parser.parse_args()
    places = json.loads(given.videos.read_text(encoding="utf-8")) if given.videos else {}
    moments = json.loads(given.moments.read_text(encoding="utf-8")) if given.moments else {}
    with open(given.questions, encoding="utf-8", newline="") as rows, open(given.out, "w", encoding="utf-8") as out:
        # The questions about a video follow each other, so that the first rows are about few videos.
        for row in sorted(csv.DictReader(rows), key=video_of):
            record = make_record(row, places, moments, given.open)
            out.write(json.dumps(record) + "\n")


def video_of(row: dict[str, str]) -> str:
    return row.get("video_id") or row["video"]  # NExT-QA's own files call it video


def make_record(row: dict[str, str], places: dict, moments: dict, is_open: bool) -> dict:
    """
    A row as a record.

    Args:
        places: the path of each video by its id.
        moments: by video the `location` of each question, a list of [start, end] in seconds.
        is_open: ask without options.
    """
    video = video_of(row)
    options = [row[f"a{number}"] for number in range(len(LETTERS))]
    answer = row["answer"]
    right = options.index(answer) if answer in options else int(answer)  # NExT-QA's own files have the number
    question = row["question"].strip()
    question = question[:1].upper() + question[1:] + "?"
    record = {"id": f"{video}-{row['qid']}", "video": places.get(video, video), "kind": row["type"]}
    if is_open:
        record |= {"question": question, "answer": options[right]}
    else:
        lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
        asked = "\n".join([question, *lines, "Answer with the letter."])
        record |= {"question": asked, "answer": LETTERS[right], "query": question, "options": options, "source": "mcq"}
    spans = moments.get(video, {}).get("location", {}).get(row["qid"])
    if spans:
        record["evidence"] = [[{"start": start, "end": end} for start, end in spans]]
    return record


if __name__ == "__main__":
    main()
