"""The summary of all measurements, and what a measurement says while it runs."""

from benchmarks.machine import steps
from benchmarks.speed.results import SUMMARY, spread, summarise
from qtsplus.common.journals import write_json


def test_the_summary_gathers_all_benchmarks(tmp_path):
    """In whichever order they are run; what has not been run is said to be missing."""
    write_json(tmp_path / "scaling-cpu.json", {"figures": {"growth_exponent_time": 1.01}})
    summarise(tmp_path, "cpu")
    assert "not measured" in (tmp_path / "summary.md").read_text()
    assert not (tmp_path / "speed-cpu.json").exists()

    write_json(tmp_path / "memory-cpu.json", {"figures": {"peak_memory_ratio": 0.5, "something_else": 3}})
    write_json(tmp_path / "train-cpu.json", {"figures": {"train_step_speedup": 2.5}})
    assert summarise(tmp_path, "cpu") == {
        **dict.fromkeys(SUMMARY),
        "train_step_speedup": 2.5,
        "growth_exponent_time": 1.01,
        "peak_memory_ratio": 0.5,
    }


def test_median_and_spread():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}


def test_progress_goes_to_standard_error(capsys):
    with steps("speed-cpu", 1) as step:
        step("1 of 1")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "speed-cpu: 1 of 1" in captured.err
    with steps("speed-cpu", 1, progress=False) as step:
        step("1 of 1")
    assert capsys.readouterr() == ("", "")
