"""ShareGPTVideo, on which the paper trains, as records: questions, or captions to make the paper's sets from.

    python recipes/sharegptvideo.py video_240k_caption_15k.jsonl train.jsonl --limit 240000
    python recipes/sharegptvideo.py video_caption_300k.jsonl captions.jsonl --captions

The first 240,000 rows of the first file are questions, the rest captions. A video is a folder of frames, which its
authors took twice a second. Write the records beside these folders.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

FPS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="a file of video_instruction/train/sft")
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    parser.add_argument("--captions", action="store_true", help="the answers are captions of their videos")
    parser.add_argument("--limit", type=int, help="so many rows, the first ones; without it all")
    given = parser.parse_args()
    with open(given.rows, encoding="utf-8") as rows, open(given.out, "w", encoding="utf-8") as out:
        for line in islice(rows, given.limit):
            record = make_record(json.loads(line), given.captions)
            out.write(json.dumps(record) + "\n")


def make_record(row: dict, is_caption: bool) -> dict:
    """A row, a conversation of one question and one answer, as a record."""
    asked, said = row["conversations"]
    record = {"id": row["id"], "fps": FPS}
    if is_caption:
        return record | {"vision_id": row["video"], "caption": said["value"]}
    question = asked["value"].replace("<video>", "").strip()
    return record | {"video": row["video"], "question": question, "answer": said["value"]}


if __name__ == "__main__":
    main()
