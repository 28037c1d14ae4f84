"""The whole model against the reference: a converted checkpoint, its logits, tokens and training step."""

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.hub.checkpoint import REFERENCE, our_name
from qtsplus.hub.convert import convert_reference_config
from reference import load, meta
from tiny import assert_same, compress, run

E2E = ("case1", "e2e")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A folder made from the reference's checkpoint, as `from_pretrained` wants it."""
    folder = tmp_path_factory.mktemp("converted")
    config = convert_reference_config(meta(*E2E, "checkpoint", "config"), meta(*E2E, "vision", "config"))
    config.save_pretrained(folder)
    weights = {our_name(name, REFERENCE): tensor for name, tensor in load(*E2E, "checkpoint", "model").items()}
    weights["model.qtsplus.rho_history"] = torch.zeros(2, dtype=torch.int64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def model(converted):
    return Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(converted)


@pytest.fixture(scope="module")
def golden():
    return load(*E2E, "outputs")


def full_prompt(name: str = "inputs") -> dict[str, torch.Tensor]:
    """The reference's prompt has one placeholder per video; ours has one per visual token, as Qwen2.5-VL's does."""
    inputs = load(*E2E, "inputs")
    facts = meta(*E2E, "meta")
    ids = inputs["input_ids"][0].tolist()
    at = ids.index(facts["video_token_id"])

    def spread(row, value):
        return torch.tensor([row[:at] + [value] * facts["M"] + row[at + 1 :]])

    full = {
        "input_ids": spread(ids, facts["video_token_id"]),
        "attention_mask": spread(inputs["attention_mask"][0].tolist(), 1),
        "pixel_values_videos": inputs["pixel_values_videos"],
        "video_grid_thw": inputs["video_grid_thw"],
        "query_input_ids": inputs["question_input_ids"],
    }
    if name == "train":
        full["labels"] = spread(load(*E2E, "train")["labels"][0].tolist(), -100)
    return full


def test_forward(model, golden):
    output = run(model, full_prompt())
    assert output.qtsplus.kept_indices[0].tolist() == golden["indices"].tolist()
    assert output.qtsplus.n.tolist() == golden["n"].tolist()
    assert_close(output.qtsplus.relevance[0], golden["r"][0], atol=2e-6, rtol=1e-5)
    assert_close(output.qtsplus.rho, golden["rho"], atol=1e-6, rtol=1e-6)
    assert_close(output.logits, golden["logits"], atol=5e-4, rtol=1e-5)


def test_compact_prompt(model, golden):
    inputs = full_prompt()
    with torch.no_grad():
        prompt = compress(model.model, **inputs)
        features = model.model.get_video_features(
            inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True
        ).pooler_output[0]
        embeds = model.model.splice(model.get_input_embeddings()(prompt.input_ids), prompt.input_ids, prompt.features)
    assert_close(features, golden["vision_features"], atol=5e-6, rtol=1e-5)
    # The reference's own float32 is 1.3e-5 from the same weights in float64; so is ours without AVX-512.
    assert_close(prompt.features["video"][0], golden["Z"], atol=2e-5, rtol=1e-5)
    assert_close(embeds, golden["inputs_embeds"], atol=2e-5, rtol=1e-5)
    assert_same(prompt.position_ids[1:], golden["position_ids_forward"])


def test_greedy_tokens(model, golden):
    inputs = full_prompt()
    output = model.generate(
        **inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    answer = output.sequences[0, inputs["input_ids"].shape[1] :]
    assert answer.tolist() == golden["generated_new_tokens"].tolist() == meta(*E2E, "meta")["greedy_tokens"]
    assert_close(torch.cat(output.logits), golden["generate_step_logits"], atol=5e-4, rtol=1e-5)


def test_training_step(model, monkeypatch):
    golden = load(*E2E, "train")
    monkeypatch.setattr("qtsplus.model.selector_qtsplus.gumbel_noise", lambda n, device: golden["gumbel"][0])
    output = model.train()(**full_prompt("train"))
    qtsplus = output.qtsplus
    assert qtsplus.kept_indices[0].tolist() == golden["indices"].tolist()
    assert_close(qtsplus.threshold, golden["t"], atol=1e-6, rtol=1e-6)
    assert_close(output.logits, golden["logits"], atol=5e-4, rtol=1e-5)
    assert_close(qtsplus.loss_t, golden["loss_flops"], atol=1e-8, rtol=1e-5)
    assert_close(qtsplus.loss_m, golden["loss_kv"], atol=1e-8, rtol=1e-5)
    assert_close(qtsplus.loss_s, golden["loss_smooth"], atol=1e-8, rtol=1e-5)
    assert_close(output.loss, golden["total_loss"], atol=1e-5, rtol=1e-6)

    output.loss.backward()
    parameters = dict(model.named_parameters())
    gradients = {key.removeprefix("grad/"): value for key, value in golden.items() if key.startswith("grad/")}
    assert len(gradients) == 7
    for name, gradient in gradients.items():
        mine = parameters[our_name(name, REFERENCE)].grad
        assert_close(mine, gradient, atol=float(2e-5 * gradient.abs().max()), rtol=1e-4)
