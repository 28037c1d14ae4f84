"""Whose attention the selector's scores learn from: the model's own in one pass, or another checkpoint's."""

import copy
import json

import pytest
import torch

from qtsplus.training.attention import (
    AttentionChoice,
    answer_attention,
    relevance_divergences,
    require_same_tokens,
)
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import build_trainer
from qtsplus.training.trainer import QTSplusTrainer
from tiny import tiny_model
from training_examples import InOrder, collate, examples, make_trainer, steps


@pytest.fixture
def inputs():
    batch = collate(examples(4))
    batch.pop("source_ids")
    return batch


def passes_with_all_tokens(model, work) -> int:
    """How often `work` lets the model read every visual token."""
    counted = []

    def note(module, args, kwargs):
        counted.append(kwargs.get("selection") == "all")

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    work()
    hook.remove()
    return sum(counted)


def deeper_model():
    """A teacher with a third layer."""
    model = tiny_model(seed=5)
    layers = model.model.language_model.layers
    layers.append(copy.deepcopy(layers[0]))
    layers[2].self_attn.layer_idx = 2
    model.config.text_config.num_hidden_layers = 3
    model.config.text_config.layer_types = ["full_attention"] * 3
    return model


@pytest.mark.parametrize("freeze", [True, False])
def test_another_model_s_attention_is_the_target(tmp_path, freeze):
    """Its layers are the ones that are chosen, also those that the student lacks."""
    student = make_trainer(tmp_path, max_steps=1, relevance_weight=1.0)
    arguments = copy.copy(student.args)
    arguments.relevance_layers, arguments.freeze_language_model = [2], freeze
    teacher = deeper_model()
    trainer = InOrder(
        tiny_model(rho_min=0.1, rho_max=0.9, n_max=10),
        arguments,
        relevance_teacher=teacher,
        train_dataset=examples(4),
        data_collator=collate,
    )
    batch = collate(examples(4))
    labels = batch.pop("labels")
    batch.pop("source_ids")
    targets = answer_attention(teacher, batch, labels, AttentionChoice((2,)))
    expected = relevance_divergences(trainer.model.train()(**batch).qtsplus.log_relevance, targets).mean().detach()
    before = {name: weight.clone() for name, weight in teacher.named_parameters()}
    trainer.train()
    assert steps(trainer)[0]["loss_relevance"] == pytest.approx(float(expected), rel=1e-5)
    for name, weight in teacher.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None, name
    student.train()
    assert steps(student)[0]["loss_relevance"] != pytest.approx(float(expected), rel=1e-2)


def test_a_chosen_layer_has_to_be_the_teachers(tmp_path):
    with pytest.raises(ValueError, match=r"relevance_layers has \[2\]: expected layers with attention, of \[0, 1\]"):
        make_trainer(tmp_path, relevance_weight=1.0, relevance_layers=[2])


# --------------------------------------------------------------------------------------------------------------------
# In groups of frames
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["answer", "prompt"])
def test_one_group_teaches_as_the_layer_that_reads_all_tokens(inputs, positions):
    model, labels = tiny_model(), inputs.pop("labels")
    labels[2] = -100
    for layer in (0, 1):
        model.config.qtsplus_config.attention_layer = layer
        expected = answer_attention(model, inputs, labels, AttentionChoice((layer,), positions=positions))
        found = answer_attention(model, inputs, labels, AttentionChoice(positions=positions, grouped=True))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    model.config.qtsplus_config.attention_group = 1
    in_groups = answer_attention(model, inputs, labels, AttentionChoice(positions=positions, grouped=True))
    assert [len(row) for row in in_groups] == [len(row) for row in expected]
    assert all(0 < float(row.sum()) < 1 for row in in_groups if len(row))


def test_lm_attention_teaches_without_a_pass_over_all_tokens(tmp_path):
    """The model that reads its own first layers; the loss is that of its targets."""
    student = make_trainer(tmp_path, max_steps=1, relevance_weight=1.0, freeze_language_model=True)
    settings = {"rho_min": 0.1, "rho_max": 0.9, "n_max": 10, "attention_layer": 1, "attention_group": 1}
    given = {"train_dataset": examples(4), "data_collator": collate, "relevance_teacher": "lm_attention"}
    trainer = InOrder(tiny_model(**settings), student.args, **given)
    batch = collate(examples(4))
    labels = batch.pop("labels")
    batch.pop("source_ids")
    targets = answer_attention(tiny_model(**settings), batch, labels, AttentionChoice(grouped=True))
    expected = relevance_divergences(trainer.model.train()(**batch).qtsplus.log_relevance, targets).mean().detach()
    assert passes_with_all_tokens(trainer.model, trainer.train) == 0
    assert steps(trainer)[0]["loss_relevance"] == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(ValueError, match="which reads attention_layer and attention_heads of qtsplus_config"):
        student.args.relevance_layers = [0]
        InOrder(tiny_model(**settings), student.args, **given)
    with pytest.raises(ValueError, match="relevance_teacher='it': expected a model, or 'lm_attention'"):
        InOrder(tiny_model(**settings), student.args, **{**given, "relevance_teacher": "it"})


