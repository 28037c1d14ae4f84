"""Dense supervision: what every visual token shows, where it stands, and what a question names."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.teaching import naming
from benchmarks.teaching.dataset import TinyWorldCollator, TinyWorldDataset, read_tinyworld
from benchmarks.world.open_sets import build_open
from benchmarks.world.token_words import UNNAMED, NamedTokens, read_token_words, write_token_words
from qtsplus.hub.files import hub_configs
from qtsplus.training.models import make_config, make_model, make_processor
from teaching_examples import make_trainer
from training_examples import assert_same_training, collate, steps

WORDS = ("nothing", "red", "blue", "circle", "star", "up", "down")
ASPECTS = (("nothing", "red", "blue"), ("nothing", "circle", "star"))
CONTEXT = (("nothing", "up", "down"),)
LAYER = 2  # that looks things up; the first one of the model here is before it
PLACES = (torch.arange(20, 30), torch.arange(30, 36), torch.arange(36, 42))


def some_labels(grid: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    labels = [rng.choice([0, *pair, UNNAMED], grid) for pair in ((1, 2), (3, 4), (5, 6))]
    return np.stack(labels, axis=-1).astype(np.int64)


def words_of(grid: tuple[int, int, int], seed: int = 0) -> naming.TokenWords:
    """As for a vocabulary in which these words have the ids 10 to 16, and the signs of a place those of [`PLACES`]."""
    aspects, context = (
        torch.tensor([[word in aspect for word in WORDS] for aspect in of]) for of in (ASPECTS, CONTEXT)
    )
    labels = torch.from_numpy(some_labels(grid, seed))
    words = torch.arange(10, 17)
    return naming.TokenWords(labels, words, aspects, context, PLACES)


@pytest.fixture(scope="module")
def tokenizer():
    return make_processor("qtsplus-tiny", None, make_config("qtsplus-tiny", None)).tokenizer


def test_the_loss_is_that_of_every_token_by_itself():
    torch.manual_seed(0)
    features, embeddings = torch.randn(12, 8, requires_grad=True), torch.randn(32, 8, requires_grad=True)
    named = words_of((3, 2, 2))
    loss = naming.naming_loss(features, named.labels_on((3, 2, 2)), named, embeddings)

    means = []
    for aspect, words in enumerate(ASPECTS):
        ids = [10 + WORDS.index(word) for word in words]
        parts = []
        for token, labels in zip(features, named.labels.reshape(-1, 3).tolist(), strict=True):
            if labels[aspect] != UNNAMED:
                scores = embeddings[ids] @ (token / (token.square().mean() + torch.finfo(torch.float32).eps).sqrt())
                parts.append(-scores.log_softmax(0)[ids.index(10 + labels[aspect])])
        means.append(torch.stack(parts).mean())
    twin = torch.stack(means).mean()
    torch.testing.assert_close(loss, twin)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (features, embeddings)),
        torch.autograd.grad(twin, (features, embeddings)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_tokens_without_any_word_add_nothing():
    named = words_of((1, 1, 2))
    silent = torch.full_like(named.labels_on((1, 1, 2)), UNNAMED)
    assert naming.naming_loss(torch.randn(2, 8), silent, named, torch.randn(48, 8)) == 0


def test_a_token_is_followed_to_those_a_step_before_that_show_the_same():
    """Four tokens a step: a red circle moves and meets another; a blue star stands still till its shape is unknown."""
    red, blue, none, unknown = [1, 3, 0], [2, 4, 0], [0, 0, 0], [2, UNNAMED, 0]
    steps = [[red, none, blue, none], [none, red, blue, unknown], [red, red, unknown, none], [none, red, blue, none]]
    words = replace(words_of((1, 1, 1)), labels=torch.tensor(steps).reshape(4, 2, 2, 3))
    pairs = words.earlier((4, 2, 2)).nonzero().tolist()
    assert pairs == [[5, 0], [6, 2], [8, 5], [9, 5], [13, 8], [13, 9]]
    # Where it is known which thing that is, its words do not count.
    things = torch.tensor([[0, -1, 1, -1], [-1, 0, 1, 1], [0, 0, 1, -1], [-1, 2, 1, -1]]).reshape(4, 2, 2)
    pairs = replace(words, things=things).earlier((4, 2, 2)).nonzero().tolist()
    assert pairs == [[5, 0], [6, 2], [7, 2], [8, 5], [9, 5], [10, 6], [10, 7], [14, 10]]


@pytest.mark.parametrize("grid", [(2, 2, 3), (1, 4, 3), (1, 1, 2), (1, 3, 6)])
def test_another_grid_is_refused(grid):
    with pytest.raises(ValueError, match="token_words name a grid of .1, 2, 3. tokens; the model has"):
        words_of((1, 2, 3)).labels_on(grid)


def test_a_file_comes_back_as_it_was_written(tmp_path, tokenizer):
    written = NamedTokens(some_labels((3, 2, 2)), WORDS, ASPECTS, CONTEXT)
    write_token_words(tmp_path / "words.safetensors", written)
    assert [path.name for path in tmp_path.iterdir()] == ["words.safetensors"]
    found = read_token_words(tmp_path / "words.safetensors")
    np.testing.assert_array_equal(found.labels, written.labels)
    loaded = naming.load_token_words(tmp_path / "words.safetensors", tokenizer)
    assert tokenizer.convert_ids_to_tokens(loaded.words.tolist()) == [f"\u0120{word}" for word in WORDS]
    assert [tokenizer.decode(signs) for signs in loaded.places] == ["0123456789", "abcdefghijklm", "nopqrstuvwxyz"]
    for masks, aspects in ((loaded.aspects, ASPECTS), (loaded.context, CONTEXT)):
        assert [[WORDS[index] for index in mask.nonzero()] for mask in masks] == list(map(list, aspects))


@pytest.mark.parametrize("content", [None, b"", b"not a safetensors file", "other"])
def test_another_file_is_refused(tmp_path, tokenizer, content):
    path = tmp_path / "words.safetensors"
    if content == "other":
        path = hub_configs() / "qtsplus-tiny" / "model.safetensors"
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="does not name the tokens of a video"):
        naming.load_token_words(path, tokenizer)


# --------------------------------------------------------------------------------------------------------------------
# In training
# --------------------------------------------------------------------------------------------------------------------


def collate_with_words(rows: list) -> dict:
    """Every row with a video says what its tokens show."""
    words = [words_of((t, h // 2, w // 2), seed=len(row.ids)) for row in rows for t, h, w in row.videos or [(0, 0, 0)]]
    named = [word if row.videos else None for row, word in zip(rows, words, strict=True)]
    return {**collate(rows), **({"token_words": named} if any(row.videos for row in rows) else {})}


def train(folder, **settings):
    trainer = make_trainer(folder, **{"freeze_vision_model": False, "freeze_language_model": False, **settings})
    trainer.data_collator = collate_with_words
    trainer.train()
    return trainer


@pytest.mark.parametrize("selection", ["all", "qtsplus"])
def test_the_loss_gains_its_weighted_mean(tmp_path, selection):
    selector = {"selection": selection, "rho_prior": 0.3}
    plain = steps(train(tmp_path, selector=selector, max_steps=1))[0]
    named = steps(train(tmp_path, selector=selector, max_steps=1, naming_weight=0.5))[0]
    assert named["loss_naming"] > 0 and "loss_naming" not in plain
    assert named["loss"] == pytest.approx(plain["loss"] + 0.5 * named["loss_naming"], rel=1e-5)
    assert named["loss_lm"] == pytest.approx(plain["loss_lm"], rel=1e-6)


def test_micro_batches_add_up_to_one_big_batch(tmp_path):
    settings = {"selector": {"selection": "all"}, "naming_weight": 2.0}
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    assert_same_training(train(tmp_path, **settings), train(tmp_path, **settings, **split))


def test_every_question_names_its_own_words():
    """Two turns: 11 and 13 are asked for, then 14 twice; 12 stands in an answer, 10 is nothing."""
    ids = torch.tensor([1, 11, 2, 13, 10, 3, 12, 4, 5, 14, 14, 6, 7, 8])
    labels = torch.full_like(ids, UNNAMED)
    labels[6:8], labels[12:14] = ids[6:8], ids[12:14]
    words = words_of((1, 1, 1))
    assert naming.turns_of(labels[None])[0].tolist() == [UNNAMED] * 5 + [0] + [UNNAMED] * 5 + [1] + [UNNAMED] * 2
    assert naming._named(ids, labels, words).nonzero().tolist() == [[0, 1], [0, 3], [1, 4]]


def test_a_base_learns_with_gaps(tmp_path):
    """In the steps that draw a fraction, a model that keeps everything keeps that fraction at random."""
    selector = {"selection": "all"}
    trainer = train(tmp_path, selector=selector, retention_range=[0.4, 0.5], retention_share=0.5, max_steps=8)
    kept = [line["kept_fraction"] for line in steps(trainer)]
    assert 1.0 in kept and all(share == 1.0 or 0.35 < share < 0.7 for share in kept) and min(kept) < 0.7


def test_labels_of_another_grid_and_a_frozen_vision_tower_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, naming_weight=1.0, freeze_vision_model=False)
    trainer.data_collator = lambda rows: {
        **collate_with_words(rows),
        "token_words": [words_of((1, 1, 1)) if row.videos else None for row in rows],
    }
    with pytest.raises(ValueError, match=r"token_words name a grid of \(1, 1, 1\) tokens; the model has"):
        trainer.train()
    with pytest.raises(ValueError, match="looking_layer=9: expected a layer from 1 to 2"):
        train(tmp_path, naming_weight=1.0, looking_layer=9)
    with pytest.raises(ValueError, match="naming_weight teaches the vision tower and the language model"):
        make_trainer(tmp_path, naming_weight=1.0)


def test_an_open_world_names_its_tokens_and_a_batch_of_it_trains(tmp_path):
    path = build_open(tmp_path, "test", 2, 4, variant="plain")
    processor = make_processor("qtsplus-tiny", None, make_config("qtsplus-tiny", None))
    dataset = TinyWorldDataset(read_tinyworld(path)[::8], processor)
    assert "token_words" not in dataset[0]
    dataset.dense = True
    batch = TinyWorldCollator(processor)([dataset[index] for index in range(len(dataset))])
    labels, words = batch.pop("labels"), batch.pop("token_words")
    for name in ("source_ids", "skipped", "needles"):
        batch.pop(name)
    model = make_model("qtsplus-tiny", None, {"selection": "all"}).train()
    inputs = naming.with_features(model, batch)
    loss = naming.naming_losses(model, inputs, labels, model(**inputs), words, LAYER).sum()
    loss.backward()
    assert len(words) == len(labels) and all(word.labels.shape == (4, 6, 6, 6) for word in words)
    assert model.model.visual.patch_embed.proj.weight.grad.abs().max() > 0
