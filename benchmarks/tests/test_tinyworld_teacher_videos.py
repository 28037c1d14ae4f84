"""TinyWorld's smaller videos name the full-size ones that their teacher reads."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.teaching.dataset import read_tinyworld
from benchmarks.world.tinyworld import build_dataset


def test_smaller_videos_name_those_that_their_teacher_reads(tmp_path):
    options = {"seconds": (2,), "progress": False, "crowd": True}
    plain = Path(build_dataset(tmp_path / "plain", "test", 2, frame_size=84, **options))
    with pytest.raises(ValueError, match=r"teacher_videos: no .*full/test/videos\.json says how"):
        build_dataset(tmp_path / "small", "test", 2, frame_size=84, teacher_videos=tmp_path / "full", **options)
    assert not (tmp_path / "small").exists()
    build_dataset(tmp_path / "full", "test", 2, **options)
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    for folder, conversations in (("small", True), ("link/small", False)):
        given = {**options, "teacher_videos": tmp_path / "full", "conversations": conversations}
        small = Path(build_dataset(tmp_path / folder, "test", 2, frame_size=84, **given))
        records = [json.loads(line) for line in small.open()]
        assert len({record["video"] for record in records}) == 2
        for record in records:
            theirs = small.parent / record["teacher_video"]
            assert not Path(record["teacher_video"]).is_absolute()
            assert theirs.samefile(tmp_path / "full" / record["video"])
            assert read_tinyworld(small)[0].teacher_video == str(small.parent / records[0]["teacher_video"])
    without = [{name: value for name, value in record.items() if name != "teacher_video"} for record in records]
    assert without == [json.loads(line) for line in plain.open()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": (4,)}, r"made with seconds=\[2\], not \[4\]; expected the same videos"),
        ({"max_objects": 6}, "made with max_objects=21, not 6"),
        ({"crowd": False}, "max_objects=21, not 12 and with crowd=True, not False"),
        ({"split": "train"}, r"train.videos\.json .* made the split 'train'"),
        ({"size": 2}, "holds 1 of the first 2 videos"),
        ({"frame_size": 168}, "holds frames of 84 pixels a side; expected a multiple of 168"),
        ({"frame_size": 56}, "holds frames of 84 pixels a side; expected a multiple of 56"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_teacher_reads_the_same_videos(tmp_path_factory, tmp_path, change, message):
    given = {"split": "test", "size": 1, "seconds": (2,), "frame_size": 84, "crowd": True, "progress": False}
    theirs = tmp_path_factory.getbasetemp() / "theirs"
    build_dataset(theirs, **given)
    with pytest.raises(ValueError, match=message):
        build_dataset(tmp_path / "ours", **{**given, **change}, teacher_videos=theirs)
    assert not (tmp_path / "ours").exists()


def test_a_teachers_videos_of_other_code_are_refused(tmp_path):
    given = {"split": "test", "size": 1, "seconds": (2,), "crowd": True, "progress": False}
    build_dataset(tmp_path / "theirs", **given)
    file = tmp_path / "theirs" / "test" / "videos.json"
    for change, message in (
        ({"first_video": "0"}, "made with another version of this package"),
        ({"frame_size": "168"}, "holds frames of 168 pixels"),
    ):
        made_with = json.loads(file.read_text())
        file.write_text(json.dumps({**made_with, **change}))
        with pytest.raises(ValueError, match=message):
            build_dataset(tmp_path / "ours", **given, frame_size=84, teacher_videos=tmp_path / "theirs")
        file.write_text(json.dumps(made_with))


def test_the_command_takes_the_folder(tmp_path):
    data = ["tinyworld", "--crowd", "--size", "1", "--seconds", "1", "--out"]
    smaller = ["--frame-size", "84", "--teacher-videos", str(tmp_path / "full")]
    for command in ([*data, str(tmp_path / "full")], [*data, str(tmp_path / "small"), *smaller]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "small" / "train.jsonl").read_text().splitlines()[0])
    assert record["teacher_video"] == "../full/train/000000.mp4"
