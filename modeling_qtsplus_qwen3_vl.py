"""Qwen3-VL with the query-aware selector: configuration, model and processor.

Qwen3-VL gives every temporal patch of a video its time as text ("<0.5 seconds>"), and adds features of earlier vision
layers to the first layers of the language model (DeepStack). Behind the features of every token stand those for the
deeper layers, so that whoever keeps a token keeps all of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration, Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from .configuration_qtsplus import as_selector_config, with_selector
from .mixin_qtsplus import QTSplusHeadMixin, QTSplusModelMixin, QTSplusPreTrainedMixin
from .processing_qtsplus import QTSplusProcessorMixin
from .prompt_qtsplus import IMAGE, TEXT, VIDEO, VisualSpan


class Qwen3VLQTSplusConfig(Qwen3VLConfig):
    r"""
    Configuration of [`Qwen3VLQTSplusForConditionalGeneration`]: Qwen3-VL's, and a [`QTSplusConfig`].

    Args:
        qtsplus_config (`QTSplusConfig` or `dict`, *optional*): the selector; its defaults where absent.
        user_turn_token_ids, turn_end_token_id, special_token_ids: as in [`Qwen2_5_VLQTSplusConfig`].
        frame_text_token_ids (`list[int]`): the ids that open the time in front of a frame (`<`).
    """

    model_type = "qwen3_vl_qtsplus"
    keys_to_ignore_at_inference = ["past_key_values", "qtsplus"]
    sub_configs, sub_configs_defaults = with_selector(Qwen3VLConfig)

    qtsplus_config: dict | PreTrainedConfig | None = None
    user_turn_token_ids: list[int] | tuple[int, ...] = (151644, 872)
    turn_end_token_id: int = 151645
    special_token_ids: list[int] | tuple[int, ...] = tuple(range(151643, 151657))
    frame_text_token_ids: list[int] | tuple[int, ...] = (27,)

    def __post_init__(self, **kwargs):
        self.qtsplus_config = as_selector_config(self.qtsplus_config)
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)


class Qwen3VLQTSplusModel(QTSplusModelMixin, QTSplusPreTrainedMixin, Qwen3VLModel):
    """Qwen3-VL without a head, with a [`QTSplusSelector`] as `qtsplus`."""

    config: Qwen3VLQTSplusConfig
    config_class = Qwen3VLQTSplusConfig
    _no_split_modules = [*Qwen3VLModel._no_split_modules, "QTSplusSelector"]
    frames_apart = True

    def __init__(self, config: Qwen3VLQTSplusConfig):
        super().__init__(config)
        self.qtsplus = self.build_selector(config)
        self.post_init()

    @property
    def token_width(self) -> int:
        return super().token_width * (1 + len(self.config.vision_config.deepstack_visual_indexes))

    def merged_grid(self, grid_thw: torch.Tensor, modality: int = VIDEO) -> list[tuple[int, int, int]]:
        merge = self.config.vision_config.spatial_merge_size
        return [(t, h // merge, w // merge) for t, h, w in grid_thw.tolist()]

    def encode_pixels(self, modality: int, pixels: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        encoded = self.get_image_features(pixels, grid_thw, return_dict=True)  # videos are encoded the same way
        sizes = [len(tokens) for tokens in encoded.pooler_output]
        # Split by image from Transformers 5.18 on, whole before.
        deeper = [layer if torch.is_tensor(layer) else torch.cat(layer) for layer in encoded.deepstack_features]
        return list(torch.cat([torch.cat(encoded.pooler_output), *deeper], dim=1).split(sizes))

    def language_positions(self, spans: list[VisualSpan], start: int, positions: torch.Tensor) -> torch.Tensor:
        """Time is text here: every frame stands like an image."""
        images = [replace(span, modality=IMAGE, frame=0) for span in spans]
        return self.row_positions(images, positions.shape[1], start, [], positions.device)

    def language_inputs(
        self, inputs_embeds: torch.Tensor, input_ids: torch.Tensor, features: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, Any]:
        width = inputs_embeds.shape[-1]
        wide = nn.functional.pad(inputs_embeds, (0, self.token_width - width))
        wide = self.splice(wide, input_ids, features)
        visual = self.token_types(input_ids) != TEXT
        return {
            "inputs_embeds": wide[..., :width],
            "visual_pos_masks": visual,
            "deepstack_visual_embeds": list(wide[visual][:, width:].split(width, dim=1)),
        }


class Qwen3VLQTSplusForConditionalGeneration(QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen3VLForConditionalGeneration):
    """Qwen3-VL that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen3VLQTSplusConfig
    config_class = Qwen3VLQTSplusConfig
    _no_split_modules = [*Qwen3VLModel._no_split_modules, "QTSplusSelector"]
    backbone_name = "Qwen3-VL"

    def __init__(self, config: Qwen3VLQTSplusConfig):
        # The stock one would build a stock model first.
        super(Qwen3VLForConditionalGeneration, self).__init__(config)
        self.model = Qwen3VLQTSplusModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


class Qwen3VLQTSplusProcessor(QTSplusProcessorMixin, Qwen3VLProcessor):
    r"""[`Qwen3VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""

    @property
    def query_token_ids(self) -> dict[str, int | list[int]]:
        return {
            **super().query_token_ids,
            "video_token_id": self.video_token_id,
            "frame_text_token_ids": self.tokenizer("<0.5 seconds>", add_special_tokens=False)["input_ids"][:1],
        }


Qwen3VLQTSplusProcessor.register_for_auto_class()

__all__ = [
    "Qwen3VLQTSplusConfig",
    "Qwen3VLQTSplusForConditionalGeneration",
    "Qwen3VLQTSplusModel",
    "Qwen3VLQTSplusProcessor",
]
