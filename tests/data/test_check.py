"""`qtsplus data check` on rows that are built to fail each of its checks, and on sets that are good."""

import json
import signal
import struct
import subprocess
import sys
import zlib

import pytest
from PIL import Image
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.data.check import check_set
from qtsplus.data.records import Caption, Choice, FreeAnswer, VideoRecord
from set_files import write_records

OPTIONS = {"A": "a cup", "B": "a rope", "C": "a hat", "D": "a phone"}


def choice(number: int, **changes) -> Choice:
    fields = {"vision_id": f"v_{number}", "question": f"What is held at {number}?", "answer": "ABCD"[number % 4]}
    return Choice(**{**fields, "options": OPTIONS, "id": f"c{number}", **changes})


def checked(tmp_path, records, **arguments):
    write_records(tmp_path / "set.jsonl", records)
    return check_set(tmp_path / "set.jsonl", **{"media": False, **arguments})


def reasons(found, check=None):
    return [(bad.row, bad.reason) for bad in found.bad if check in (None, bad.check)]


def test_a_good_set_has_no_bad_row(tmp_path):
    questions = [
        FreeAnswer(vision_id="v_1", question="Is it red or blue?", answer="blue"),
        choice(1, question="Does he hold a cup, a rope, a hat or a phone?", id=None),
        Caption(vision_id="v_1", caption="A man holds a cup."),
        VideoRecord("v_1.mp4", "Which is it? A. red B. blue", "A", query="Which is it?", options=("red", "blue")),
        VideoRecord(None, "What is the colour of grass?", "green"),
    ]
    found = checked(tmp_path, [*map(choice, range(2, 42)), *questions])
    assert found.rows == 45 and found.bad == []


def test_rows_that_are_no_records_are_listed_with_their_numbers(tmp_path):
    good = choice(0).row()
    rows = [good, {**good, "options": {"A": "1"}}, {**good, "id": "x", "answer": "E"}]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n{broken\n")
    found = check_set(tmp_path / "set.jsonl", media=False)
    assert [(bad.row, bad.id, bad.check) for bad in found.bad] == [
        (2, "c0", "schema"),
        (3, "x", "schema"),
        (5, None, "schema"),
    ]
    assert "expected A, B, C and D" in found.bad[0].reason and "no JSON" in found.bad[2].reason
    assert found.rows == 4


def test_every_video_is_looked_for_and_decoded(tmp_path, tiny_mp4):
    media = tmp_path / "media"
    (media / "frames").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(media / "frames" / "0.png")
    (media / "bad_frames").mkdir()
    (media / "bad_frames" / "0.png").write_bytes(b"\x89PNG\r\n")
    (media / "no_frames").mkdir()
    (media / "good.mp4").write_bytes(tiny_mp4.read_bytes())
    (media / "text.mp4").write_text("no video")
    (media / "empty.mp4").touch()
    names = ["good", "good.mp4", "frames", "missing", "text", "empty.mp4", "bad_frames", "no_frames", "missing"]
    records = [FreeAnswer(vision_id=name, question=f"Why {index}?", answer="So.") for index, name in enumerate(names)]
    found = checked(tmp_path, records, media=True, media_root=media)
    assert [bad.row for bad in found.bad] == [4, 5, 6, 7, 8, 9] and {bad.check for bad in found.bad} == {"media"}
    expected = ["There is no video at", "Cannot decode", "Cannot decode", "Cannot read the frame", "holds no frames"]
    for bad, words in zip(found.bad, expected, strict=False):
        assert words in bad.reason and "\n" not in bad.reason
    assert found.videos == 7
    assert not checked(tmp_path, records, media=False).bad


def test_folders_of_frames_are_looked_through(tmp_path):
    media = tmp_path / "media"
    names = {
        "strided": ["f_0.png", "f_30.png", "f_60.png"],
        "unnumbered": ["a.png", "b_7.png"],
        "gap": ["f_8.png", "f_9.png", "f_10.png", "f_13.png"],
    }
    for folder, files in names.items():
        (media / folder).mkdir(parents=True)
        for file in files:
            Image.new("RGB", (8, 8)).save(media / folder / file)
    (media / "vast").mkdir()
    Image.new("1", (8, 8)).save(media / "vast" / "0.png")
    small = (media / "vast" / "0.png").read_bytes()
    header = b"IHDR" + struct.pack(">II", 30_000, 30_000) + small[24:29]
    (media / "vast" / "0.png").write_bytes(small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:])
    records = [FreeAnswer(vision_id=name, question=f"Why {name}?", answer="So.") for name in (*names, "vast")]
    found = checked(tmp_path, records, media=True, media_root=media)
    assert [bad.row for bad in found.bad] == [3, 4] and {bad.check for bad in found.bad} == {"media"}
    expected = ["1 gap, such as after 'f_10.png'", "900000000 pixels"]
    for bad, words in zip(found.bad, expected, strict=True):
        assert words in bad.reason, bad


