"""The speed benchmark at toy size: what it counts, that it compares like with like, and how it goes on."""

import json
import statistics

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.files import read_result
from benchmarks.speed import speed
from benchmarks.speed.clock import StageClock
from benchmarks.speed.results import SUMMARY
from benchmarks.speed.shapes import MODEL_SHAPES, SIDES, build_pair, find_shape, make_config
from pairs import assert_one_model

REPEATS = 2
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def models():
    return build_pair(MODEL_SHAPES["tiny"], "cpu", torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results of `python -m benchmarks speed --shape tiny`."""
    out = tmp_path_factory.mktemp("results")
    speed.run_speed("tiny", out, dtype="float32", repeats=REPEATS, progress=False)
    return out


@pytest.fixture(scope="module")
def document(folder):
    return read_result(folder / "speed-tiny.json")


def test_both_sides_are_one_model(models):
    assert_one_model(models)


def test_each_side_attends_as_its_users_get_it(models):
    for side in ("stock", "ours"):
        config = models[side].config
        assert config.text_config._attn_implementation == config.vision_config._attn_implementation == "sdpa"


def test_files_and_summary(folder, document):
    assert {file.name for file in folder.iterdir()} == {
        *("speed-tiny.json", "speed-tiny.png", "frames-tiny.png", "summary.md")
    }
    assert (folder / "frames-tiny.png").read_bytes().startswith(PNG)
    assert list(document["summary"]) == list(SUMMARY)
    measured = {name for name, value in document["summary"].items() if value is not None}
    assert measured == set(document["figures"])
    assert {"processor", "threads", "torch", "transformers", "load_average"} <= set(document["environment"])


def test_tokens_are_counted_where_the_language_model_reads_them(document):
    """8 frames of 4 x 4 tokens for each two; of the 64, ours keeps 11%, rounded up."""
    for side, visual in (("stock", 64), ("ours", 8)):
        assert {run["visual_tokens_to_lm"] for run in document["repeats"][side]} == {visual}
    assert document["tokens"]["visual_tokens"] == 64
    assert [point["frames"] for point in document["frames"]] == [4, 8]
    assert [point["stock"]["visual_tokens_to_lm"] for point in document["frames"]] == [32, 64]
    assert [point["ours"]["visual_tokens_to_lm"] for point in document["frames"]] == [4, 8]


def test_every_repeat_is_kept_and_the_figures_follow(document):
    runs = document["repeats"]
    assert [len(runs[side]) for side in SIDES] == [REPEATS, REPEATS]

    def median(side, stage):
        return statistics.median(run[stage] for run in runs[side])

    summary = document["summary"]
    for name, expected in {
        "first_token_speedup": median("stock", "features_to_first_token") / median("ours", "features_to_first_token"),
        "file_to_first_token_speedup": median("stock", "file_to_first_token") / median("ours", "file_to_first_token"),
        "selection_share_of_stock_prefill": median("ours", "selection") / median("stock", "prefill"),
        "vision_speedup": median("stock", "vision") / median("ours", "vision"),
        "second_question_speedup": median("stock", "pixels_to_first_token") / median("ours", "second_question"),
    }.items():
        assert summary[name] == pytest.approx(expected), name


def test_attention_selection_stands_beside(tmp_path):
    how = {"selection": "lm_attention", "dtype": "float32", "repeats": 1, "sweep": False, "progress": False}
    file = speed.run_speed("tiny", tmp_path, **how)
    document = read_result(file)
    assert file.name == "speed-lm-attention-tiny.json" and "--selection lm_attention" in document["command"]
    ours = document["repeats"]["ours"][0]
    assert ours["relevance"] == ours["selection"] > 0 and not {"gate", "re-encode"} & set(ours)
    assert set(document["cost"]["ours"]) == {"vision", "relevance", "prefill", "per_token"}
    assert document["summary"]["first_token_speedup"] == document["figures"]["first_token_speedup"]
    assert "| lm-attention-tiny |" in (tmp_path / "summary.md").read_text()
    with pytest.raises(ValueError, match="selection='random': expected 'qtsplus' or 'lm_attention'"):
        speed.run_speed("tiny", tmp_path, selection="random")


def test_stages_are_parts_of_the_whole(document):
    parts = {
        "stock": ("decode", "preprocess", "vision", "prefill"),
        "ours": ("reading", "vision", "relevance", "gate", "re-encode", "prefill"),
    }
    for side in SIDES:
        for run in document["repeats"][side]:
            assert all(run[stage] > 0 for stage in (*parts[side], "per_token"))
            assert sum(run[stage] for stage in parts[side]) <= run["file_to_first_token"]
            assert run["prefill"] + run.get("selection", 0) <= run["features_to_first_token"]
    for run in document["repeats"]["stock"]:
        assert run["vision"] + run["features_to_first_token"] <= run["pixels_to_first_token"]
    for run in document["repeats"]["ours"]:
        assert run["second_question"] > 0
        assert run["relevance"] + run["gate"] + run["re-encode"] == pytest.approx(run["selection"])


def test_every_stage_has_its_distance_from_the_floor(document):
    for side in SIDES:
        for stage, row in document["cost"][side].items():
            assert row["seconds"] == document["seconds"][side][stage]["median"]
            assert row["times_floor"] == pytest.approx(row["seconds"] / row["floor"])


def test_hooks_are_gone_after_a_failure(models):
    visual = models["ours"].model.visual
    with pytest.raises(KeyError), StageClock("cpu", vision=visual):
        raise KeyError
    assert not visual._forward_hooks and not visual._forward_pre_hooks


def test_an_interruption_leaves_no_result_and_loses_no_repeat(tmp_path, monkeypatch):
    whole = speed._Bench.measure
    calls = []

    def interrupted(self, video):
        calls.append(video.name)
        if len(calls) == 3:  # to warm up, the first repeat, and now the second
            raise KeyboardInterrupt
        return whole(self, video)

    monkeypatch.setattr(speed._Bench, "measure", interrupted)
    arguments = ["speed", "--shape", "tiny", "--no-sweep", "--repeats", "2", "--out", str(tmp_path)]
    stopped = CliRunner().invoke(app, arguments)
    assert stopped.exit_code == 130
    assert "interrupted" in stopped.stderr
    assert [file.name for file in tmp_path.iterdir()] == [".speed-tiny.jsonl"]

    finished = CliRunner().invoke(app, arguments)
    assert finished.exit_code == 0, finished.stderr
    assert "first_token_speedup" in finished.stdout
    assert calls == ["tiny-8.mp4"] * 5, "warmed up again, and only the second repeat measured"
    assert len(read_result(tmp_path / "speed-tiny.json")["repeats"]["ours"]) == 2


def test_what_was_measured_without_the_sweep_counts_with_it(tmp_path, monkeypatch):
    """And with other numbers of repeats."""
    calls = []

    def measure(self, video):
        calls.append(video.name)
        if len(calls) in (3, 5):
            raise KeyboardInterrupt
        return {side: {"file_to_first_token": 1.0} for side in SIDES}

    monkeypatch.setattr(speed._Bench, "measure", measure)
    for repeats, sweep in ((2, False), (3, True)):
        with pytest.raises(KeyboardInterrupt):
            speed.run_speed("tiny", tmp_path, dtype="float32", repeats=repeats, sweep=sweep, progress=False)
    keys = [json.loads(line).get("key") for line in (tmp_path / ".speed-tiny.jsonl").read_text().splitlines()]
    assert keys[1:] == ["tiny/8/0"]
    assert len(calls) == 5


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="no shape 'huge'"):
        find_shape("huge")
    wrong = (["--shape", "huge"], ["--shape", "tiny", "--device", "nowhere"], ["--shape", "tiny", "--retention", "2"])
    for arguments in wrong:
        result = CliRunner().invoke(app, ["speed", *arguments, "--out", str(tmp_path)])
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not list(tmp_path.iterdir())


def test_shapes():
    """What the pages say of them."""
    assert MODEL_SHAPES["cpu"].visual_tokens == 4032
    quarter, whole = make_config(MODEL_SHAPES["cpu"]), make_config(MODEL_SHAPES["3b"])
    assert (whole.text_config.num_hidden_layers, whole.vision_config.depth) == (36, 32)
    assert (quarter.text_config.num_hidden_layers, quarter.vision_config.depth) == (9, 8)
    assert len(quarter.text_config.layer_types) == 9
    assert quarter.text_config.hidden_size == whole.text_config.hidden_size == 2048
    assert whole.text_config.vocab_size == 151936
