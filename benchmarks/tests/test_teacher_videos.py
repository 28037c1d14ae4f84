"""Small videos whose teacher reads them at full size: its attention, summed onto their tokens."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.teaching import targets as kept_targets
from benchmarks.teaching.dataset import TinyWorldRecord, read_tinyworld, sum_onto
from benchmarks.teaching.trainer import TinyWorldTrainer
from benchmarks.world.clip import render_clip
from benchmarks.world.tinyworld import build_dataset
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import build_trainer
from training_examples import steps

FULL, SMALL = (2, 6, 6), (2, 3, 3)


def naive_sum(attention, grid, smaller):
    found = torch.zeros(smaller)
    for index, value in enumerate(attention.tolist()):
        row, column = index // grid[2] % grid[1], index % grid[2]
        found[index // (grid[1] * grid[2]), row * smaller[1] // grid[1], column * smaller[2] // grid[2]] += value
    return found.flatten()


@given(st.tuples(*[st.integers(1, 4)] * 5), st.integers(0, 2**16))
def test_sums_are_those_of_a_loop_and_lose_nothing(sizes, seed):
    time, rows, columns, down, across = sizes
    grid, smaller = (time, rows * down, columns * across), (time, rows, columns)
    attention = torch.rand(time * rows * down * columns * across, generator=torch.Generator().manual_seed(seed))
    found = sum_onto(attention, grid, smaller)
    torch.testing.assert_close(found, naive_sum(attention, grid, smaller))
    assert found.sum() == pytest.approx(float(attention.sum()), rel=1e-5)
    assert torch.equal(sum_onto(attention, grid, grid), attention)


@pytest.mark.parametrize("smaller", [(1, 3, 3), (4, 6, 6), (2, 4, 3), (2, 3, 5), (2, 12, 6)])
def test_grids_that_do_not_fit_are_refused(smaller):
    with pytest.raises(ValueError, match=rf"it is \(2, 6, 6\) tokens .* for \({', '.join(map(str, smaller))}\) of"):
        sum_onto(torch.rand(72), FULL, smaller)


# --------------------------------------------------------------------------------------------------------------------
# By a recipe
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    """Two videos of two seconds at both sizes, with a conversation about each."""
    folder = tmp_path_factory.mktemp("sets")
    made = {"seconds": (2,), "crowd": True, "conversations": True, "progress": False}
    build_dataset(folder / "full", "train", 2, **made)
    build_dataset(folder / "small", "train", 2, frame_size=84, teacher_videos=folder / "full", **made)
    return folder


@pytest.fixture
def recipe(sets, tmp_path):
    """A mixed recipe, small records first, with changes."""

    def load(*changes, files=("small", "full"), features=True):
        path = tmp_path / "tiny.yaml"
        path.write_text(f"""
model: {{variant: qtsplus-tiny, selector: {{gate: detached}}}}
data:
  train_files: [{", ".join(f"{sets}/{name}/train.jsonl" for name in files)}]
  features: {f"{tmp_path}/features" if features else "null"}
training:
  {{output_dir: {tmp_path}/run, max_steps: 3, per_device_train_batch_size: 2, learning_rate: 1e-3, use_cpu: true,
    freeze_language_model: true, relevance_weight: 1.0, save_strategy: "no", logging_steps: 1, report_to: none}}