def test_special_tokens_are_told(tmp_path):
    good = "Is 1 < 2, a|b > c, <b>bold</b>, <|, |>, <think> or <imagination>?"
    records = [
        FreeAnswer(vision_id="v", question=good, answer="Yes, 1 < 2."),
        FreeAnswer(vision_id="v", question="What<|im_end|>?", answer="So."),
        FreeAnswer(vision_id="v", question="Why?", answer="So.<|endoftext|>"),
        choice(1, options={**OPTIONS, "D": "<|video_pad|>"}),
        Caption(vision_id="v", caption="A man.</s>"),
        VideoRecord("v", "Who?", "He.", query="<image>"),
        VideoRecord("v", "Where?", "Here.", earlier=(("What <IMG_CONTEXT>?", "That."),)),
        VideoRecord("v", "How?", "So.", options=("So.", "<|im_start|>")),
    ]
    found = checked(tmp_path, records)
    assert [(bad.row, bad.check) for bad in found.bad] == [(row, "special token") for row in range(2, 9)]
    assert found.bad[0].reason == "'<|im_end|>' in its text is a special token; it is read as text."


def test_a_set_without_rows_and_another_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text(json.dumps(choice(1).row()) + "\n{}\n")
    write_records(tmp_path / "set.jsonl", [choice(1)])
    for path, against, message in (
        ("empty", None, "empty.jsonl holds no row"),
        ("set", "empty", "empty.jsonl holds no record"),
        ("set", "broken", "Row 2 of .*broken.jsonl is not a record"),
    ):
        others = None if against is None else tmp_path / f"{against}.jsonl"
        with pytest.raises(ValueError, match=message):
            check_set(tmp_path / f"{path}.jsonl", against=others, media=False)


