"""Dense supervision: the names in a question look at what they mean, and an answer at the name that it says."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.teaching.dataset import TinyWorldCollator, TinyWorldDataset, read_tinyworld
from benchmarks.teaching.looking import LOOKS, looking_losses, watching
from benchmarks.teaching.referring import find_names, said_names
from benchmarks.teaching.trainer import TinyWorldTrainer
from benchmarks.world.crowd import CROWD_COLOURS
from benchmarks.world.scene import OBJECT_SHAPES
from benchmarks.world.tinyworld import build_dataset
from benchmarks.world.token_words import read_token_words
from qtsplus.training.models import make_config, make_model, make_processor
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import build_trainer

LAYER = 2


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    return Path(
        build_dataset(
            tmp_path_factory.mktemp("crowd"),
            "train",
            2,
            seconds=(4,),
            multiple_choice=0,
            conversations=True,
            crowd=True,
            progress=False,
        )
    )


@pytest.fixture(scope="module")
def processor():
    return make_processor("qtsplus-tiny", None, make_config("qtsplus-tiny", None))


@pytest.fixture
def batch(crowd, processor):
    dataset = TinyWorldDataset(read_tinyworld(crowd), processor)
    dataset.dense = True
    return TinyWorldCollator(processor)([dataset[0], dataset[1]])


def turns_of_row(words, labels):
    """Of each token of a row the number of its question, and where each answer begins to be predicted."""
    begins = [at for at in range(len(words) - 1) if labels[at] == -100 != labels[at + 1]]
    return [sum(begin < at for begin in begins) for at in range(len(words))], begins


def test_names_and_the_answers_that_say_them_are_found(crowd, processor, batch):
    for row, line in enumerate(crowd.read_text(encoding="utf-8").splitlines()):
        record = json.loads(line)
        turns = [*record["earlier"], [record["question"], record["answer"]]]
        real = batch["attention_mask"][row].bool()
        ids, labels = batch["input_ids"][row, real], batch["labels"][row, real]
        names = find_names(ids, labels, batch["token_words"][row])
        texts = [processor.tokenizer.decode(token).strip() for token in ids]
        pattern = f"({'|'.join(CROWD_COLOURS)}) ({'|'.join(OBJECT_SHAPES)})"
        written = [(turn, *found) for turn, (text, _) in enumerate(turns) for found in re.findall(pattern, text)]
        assert [(name.turn, texts[name.place - 1], texts[name.place]) for name in names] == written
        assert len(written) > 5

        _, begins = turns_of_row(texts, labels.tolist())
        twin = []
        for name in names:
            question, answer = turns[name.turn]
            if answer == f"{texts[name.place - 1]} {texts[name.place]}":
                assert question.startswith("Which object appears first")
                twin += [(begins[name.turn], name.place), (begins[name.turn] + 1, name.place)]
        places, said = said_names(labels, names, batch["token_words"][row])
        assert list(zip(places.tolist(), said.tolist(), strict=True)) == twin and twin


def test_the_shares_are_those_of_eager_attention_with_their_gradients(crowd, processor, batch):
    model = make_model("qtsplus-tiny", None, {"selection": "all"}).train()
    labels, needles, words = (batch.pop(name) for name in ("labels", "needles", "token_words"))
    for name in ("source_ids", "skipped"):
        batch.pop(name)
    with watching(model, batch, labels, needles, LAYER, words, names=True) as looks:
        model(**batch, use_cache=False)
    losses = {kind: looking_losses(looks, kind) for kind in LOOKS}

    model.set_attn_implementation("eager")
    attentions = model(**batch, use_cache=False, output_attentions=True).attentions
    records = read_tinyworld(crowd)
    referring, choosing = [], []
    for row in range(2):
        real = batch["attention_mask"][row].nonzero()[:, 0]
        ids, row_labels = batch["input_ids"][row, real], labels[row, real].tolist()
        texts = [processor.tokenizer.decode(token).strip() for token in ids]
        turns, begins = turns_of_row(texts, row_labels)
        visual = (ids == model.config.video_token_id).nonzero()[:, 0].tolist()
        shown = read_token_words(records[row].token_words)
        cells = shown.labels.reshape(-1, shown.labels.shape[-1])
        meant, said = [], []
        for at in range(1, len(texts)):
            colour, shape = texts[at - 1 : at + 1]
            if row_labels[at] != -100 or colour not in CROWD_COLOURS or shape not in OBJECT_SHAPES:
                continue
            seen = [
                visual[token]
                for token in needles[row][turns[at]][0].tolist()
                if (shown.words[cells[token, 0]], shown.words[cells[token, 1]]) == (colour, shape)
            ]
            if seen:
                meant.append(attentions[LAYER][row, :, real[at], real[seen]].sum(-1).mean())
            begin = begins[turns[at]]
            if texts[begin + 1 : begin + 3] == [colour, shape]:
                said += [attentions[LAYER + 1][row, :, real[begin + step], real[at]].mean() for step in (0, 1)]
        referring.append(-(torch.stack(meant) / 0.5).clamp(max=1).log().mean())
        choosing.append(-(torch.stack(said) / 0.9).clamp(max=1).log().mean())
    weights = [model.model.language_model.layers[at].self_attn.k_proj.weight for at in (0, LAYER)]
    for kind, twin in {"referring": torch.stack(referring), "choosing": torch.stack(choosing)}.items():
        torch.testing.assert_close(losses[kind], twin)
        ours, theirs = (torch.autograd.grad(value.sum(), weights, retain_graph=True) for value in (losses[kind], twin))
        for one, other in zip(ours, theirs, strict=True):
            assert other.abs().max() > 0
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_it_is_trained_by_a_weight_of_its_own(crowd, tmp_path):
    recipe = {
        "model": {"variant": "qtsplus-tiny", "selector": {"selection": "all"}},
        "data": {"train_files": [str(crowd)]},
        "training": {
            "output_dir": str(tmp_path / "run"),
            "freeze_selector": True,
            "freeze_language_model": False,
            "max_steps": 12,
            "per_device_train_batch_size": 2,
            "learning_rate": 3.0e-3,
            "referring_weight": 1.0,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    trainer = build_trainer(load_stages(tmp_path / "recipe.yaml", trainer_class=TinyWorldTrainer)[0])
    trainer.train()
    first, *_, last = [line for line in trainer.state.log_history if "loss" in line]
    assert "loss_looking" not in first and "loss_naming" not in first
    assert first["loss"] == pytest.approx(
        sum(first[f"loss_{part}"] for part in ("lm", "referring", "choosing")), rel=1e-4
    )
    assert all(last[name] < first[name] for name in ("loss_referring", "loss_choosing"))