# --------------------------------------------------------------------------------------------------------------------
# Other tokens
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: setattr(config, "video_token_id", 499), "video_token_id=499 and the model 500"),
        (lambda config: setattr(config.vision_config, "patch_size", 8), "patch_size=8 and the model 4"),
        (lambda config: setattr(config.vision_config, "spatial_merge_size", 4), "merge_size=4 and the model 2"),
    ],
)
def test_a_teacher_with_other_visual_tokens_is_refused(tmp_path, change, message):
    student, other = tiny_model(), tiny_model(seed=1)
    require_same_tokens(other.config, student.config)
    change(other.config)
    with pytest.raises(ValueError, match=message):
        require_same_tokens(other.config, student.config)
    trainer = make_trainer(tmp_path, relevance_weight=1.0, max_steps=1)
    with pytest.raises(ValueError, match=message):
        QTSplusTrainer(tiny_model(), trainer.args, relevance_teacher=other)


# --------------------------------------------------------------------------------------------------------------------
# By a recipe
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe_file(tmp_path, tiny_mp4, tiny_published):
    record = {"video": str(tiny_mp4), "question": "What?", "answer": "A circle."}
    records = [record, {**record, "answer": "Two.", "earlier": [["How many?", "One."]]}, {**record, "video": None}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
model: {{variant: qtsplus-tiny, selector: {{n_max: 20}}, relevance_teacher: {tiny_published}}}
data: {{train_files: [{tmp_path}/train.jsonl]}}
training:
  {{output_dir: {tmp_path}/run, max_steps: 3, per_device_train_batch_size: 2, learning_rate: 1e-3, use_cpu: true,
    freeze_language_model: false, relevance_weight: 1.0, save_strategy: "no", logging_steps: 1, report_to: none}}
""")
    return path


def test_a_recipe_keeps_what_lm_attention_taught(recipe_file, tmp_path, monkeypatch):
    settings = ["model.relevance_teacher=lm_attention", "training.freeze_language_model=true"]
    every_time = build_trainer(load_stages(recipe_file, settings)[0])
    every_time.train()
    once = build_trainer(load_stages(recipe_file, [*settings, f"data.features={tmp_path}/features"])[0])
    monkeypatch.setattr("qtsplus.training.trainer.answer_attention", None)
    once.train()
    for line, expected in zip(steps(once), steps(every_time), strict=True):
        assert line.keys() == expected.keys()
        for name in {"loss", "loss_relevance"} & line.keys():
            assert line[name] == pytest.approx(expected[name], rel=1e-4), name
    changed = [*settings, "model.selector={n_max: 20, attention_group: 1}", f"data.features={tmp_path}/features"]
    monkeypatch.setattr("qtsplus.training.attention.answer_attention", None)
    with pytest.raises(TypeError):  # other groups see other things
        build_trainer(load_stages(recipe_file, changed)[0])


@pytest.mark.parametrize("settings", [[], ["training.relevance_layers=[1, 3]"]])
def test_another_teacher_reads_every_example_once(recipe_file, tmp_path, monkeypatch, settings):
    """Although the language model trains: it is not the teacher. Each has its own vision tower's features."""
    every_time = build_trainer(load_stages(recipe_file, settings)[0])
    every_time.train()
    settings = [*settings, f"data.features={tmp_path}/features"]
    once = build_trainer(load_stages(recipe_file, settings)[0])
    assert once.relevance_teacher is None
    monkeypatch.setattr("qtsplus.training.trainer.answer_attention", None)
    once.train()
    assert len(list((tmp_path / "features").iterdir())) == 3
    for line, expected in zip(steps(once), steps(every_time), strict=True):
        assert line.keys() == expected.keys()
        for name in {"loss", "loss_relevance", "grad_norm"} & line.keys():
            assert line[name] == pytest.approx(expected[name], rel=1e-4), name

    monkeypatch.setattr("qtsplus.training.attention.answer_attention", None)
    build_trainer(load_stages(recipe_file, settings)[0])  # all is there
    with pytest.raises(TypeError):  # it would look from elsewhere
        build_trainer(load_stages(recipe_file, [*settings, "training.relevance_layers=[0]"])[0])


def test_a_teacher_with_other_videos_or_words_is_refused_by_a_recipe(
    recipe_file, tmp_path, tiny_published, monkeypatch
):
    def teacher(change, file="config.json"):
        folder = tmp_path / "other"
        folder.mkdir(exist_ok=True)
        for path in tiny_published.iterdir():
            if path.is_file():
                (folder / path.name).write_bytes(path.read_bytes())
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))
        return load_stages(recipe_file, [f"model.relevance_teacher={folder}"])[0]

    with pytest.raises(ValueError, match="temporal_patch_size"):
        build_trainer(teacher(lambda config: config["vision_config"].update(temporal_patch_size=1)))

    def another_word(content):
        content["model"]["vocab"]["another"] = 1000

    with pytest.raises(ValueError, match="whose tokenizer has other tokens"):
        build_trainer(teacher(another_word, "tokenizer.json"))
    with pytest.raises(ValueError, match="model.relevance_teacher is empty"):
        load_stages(recipe_file, ["model.relevance_teacher=''"])[0]
