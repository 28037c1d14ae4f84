"""Dense supervision: the answers of a small base look at the visual tokens that they rest on."""

import json

import numpy as np
import pytest
import torch

from benchmarks.teaching.dataset import TinyWorldRecord, read_tinyworld
from benchmarks.teaching.looking import LOOKS, looking_losses, watching
from teaching_examples import make_trainer
from training_examples import collate, examples, steps

LAYER = 1
ENOUGH = LOOKS["looking"]


def needles_of(rows: list) -> list[list[list[torch.Tensor]]]:
    """Two or three tokens for the one answer of a row with a video; every third answer or so rests on nothing."""
    draws = [sum(row.ids) % 3 for row in rows]
    return [
        [[torch.tensor([0, 3, 5][: draw + 1] if draw else [], dtype=torch.int64)]] if row.videos else []
        for row, draw in zip(rows, draws, strict=True)
    ]


def collate_with_needles(rows: list) -> dict:
    return {**collate(rows), **({"needles": needles_of(rows)} if any(row.videos for row in rows) else {})}


def train(folder, **settings):
    defaults = {"freeze_language_model": False, "looking_layer": LAYER, "selector": {"selection": "all"}}
    trainer = make_trainer(folder, **{**defaults, **settings})
    trainer.data_collator = collate_with_needles
    trainer.train()
    return trainer


def watched(model):
    """Six rows with their labels and needles, what was watched of them, and the eager attention of the layer."""
    rows = examples(6)
    inputs = collate(rows)
    labels, needles = inputs.pop("labels"), needles_of(rows)
    inputs.pop("source_ids")
    with watching(model, inputs, labels, needles, LAYER) as looks:
        model(**inputs, selection="all", use_cache=False)
    model.set_attn_implementation("eager")
    attention = model(**inputs, selection="all", use_cache=False, output_attentions=True).attentions[LAYER]
    return inputs, labels, needles, looks, attention


def test_an_answer_that_rests_on_nothing_is_to_look_at_the_text(tmp_path):
    model = make_trainer(tmp_path, freeze_language_model=False).model
    inputs, labels, needles, looks, attention = watched(model)
    wanted = []
    for row, own in enumerate(needles):
        if own and not len(own[0][0]):
            visual = inputs["input_ids"][row] == model.config.video_token_id
            start = int((labels[row] != -100).nonzero()[0]) - 1
            share = attention[row, :, start, ~visual].sum(-1).mean()
            wanted.append(-(share / LOOKS["sparing"]).clamp(max=1).log())
    assert len(wanted) > 0
    torch.testing.assert_close(looking_losses(looks, "sparing"), torch.stack(wanted))


def test_the_shares_are_those_of_eager_attention_with_their_gradients(tmp_path):
    model = make_trainer(tmp_path, freeze_language_model=False).model.train()
    inputs, labels, needles, looks, attention = watched(model)
    losses = looking_losses(looks, "looking")
    wanted = []
    for row, own in enumerate(needles):
        if own and len(own[0][0]):
            real = inputs["attention_mask"][row].nonzero()[:, 0]
            visual = (inputs["input_ids"][row, real] == model.config.video_token_id).nonzero()[:, 0].tolist()
            start = int((labels[row, real] != -100).nonzero()[0]) - 1
            share = attention[row, :, start, [visual[token] for token in own[0][0].tolist()]].sum(-1).mean()
            wanted.append(-(share / ENOUGH).clamp(max=1).log())
    assert len(losses) == len(wanted) > 1
    torch.testing.assert_close(losses, torch.stack(wanted))
    weights = [model.model.language_model.layers[LAYER].self_attn.k_proj.weight, model.get_input_embeddings().weight]
    for ours, theirs in zip(
        torch.autograd.grad(losses.sum(), weights),
        torch.autograd.grad(torch.stack(wanted).sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_the_loss_gains_its_weighted_mean(tmp_path):
    plain = steps(train(tmp_path, max_steps=1))[0]
    looked = steps(train(tmp_path, max_steps=1, looking_weight=0.5))[0]
    assert looked["loss_looking"] > 0 and "loss_looking" not in plain
    needles = [own[0] for own in needles_of(examples(4)) if own]
    with_video, resting = len(needles), sum(len(own[0]) > 0 for own in needles)
    assert 0 < resting < with_video  # whose mean it is
    gained = 0.5 * looked["loss_looking"] * resting / with_video
    assert looked["loss"] == pytest.approx(plain["loss"] + gained, rel=1e-5)
    assert looked["loss_lm"] == pytest.approx(plain["loss_lm"], rel=1e-6)


def test_answers_come_to_look_where_they_are_told(tmp_path):
    losses = [line["loss_looking"] for line in steps(train(tmp_path, looking_weight=1.0, max_steps=40))]
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])


def test_steps_that_leave_tokens_out_do_not_teach_it(tmp_path):
    gaps = {"retention_range": [0.4, 0.5], "retention_share": 0.5}
    lines = steps(train(tmp_path, looking_weight=1.0, max_steps=8, **gaps))
    assert {line["kept_fraction"] == 1.0 for line in lines} == {True, False}
    assert all(("loss_looking" in line) == (line["kept_fraction"] == 1.0) for line in lines)


def test_what_cannot_be_looked_at_is_refused(tmp_path):
    with pytest.raises(ValueError, match="looking_weight teaches the language model"):
        make_trainer(tmp_path, looking_weight=1.0)
    trainer = make_trainer(
        tmp_path, looking_weight=1.0, looking_layer=LAYER, freeze_language_model=False, selector={"selection": "all"}
    )
    trainer.data_collator = lambda rows: {**collate(rows), "needles": [[[torch.tensor([99])]]] * len(rows)}
    with pytest.raises(ValueError, match="needles name the visual token 99; the video has"):
        trainer.train()
    with pytest.raises(ValueError, match=r"looking_layer=9: expected layers \[9\] to have attention, of \[0, 1"):
        train(tmp_path, looking_weight=1.0, looking_layer=9)
    row = {"video": "a.mp4", "question": "What?", "answer": "That.", "earlier": [["Who?", "He."]]}
    assert TinyWorldRecord(**row, needles=[[1], []]).needles == ((1,), ())
    with pytest.raises(ValueError, match="needles of 1 answers, but 2 answers"):
        TinyWorldRecord(**row, needles=[[1]])


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({"needles": [[1], [2]]}, "Row 1 of .*: has needles of 2 answers, but 1 answers"),
        ({"needles": [["x"]]}, "Row 1 of .* is not a record: needles.0.0 is 'x'; expected"),
        ({"token_words": "words.safetensors"}, None),
    ],
)
def test_rows_are_read_with_their_supervision(dense, message, tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"video": "a.mp4", "question": "What?", "answer": "That.", **dense}) + "\n")
    if message is None:
        (record,) = read_tinyworld(path)
        assert record.token_words == str(tmp_path / "words.safetensors") and record.needles == ()
        return
    with pytest.raises(ValueError, match=message):
        read_tinyworld(path)
