"""The seam for selection: one contract, a choice per call, and the methods that never look at the question."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import floats, integers, lists, tuples
from torch.nn.functional import cosine_similarity, normalize
from transformers import Trainer, TrainingArguments

from naive import naive_farthest
from qtsplus.model.budget_qtsplus import count_of_mass
from qtsplus.model.fields_qtsplus import SELECTIONS
from qtsplus.model.methods_qtsplus import (
    METHODS,
    TIE,
    WINDOW,
    coverage,
    diversity,
    most_relevant,
    temporal_redundancy,
    top_n,
)
from qtsplus.model.prompt_qtsplus import NAMES
from scenes import Scene
from tiny import assert_same, batch, compress, prompt, run, seeded, tiny_model

GRIDS = lists(tuples(integers(1, 4), integers(1, 3), integers(1, 3)), min_size=1, max_size=3)
SHARES = floats(0.05, 1)
SEEDS = integers(0, 99)
WITHOUT_BUDGET = "all"


def twin_of_diversity(scene, n):
    features = normalize(scene.features, dim=-1)
    similarity = features @ features.T
    mean = normalize(features.mean(0), dim=0)
    (first,) = naive_farthest(1 - features @ mean, similarity, 1, TIE)
    distance = 1 - similarity[first]
    distance[first] = torch.inf
    return naive_farthest(distance, similarity, n, TIE)


def twin_of_coverage(scene, n):
    steps = scene.steps()
    times = steps.unique()
    share = WINDOW * len(times) / (2 * n)
    reach = max(1, min(len(times), round(share)))
    means = torch.stack([scene.features[steps == time].mean(0) for time in times])
    around = torch.stack([means[(times - time).abs() <= reach].mean(0) for time in times])
    distance = 1 - cosine_similarity(scene.features, around[steps])
    features = normalize(scene.features, dim=-1)
    similarity = features @ features.T
    apart = steps[:, None] - steps
    similarity[apart.abs() > reach] = -torch.inf
    return naive_farthest(distance, similarity, n, TIE)


def test_a_fraction_of_numpy_is_the_decimal_that_it_is_written_as():
    model = tiny_model()
    for kind in (float, np.float16, np.float32):
        assert run(model, batch(prompt(videos=[(2, 8, 10)])), retention=kind(0.1)).qtsplus.n == 4


@settings(max_examples=40)
@given(grids=GRIDS, share=SHARES, seed=SEEDS)
def test_temporal_redundancy_keeps_the_largest_changes(grids, share, seed):
    scene = Scene.random(grids, seed)
    changes = []
    for features, (_, height, width) in zip(scene.visual, grids, strict=True):
        places = height * width
        mean_of_first = features[:places].mean(0).expand(places, -1)
        before = torch.cat([mean_of_first, features[:-places]])
        changes.append(1 - cosine_similarity(features, before))
    n = scene.count(share)
    change = torch.cat(changes).round(decimals=5)
    expected = change.sort(descending=True, stable=True).indices[:n].sort().values
    assert_same(temporal_redundancy(scene.candidates(), n), expected)


@pytest.mark.parametrize(
    ("method", "twin"),
    [
        (diversity, twin_of_diversity),
        (coverage, twin_of_coverage),
    ],
)
@settings(max_examples=40)
@given(grids=GRIDS, share=SHARES, seed=SEEDS)
def test_up_to_32_tokens_are_added_as_if_one_at_a_time(method, twin, grids, share, seed):
    scene = Scene.random(grids, seed)
    n = min(32, scene.count(share))
    kept = method(scene.candidates(), n)
    assert kept.tolist() == twin(scene, n)


@pytest.mark.parametrize("drift", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("n", [100, 400])
def test_in_rounds_diversity_leaves_no_token_much_farther_than_one_at_a_time(n, drift):
    scene = Scene.changing(drift, seed=n)
    features = normalize(scene.features, dim=-1)

    def farthest_from(indices):
        similarity = features @ features[indices].T
        return 1 - similarity.amax(1).min()

    in_rounds = diversity(scene.candidates(), n)
    expected = farthest_from(twin_of_diversity(scene, n))
    assert farthest_from(in_rounds) <= 1.05 * expected + TIE


@pytest.mark.parametrize("drift", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("n", [100, 400])
@pytest.mark.parametrize("copies", [1, 4])
def test_in_rounds_coverage_keeps_nearly_the_tokens_that_it_keeps_one_at_a_time(n, drift, copies):
    """Also where each frame comes several times, so that tokens tie."""
    scene = Scene.changing(drift, seed=n)
    frames = scene.features.unflatten(0, (40, -1))[::copies]
    scene.visual = [frames.repeat_interleave(copies, 0).flatten(0, 1)]
    kept = coverage(scene.candidates(), n)
    same = set(kept.tolist()) & set(twin_of_coverage(scene, n))
    assert len(same) >= 0.95 * n


@pytest.mark.parametrize("method", [temporal_redundancy, diversity, coverage])
def test_in_training_a_choice_is_the_same_and_nothing_of_it_is_kept_for_a_gradient(method):
    scene = Scene.random([(40, 4, 8)], seed=0)
    expected = method(scene.candidates(), 300)

    scene.visual[0].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
        kept = method(scene.candidates(), 300)
    assert_same(kept, expected)


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
@given(
    levels=lists(integers(-5, 0), min_size=1, max_size=40),
    share=floats(0.01, 1),
    seed=SEEDS,
)
def test_of_tied_scores_the_earliest_stay_whatever_rounding_does(levels, share, seed):
    scores = 1e-3 * torch.tensor(levels)
    count = len(levels)
    n = max(1, int(share * count))
    expected = scores.sort(descending=True, stable=True).indices[:n].sort().values
    noise = torch.rand(count, generator=seeded(seed)) - 0.5
    kept = top_n(scores + 5e-5 * noise, n)
    assert_same(kept, expected)


def test_scores_without_a_chance_come_last_and_in_order():
    scores = torch.tensor([-torch.inf, -3.0, -torch.inf, -1.0])
    assert [top_n(scores, n).tolist() for n in range(1, 5)] == [[3], [1, 3], [0, 1, 3], [0, 1, 2, 3]]


@settings(max_examples=40)
@given(
    grids=GRIDS,
    copies=integers(2, 4),
    share=SHARES,
    seed=SEEDS,
)
@pytest.mark.parametrize("method", [most_relevant, temporal_redundancy, diversity, coverage])
def test_rounding_of_the_features_of_equal_frames_changes_no_choice(method, grids, copies, share, seed):
    """Every frame stands still for some steps; encoded again its features differ by a millionth."""
    shown = Scene.random(grids, seed)
    generator = seeded(seed)
    weight = shown.features[0]
    longer_grids = [(time * copies, height, width) for time, height, width in grids]

    def choice(noise):
        visual = []
        for features, (time, _, _) in zip(shown.visual, grids, strict=True):
            frames = features.unflatten(0, (time, -1))
            repeated = frames.repeat_interleave(copies, 0).flatten(0, 1)
            rounding = torch.rand(repeated.shape, generator=generator)
            visual.append(repeated + noise * rounding)
        scene = Scene(visual, longer_grids)
        score = (scene.features @ weight).log_softmax(0)
        return method(scene.candidates(lambda _: score), scene.count(share))

    assert_same(choice(1e-6), choice(0))


# The model ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs():
    return batch(
        prompt(videos=[(4, 8, 12)]),
        prompt(videos=[(2, 4, 8), (3, 4, 4)], seed=1),
        prompt(seed=2),
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_choice_per_call_is_the_configured_choice(model, inputs, name):
    """For every method, in forward and generate; and no call changes what the next one does."""
    budget = {} if name == WITHOUT_BUDGET else {"retention": 0.2}
    before = run(model, inputs).logits

    def chosen(model, **call):
        torch.manual_seed(5)
        output = run(model, inputs, **call)
        torch.manual_seed(5)
        ids = model.generate(**inputs, **call, max_new_tokens=3)
        return [output.logits, *output.qtsplus.kept_indices, ids]

    expected = chosen(tiny_model(selection=name), **budget)
    assert_same(chosen(model, **budget, selection=name), expected)
    assert_same(run(model, inputs).logits, before)


def test_methods_choose_differently(model, inputs):
    choices = {}
    for name in set(SELECTIONS) - {WITHOUT_BUDGET}:
        kept_indices = run(model, inputs, selection=name, retention=0.2).qtsplus.kept_indices
        choices[name] = kept_indices[0].tolist()
    assert len(set(map(str, choices.values()))) == len(choices)


@pytest.mark.parametrize(
    ("mass", "tokens", "tokens_with_null"),
    [
        (0.6, 2, 1),
        (0.8, 3, 2),
        (1.0, 5, 5),
    ],
)
def test_the_mass_of_the_attention_is_held_by_the_fewest_tokens(mass, tokens, tokens_with_null):
    shares = torch.tensor([0.1, 0.5, 0.05, 0.25, 0.1]).log()
    assert count_of_mass(shares, mass) == tokens
    with_null = shares + math.log(0.5)  # the null token took the other half
    assert count_of_mass(with_null, mass) == tokens_with_null


def test_relevance_is_none_where_nothing_was_scored(model, inputs):
    assert run(model, inputs, selection="all").qtsplus.relevance is None
    assert run(model, inputs, selection="uniform", retention=0.2).qtsplus.relevance is None
    free = run(model, inputs, selection="uniform").qtsplus  # its budget has read the relevance, and the choice has not
    assert free.relevance is None
    assert free.seen is None
    scored = run(model, inputs).qtsplus.relevance
    assert [len(row) for row in scored] == [96, 28, 0]


def test_a_selection_may_be_a_function_of_a_notebook(model, inputs):
    def first(candidates, n):
        return torch.arange(n)

    chosen = run(model, inputs, selection=first, retention=0.1).qtsplus
    for kept, n in zip(chosen.kept_indices, (10, 3, 0), strict=True):
        assert_same(kept, torch.arange(n))
    for other in (7, {"a": 1}):
        with pytest.raises(ValueError, match=r"selection=.*; expected one of .*, or a function like theirs"):
            model(**inputs, selection=other)


@pytest.mark.parametrize(
    ("read", "computes"),
    [
        ("query", set()),
        ("log_relevance", {"QTSplusRMSNorm"}),
        ("log_attention", {"Qwen2_5_VLDecoderLayer"}),
    ],
)
def test_what_costs_something_is_computed_when_it_is_read(model, inputs, read, computes):
    computed = set()

    def first(candidates, n):
        getattr(candidates, read)
        return torch.arange(n)

    def note(module, _):
        computed.add(type(module).__name__)

    norms = [layer.q_norm for layer in model.model.qtsplus.scoring_layers]
    parts = [*norms, model.model.language_model.layers[0]]
    hooks = [part.register_forward_pre_hook(note) for part in parts]
    compress(model.model, **inputs, selection=first, retention=0.2)
    for hook in hooks:
        hook.remove()
    assert computed == computes


def test_every_input_stands_in_the_signatures(model):
    """There the Trainer looks for the columns of a batch that it may not drop, and `generate` for its arguments."""
    names = set(NAMES)
    for forward in (model.forward, model.model.forward):
        assert names | {"kwargs", "input_ids"} <= set(inspect.signature(forward).parameters)
    arguments = TrainingArguments(
        use_cpu=True,
        report_to="none",
        output_dir="unused",
    )
    trainer = Trainer(model=model, args=arguments)
    trainer._set_signature_columns_if_needed()
    assert names <= set(trainer._signature_columns)


def test_a_method_may_write_into_the_tensor_that_it_returned_before_and_a_hook_into_what_is_kept():
    model = tiny_model()
    inputs = batch(prompt(videos=[(4, 4, 6)]))
    kept = torch.arange(2)

    def next_tokens(candidates, n):
        return kept.add_(1)

    def one_back(module, arguments, result):
        result[1].kept_indices[0].sub_(1)

    def columns():
        return model(**inputs, selection=next_tokens, max_visual_tokens=2).qtsplus.columns

    before = columns()
    model.model.qtsplus.register_forward_hook(one_back)
    assert torch.equal(columns(), before)
