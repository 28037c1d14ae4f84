"""`qtsplus data check` on rows that are built to fail each of its checks, and on sets that are good."""

import json

import pytest
from PIL import Image
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.data.check import check_set
from qtsplus.data.records import Caption, Choice, FreeAnswer, VideoRecord
from set_files import write_records

OPTIONS = {"A": "a cup", "B": "a rope", "C": "a hat", "D": "a phone"}


def choice(number: int, **changes) -> Choice:
    fields = {
        "vision_id": f"v_{number}",
        "question": f"What is held at {number}?",
        "answer": "ABCD"[number % 4],
        "options": OPTIONS,
        "id": f"c{number}",
    }
    return Choice(**{**fields, **changes})


def questions_about(*names: str) -> list[FreeAnswer]:
    """A different question for each name of a video."""
    records = [FreeAnswer(vision_id=name, question=f"Why {index}?", answer="So.") for index, name in enumerate(names)]
    return records


def checked(tmp_path, records, media):
    write_records(tmp_path / "set.jsonl", records)
    return check_set(tmp_path / "set.jsonl", media)


def save_image(path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)


def test_a_good_set_has_no_bad_row(tmp_path, tiny_mp4):
    for number in range(1, 4):
        (tmp_path / f"v_{number}.mp4").write_bytes(tiny_mp4.read_bytes())
    records = [
        choice(1, question="Does he hold a cup, a rope, a hat or a phone?", id=None),
        choice(2),
        choice(3),
        FreeAnswer(vision_id="v_1", question="Is it red or blue?", answer="blue"),
        Caption(vision_id="v_1", caption="A man holds a cup."),
        VideoRecord("v_1.mp4", "Which is it? A. red B. blue", "A", query="Which is it?", options=("red", "blue")),
        VideoRecord(None, "What is the colour of grass?", "green"),
    ]
    result = checked(tmp_path, records, tmp_path)
    assert result.rows == 7
    assert result.bad == []


def test_rows_that_are_no_records_are_listed_with_their_numbers(tmp_path, tiny_mp4):
    (tmp_path / "v_0.mp4").write_bytes(tiny_mp4.read_bytes())
    good = choice(0).row()
    too_few = good | {"options": {"A": "1"}}
    no_option = good | {"id": "x", "answer": "E"}
    lines = [json.dumps(row) for row in (good, too_few, no_option)]
    late = {"video": "v_0.mp4", "question": "Who?", "answer": "I.", "evidence": [[{"start": 3, "end": 9}]]}
    lines += ["", "{broken", json.dumps(late)]
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(lines))
    result = check_set(path)
    assert result.rows == 5
    options, answer, broken, outside = result.bad
    assert options.row == 2
    assert options.id == "c0"
    assert "expected A, B, C and D" in options.reason
    assert answer.row == 3
    assert answer.id == "x"
    assert broken.row == 5
    assert broken.id is None
    assert "not JSON" in broken.reason
    assert "its evidence is from 3 to 9 s; expected times" in outside.reason


@pytest.fixture
def media(tmp_path, tiny_mp4):
    """Good and bad videos and folders of frames."""
    media = tmp_path / "media"
    save_image(media / "frames" / "0.png")
    (media / "bad_frames").mkdir()
    (media / "bad_frames" / "0.png").write_bytes(b"\x89PNG\r\n")
    (media / "no_frames").mkdir()
    (media / "good.mp4").write_bytes(tiny_mp4.read_bytes())
    (media / "text.mp4").write_text("no video")
    (media / "empty.mp4").touch()
    return media


@pytest.mark.parametrize("name", ["good.mp4", "frames"])
def test_a_good_video_is_not_told(tmp_path, media, name):
    result = checked(tmp_path, questions_about(name), media)
    assert result.bad == []
    assert result.videos == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "There is no video at"),
        ("text", "Cannot decode"),
        ("empty.mp4", "Cannot decode"),
        ("bad_frames", "Cannot read the frame"),
        ("no_frames", "holds no frames"),
    ],
)
def test_a_bad_video_is_told_for_each_row_about_it(tmp_path, media, name, reason):
    records = questions_about("good", name, "frames", name)
    result = checked(tmp_path, records, media)
    assert [bad.row for bad in result.bad] == [2, 4]
    assert result.videos == 3
    for bad in result.bad:
        assert reason in bad.reason
        assert "\n" not in bad.reason


def test_a_set_without_rows_is_refused(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ValueError, match="empty.jsonl holds no row"):
        check_set(empty)


# --- The command ---


def run(*arguments):
    return CliRunner().invoke(app, ["data", "check", *map(str, arguments)])


def test_the_command_lists_bad_rows_and_ends_with_1(tmp_path, tiny_mp4):
    (tmp_path / "v_1.mp4").write_bytes(tiny_mp4.read_bytes())
    path = tmp_path / "set.jsonl"
    write_records(path, [choice(1), choice(2)])
    result = run(path)
    assert result.exit_code == 1
    media, summary = result.stdout.splitlines()
    assert media.startswith("Row 2 (c2): There is no video at")
    assert summary == "2 rows, 1 of them bad; 2 videos looked at."


def test_the_command_ends_with_0_for_a_good_set(tmp_path, tiny_mp4):
    (tmp_path / "v_1.mp4").write_bytes(tiny_mp4.read_bytes())
    path = tmp_path / "set.jsonl"
    write_records(path, [choice(1)])
    result = run(path)
    assert result.exit_code == 0
    assert result.stdout == "1 row, none of them bad; 1 video looked at.\n"
