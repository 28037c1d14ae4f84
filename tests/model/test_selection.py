"""The seam for selection: one contract, a choice per call, and the two methods that never look at the question."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cosine_similarity
from transformers import Trainer, TrainingArguments

from qtsplus import QTSplusConfig
from qtsplus.model.configuration_qtsplus import SELECTIONS
from qtsplus.model.methods_qtsplus import (
    METHODS,
    TIE,
    WINDOW,
    Candidates,
    coverage,
    diversity,
    most_relevant,
    temporal_redundancy,
    top_n,
)
from qtsplus.model.prompt_qtsplus import NAMES
from qtsplus.model.selector_qtsplus import share_of_mass
from tiny import batch, compress, prompt, tiny_model

GRIDS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3)


def candidates_of(grids, seed, width=6):
    generator = torch.Generator().manual_seed(seed)
    visual = [torch.randn(t * h * w, width, generator=generator) for t, h, w in grids]
    total = sum(map(len, visual))

    def score(_):
        raise AssertionError("a query-free method looked at the question")

    return Candidates(visual, torch.empty(0, width), torch.zeros(3, total, dtype=torch.long), grids, score)


@pytest.fixture(scope="module")
def inputs():
    return batch(prompt(videos=[(4, 8, 12)]), prompt(videos=[(2, 4, 8), (3, 4, 4)], seed=1), prompt(seed=2))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(grids=GRIDS, share=st.floats(0.05, 1), seed=st.integers(0, 99))
def test_temporal_redundancy_keeps_the_largest_changes(grids, share, seed):
    candidates = candidates_of(grids, seed)
    change = []
    for features, (_, h, w) in zip(candidates.visual, grids, strict=True):
        for index, token in enumerate(features):
            before = features[index - h * w] if index >= h * w else features[: h * w].mean(0)
            change.append(1 - cosine_similarity(token, before, dim=0))
    n = max(1, int(share * candidates.num_tokens))
    expected = torch.stack(change).round(decimals=5).sort(descending=True, stable=True).indices[:n].sort().values
    assert torch.equal(temporal_redundancy(candidates, n), expected)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(grids=GRIDS, share=st.floats(0.05, 1), seed=st.integers(0, 99))
def test_diversity_adds_the_token_farthest_from_the_kept_ones(grids, share, seed):
    candidates = candidates_of(grids, seed)
    features = torch.cat(candidates.visual)
    distance = 1 - cosine_similarity(features[:, None], features[None], dim=-1)
    mean = torch.nn.functional.normalize(features, dim=-1).mean(0)
    best = 1 - cosine_similarity(features, mean[None], dim=-1)
    kept: list[int] = []
    n = max(1, int(share * len(features)))
    while len(kept) < n:
        rest = [index for index in range(len(features)) if index not in kept]
        kept.append(next(index for index in rest if best[index] >= best[rest].max() - TIE))
        best = distance[:, kept].amin(1)
    assert diversity(candidates, n).tolist() == sorted(kept)


def test_a_still_part_of_a_video_is_redundant_and_a_copied_token_not_diverse():
    still, moving = torch.randn(1, 4, 8).expand(3, -1, -1), torch.randn(3, 4, 8)
    visual = torch.cat([still, moving], dim=1).flatten(0, 1)  # 3 frames of 8 tokens, the first 4 of each never change
    scene = Candidates([visual], visual[:0], torch.zeros(3, 24), [(3, 1, 8)], lambda _: visual.sum(1))
    assert temporal_redundancy(scene, 16).tolist() == [*range(8), *range(12, 16), *range(20, 24)]
    assert len({index if index % 8 >= 4 else index % 8 for index in diversity(scene, 16).tolist()}) == 16


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(grids=GRIDS, share=st.floats(0.05, 1), seed=st.integers(0, 99))
def test_coverage_adds_what_differs_from_its_time_and_from_what_was_kept_of_it(grids, share, seed):
    candidates = candidates_of(grids, seed)
    features = torch.cat(candidates.visual)
    videos = zip(candidates.visual, grids, strict=True)
    means = torch.cat([video.unflatten(0, (grid[0], -1)).mean(1) for video, grid in videos])
    steps = [place for place, (h, w) in enumerate((h, w) for t, h, w in grids for _ in range(t)) for _ in range(h * w)]
    n = max(1, int(share * len(features)))
    reach = max(1, min(len(means), round(WINDOW * len(means) / (2 * n))))
    around = torch.stack([means[max(0, step - reach) : step + reach + 1].mean(0) for step in steps])
    away, kept = 1 - cosine_similarity(features, around), []
    while len(kept) < n:
        rest = [index for index in range(len(features)) if index not in kept]
        kept.append(next(index for index in rest if away[index] >= away[rest].max() - TIE))
        like = 1 - cosine_similarity(features, features[kept[-1]][None])
        near = torch.tensor([abs(step - steps[kept[-1]]) <= reach for step in steps])
        away = torch.where(near, torch.minimum(away, like), away)
    assert coverage(candidates, n).tolist() == sorted(kept)


def test_what_comes_again_later_is_covered_again_and_what_stays_is_not():
    """An hour of two things: one is there at its begin and near its end, and what stands behind them stays."""
    behind, first, second = torch.eye(4)[:3]
    steps = behind.repeat(400, 4, 1)
    steps[3, 1] = steps[390, 2] = first
    steps[4, 2] = second
    film = Candidates([steps.flatten(0, 1)], behind[None], torch.zeros(3, 1600), [(400, 2, 2)], lambda _: behind)
    shown = {3 * 4 + 1, 4 * 4 + 2, 390 * 4 + 2}
    assert shown <= set(coverage(film, 8).tolist())
    assert not shown <= set(diversity(film, 3).tolist()), "a second time is no news to it"


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(levels=st.lists(st.integers(-5, 0), min_size=1, max_size=40), share=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_of_tied_scores_the_earliest_stay_whatever_rounding_does(levels, share, seed):
    scores, n = 1e-3 * torch.tensor(levels), max(1, int(share * len(levels)))
    expected = scores.sort(descending=True, stable=True).indices[:n].sort().values
    noise = torch.rand(len(levels), generator=torch.Generator().manual_seed(seed)) - 0.5
    assert torch.equal(top_n(scores + 5e-5 * noise, n), expected)


def test_scores_without_a_chance_come_last_and_in_order():
    scores = torch.tensor([-torch.inf, -3.0, -torch.inf, -1.0])
    assert [top_n(scores, n).tolist() for n in (1, 2, 3, 4)] == [[3], [1, 3], [0, 1, 3], [0, 1, 2, 3]]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(grids=GRIDS, copies=st.integers(2, 4), share=st.floats(0.05, 1), seed=st.integers(0, 99))
@pytest.mark.parametrize("method", [most_relevant, temporal_redundancy, diversity, coverage])
def test_rounding_of_the_features_of_equal_frames_changes_no_choice(method, grids, copies, share, seed):
    """Every frame stands still for some steps; encoded again its features differ by a millionth."""
    shown = candidates_of(grids, seed)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, generator=generator)

    def still(noise):
        frames = [part.unflatten(0, (grid[0], -1)) for part, grid in zip(shown.visual, grids, strict=True)]
        visual = [part.repeat_interleave(copies, 0).flatten(0, 1) for part in frames]
        visual = [part + noise * torch.rand(part.shape, generator=generator) for part in visual]
        score = (torch.cat(visual) @ weight).log_softmax(0)
        positions = torch.zeros(3, len(score), dtype=torch.long)
        return Candidates(visual, shown.query, positions, [(t * copies, h, w) for t, h, w in grids], lambda _: score)

    n = max(1, int(share * still(0).num_tokens))
    assert torch.equal(method(still(0), n), method(still(1e-6), n))


@pytest.mark.parametrize("name", METHODS)
def test_a_choice_per_call_is_the_configured_choice(model, inputs, name):
    """For every method, in forward and generate; and no call changes what the next one does."""
    budget = {} if name == "all" else {"retention": 0.2}
    configured = tiny_model(selection=name)
    before = model(**inputs).logits
    results = []
    for chooser, call in ((configured, {}), (model, {"selection": name})):
        torch.manual_seed(5)
        output = chooser(**inputs, **budget, **call)
        torch.manual_seed(5)
        ids = chooser.generate(**inputs, **budget, **call, max_new_tokens=3)
        results.append((output.logits, *output.qtsplus.kept_indices, ids))
    assert all(map(torch.equal, *results))
    assert torch.equal(model(**inputs).logits, before)


def test_methods_choose_differently(model, inputs):
    kept = {
        name: tuple(model(**inputs, selection=name, retention=0.2).qtsplus.kept_indices[0].tolist())
        for name in METHODS
        if name != "all"
    }
    assert len(set(kept.values())) == len(kept) and {len(indices) for indices in kept.values()} == {20}


def test_a_selector_alone_has_no_attention_to_ask(model):
    visual = torch.randn(9, 64)
    with pytest.raises(ValueError, match="asks the language model: call the whole model"):
        model.model.qtsplus([visual], [visual[:2]], [torch.zeros(3, 9)], selection="lm_attention")


def test_the_mass_of_the_attention_is_held_by_the_fewest_tokens():
    log_attention = torch.tensor([0.1, 0.5, 0.05, 0.25, 0.1]).log() - 3
    visual = torch.zeros(5, 2)
    candidates = Candidates([visual], visual, torch.zeros(3, 5), [(1, 1, 5)], pytest.fail, attend=lambda: log_attention)
    shares = candidates.log_attention.log_softmax(0)
    assert [round(5 * share_of_mass(shares, mass)) for mass in (0.3, 0.6, 0.8, 1.0)] == [1, 2, 3, 5]
    with_null = shares + math.log(0.5)  # the null token took the other half
    assert [round(5 * share_of_mass(with_null, mass)) for mass in (0.3, 0.6, 0.8, 1.0)] == [1, 1, 2, 5]


def test_relevance_is_none_where_nothing_was_scored(model, inputs):
    assert model(**inputs, selection="all").qtsplus.relevance is None
    assert model(**inputs, selection="uniform", retention=0.2).qtsplus.relevance is None
    free = model(**inputs, selection="uniform").qtsplus  # its budget has read it, and the choice has not
    assert free.relevance is None and free.seen is None
    scored = model(**inputs).qtsplus.relevance
    assert [len(row) for row in scored] == [96, 8 * 2 + 4 * 3, 0]


def test_a_selection_may_be_a_function(model, inputs):
    """As in a notebook: handed in with the call, it does what the same function does by its name."""
    methods = {name: METHODS[name] for name in ("uniform", "diversity", "lm_attention")}
    for name, method in methods.items():
        call = {"retention": 0.3, "max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
        one, other = (model.generate(**inputs, **call, selection=selection) for selection in (name, method))
        assert torch.equal(one.sequences, other.sequences)
        for kept, expected in zip(other.qtsplus.kept_indices, one.qtsplus.kept_indices, strict=True):
            assert torch.equal(kept, expected)
    with torch.no_grad():
        chosen = model(**inputs, selection=lambda candidates, n: torch.arange(n), retention=0.1).qtsplus
    assert [kept.tolist() for kept in chosen.kept_indices] == [list(range(10)), list(range(3)), []]
    with pytest.raises(ValueError, match=r"selection=7; expected one of .*, or a function like theirs"):
        model(**inputs, selection=7)


def test_what_costs_something_is_computed_when_it_is_read(model, inputs):
    asked = []
    for part in (*model.model.qtsplus.scoring_layers, model.model.language_model.layers[0]):
        part.register_forward_pre_hook(lambda module, _: asked.append(type(module).__name__))

    def keep(read):
        def first(candidates, n):
            getattr(candidates, read)
            return torch.arange(n)

        asked.clear()
        with torch.no_grad():
            compress(model.model, **inputs, selection=first, retention=0.2)
        return set(asked)

    assert keep("query") == set()
    assert keep("log_relevance") == {"QTSplusLayer"}
    assert keep("log_attention") and "QTSplusLayer" not in keep("log_attention")


def test_the_configuration_takes_the_names_of_all_methods():
    assert set(SELECTIONS) == set(METHODS)


def test_a_new_method_is_a_function_and_its_name(model, inputs, monkeypatch):
    def corners(candidates, n):
        assert candidates.visual[0].shape[1] == 64 and candidates.query.shape[0] == 5
        assert sum(t * h * w for t, h, w in candidates.grids) == candidates.positions.shape[1] == candidates.num_tokens
        assert candidates.log_relevance.shape == (candidates.num_tokens,)
        return torch.arange(n)

    monkeypatch.setitem(METHODS, "mine:corners", corners)
    assert QTSplusConfig(selection="mine:corners").selection == "mine:corners"
    kept = model(**inputs, selection="mine:corners", max_visual_tokens=4, retention=1.0).qtsplus.kept_indices
    assert [row.tolist() for row in kept] == [[0, 1, 2, 3], [0, 1, 2, 3], []]


def test_every_input_stands_in_the_signatures(model):
    """There the Trainer looks for the columns of a batch that it may not drop, and `generate` for its arguments."""
    for forward in (model.forward, model.model.forward):
        parameters = inspect.signature(forward).parameters
        assert set(NAMES) <= set(parameters) and "kwargs" in parameters and "input_ids" in parameters
    trainer = Trainer(model=model, args=TrainingArguments(use_cpu=True, report_to="none", output_dir="unused"))
    trainer._set_signature_columns_if_needed()
    assert set(NAMES) <= set(trainer._signature_columns)
