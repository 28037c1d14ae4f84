"""Peak memory: what the measurement sees, and the memory benchmark at toy size."""

import os

import pytest
import torch

from benchmarks.files import read_result
from benchmarks.speed import memory, peak
from benchmarks.speed.shapes import MODEL_SHAPES, build

RELEVANCE = {"tokens": 20_000, "heads": 4, "key_value_heads": 2, "head_dim": 16, "question_tokens": 16}


@pytest.mark.skipif(not peak._CLEAR.exists(), reason="not Linux")
def test_the_peak_of_what_was_freed_again():
    with peak.extra_memory("cpu") as measured:
        for _ in range(3):
            torch.ones(30_000_000).sum()  # 120 MB, touched
    assert measured.mb == pytest.approx(120, abs=12)


def test_a_system_that_does_not_say(monkeypatch, tmp_path):
    monkeypatch.setattr(peak, "_CLEAR", tmp_path / "no such file")
    with pytest.raises(ValueError, match="use Linux or a GPU"), peak.extra_memory("cpu"):
        pass


def test_a_process_of_its_own():
    assert peak.in_own_process(os.getpid) != os.getpid()


def test_a_process_that_fails():
    with pytest.raises(ChildProcessError, match="failed"):
        peak.in_own_process(os.getpid, no_such_argument=1)


def test_document(tmp_path, monkeypatch):
    """Of a process that has run tests before, memory says nothing: each repeat counts as 100 MB."""
    monkeypatch.setattr(
        memory,
        "in_own_process",
        lambda function, **arguments: {**function(**arguments), "extra_mb": [100.0] * arguments["repeats"]},
    )
    file = memory.run_memory("tiny", tmp_path, dtype="float32", repeats=2, relevance=RELEVANCE, progress=False)
    document = read_result(file)
    assert set(document["repeats"]) == {"stock", "ours", "relevance ours", "relevance naive"}
    weights = {side: document["repeats"][side]["weights_mb"] for side in ("stock", "ours")}
    selector = build(MODEL_SHAPES["tiny"], "ours", "cpu", torch.float32).model.qtsplus
    assert weights["ours"] - weights["stock"] == pytest.approx(sum(p.nbytes for p in selector.parameters()) / 1e6)
    ratio = (100 + weights["ours"]) / (100 + weights["stock"])
    assert document["figures"]["peak_memory_ratio"] == pytest.approx(ratio)
    assert {file.name for file in tmp_path.iterdir()} == {"memory-tiny.json", "summary.md"}


def test_an_interrupted_run_measures_only_what_is_missing(tmp_path, monkeypatch):
    measured = []

    def call(function, **arguments):
        measured.append(arguments.get("side") or arguments["way"])
        if measured == ["stock", "ours"]:
            raise KeyboardInterrupt
        return {"weights_mb": 1.0, "extra_mb": [1.0], "peak_by": ""}

    monkeypatch.setattr(memory, "in_own_process", call)
    with pytest.raises(KeyboardInterrupt):
        memory.run_memory("tiny", tmp_path, dtype="float32", repeats=1, progress=False)
    assert [file.name for file in tmp_path.iterdir()] == [".memory-tiny.jsonl"]
    memory.run_memory("tiny", tmp_path, dtype="float32", repeats=1, progress=False)
    assert measured == ["stock", "ours", "ours", "ours", "naive"]


@pytest.mark.slow
def test_the_twin_holds_the_scores_and_ours_does_not():
    """70,001 x 16 x 4 scores in float32 are 18 MB, of which the twin holds several copies."""
    sizes = {**RELEVANCE, "tokens": 70_001}
    ours, naive = (
        peak.in_own_process(memory.measure_relevance, way=way, device="cpu", repeats=2, **sizes)["extra_mb"]
        for way in ("ours", "naive")
    )
    assert min(naive) > 2 * 18
    assert max(ours) < min(naive) / 2


@pytest.mark.slow
def test_a_first_token_takes_memory():
    call = {"shape": "tiny", "device": "cpu", "dtype": "float32", "attention": None, "retention": 0.11, "repeats": 2}
    for side in ("stock", "ours"):
        measured = peak.in_own_process(memory.measure_first_token, side=side, **call)
        assert 1 < measured["extra_mb"][0] < 500
