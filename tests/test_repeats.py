"""Which steps of a video repeat another, by their pixels."""

import pytest
import torch

from model_checks import shared_model
from qtsplus.encoding_qtsplus import Repeats
from tiny import PATCH_VALUES


def steps(*values):
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 6).clone()


@pytest.mark.parametrize(
    ("tolerance", "expected"), [(0.0, [0, 0, 2, 3, 4, 4]), (0.1, [0, 0, 0, 3, 3, 3]), (None, [0, 1, 2, 3, 4, 5])]
)
def test_sources(tolerance, expected):
    assert Repeats(tolerance).sources(steps(0, 0, 0.06, 0.12, 0.2, 0.2), [2, 3]) == expected


def test_slow_change_does_not_add_up():
    """Every step is compared with the one whose features it takes, not with its neighbour."""
    slow = torch.linspace(0, 1, 101)[:, None].expand(-1, 4)
    sources = Repeats(0.095).sources(slow, [2, 2])
    assert max(abs(float(slow[index, 0] - slow[source, 0])) for index, source in enumerate(sources)) <= 0.095
    assert len(set(sources)) == 11


def test_a_step_of_another_grid_is_no_repeat():
    repeats = Repeats()
    assert repeats.sources(steps(1, 1), [2, 3]) == [0, 0]
    assert repeats.sources(steps(1), [3, 2]) == [0]


def test_nothing_equals_what_is_not_a_number():
    assert Repeats().sources(steps(float("nan"), float("nan")), [2, 3]) == [0, 1]
    assert Repeats(1.0).sources(steps(float("nan"), float("nan")), [2, 3]) == [0, 1]


def test_it_holds_one_step_of_what_it_was_given():
    repeats, pixels = Repeats(), torch.randn(4 * 4 * 4, PATCH_VALUES)
    (features,) = shared_model().encode_videos(pixels, torch.tensor([[4, 4, 4]]), repeats=repeats)
    held = [value.untyped_storage().nbytes() for value in vars(repeats).values() if torch.is_tensor(value)]
    assert sorted(held) == sorted((pixels.nbytes // 4, features.nbytes // 4))


@pytest.mark.parametrize("tolerance", [-0.1, float("nan")])
def test_bad_tolerances(tolerance):
    with pytest.raises(ValueError, match="expected 0 or more, or None to encode every step"):
        Repeats(tolerance)
