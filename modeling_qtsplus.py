"""Qwen2.5-VL with the query-aware selector between the visual merger and the language model."""

import torch
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
    Qwen2_5_VLPreTrainedModel,
)

from .attention_qtsplus import VARLEN_ATTENTION, attend_together
from .configuration_qtsplus import Qwen2_5_VLQTSplusConfig
from .mixin_qtsplus import (
    QTSplusCausalLMOutputWithPast,
    QTSplusHeadMixin,
    QTSplusModelMixin,
    QTSplusModelOutputWithPast,
    QTSplusPreTrainedMixin,
)
from .prompt_qtsplus import VIDEO


class Qwen2_5_VLQTSplusModel(QTSplusModelMixin, QTSplusPreTrainedMixin, Qwen2_5_VLModel):
    """
    Qwen2.5-VL without a head, with a [`QTSplusSelector`] as `qtsplus`.

    The vision tower attends by `"qtsplus_varlen"`, unless `attn_implementation` names another function for the model or
    for its `"vision_config"`.
    """

    config: Qwen2_5_VLQTSplusConfig
    config_class = Qwen2_5_VLQTSplusConfig
    _no_split_modules = [*Qwen2_5_VLPreTrainedModel._no_split_modules, "QTSplusSelector"]

    def __init__(self, config: Qwen2_5_VLQTSplusConfig):
        if config.vision_config._attn_implementation is None:
            config.vision_config._attn_implementation = VARLEN_ATTENTION
        super().__init__(config)
        for block in self.visual.blocks:
            block.attn.register_forward_pre_hook(attend_together, with_kwargs=True)
        self.qtsplus = self.build_selector(config)
        self.post_init()

    @property
    def tokens_per_second(self) -> float:
        return self.config.vision_config.tokens_per_second

    @property
    def tile_side(self) -> int:
        """A window of attention. Only layers over whole frames tell it of other tiles."""
        vision = self.config.vision_config
        return vision.window_size // vision.patch_size // vision.spatial_merge_size

    def merged_grid(self, grid_thw: torch.Tensor, modality: int = VIDEO) -> list[tuple[int, int, int]]:
        merge = self.config.vision_config.spatial_merge_size
        return [(t, h // merge, w // merge) for t, h, w in grid_thw.tolist()]


class Qwen2_5_VLQTSplusForConditionalGeneration(
    QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen2_5_VLForConditionalGeneration
):
    """Qwen2.5-VL that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen2_5_VLQTSplusConfig
    config_class = Qwen2_5_VLQTSplusConfig
    _no_split_modules = [*Qwen2_5_VLPreTrainedModel._no_split_modules, "QTSplusSelector"]
    backbone_name = "Qwen2.5-VL"

    def __init__(self, config: Qwen2_5_VLQTSplusConfig):
        # The stock one would build a stock model first.
        super(Qwen2_5_VLForConditionalGeneration, self).__init__(config)
        self.model = Qwen2_5_VLQTSplusModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


__all__ = [
    "QTSplusCausalLMOutputWithPast",
    "QTSplusModelOutputWithPast",
    "Qwen2_5_VLQTSplusForConditionalGeneration",
    "Qwen2_5_VLQTSplusModel",
]
