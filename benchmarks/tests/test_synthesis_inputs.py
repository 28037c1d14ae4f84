"""The captions that questions are written about."""

import pytest

from benchmarks.synthesis.inputs import iter_captions
from qtsplus.data.records import Caption, VideoRecord
from set_files import write_records


def test_captions_are_taken_from_rows_conversations_and_tinyworld(tmp_path):
    rows = [
        Caption(vision_id="a", caption="A man."),
        VideoRecord("b.mp4", "Describe the video.", "A car.", id="1"),
        VideoRecord("c.mp4", "Describe the video.", "A red square.", kind="caption", source="caption"),
        VideoRecord("c.mp4", "What colour?", "red", kind="attribute"),
        VideoRecord("c.mp4", "Where?", "left", earlier=(("What?", "a dot"),)),
    ]
    write_records(tmp_path / "set.jsonl", rows)
    found = [(caption.vision_id, caption.caption) for caption in iter_captions(tmp_path / "set.jsonl")]
    assert found == [("a", "A man."), ("b.mp4", "A car."), ("c.mp4", "A red square.")]
    write_records(tmp_path / "none.jsonl", rows[3:])
    with pytest.raises(ValueError, match="holds no caption"):
        list(iter_captions(tmp_path / "none.jsonl"))
