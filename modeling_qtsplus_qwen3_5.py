"""Qwen3.5 (dense) with the query-aware selector: configuration, model and processor.

As Qwen3-VL, every temporal patch of a video has its time as text ("<0.5 seconds>") in front. There is no DeepStack, and
most layers of the language model are linear attention: they carry a state from token to token, without keys.
"""

from dataclasses import replace

import torch
import transformers
from torch import nn

try:
    from transformers import PreTrainedConfig
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5Model
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
except ImportError as error:
    raise ImportError(
        f"Transformers {transformers.__version__} has no Qwen3.5: install 5.17 or newer (pip install -U transformers)."
    ) from error

from .configuration_qtsplus import as_selector_config, with_selector
from .mixin_qtsplus import QTSplusHeadMixin, QTSplusModelMixin, QTSplusPreTrainedMixin
from .processing_qtsplus import QTSplusProcessorMixin
from .prompt_qtsplus import IMAGE, VIDEO, VisualSpan


class Qwen3_5QTSplusConfig(Qwen3_5Config):
    r"""
    Configuration of [`Qwen3_5QTSplusForConditionalGeneration`]: Qwen3.5's, and a [`QTSplusConfig`].

    Args:
        qtsplus_config (`QTSplusConfig` or `dict`, *optional*): the selector; its defaults where absent.
        user_turn_token_ids, turn_end_token_id, special_token_ids: as in [`Qwen2_5_VLQTSplusConfig`].
        frame_text_token_ids (`list[int]`): the ids that open the time in front of a frame (`<`).
    """

    model_type = "qwen3_5_qtsplus"
    keys_to_ignore_at_inference = ["past_key_values", "qtsplus"]
    sub_configs, sub_configs_defaults = with_selector(Qwen3_5Config)

    qtsplus_config: dict | PreTrainedConfig | None = None
    user_turn_token_ids: list[int] | tuple[int, ...] = (248045, 846)
    turn_end_token_id: int = 248046
    special_token_ids: list[int] | tuple[int, ...] = tuple(range(248044, 248058))
    frame_text_token_ids: list[int] | tuple[int, ...] = (27,)

    def __post_init__(self, **kwargs):
        self.qtsplus_config = as_selector_config(self.qtsplus_config)
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)


class Qwen3_5QTSplusModel(QTSplusModelMixin, QTSplusPreTrainedMixin, Qwen3_5Model):
    """Qwen3.5 without a head, with a [`QTSplusSelector`] as `qtsplus`."""

    config: Qwen3_5QTSplusConfig
    config_class = Qwen3_5QTSplusConfig
    _no_split_modules = [*Qwen3_5Model._no_split_modules, "QTSplusSelector"]
    frames_apart = True
    recurrent = True

    def __init__(self, config: Qwen3_5QTSplusConfig):
        super().__init__(config)
        self.qtsplus = self.build_selector(config)
        self.post_init()

    def merged_grid(self, grid_thw: torch.Tensor, modality: int = VIDEO) -> list[tuple[int, int, int]]:
        merge = self.config.vision_config.spatial_merge_size
        return [(t, h // merge, w // merge) for t, h, w in grid_thw.tolist()]

    def language_positions(self, spans: list[VisualSpan], start: int, positions: torch.Tensor) -> torch.Tensor:
        """Time is text here: every frame stands like an image."""
        images = [replace(span, modality=IMAGE, frame=0) for span in spans]
        return self.row_positions(images, positions.shape[1], start, [], positions.device)


class Qwen3_5QTSplusForConditionalGeneration(QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen3_5ForConditionalGeneration):
    """Qwen3.5 that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen3_5QTSplusConfig
    config_class = Qwen3_5QTSplusConfig
    _no_split_modules = [*Qwen3_5Model._no_split_modules, "QTSplusSelector"]
    backbone_name = "Qwen3.5"

    def __init__(self, config: Qwen3_5QTSplusConfig):
        # The stock one would build a stock model first.
        super(Qwen3_5ForConditionalGeneration, self).__init__(config)
        self.model = Qwen3_5QTSplusModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


class Qwen3_5QTSplusProcessor(QTSplusProcessorMixin, Qwen3VLProcessor):
    r"""[`Qwen3VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""

    @property
    def query_token_ids(self) -> dict[str, int | list[int]]:
        return {
            **super().query_token_ids,
            "video_token_id": self.video_token_id,
            "frame_text_token_ids": self.tokenizer("<0.5 seconds>", add_special_tokens=False)["input_ids"][:1],
        }


Qwen3_5QTSplusProcessor.register_for_auto_class()

__all__ = [
    "Qwen3_5QTSplusConfig",
    "Qwen3_5QTSplusForConditionalGeneration",
    "Qwen3_5QTSplusModel",
    "Qwen3_5QTSplusProcessor",
]
