"""
Qwen3-VL and Qwen3.5 (dense) with the query-aware selector between the visual merger and the language model. This file
has only what differs from Qwen2.5-VL.
"""

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration, Qwen3VLModel

from .configuration_qtsplus import Qwen3_5QTSplusConfig, Qwen3VLQTSplusConfig
from .encoding_qtsplus import tower_inputs
from .generation_qtsplus import QTSplusPreTrainedMixin
from .layout_qtsplus import FeaturesOfRows
from .mixin_qtsplus import QTSplusHeadMixin, QwenVLQTSplusModelMixin


class Qwen3QTSplusModelMixin(QwenVLQTSplusModelMixin):
    """In the prompt the time of every temporal patch, such as "<0.5 seconds>", precedes its tokens."""

    frames_apart = True


class Qwen3VLQTSplusModel(Qwen3QTSplusModelMixin, QTSplusPreTrainedMixin, Qwen3VLModel):
    """
    Qwen3-VL without a head, with a [`QTSplusSelector`] as `qtsplus`. Qwen3-VL adds features of earlier vision layers to
    the first layers of the language model (DeepStack). Here every token carries them behind its own features.
    """

    config: Qwen3VLQTSplusConfig

    @property
    def token_width(self) -> int:
        num_deepstack_layers = len(self.config.vision_config.deepstack_visual_indexes)
        return super().token_width * (1 + num_deepstack_layers)

    def encode_pixels(self, pixels: Tensor, grid_thw: Tensor) -> list[Tensor]:
        encoded = self.get_image_features(pixels, grid_thw, return_dict=True, **tower_inputs(self.visual, grid_thw))
        sizes = [len(tokens) for tokens in encoded.pooler_output]
        layers = [torch.cat(encoded.pooler_output)]
        for layer in encoded.deepstack_features:
            if not torch.is_tensor(layer):  # from Transformers 5.18 on it is divided by image
                layer = torch.cat(layer)
            layers.append(layer)
        return list(torch.cat(layers, dim=1).split(sizes))

    def language_inputs(self, inputs_embeds: Tensor, input_ids: Tensor, features: FeaturesOfRows) -> dict:
        width = inputs_embeds.shape[-1]
        padded = nn.functional.pad(inputs_embeds, (0, self.token_width - width))
        padded = self.splice(padded, input_ids, features)
        # The layers add DeepStack's features at `visual_pos_masks`. With a mask of the visual tokens the host would
        # wait in each layer. An index of all rows of the batch adds them everywhere, and those of text are zeros.
        return {
            "inputs_embeds": padded[..., :width],
            "visual_pos_masks": torch.arange(len(padded), device=padded.device),
            "deepstack_visual_embeds": list(padded[..., width:].split(width, dim=-1)),
        }


class Qwen3VLQTSplusForConditionalGeneration(QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen3VLForConditionalGeneration):
    """Qwen3-VL that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen3VLQTSplusConfig
    stock_class = Qwen3VLForConditionalGeneration
    model_class = Qwen3VLQTSplusModel
    backbone_name = "Qwen3-VL"


class Qwen3_5QTSplusModel(Qwen3QTSplusModelMixin, QTSplusPreTrainedMixin, Qwen3_5Model):
    """
    Qwen3.5 without a head, with a [`QTSplusSelector`] as `qtsplus`. There is no DeepStack, and most layers of the
    language model are linear attention: they carry a state from token to token, without keys.
    """

    config: Qwen3_5QTSplusConfig


class Qwen3_5QTSplusForConditionalGeneration(QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen3_5ForConditionalGeneration):
    """Qwen3.5 that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen3_5QTSplusConfig
    stock_class = Qwen3_5ForConditionalGeneration
    model_class = Qwen3_5QTSplusModel
    backbone_name = "Qwen3.5"
    projections = rf"{QTSplusHeadMixin.projections}|linear_attn\.(in_proj_(qkv|z|a|b)|out_proj)"


__all__ = [
    "Qwen3VLQTSplusForConditionalGeneration",
    "Qwen3VLQTSplusModel",
    "Qwen3_5QTSplusForConditionalGeneration",
    "Qwen3_5QTSplusModel",
]
