"""Qwen2-VL with the query-aware selector: configuration, model and processor.

As Qwen2.5-VL, but its language model counts temporal patches where Qwen2.5-VL measures seconds.
"""

from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration, Qwen2VLModel
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from .configuration_qtsplus import as_selector_config, with_selector
from .mixin_qtsplus import QTSplusHeadMixin, QTSplusModelMixin, QTSplusPreTrainedMixin
from .processing_qtsplus import QTSplusProcessorMixin
from .prompt_qtsplus import IMAGE, VIDEO, VisualSpan


class Qwen2VLQTSplusConfig(Qwen2VLConfig):
    r"""
    Configuration of [`Qwen2VLQTSplusForConditionalGeneration`]: Qwen2-VL's, and a [`QTSplusConfig`].

    Args:
        qtsplus_config (`QTSplusConfig` or `dict`, *optional*): the selector; its defaults where absent.
        user_turn_token_ids, turn_end_token_id, special_token_ids: as in [`Qwen2_5_VLQTSplusConfig`].
    """

    model_type = "qwen2_vl_qtsplus"
    keys_to_ignore_at_inference = ["past_key_values", "qtsplus"]
    sub_configs, sub_configs_defaults = with_selector(Qwen2VLConfig)

    qtsplus_config: dict | PreTrainedConfig | None = None
    user_turn_token_ids: list[int] | tuple[int, ...] = (151644, 872)
    turn_end_token_id: int = 151645
    special_token_ids: list[int] | tuple[int, ...] = tuple(range(151643, 151657))

    def __post_init__(self, **kwargs):
        self.qtsplus_config = as_selector_config(self.qtsplus_config)
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)


class Qwen2VLQTSplusModel(QTSplusModelMixin, QTSplusPreTrainedMixin, Qwen2VLModel):
    """Qwen2-VL without a head, with a [`QTSplusSelector`] as `qtsplus`."""

    config: Qwen2VLQTSplusConfig
    config_class = Qwen2VLQTSplusConfig
    _no_split_modules = [*Qwen2VLModel._no_split_modules, "QTSplusSelector"]

    def __init__(self, config: Qwen2VLQTSplusConfig):
        super().__init__(config)
        self.qtsplus = self.build_selector(config)
        self.post_init()

    @property
    def tile_side(self) -> int:
        """As large as a window of Qwen2.5-VL; here every layer would tell it of other tiles."""
        return 4

    def merged_grid(self, grid_thw: torch.Tensor, modality: int = VIDEO) -> list[tuple[int, int, int]]:
        merge = self.config.vision_config.spatial_merge_size
        return [(t, h // merge, w // merge) for t, h, w in grid_thw.tolist()]

    def language_positions(self, spans: list[VisualSpan], start: int, positions: torch.Tensor) -> torch.Tensor:
        """One position per temporal patch, as along an image."""
        images = [replace(span, modality=IMAGE) for span in spans]
        return self.row_positions(images, positions.shape[1], start, [], positions.device)


class Qwen2VLQTSplusForConditionalGeneration(QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen2VLForConditionalGeneration):
    """Qwen2-VL that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen2VLQTSplusConfig
    config_class = Qwen2VLQTSplusConfig
    _no_split_modules = [*Qwen2VLModel._no_split_modules, "QTSplusSelector"]
    backbone_name = "Qwen2-VL"

    def __init__(self, config: Qwen2VLQTSplusConfig):
        # The stock one would build a stock model first.
        super(Qwen2VLForConditionalGeneration, self).__init__(config)
        self.model = Qwen2VLQTSplusModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


class Qwen2VLQTSplusProcessor(QTSplusProcessorMixin, Qwen2VLProcessor):
    r"""[`Qwen2VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""


Qwen2VLQTSplusProcessor.register_for_auto_class()

__all__ = [
    "Qwen2VLQTSplusConfig",
    "Qwen2VLQTSplusForConditionalGeneration",
    "Qwen2VLQTSplusModel",
    "Qwen2VLQTSplusProcessor",
]
