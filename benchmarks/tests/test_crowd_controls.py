"""
What a crowded world must be like, so that only the question can say where to look. Each control is one that the sparse
world fails.
"""

import collections
import re

import numpy as np
import pytest
import torch

from benchmarks.bases import CROWD
from benchmarks.exact_match import model_inputs
from benchmarks.world.clip import write_mp4
from benchmarks.world.crowd import LABEL_WORDS, make_crowd, render_crowd, token_labels
from benchmarks.world.crowd_questions import CROWD_PLAN
from benchmarks.world.scene import FPS, GRID, sightings
from benchmarks.world.tinyworld import ask_world, evidence_tokens, make_world
from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.labelled import sighting_tokens
from qtsplus.model.selector_qtsplus import kept_count
from tiny import load_bundled

SECONDS = 8
GRID_OF_TOKENS = (SECONDS, GRID, GRID)
TOKENS = SECONDS * GRID * GRID
BUDGET = kept_count(0.1, TOKENS, TOKENS)


def ask(make, seeds):
    """Per world: it, and its questions with the tokens that each needs, where it needs any."""
    asked = []
    wide = {"caption", "moment", "summary"}  # which look at everything
    for world in map(make, seeds):
        found = [(question, evidence_tokens(question, GRID_OF_TOKENS)) for question in ask_world(world, 0.0)]
        needles = [(question, np.unique(np.concatenate(n))) for question, n in found if n and question.kind not in wide]
        asked.append((world, needles))
    return asked


@pytest.fixture(scope="module")
def crowds():
    return ask(make_crowd, range(50))


@pytest.fixture(scope="module")
def sparse():
    return ask(lambda seed: make_world(seed, SECONDS, 4), range(50))


def object_tokens(world):
    return np.unique(np.concatenate([sighting_tokens(sightings(item), GRID_OF_TOKENS) for item in world.objects]))


def token_recall(asked, keep):
    """Share of the tokens that a question needs which `keep(world)` keeps, mean over questions."""
    shares = [np.isin(needle, keep(world)).mean() for world, needles in asked for _, needle in needles]
    return float(np.mean(shares))


def fills(asked):
    return np.array([len(object_tokens(world)) / TOKENS for world, _ in asked])


def test_objects_fill_about_half_of_the_tokens(crowds, sparse):
    for world, _ in crowds:
        labelled = token_labels(world, GRID_OF_TOKENS)[..., 0].ravel() != LABEL_WORDS.index("nothing")
        np.testing.assert_array_equal(np.flatnonzero(labelled), object_tokens(world))
    assert fills(crowds).min() >= 0.4 and fills(crowds).max() <= 0.6
    assert fills(sparse).max() < 0.2


def test_distractors_outnumber_a_tenth_of_the_tokens_five_to_one(crowds, sparse):
    def least(asked):
        return min(
            len(np.setdiff1d(object_tokens(world), needle)) / (TOKENS / 10)
            for world, needles in asked
            for _, needle in needles
        )

    assert least(crowds) >= 5
    assert least(sparse) < 1


def test_a_salience_oracle_keeps_no_more_of_a_needle_than_the_budget_over_the_fill(crowds, sparse):
    rng = np.random.default_rng(0)

    def salient(world):
        """A tenth of the tokens: those of objects, in random order, then the rest."""
        objects = object_tokens(world)
        rest = np.setdiff1d(np.arange(TOKENS), objects)
        return np.concatenate([rng.permutation(objects), rng.permutation(rest)])[:BUDGET]

    even = np.arange(BUDGET) * TOKENS // BUDGET
    assert token_recall(crowds, salient) == pytest.approx(BUDGET / TOKENS / fills(crowds).mean(), abs=0.03)
    assert token_recall(crowds, lambda world: even) == pytest.approx(0.1, abs=0.02)
    assert token_recall(sparse, salient) > 0.95


