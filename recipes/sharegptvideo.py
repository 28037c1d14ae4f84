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

from qtsplus.common.files import whole_file
from qtsplus.data.formats import iter_rows
from qtsplus.data.records import VideoRecord

FPS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="a file of video_instruction/train/sft")
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    parser.add_argument("--captions", action="store_true", help="the answers are captions of their videos")
    parser.add_argument("--limit", type=int, help="so many rows, the first ones; without it all")
    arguments = parser.parse_args()
    count = 0
    try:
        with whole_file(arguments.out) as out:
            for row in islice(iter_rows(arguments.rows), arguments.limit):
                if not isinstance(row.record, VideoRecord) or row.record.video is None:
                    problem = row.problem or "it names no video"
                    raise ValueError(f"row {row.number} of {arguments.rows} ({row.id}) cannot be used: {problem}")
                record = make_record(row.record, arguments.captions)
                out.write(json.dumps(record) + "\n")
                count += 1
            if count == 0:
                raise ValueError(f"{arguments.rows} has no row")
    except ValueError as error:
        parser.error(str(error))
    print(f"{arguments.out}: {count} records")


def make_record(row: VideoRecord, is_caption: bool) -> dict:
    """A row, a conversation, as a record."""
    if is_caption:
        return {"id": row.id, "fps": FPS, "vision_id": row.video, "caption": row.answer}
    return row.row() | {"fps": FPS, "question": row.question.strip()}


if __name__ == "__main__":
    main()
