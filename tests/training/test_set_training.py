"""Training and evaluation straight from sets of single-choice items and free answers, mixed in a batch."""

import json
import re
from pathlib import Path

import pytest
import torch
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
    (folder / "media" / "v_2").mkdir(parents=True)
    (folder / "media" / "v_1.mp4").write_bytes(tiny_mp4.read_bytes())
    for index in range(4):
        Image.new("RGB", (56, 56), (60 * index, 90, 200)).save(folder / "media" / "v_2" / f"{index}.jpg")
    videos = [{"vision_id": "v_1"}, {"vision_id": "v_2", "fps": 2.0}]
    asked = {"question": "What colour is it?", "options": OPTIONS, "type": "attribute"}
    write_records(folder / "vscq2.jsonl", [Choice(**video, **asked, answer="B") for video in videos])
    free = {"question": "What is shown?", "answer": "A red circle."}
    write_records(folder / "vqa.jsonl", [FreeAnswer(**video, **free) for video in videos])
    return folder


def train(sets: Path, out: Path, files: list[str], *overrides: str):
    changed = [
        f"data.train_files=[{', '.join(str(sets / name) for name in files)}]",
        f"data.media_root={sets / 'media'}",
        f"training.output_dir={out}",
        *overrides,
    ]
    return CliRunner().invoke(app, ["train", str(RECIPE), *(part for line in changed for part in ("--set", line))])


def test_a_batch_mixes_items_and_answers(sets, tiny_processor):
    names = ("vscq2.jsonl", "vqa.jsonl")
    records = [record for name in names for record in read_records(sets / name, sets / "media")]
    dataset = VideoQADataset(records, tiny_processor)
    batch = VideoQACollator(tiny_processor)([dataset[index] for index in range(4)])
    assert [SOURCES[index] for index in batch["source_ids"]] == ["mcq", "mcq", "vqa", "vqa"] and not batch["skipped"]
    decode = tiny_processor.tokenizer.decode
    answers = [decode(ids[labels != -100]) for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)]
    assert answers == ["B<|im_end|>"] * 2 + ["A red circle.<|im_end|>"] * 2
    queries = [
        decode(ids[mask.bool()])
        for ids, mask in zip(batch["query_input_ids"], batch["query_attention_mask"], strict=True)
    ]
    assert queries == ["What colour is it?"] * 2 + ["What is shown?"] * 2
    prompt = decode(batch["input_ids"][0])
    assert "\nB. blue\n" in prompt and "Answer with the letter." in prompt
    assert batch["video_grid_thw"][:, 0].tolist() == [8 // 2, 4 // 2] * 2
    assert torch.equal(batch["second_per_grid_ts"], torch.tensor([1.0, 1.0, 1.0, 1.0]))


def test_the_papers_stage_trains_on_both_sets_and_is_evaluated(sets, tmp_path):
    result = train(sets, tmp_path / "run", ["vscq2.jsonl", "vqa.jsonl"], "training.num_train_epochs=2")
    assert result.exit_code == 0, result.output
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    steps = [line for line in history if "loss" in line]
    assert len(steps) == 2 and all({"loss_mcq", "loss_vqa", "rho"} <= line.keys() for line in steps)
    assert all(line["loss_mcq"] > 0 and line["loss_vqa"] > 0 for line in steps)
    command = ["eval", str(sets / "vscq2.jsonl"), "--model", str(tmp_path / "run")]
    command += ["--media-root", str(sets / "media")]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["questions"] == 2 and list(told["kinds"]) == ["attribute"] and told["unreadable"] == []


def test_tables_and_conversations_train_too(sets, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = FreeAnswer(vision_id="v_1", question="What is shown?", answer="A red circle.").row()
    parquet.write_table(pyarrow.Table.from_pylist([row]), sets / "vqa.parquet")
    said = zip(("human", "gpt") * 2, ("<image>\nWhat?", "A.", "Where?", "Left."), strict=True)
    turns = [{"from": speaker, "value": text} for speaker, text in said]
    (sets / "llava.json").write_text(json.dumps([{"video": "v_1.mp4", "conversations": turns}]))
    result = train(sets, tmp_path / "run", ["vqa.parquet", "llava.json"], "training.max_steps=2")
    assert result.exit_code == 0, result.output
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 2 and state["log_history"][0]["loss_vqa"] > 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Caption(vision_id="v_1", caption="A red circle.")], "Row 1 of .* it is a caption, which asks nothing"),
        (
            [FreeAnswer(vision_id="v_2", question="Y?", answer="So.")],
            'is a folder of frames: give their rate .*"fps": 2',
        ),
    ],
)
def test_a_set_that_cannot_train_ends_in_one_line(rows, message, sets, tmp_path):
    write_records(tmp_path / "set.jsonl", rows)
    result = train(sets, tmp_path / "run", [str(tmp_path / "set.jsonl")])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr)


def test_an_empty_media_root_is_refused(sets, tmp_path):
    result = train(sets, tmp_path / "run", ["vqa.jsonl"], "data.media_root=' '")
    assert result.exit_code == 2 and "data.media_root is empty" in result.stderr
