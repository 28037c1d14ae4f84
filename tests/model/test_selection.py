"""The seam for selection: one contract, a choice per call, and the methods that never look at the question."""

import inspect
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cosine_similarity, normalize
from transformers import Trainer, TrainingArguments

from naive import naive_farthest
from qtsplus import QTSplusConfig
from qtsplus.model.budget_qtsplus import share_of_mass
from qtsplus.model.fields_qtsplus import SELECTIONS
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
from tiny import assert_same, batch, compress, prompt, run, tiny_model

WIDTH = 6
GRIDS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3)
SHARES = st.floats(0.05, 1)
SEEDS = st.integers(0, 99)
WITHOUT_BUDGET = "all"


def never(_):
    raise AssertionError("a method that does not look at the question asked for its relevance")


@dataclass
class Scene:
    """Random features of some videos."""

    visual: list[torch.Tensor]  # [t * h * w, width] of each
    grids: list[tuple[int, int, int]]

    @classmethod
    def random(cls, grids, seed, width=WIDTH):
        generator = torch.Generator().manual_seed(seed)
        return cls([torch.randn(math.prod(grid), width, generator=generator) for grid in grids], grids)

    @property
    def features(self):
        return torch.cat(self.visual)

    def candidates(self, score=never):
        positions = torch.zeros(3, len(self.features), dtype=torch.long)
        return Candidates(self.visual, self.features[:0], positions, self.grids, score)

    def count(self, share):
        return max(1, int(share * len(self.features)))

    def steps(self):
        """`[M]`, the step in time of each token; those of the next video follow."""
        steps = []
        for time, height, width in self.grids:
            first = steps[-1] + 1 if steps else 0
            for step in range(first, first + time):
                steps.extend([step] * (height * width))
        return torch.tensor(steps)


def twin_of_diversity(scene, n):
    features = normalize(scene.features, dim=-1)
    similarity = features @ features.T
    from_mean = 1 - features @ normalize(features.mean(0), dim=0)
    (first,) = naive_farthest(from_mean, similarity, 1, TIE)
    distance = 1 - similarity[first]
    distance[first] = torch.inf
    return naive_farthest(distance, similarity, n, TIE)


def twin_of_coverage(scene, n):
    steps = scene.steps()
    num_steps = int(steps[-1]) + 1
    reach = max(1, min(num_steps, round(WINDOW * num_steps / (2 * n))))
    apart = (steps[:, None] - steps).abs()
    means = torch.stack([scene.features[steps == step].mean(0) for step in range(num_steps)])
    times = torch.arange(num_steps)
    around = torch.stack([means[(times - step).abs() <= reach].mean(0) for step in range(num_steps)])
    distance = 1 - cosine_similarity(scene.features, around[steps])
    features = normalize(scene.features, dim=-1)
    similarity = (features @ features.T).masked_fill(apart > reach, -torch.inf)
    return naive_farthest(distance, similarity, n, TIE)


@settings(max_examples=40)
@given(grids=GRIDS, share=SHARES, seed=SEEDS)
def test_temporal_redundancy_keeps_the_largest_changes(grids, share, seed):
    scene = Scene.random(grids, seed)
    change = []
    for features, (_, height, width) in zip(scene.visual, grids, strict=True):
        places = height * width
        before = torch.cat([features[:places].mean(0).expand(places, -1), features[:-places]])
        change.append(1 - cosine_similarity(features, before))
    n = scene.count(share)
    ranking = torch.cat(change).round(decimals=5).sort(descending=True, stable=True).indices
    assert temporal_redundancy(scene.candidates(), n).tolist() == sorted(ranking[:n].tolist())


@pytest.mark.parametrize(("method", "twin"), [(diversity, twin_of_diversity), (coverage, twin_of_coverage)])
@settings(max_examples=40)
@given(grids=GRIDS, share=SHARES, seed=SEEDS)
def test_up_to_32_tokens_are_added_as_if_one_at_a_time(method, twin, grids, share, seed):
    scene = Scene.random(grids, seed)
    n = min(32, scene.count(share))
    assert method(scene.candidates(), n).tolist() == twin(scene, n)