""")
        return load_stages(path, changes, TinyWorldTrainer)[0]

    return load


@pytest.fixture
def read(monkeypatch) -> list[tuple[int, int, int]]:
    """The grids of what teachers have read."""
    grids, own = [], kept_targets.answer_attention

    def note(model, inputs, labels, choice):
        grids.extend(model.model.merged_grid(inputs["video_grid_thw"]))
        return own(model, inputs, labels, choice)

    monkeypatch.setattr(kept_targets, "answer_attention", note)
    return grids


def test_two_processes_share_the_reading_and_train_as_one(recipe, tmp_path):
    recipe()  # writes the file
    logs, files = [], []
    for number in (1, 2):
        settings = [
            f"data.features={tmp_path}/features{number}",
            f"training.output_dir={tmp_path}/run{number}",
            f"training.per_device_train_batch_size={4 // number}",
            "training.train_sampling_strategy=sequential",
            "training.ddp_backend=gloo",
        ]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)]
        command = [sys.executable, *launcher, "-m", "benchmarks", "train", str(tmp_path / "tiny.yaml")]
        changes = [part for change in settings for part in ("--set", change)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        result = subprocess.run([*command, *changes], env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-3000:]
        state = json.loads((tmp_path / f"run{number}/trainer_state.json").read_text(encoding="utf-8"))
        logs.append([{name: line[name] for name in ("loss", "loss_relevance")} for line in state["log_history"][:-1]])
        files.append(sorted(path.name for path in (tmp_path / f"features{number}").glob("*/*.safetensors")))
    # Two videos at two sizes, and a target for each at full size.
    assert files[0] == files[1] and len(files[0]) == 6
    for alone, shared in zip(*logs, strict=True):
        assert shared == pytest.approx(alone, rel=1e-4) and alone["loss_relevance"] > 0


def without_teacher(dataset, index):
    """The target of a record about its own video, from the files that are kept."""
    record, example = dataset.records[index], dataset[index]
    return dataset.targets.load(replace(record, teacher_video=None), example).get("attention")


def test_small_records_learn_the_sums_of_what_full_ones_are_attended_to(recipe, read):
    trainer = build_trainer(recipe())
    dataset = trainer.train_dataset
    assert [record.teacher_video is not None for record in dataset.records] == [True, True, False, False]
    for small, full in ((0, 2), (1, 3)):
        attention = without_teacher(dataset, full)
        assert torch.equal(attention, dataset[full]["attention"]) and 0 < attention.sum() < 1
        assert attention.std() > 0
        torch.testing.assert_close(dataset[small]["attention"], naive_sum(attention, FULL, SMALL))
        assert without_teacher(dataset, small) is None  # nobody has read the small video
    assert set(map(tuple, read)) == {FULL} and len(read) == 2  # the full records' targets are the same files
    trainer.train()
    assert all(line["loss_relevance"] > 0 for line in steps(trainer)) and len(steps(trainer)) == 3

    build_trainer(recipe())
    assert len(read) == 2  # all is there


def test_another_teachers_video_is_another_target(recipe, read):
    dataset = build_trainer(recipe(files=["small"])).train_dataset
    assert len(read) == 2 and set(map(tuple, read)) == {FULL}
    first, second = dataset.records
    assert "attention" in dataset.example(first)
    for other in (None, second.teacher_video, first.video):
        assert "attention" not in dataset.example(replace(first, teacher_video=other))
    # Alone, the small records ask for what the full ones ask for.
    build_trainer(recipe())
    assert len(read) == 2


def test_a_small_record_without_a_teachers_video_is_read_as_it_is(recipe, read, sets):
    lines = [json.loads(line) for line in (sets / "small/train.jsonl").read_text().splitlines()]
    plain = [{**line, "teacher_video": None} for line in lines]
    (sets / "small/plain.jsonl").write_text("\n".join(map(json.dumps, plain)))
    build_trainer(recipe(f"data.train_files=[{sets}/small/plain.jsonl]"))
    assert [tuple(grid) for grid in read] == [SMALL, SMALL]


@pytest.mark.parametrize(
    "changes",
    [["data.features=null"], ["training.freeze_language_model=false"], ["training.lora_rank=2"]],
    ids=lambda changes: changes[0],
)
def test_a_teacher_that_is_asked_in_every_step_is_refused(recipe, changes):
    with pytest.raises(ValueError, match="has the teacher_video .* give data.features and a teacher that does not tr"):
        build_trainer(recipe(*changes))
    build_trainer(recipe(*changes, files=["full"]))


def test_without_a_relevance_weight_the_teachers_video_is_never_looked_for(recipe, sets, tmp_path):
    records = [json.loads(line) for line in (sets / "small/train.jsonl").read_text().splitlines()]
    lines = [json.dumps({**record, "teacher_video": "missing.mp4"}) for record in records]
    (sets / "small/missing.jsonl").write_text("\n".join(lines))
    changes = [f"data.train_files=[{sets}/small/missing.jsonl]", "training.max_steps=1"]
    for features in (True, False):
        trainer = build_trainer(recipe(*changes, "training.relevance_weight=0", features=features))
        trainer.train()
        assert steps(trainer)[0]["loss_lm"] > 0 and not trainer.skipped
    with pytest.raises(ValueError, match=r"missing\.mp4, the teacher_video of .*small.*000000\.mp4, cannot be used"):
        build_trainer(recipe(*changes))


@pytest.mark.parametrize(
    ("seconds", "side", "grid"), [(4, 168, "4, 6, 6"), (2, 112, "2, 4, 4")], ids=["other-steps", "parts-of-tokens"]
)
def test_a_teachers_video_of_other_tokens_is_refused(recipe, sets, seconds, side, grid):
    render_clip(sets / f"other-{side}.mp4", seconds=seconds, fps=2, size=(side, side), seed=0)
    record = json.loads((sets / "small/train.jsonl").read_text().splitlines()[0])
    (sets / "small/other.jsonl").write_text(json.dumps({**record, "teacher_video": f"../other-{side}.mp4"}))
    expected = rf"other-{side}\.mp4, the teacher_video of .*000000\.mp4, .*: it is \({grid}\) .* for \(2, 3, 3\)"
    with pytest.raises(ValueError, match=expected):
        build_trainer(recipe(f"data.train_files=[{sets}/small/other.jsonl]"))


def test_a_question_of_special_tokens_is_text_to_look_from(recipe, sets):
    record = json.loads((sets / "small/train.jsonl").read_text().splitlines()[0])
    bare = {**record, "question": "<|vision_start|>", "earlier": [], "needles": []}
    (sets / "small/bare.jsonl").write_text(json.dumps(bare))
    changes = [f"data.train_files=[{sets}/small/bare.jsonl]"]
    assert 0 < build_trainer(recipe(*changes)).train_dataset[0]["attention"].sum() < 1


def test_teachers_videos_are_encoded_once(recipe, tmp_path):
    def encoded():
        towers = (path.parent.name for path in (tmp_path / "features").glob("*/*.safetensors"))
        return [tower for tower in towers if not tower.startswith("attention-")]

    build_trainer(recipe("training.relevance_weight=0", files=["small"]))
    assert len(encoded()) == 2
    build_trainer(recipe(files=["small"]))
    assert len(encoded()) == 4 and len(set(encoded())) == 1


def test_teachers_videos_are_found_where_videos_are(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "v_2.mp4").touch()
    names = ["full/v_2", "../v_1.mp4", "https://example.org/v.mp4", None]
    rows = [{"video": "v.mp4", "question": "Q?", "answer": "A.", "teacher_video": name} for name in names]
    (tmp_path / "vqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = [record.teacher_video for record in read_tinyworld(tmp_path / "vqa.jsonl")]
    assert found == [str(tmp_path / "full/v_2.mp4"), f"{tmp_path}/../v_1.mp4", names[2], None]


@pytest.mark.parametrize("value", [5, True, [], ["a.mp4"], {}, "", " ", "\ud800"], ids=repr)
def test_what_is_no_name_is_refused(tmp_path, value):
    row = {"video": "v.mp4", "question": "Q?", "answer": "A.", "teacher_video": value}
    (tmp_path / "vqa.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="Row 1 of .* is not a record: teacher_video is"):
        read_tinyworld(tmp_path / "vqa.jsonl")


def test_a_teachers_video_stands_beside_a_video():
    record = TinyWorldRecord("small.mp4", "Who?", "A man.", query="Man?", teacher_video="full.mp4")
    assert record.at_full_size() == TinyWorldRecord("full.mp4", "Who?", "A man.", query="Man?")
    with pytest.raises(ValueError, match="has a teacher_video, but no video"):
        replace(record, video=None)
