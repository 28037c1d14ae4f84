"""A run of `vscq1` over numbered captions against a scripted server, as a program that can be killed."""

import sys
from functools import partial
from pathlib import Path

from benchmarks.synthesis.endpoint import Endpoint, read_key
from benchmarks.synthesis.engine import Job, run_job
from benchmarks.synthesis.questions import write_questions
from qtsplus.data.records import Caption


def captions(count):
    """Captions that share no sentence."""
    for number in range(count):
        seen = f"A dog with number {number} runs over a field. Then it rests near tree {number * 7}. A man calls it."
        yield Caption(vision_id=f"video-{number}", id=f"caption-{number}", caption=seen)


def questions_job(url, count, **settings):
    endpoint = Endpoint(url, "teacher", read_key(), **{"timeout": 60.0, **settings})
    return Job("vscq1", lambda: captions(count), partial(write_questions, endpoint), endpoint, endpoint.settings())


if __name__ == "__main__":
    address, folder, items, concurrency = sys.argv[1:]
    run_job(questions_job(address, int(items)), Path(folder), concurrency=int(concurrency))
