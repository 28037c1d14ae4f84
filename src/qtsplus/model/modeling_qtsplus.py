"""
Qwen2.5-VL and Qwen2-VL with the query-aware selector between the visual merger and the language model. Each has only
what differs from layout_qtsplus.py.
"""

from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration, Qwen2VLModel

from .configuration_qtsplus import (
    Qwen2_5_VLQTSplusConfig,
    Qwen2VLQTSplusConfig,
)
from .encoding_qtsplus import WindowsTogether
from .generation_qtsplus import QTSplusPreTrainedMixin
from .mixin_qtsplus import QTSplusHeadMixin, QwenVLQTSplusModelMixin


class Qwen2_5_VLQTSplusModel(QwenVLQTSplusModelMixin, QTSplusPreTrainedMixin, Qwen2_5_VLModel):
    """Qwen2.5-VL without a head, with a [`QTSplusSelector`] as `qtsplus`."""

    config: Qwen2_5_VLQTSplusConfig
    language_seconds = True

    def __init__(self, config: Qwen2_5_VLQTSplusConfig):
        super().__init__(config)
        for block in self.visual.blocks:
            block.attn = WindowsTogether(block.attn)


class Qwen2_5_VLQTSplusForConditionalGeneration(
    QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen2_5_VLForConditionalGeneration
):
    """Qwen2.5-VL that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen2_5_VLQTSplusConfig
    stock_class = Qwen2_5_VLForConditionalGeneration
    model_class = Qwen2_5_VLQTSplusModel
    backbone_name = "Qwen2.5-VL"


class Qwen2VLQTSplusModel(QwenVLQTSplusModelMixin, QTSplusPreTrainedMixin, Qwen2VLModel):
    """Qwen2-VL without a head, with a [`QTSplusSelector`] as `qtsplus`."""

    config: Qwen2VLQTSplusConfig


class Qwen2VLQTSplusForConditionalGeneration(QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen2VLForConditionalGeneration):
    """Qwen2-VL that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen2VLQTSplusConfig
    stock_class = Qwen2VLForConditionalGeneration
    model_class = Qwen2VLQTSplusModel
    backbone_name = "Qwen2-VL"


__all__ = [
    "Qwen2VLQTSplusForConditionalGeneration",
    "Qwen2VLQTSplusModel",
    "Qwen2_5_VLQTSplusForConditionalGeneration",
    "Qwen2_5_VLQTSplusModel",
]
