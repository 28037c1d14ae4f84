"""Training and evaluation straight from sets of single-choice items and free answers, mixed in a batch."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.data.formats import read_records
from qtsplus.data.records import SOURCES, Caption, Choice, FreeAnswer
from qtsplus.training import VideoQACollator, VideoQADataset
from set_files import write_records

RECIPE = Path(__file__).with_name("sets.yaml")
OPTIONS = {"A": "red", "B": "blue", "C": "green", "D": "white"}


@pytest.fixture(scope="module")
def sets(tmp_path_factory, tiny_mp4) -> Path:
    """A media root with a file and a folder of frames, and beside it a set of each kind about them."""
    folder = tmp_path_factory.mktemp("sets")
    media = folder / "media"
    frames = media / "v_2"
    frames.mkdir(parents=True)
    (media / "v_1.mp4").write_bytes(tiny_mp4.read_bytes())
    for index in range(4):
        Image.new("RGB", (56, 56), (60 * index, 90, 200)).save(frames / f"{index}.jpg")
    choices = []
    answers = []
    for video in ({"vision_id": "v_1"}, {"vision_id": "v_2", "fps": 2.0}):
        question = "What colour is it?"
        choices.append(Choice(**video, question=question, options=OPTIONS, answer="B", type="attribute"))
        answers.append(FreeAnswer(**video, question="What is shown?", answer="A red circle."))
    write_records(folder / "vscq2.jsonl", choices)
    write_records(folder / "vqa.jsonl", answers)
    return folder


def train(sets: Path, out: Path, files: list[str], *overrides: str):
    paths = [str(sets / name) for name in files]
    command = ["train", str(RECIPE)]
    command += ["--set", f"data.train_files=[{', '.join(paths)}]"]
    command += ["--set", f"data.media_root={sets / 'media'}"]
    command += ["--set", f"training.output_dir={out}"]
    for override in overrides:
        command += ["--set", override]
    return CliRunner().invoke(app, command)


def test_a_batch_mixes_items_and_answers(sets, tiny_processor):
    records = []
    for name in ("vscq2.jsonl", "vqa.jsonl"):
        records += read_records(sets / name, sets / "media")
    dataset = VideoQADataset(records, tiny_processor)
    examples = [dataset.example(record) for record in records]
    batch = VideoQACollator(tiny_processor)(examples)
    sources = [SOURCES[index] for index in batch["source_ids"]]
    assert sources == ["mcq", "mcq", "vqa", "vqa"]
    assert batch["skipped"] == []
    prompt = tiny_processor.tokenizer.decode(batch["input_ids"][0])
    assert "\nB. blue\n" in prompt
    assert "Answer with the letter." in prompt
    assert batch["video_grid_thw"][:, 0].tolist() == [4, 2, 4, 2]
    assert batch["second_per_grid_ts"].tolist() == [1.0, 1.0, 1.0, 1.0]


def test_the_papers_stage_trains_on_both_sets_and_is_evaluated(sets, tmp_path):
    run = tmp_path / "run"
    result = train(sets, run, ["vscq2.jsonl", "vqa.jsonl"], "training.num_train_epochs=2")
    assert result.exit_code == 0, result.output
    state = json.loads((run / "trainer_state.json").read_text())
    steps = [line for line in state["log_history"] if "loss" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["loss_mcq"] > 0
        assert line["loss_vqa"] > 0
        assert "rho" in line
    command = ["eval", str(sets / "vscq2.jsonl"), "--model", str(run), "--media-root", str(sets / "media"), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["questions"] == 2
    assert list(summary["kinds"]) == ["attribute"]
    assert summary["unreadable"] == []


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Caption(vision_id="v_1", caption="A red circle."), "Row 1 of .* it is a caption, which asks nothing"),
        (
            FreeAnswer(vision_id="v_2", question="Y?", answer="So."),
            "The record of .*v_2 cannot be used: .*fps",
        ),
    ],
)
def test_a_set_that_cannot_train_ends_in_one_line(record, message, sets, tmp_path):
    path = tmp_path / "set.jsonl"
    write_records(path, [record])
    result = train(sets, tmp_path / "run", [str(path)])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr)