def test_no_two_questions_about_a_video_need_the_same_token(crowds, sparse):
    def shares_tokens(needles):
        return len(np.unique(np.concatenate([needle for _, needle in needles]))) < sum(len(n) for _, n in needles)

    assert not any(shares_tokens(needles) for _, needles in crowds)
    assert all(shares_tokens(needles) for _, needles in sparse)
    assert np.mean([len(needles) for _, needles in crowds]) > 14


def test_neither_word_of_a_name_tells_who_is_meant():
    """By what every token shows, of the objects that are there together; both words together are unique."""
    patterns = (
        r"What is in the (\w+) (\w+)\?",
        r"does the (\w+) (\w+) (?:appear|vanish|move)\?",
        r"What colour is the (\w+) with the (\w+)",
        r"What shape is the (\w+) object with the (\w+)",
        r"Is there an? (\w+) (\w+) in",
        r"the first \w+ to appear after the (\w+) (\w+)",
        r"to the (?:left|right) of the (\w+) (\w+)\?",
        r"appears first, the (\w+) (\w+) or",
        r"or the (\w+) (\w+)\?",
    )
    seen = collections.Counter()
    for world in map(make_crowd, range(50)):
        words = np.array(LABEL_WORDS)[token_labels(world, GRID_OF_TOKENS)].reshape(SECONDS, GRID * GRID, 3)
        for question in ask_world(world, 0.0):
            for pattern in patterns:
                if (match := re.search(pattern, question.query)) is None or question.answer == "No":
                    continue
                one, other = ((words == word).any(-1) for word in match.groups())
                meant = one & other
                assert meant.sum(axis=1).max() == 1  # one object at a time, and the same one:
                assert len({tuple(words[place]) for place in map(tuple, np.argwhere(meant))}) == 1
                there = meant.any(axis=1)
                assert (one.sum(axis=1)[there] > 1).all() and (other.sum(axis=1)[there] > 1).all(), question
                seen[pattern] += 1
    assert set(seen) == set(patterns) and sum(seen.values()) > 500


def test_every_kind_is_asked_as_planned_and_no_answer_is_much_likelier_than_others():
    asked, answers = collections.Counter(), collections.defaultdict(collections.Counter)
    for seed in range(200):
        for question in ask_world(make_crowd(seed), 0.0):
            asked[question.kind] += 1
            form = " ".join(question.query.split()[:2]) if question.kind in ("attribute", "relation") else question.kind
            answers[form][question.answer] += 1
    for kind, count in CROWD_PLAN.items():
        assert asked[kind] > 0.97 * 200 * count, kind
    share = {form: max(found.values()) / sum(found.values()) for form, found in answers.items()}
    # What guessing would give, and a little more.
    most = {"What is": 1 / 5, "What colour": 1 / 8, "What shape": 1 / 6, "existence": 1 / 2, "when": 1 / 7}
    most |= {"direction": 1 / 4, "count": 1 / 4, "order": 1 / 48}
    assert set(share) == set(most)
    for form, guess in most.items():
        assert share[form] < 1.4 * guess + 0.03, form


def test_an_untrained_selector_finds_no_more_than_the_budget_over_the_fill(tmp_path, crowds):
    """The crowd model's own vision tower and words; a selector that has learnt nothing."""
    model, processor = load_bundled(CROWD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.model.qtsplus.load_state_dict(type(model)(model.config).model.qtsplus.state_dict())
    shares, fill = [], []
    for world, needles in crowds[:6]:
        video = str(tmp_path / f"{world.seed}.mp4")
        write_mp4(video, render_crowd(world), FPS)
        records = [VideoRecord(video, question.question, question.answer) for question, _ in needles]
        with torch.no_grad():
            output = model(**model_inputs(processor, records), retention=0.1)
        kept = output.qtsplus.kept_indices
        assert {len(indices) for indices in kept} == {BUDGET}
        shares += [np.isin(needle, indices).mean() for (_, needle), indices in zip(needles, kept, strict=True)]
        fill.append(len(object_tokens(world)) / TOKENS)
    assert np.mean(shares) < 0.1 / np.mean(fill) + 0.08
