"""Peak memory: what the measurement sees, and the memory benchmark at toy size."""

import platform

import pytest
import torch

from qtsplus.benchmark import memory, peak
from qtsplus.benchmark.results import read_json

RELEVANCE = {"tokens": 20_000, "heads": 4, "key_value_heads": 2, "head_dim": 16, "question_tokens": 16}


@pytest.mark.parametrize("way", ["kernel", "samples"])
def test_the_peak_of_what_was_freed_again(way, monkeypatch, tmp_path):
    if way == "samples":
        monkeypatch.setattr(peak, "_CLEAR", tmp_path / "no such file")
    elif not peak._CLEAR.exists():
        pytest.skip("no high-water mark here")
    with peak.extra_memory("cpu") as measured:
        for _ in range(3):
            torch.ones(30_000_000).sum()  # 120 MB, touched
    assert measured.mb == pytest.approx(120, abs=12)
    assert measured.by


def test_a_process_of_its_own():
    assert peak.in_own_process(platform.libc_ver, executable="") == ["", ""]


def test_a_process_that_fails():
    with pytest.raises(ChildProcessError, match="failed"):
        peak.in_own_process(platform.libc_ver, no_such_argument=1)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_document(device, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "in_own_process", lambda function, **arguments: function(**arguments))
    file = memory.run_memory(
        "tiny", tmp_path, device=device, dtype="float32", repeats=1, relevance=RELEVANCE, progress=False
    )
    document = read_json(file)
    assert set(document["repeats"]) == {"stock", "ours", "relevance ours", "relevance naive"}
    weights = {side: document["repeats"][side][0]["weights_mb"] for side in ("stock", "ours")}
    # qtsplus-tiny in float32: its selector is what ours has more.
    assert weights["ours"] > weights["stock"] > 1
    whole = document["whole_mb"]
    assert document["figures"]["peak_memory_ratio"] == whole["ours"]["median"] / whole["stock"]["median"]
    assert {file.name for file in tmp_path.iterdir()} == {"memory-tiny.json", "summary.md"}


@pytest.mark.slow
def test_the_twin_needs_the_scores_and_ours_does_not():
    """70,001 x 16 x 4 scores in float32 are 18 MB, of which the twin holds several copies."""
    sizes = {**RELEVANCE, "tokens": 70_001}
    ours, naive = (
        peak.in_own_process(memory.measure_relevance, way=way, device="cpu", **sizes)["extra_mb"]
        for way in ("ours", "naive")
    )
    assert naive > 2 * 18
    assert ours < naive / 2