@pytest.mark.parametrize("drift", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("n", [100, 400])
def test_in_rounds_diversity_leaves_no_token_much_farther_than_one_at_a_time(n, drift):
    """A video of 40 steps that stands still, changes slowly, or shows something else in each step."""
    generator = torch.Generator().manual_seed(n)
    first = torch.randn(1, 40, 32, generator=generator)
    noise = 0.02 * torch.randn(40, 40, 32, generator=generator)
    steps = first + drift * torch.randn(40, 40, 32, generator=generator).cumsum(0) + noise
    scene = Scene([steps.flatten(0, 1)], [(40, 5, 8)])
    features = normalize(scene.features, dim=-1)
    kept = diversity(scene.candidates(), n).tolist()
    remaining = []
    for indices in (kept, twin_of_diversity(scene, n)):
        nearest = 1 - (features @ features[indices].T).amax(1)
        remaining.append(float(nearest.max()))
    in_rounds, one_at_a_time = remaining
    assert len(set(kept)) == n
    assert in_rounds <= 1.05 * one_at_a_time + TIE


@pytest.mark.parametrize(("n", "most_missed"), [(240, 24), (720, 0)])
def test_of_many_copies_of_many_things_diversity_misses_few_things(n, most_missed):
    generator = torch.Generator().manual_seed(1)
    things = torch.randn(1, 240, 32, generator=generator)
    copies = things + 0.02 * torch.randn(150, 240, 32, generator=generator)
    kept = diversity(Scene([copies.flatten(0, 1)], [(150, 12, 20)]).candidates(), n)
    shown = set((kept % 240).tolist())
    assert 240 - len(shown) <= most_missed


def test_a_still_part_of_a_video_is_redundant_and_a_copied_token_not_diverse():
    still = torch.randn(1, 4, 8).expand(3, -1, -1)
    moving = torch.randn(3, 4, 8)
    visual = torch.cat([still, moving], dim=1).flatten(0, 1)  # 3 frames of 8 tokens, the first 4 of each never change
    candidates = Scene([visual], [(3, 1, 8)]).candidates()
    assert temporal_redundancy(candidates, 16).tolist() == [*range(8), *range(12, 16), *range(20, 24)]
    different = set()
    for index in diversity(candidates, 16).tolist():
        place = index % 8
        different.add(place if place < 4 else index)
    assert len(different) == 16


def test_what_comes_again_later_is_covered_again_and_what_stays_is_not():
    """An hour of two things: the first is there at its begin and near its end; their background stays."""
    background, first, second = torch.eye(4)[:3]
    steps = background.repeat(400, 4, 1)
    steps[3, 1] = first
    steps[390, 2] = first
    steps[4, 2] = second
    candidates = Scene([steps.flatten(0, 1)], [(400, 2, 2)]).candidates()
    shown = {3 * 4 + 1, 4 * 4 + 2, 390 * 4 + 2}
    assert shown <= set(coverage(candidates, 8).tolist())
    assert not shown <= set(diversity(candidates, 3).tolist()), "a second time is no news to it"


@settings(max_examples=60)
@given(levels=st.lists(st.integers(-5, 0), min_size=1, max_size=40), share=st.floats(0.01, 1), seed=SEEDS)
def test_of_tied_scores_the_earliest_stay_whatever_rounding_does(levels, share, seed):
    scores = 1e-3 * torch.tensor(levels)
    n = max(1, int(share * len(levels)))
    expected = scores.sort(descending=True, stable=True).indices[:n].sort().values
    noise = torch.rand(len(levels), generator=torch.Generator().manual_seed(seed)) - 0.5
    assert_same(top_n(scores + 5e-5 * noise, n), expected)


def test_scores_without_a_chance_come_last_and_in_order():
    scores = torch.tensor([-torch.inf, -3.0, -torch.inf, -1.0])
    assert [top_n(scores, n).tolist() for n in (1, 2, 3, 4)] == [[3], [1, 3], [0, 1, 3], [0, 1, 2, 3]]


@settings(max_examples=40)
@given(grids=GRIDS, copies=st.integers(2, 4), share=SHARES, seed=SEEDS)
@pytest.mark.parametrize("method", [most_relevant, temporal_redundancy, diversity, coverage])
def test_rounding_of_the_features_of_equal_frames_changes_no_choice(method, grids, copies, share, seed):
    """Every frame stands still for some steps; encoded again its features differ by a millionth."""
    shown = Scene.random(grids, seed)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDTH, generator=generator)
    longer_grids = [(time * copies, height, width) for time, height, width in grids]

    def still(noise):
        visual = []
        for features, (time, _, _) in zip(shown.visual, grids, strict=True):
            frames = features.unflatten(0, (time, -1))
            repeated = frames.repeat_interleave(copies, 0).flatten(0, 1)
            visual.append(repeated + noise * torch.rand(repeated.shape, generator=generator))
        return Scene(visual, longer_grids)

    choices = []
    for scene in (still(0), still(1e-6)):
        score = (scene.features @ weight).log_softmax(0)
        candidates = scene.candidates(lambda _, score=score: score)
        choices.append(method(candidates, scene.count(share)))
    assert torch.equal(*choices)


# The model ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs():
    return batch(prompt(videos=[(4, 8, 12)]), prompt(videos=[(2, 4, 8), (3, 4, 4)], seed=1), prompt(seed=2))


@pytest.mark.parametrize("name", METHODS)
def test_a_choice_per_call_is_the_configured_choice(model, inputs, name):
    """For every method, in forward and generate; and no call changes what the next one does."""
    budget = {} if name == WITHOUT_BUDGET else {"retention": 0.2}
    configured = tiny_model(selection=name)
    before = model(**inputs).logits
    results = []
    for chooser, call in ((configured, budget), (model, {**budget, "selection": name})):
        torch.manual_seed(5)
        output = chooser(**inputs, **call)
        torch.manual_seed(5)
        ids = chooser.generate(**inputs, **call, max_new_tokens=3)
        results.append((output.logits, *output.qtsplus.kept_indices, ids))
    assert_same(*results)
    assert_same(model(**inputs).logits, before)