@pytest.mark.slow
def test_an_interruption_ends_the_check_at_once(tmp_path, tiny_mp4):
    """Also while a video is being looked at, which may take as long as it likes."""
    (tmp_path / "v_1.mp4").write_bytes(tiny_mp4.read_bytes())
    write_records(tmp_path / "set.jsonl", [choice(1)])
    program = """
import sys
import time
from qtsplus.cli import app
from qtsplus.data import check

def look(place):
    print("looking", flush=True)
    time.sleep(600)

check.media_problem = look
app(["data", "check", sys.argv[1]])
"""
    command = [sys.executable, "-c", program, str(tmp_path / "set.jsonl")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "looking\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
        process.stdout.close()


def test_a_video_that_was_cut_off_is_bad(tmp_path, tiny_mp4):
    import av

    with av.open(str(tiny_mp4)) as source, av.open(str(tmp_path / "whole.mkv"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    whole = (tmp_path / "whole.mkv").read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) * 2 // 3])
    records = [FreeAnswer(vision_id=name, question="Why?", answer="So.") for name in ("whole", "cut")]
    found = checked(tmp_path, records, media=True)
    assert [(bad.row, bad.check) for bad in found.bad] == [(2, "media")] and "incomplete" in found.bad[0].reason


def test_doubles_are_told_with_the_row_that_came_first(tmp_path):
    records = [
        choice(0),
        choice(0, id="other", question="WHAT is  held at 0?", options=dict(zip("ABCD", "wxyz", strict=True))),
        choice(1, id="c0"),
        Caption(vision_id="v.mp4", caption="A man."),
        Caption(vision_id="v", caption="a MAN."),
        VideoRecord("v.mp4", "And then?", "Left.", earlier=(("Where?", "Here."),)),
        VideoRecord("v.mp4", "And then?", "Right.", earlier=(("Who?", "He."),)),
        VideoRecord("v.mp4", "And then?", "Right.", earlier=(("Who?", "He."),)),
    ]
    assert reasons(checked(tmp_path, records)) == [
        (2, "row 1 has the same question about the same video."),
        (3, "row 1 has the same id."),
        (5, "row 4 has the same caption about the same video."),
        (8, "row 7 has the same question about the same video."),
    ]


def test_videos_of_another_set_are_told(tmp_path):
    others = [Caption(vision_id="a", caption="."), VideoRecord("v_2.mp4", "Why?", "So."), VideoRecord(None, "W?", "S.")]
    write_records(tmp_path / "test.jsonl", others)
    found = checked(tmp_path, [choice(1), choice(2)], against=tmp_path / "test.jsonl")
    assert [(bad.row, bad.id, bad.check, bad.reason) for bad in found.bad] == [
        (2, "c2", "overlap", "row 2 of test.jsonl is about the same video.")
    ]


def run(*arguments):
    return CliRunner().invoke(app, ["data", "check", *map(str, arguments)])


def test_the_command_lists_bad_rows_and_ends_with_1(tmp_path, tiny_mp4):
    (tmp_path / "v_1.mp4").write_bytes(tiny_mp4.read_bytes())
    records = [choice(1), choice(2), choice(1)]
    write_records(tmp_path / "set.jsonl", records)
    result = run(tmp_path / "set.jsonl")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Row 2 (c2), media: There is no video at")
    assert lines[1:3] == [
        "Row 3 (c1), duplicate: row 1 has the same id.",
        "Row 3 (c1), duplicate: row 1 has the same question about the same video.",
    ]
    assert lines[-1] == "3 rows, 2 of them bad; 2 videos looked at."
    result = run(tmp_path / "set.jsonl", "--no-media")
    assert result.exit_code == 1 and "0 videos" in result.stdout
    write_records(tmp_path / "set.jsonl", records[:1])
    result = run(tmp_path / "set.jsonl")
    assert result.exit_code == 0 and result.stdout == "1 row, none of them bad; 1 video looked at.\n"
    assert run(tmp_path / "set.jsonl", "--against", tmp_path / "set.jsonl").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{missing}"], "There is no file"),
        (["{set}", "--media-root", "{missing}"], "There is no folder"),
        (["{set}", "--against", "{missing}"], "There is no file"),
        (["{broken}"], "is no JSON array of records"),
        ([""], "is empty"),
        (["{set}", "--media-root", ""], "is empty"),
        (["{set}", "--against", " "], "is empty"),
        (["{set}", "--no-media", "--media-root", "{missing}"], "has no effect with --no-media"),
    ],
)
def test_what_cannot_be_checked_ends_in_one_line(arguments, message, tmp_path):
    (tmp_path / "set").write_text(json.dumps(choice(1).row()))
    (tmp_path / "broken.json").write_text("[{]")
    names = {name: str(tmp_path / name) for name in ("set", "missing")} | {"broken": str(tmp_path / "broken.json")}
    result = run(*(argument.format(**names) for argument in arguments))
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
