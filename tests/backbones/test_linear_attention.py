"""What Qwen3.5 has that no other backbone has: layers of linear attention, and heads wider than the hidden states."""

import pytest
import torch

from qtsplus.training.lora import add_lora, lora_config
from tiny_backbones import QWEN3_5


@pytest.fixture(scope="module")
def own_processor():
    return QWEN3_5.processor()


def test_heads_that_do_not_divide_the_hidden_states(own_processor):
    """As in Qwen3.5-27B: 24 heads of 256 beside 5,120."""
    config = QWEN3_5.config(own_processor, {})
    config.text_config.num_attention_heads = 6
    config.text_config.head_dim = 16
    with torch.device("meta"):
        selector = QWEN3_5.model(config).model.qtsplus
    assert selector.head_dim == 16
    assert 2 * sum(selector.mrope_section) == 16


def test_lora_reaches_every_projection_of_the_language_model(own_processor):
    """And no other: the vision tower and the selector have projections too."""
    model = QWEN3_5.build(own_processor)
    within = "model.language_model.layers."
    projections = {
        name for name, module in model.named_modules() if within in name and isinstance(module, torch.nn.Linear)
    }
    adapted = add_lora(model, lora_config(2)).get_base_model()
    found = {name.removesuffix(".lora_A") for name, _ in adapted.named_modules() if name.endswith(".lora_A")}
    assert found == projections
    assert any(".linear_attn." in name for name in found)
