"""Tasks of lmms-eval that are made of records."""

import json
from pathlib import Path

from benchmarks.harness import record_tasks as task
from benchmarks.world.open_sets import build_open
from qtsplus.data.formats import read_records


def test_a_task_of_records_holds_what_they_ask(tmp_path):
    records = read_records(build_open(tmp_path / "videos", "harness", 1, 4))
    source = tmp_path / "asked.jsonl"
    source.write_text(
        "".join(json.dumps({"video": r.video, "question": r.question, "answer": r.answer}) + "\n" for r in records)
    )
    assert task.write_task(source, tmp_path / "tasks") == "asked"
    lines = [json.loads(line) for line in (tmp_path / "tasks" / "asked.jsonl").read_text().splitlines()]
    assert [line["question"] for line in lines] == [record.question for record in records]
    assert all(Path(line["video"]).is_absolute() for line in lines)
