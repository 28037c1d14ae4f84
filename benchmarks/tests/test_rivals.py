"""The tokens of other videos beside a question's own: only of those that do not show what it asks for."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.teaching.dataset import TinyWorldCollator, TinyWorldDataset, read_tinyworld
from benchmarks.teaching.rivals import Rivals, may_show, name_asked, names_shown, watching_scores
from benchmarks.world.open_sets import build_open
from qtsplus.hub.files import hub_configs
from qtsplus.training.attention import relevance_divergences
from qtsplus.training.models import make_config, make_model, make_processor
from teaching_examples import make_trainer
from training_examples import collate, steps

TINY = str(hub_configs() / "qtsplus-tiny")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build_open(tmp_path_factory.mktemp("open"), "test", 6, 8)


@pytest.mark.parametrize(
    "question, name",
    [
        ("What is in the yellow ring?", ("yellow", "ring")),
        ("does an orange square come?", ("orange", "square")),
        ("Which colours does the cross take?", (None, "cross")),
        ("In which order do colours cross the middle?", (None, None)),
        ("What crosses the middle last?", (None, None)),
    ],
)
def test_what_a_question_names(question, name):
    assert name_asked(question) == name


def test_a_video_that_may_show_it_is_no_rival(path):
    """But for the few things that are the most of none of their tokens."""
    absent, present = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name = name_asked(row["question"])
        if name[1] is not None:
            found = may_show(names_shown(str(path.parent / row["token_words"])), name)
            (absent if row["answer"] == "No" else present).append(found)
    assert len(present) > 50 and sum(present) > 0.85 * len(present)
    assert len(absent) > 10 and not any(absent)
    assert may_show(frozenset({("red", None)}), ("red", "ring")) and may_show(
        frozenset({(None, "ring")}), ("red", "ring")
    )
    assert not may_show(frozenset({("red", "circle"), ("blue", "ring")}), ("red", "ring"))


@pytest.fixture(scope="module")
def watched(path):
    """A pass over a question about each of six videos."""
    model = make_model(None, TINY, {}).eval()
    processor = make_processor(None, TINY, make_config(None, TINY, {}))
    records = {record.video: record for record in read_tinyworld(path) if "ring" in record.question}
    dataset = TinyWorldDataset(list(records.values()), processor)
    dataset.about = True
    inputs = TinyWorldCollator(processor)([dataset.example(record) for record in dataset.records])
    about = inputs.pop("about")
    for name in ("labels", "source_ids", "skipped"):
        inputs.pop(name, None)
    with watching_scores(model.model.qtsplus, Rivals(about, ())) as rivals, torch.no_grad():
        scores = model(**inputs).qtsplus.log_relevance
    rivals.targets = [row.exp() * 0.9 for row in scores]
    return model.model.qtsplus, rivals, scores


def test_rivals_stand_beside_the_own_tokens(watched):
    selector, rivals, scores = watched
    assert len(scores) > 2
    alone = relevance_divergences(scores, rivals.targets, True)
    torch.testing.assert_close(rivals.divergences(selector, 0, True), alone, atol=1e-5, rtol=1e-4)
    beside = rivals.divergences(selector, 10_000, True)
    assert (beside >= alone - 1e-5).all() and (beside > alone + 1e-4).any()


def test_rows_without_a_name_a_target_or_a_rival_are_left_out(watched):
    selector, rivals, scores = watched
    first, *others = rivals.about
    unnamed = replace(first, question="What crosses the middle last?")
    same = [replace_shown(about, first) for about in others]
    for about, targets, count in (
        ([None, *others], rivals.targets, len(scores) - 1),
        ([unnamed, *others], rivals.targets, len(scores) - 1),
        (rivals.about, [torch.zeros(0), *rivals.targets[1:]], len(scores) - 1),
        ([replace(first, question="Is there a ring?"), *same], rivals.targets, 0),
    ):
        assert len(replace(rivals, about=about, targets=targets).divergences(selector, 5, True)) == count


def replace_shown(about, other):
    """Of a question about a shape that every video shows."""
    return replace(about, question="Is there a ring?", shown=other.shown | {(None, "ring")})


def test_training_learns_from_them(tmp_path, watched):
    _, rivals, _ = watched

    def with_about(rows):
        inputs = collate(rows)
        counts = [(ids == trainer.model.config.video_token_id).sum() for ids in inputs["input_ids"]]
        about = [rivals.about[row % 2] if count else None for row, count in enumerate(counts)]
        targets = [torch.full((int(count),), 0.5 / max(int(count), 1)) for count in counts]
        return {**inputs, "about": about, "attention": targets}

    settings = {"relevance_weight": 1.0, "selector": {"null_token": True}}
    trainer = make_trainer(tmp_path, rivals=20, **settings)
    trainer.data_collator = with_about
    trainer.train()
    assert all("loss_rivals" in line for line in steps(trainer))
