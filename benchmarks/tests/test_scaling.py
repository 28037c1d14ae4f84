"""Growth of selection over the visual tokens, at toy size."""

import pytest

from benchmarks.files import read_result
from benchmarks.speed import scaling
from qtsplus.model import mixin_qtsplus

SIZES = (300, 1200, 2500)


@pytest.fixture
def here(monkeypatch):
    """Measures in this process; returns the sizes that were measured."""
    measured = []

    def call(function, **arguments):
        measured.append(arguments["tokens"])
        return function(**arguments)

    monkeypatch.setattr(scaling, "in_own_process", call)
    return measured


def run(folder):
    return read_result(scaling.run_scaling("tiny", folder, sizes=SIZES, repeats=2, progress=False))


def test_every_size_is_counted_and_kept(here, tmp_path):
    document = run(tmp_path)
    assert [point["tokens"] for point in document["sizes"]] == list(SIZES)
    for point in document["sizes"]:
        assert 0.05 * point["tokens"] <= point["kept"] <= 0.5 * point["tokens"] + 1
        assert len(point["repeats"]["seconds"]) == len(point["repeats"]["extra_mb"]) == 2
        assert min(point["repeats"]["seconds"]) > 0
    assert document["figures"]["growth_exponent_time"] == document["fits"]["time"]["exponent"]
    assert (tmp_path / "scaling-tiny.png").exists()


def test_attention_is_measured_in_groups(here, tmp_path, monkeypatch):
    attend = mixin_qtsplus.log_attention
    """And what it leaves in memory is a number per token."""
    monkeypatch.setattr(scaling, "TINY_GROUP", 200)
    file = scaling.run_scaling("tiny", tmp_path, selection="lm_attention", sizes=SIZES, repeats=2, progress=False)
    document = read_result(file)
    assert mixin_qtsplus.log_attention is attend
    assert file.name == "scaling-lm-attention-tiny.json" and "--selection lm_attention" in document["command"]
    assert here == list(SIZES) and document["settings"]["group"] == 200
    for point in document["sizes"]:
        assert point["kept"] == 1 and min(point["repeats"]["seconds"]) > 0
        assert len(point["repeats"]["seconds"]) == len(point["repeats"]["extra_mb"]) == 2
    with pytest.raises(ValueError, match="selection='random': expected one of"):
        scaling.run_scaling("tiny", tmp_path, selection="random")


def test_a_power_law_is_found():
    fit = scaling.fit_power_law([1e3, 1e4, 1e5], [2e3**1.5, 2e4**1.5, 2e5**1.5])
    assert fit["exponent"] == pytest.approx(1.5)
    assert fit["factor"] == pytest.approx(2**1.5)


def test_one_size_is_not_enough(tmp_path):
    with pytest.raises(ValueError, match="two different sizes"):
        scaling.run_scaling("tiny", tmp_path, sizes=[300, 300])
    assert not list(tmp_path.iterdir())