def test_methods_choose_differently(model, inputs):
    choices = set()
    names = set(METHODS) - {WITHOUT_BUDGET}
    for name in names:
        kept_indices = model(**inputs, selection=name, retention=0.2).qtsplus.kept_indices[0]
        assert len(kept_indices) == 20
        choices.add(tuple(kept_indices.tolist()))
    assert len(choices) == len(names)


def test_a_selector_alone_has_no_attention_to_ask(model):
    visual = torch.randn(9, 64)
    with pytest.raises(ValueError, match="asks the language model: call the whole model"):
        model.model.qtsplus([visual], [visual[:2]], [torch.zeros(3, 9)], selection="lm_attention")


def test_the_mass_of_the_attention_is_held_by_the_fewest_tokens():
    masses = (0.3, 0.6, 0.8, 1.0)
    shares = torch.tensor([0.1, 0.5, 0.05, 0.25, 0.1]).log()
    assert [round(5 * share_of_mass(shares, mass)) for mass in masses] == [1, 2, 3, 5]
    with_null = shares + math.log(0.5)  # the null token took the other half
    assert [round(5 * share_of_mass(with_null, mass)) for mass in masses] == [1, 1, 2, 5]


def test_relevance_is_none_where_nothing_was_scored(model, inputs):
    assert model(**inputs, selection="all").qtsplus.relevance is None
    assert model(**inputs, selection="uniform", retention=0.2).qtsplus.relevance is None
    free = model(**inputs, selection="uniform").qtsplus  # its budget has read the relevance, and the choice has not
    assert free.relevance is None
    assert free.seen is None
    scored = model(**inputs).qtsplus.relevance
    assert [len(row) for row in scored] == [96, 8 * 2 + 4 * 3, 0]


@pytest.mark.parametrize("name", ["uniform", "diversity", "lm_attention"])
def test_a_function_does_what_it_does_by_its_name(model, inputs, name):
    call = {"retention": 0.3, "max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    by_name = model.generate(**inputs, **call, selection=name)
    by_function = model.generate(**inputs, **call, selection=METHODS[name])
    assert_same(by_function.sequences, by_name.sequences)
    assert_same(by_function.qtsplus.kept_indices, by_name.qtsplus.kept_indices)


def test_a_selection_may_be_a_function_of_a_notebook(model, inputs):
    chosen = run(model, inputs, selection=lambda candidates, n: torch.arange(n), retention=0.1).qtsplus
    assert [kept.tolist() for kept in chosen.kept_indices] == [list(range(10)), list(range(3)), []]
    with pytest.raises(ValueError, match=r"selection=7; expected one of .*, or a function like theirs"):
        model(**inputs, selection=7)


@pytest.mark.parametrize(
    ("read", "computes"),
    [("query", set()), ("log_relevance", {"QTSplusLayer"}), ("log_attention", {"Qwen2_5_VLDecoderLayer"})],
)
def test_what_costs_something_is_computed_when_it_is_read(model, inputs, read, computes):
    computed = set()

    def first(candidates, n):
        getattr(candidates, read)
        return torch.arange(n)

    hooks = []
    for part in (*model.model.qtsplus.scoring_layers, model.model.language_model.layers[0]):
        hooks.append(part.register_forward_pre_hook(lambda module, _: computed.add(type(module).__name__)))
    with torch.no_grad():
        compress(model.model, **inputs, selection=first, retention=0.2)
    for hook in hooks:
        hook.remove()
    assert computed == computes


def test_the_configuration_takes_the_names_of_all_methods():
    assert set(SELECTIONS) == set(METHODS)


def test_a_new_method_is_a_function_and_its_name(model, inputs, monkeypatch):
    def corners(candidates, n):
        total = sum(math.prod(grid) for grid in candidates.grids)
        assert candidates.visual[0].shape[1] == 64
        assert candidates.query.shape[0] == 5
        assert total == candidates.positions.shape[1] == candidates.num_tokens
        assert candidates.log_relevance.shape == (total,)
        return torch.arange(n)

    monkeypatch.setitem(METHODS, "mine:corners", corners)
    assert QTSplusConfig(selection="mine:corners").selection == "mine:corners"
    kept = model(**inputs, selection="mine:corners", max_visual_tokens=4, retention=1.0).qtsplus.kept_indices
    assert [row.tolist() for row in kept] == [[0, 1, 2, 3], [0, 1, 2, 3], []]


def test_every_input_stands_in_the_signatures(model):
    """There the Trainer looks for the columns of a batch that it may not drop, and `generate` for its arguments."""
    names = set(NAMES)
    for forward in (model.forward, model.model.forward):
        parameters = set(inspect.signature(forward).parameters)
        assert names | {"kwargs", "input_ids"} <= parameters
    trainer = Trainer(model=model, args=TrainingArguments(use_cpu=True, report_to="none", output_dir="unused"))
    trainer._set_signature_columns_if_needed()
    assert names <= set(trainer._signature_columns)
