"""InternVL (2.5 and 3) with the query-aware selector: configuration, model and processor.

A video is a sequence of frames, each with "Frame1: " and so on in front. Stock InternVL knows images alone; here a
video's placeholders have an id of their own (`config.video_token_id`), so that the model can tell one from the other.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.internvl.configuration_internvl import InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLForConditionalGeneration, InternVLModel
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.processing_utils import ProcessorMixin

from .configuration_qtsplus import as_selector_config, with_selector
from .mixin_qtsplus import QTSplusHeadMixin, QTSplusModelMixin, QTSplusPreTrainedMixin
from .processing_qtsplus import QTSplusFramesMixin
from .prompt_qtsplus import VIDEO


class InternVLQTSplusConfig(InternVLConfig):
    r"""
    Configuration of [`InternVLQTSplusForConditionalGeneration`]: InternVL's, and a [`QTSplusConfig`].

    Args:
        qtsplus_config (`QTSplusConfig` or `dict`, *optional*): the selector; its defaults where absent.
        video_token_id (`int`): the placeholder of a video's tokens, an id of the vocabulary that no text has. Its
            embedding is never seen. By default Qwen2.5's `<|video_pad|>`, which InternVL does not use.
        user_turn_token_ids, turn_end_token_id, special_token_ids: as in [`Qwen2_5_VLQTSplusConfig`].
        frame_text_token_ids (`list[int]`): the ids that open the text in front of a frame (`Frame`).

    Raises:
        ValueError: a `video_token_id` that is not in the vocabulary.
    """

    model_type = "internvl_qtsplus"
    keys_to_ignore_at_inference = ["past_key_values", "qtsplus"]
    sub_configs, sub_configs_defaults = with_selector(InternVLConfig)

    qtsplus_config: dict | PreTrainedConfig | None = None
    video_token_id: int = 151656
    user_turn_token_ids: list[int] | tuple[int, ...] = (151644, 872)
    turn_end_token_id: int = 151645
    special_token_ids: list[int] | tuple[int, ...] = tuple(range(151643, 151674))
    frame_text_token_ids: list[int] | tuple[int, ...] = ()

    def __post_init__(self, **kwargs):
        self.qtsplus_config = as_selector_config(self.qtsplus_config)
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)
        if self.video_token_id >= self.text_config.vocab_size or self.video_token_id == self.image_token_id:
            raise ValueError(
                f"video_token_id={self.video_token_id}: expected an id below {self.text_config.vocab_size}, the size "
                f"of the vocabulary, that no text has and that is not image_token_id ({self.image_token_id})."
            )


class InternVLQTSplusModel(QTSplusModelMixin, QTSplusPreTrainedMixin, InternVLModel):
    """InternVL without a head, with a [`QTSplusSelector`] as `qtsplus`. Grids count tokens."""

    config: InternVLQTSplusConfig
    config_class = InternVLQTSplusConfig
    _no_split_modules = ["QTSplusSelector"]
    rope_axes = 1
    frames_apart = True

    def __init__(self, config: InternVLQTSplusConfig):
        super().__init__(config)
        self.qtsplus = self.build_selector(config)
        self.post_init()

    def merged_grid(self, grid_thw: torch.Tensor, modality: int = VIDEO) -> list[tuple[int, int, int]]:
        return [(t, h, w) for t, h, w in grid_thw.tolist()]

    def pixel_rows(self, grid_thw: torch.Tensor) -> list[int]:
        return grid_thw[:, 0].tolist()

    @property
    def patches_per_row(self) -> int:
        vision = self.config.vision_config
        return math.prod(size // patch for size, patch in zip(vision.image_size, vision.patch_size, strict=True))

    def encode_pixels(self, modality: int, pixels: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        tokens = self.get_image_features(pixels, return_dict=True).pooler_output
        return [frames.flatten(0, 1) for frames in tokens.split(self.pixel_rows(grid_thw))]


class InternVLQTSplusForConditionalGeneration(
    QTSplusHeadMixin, QTSplusPreTrainedMixin, InternVLForConditionalGeneration
):
    """InternVL that reads a video through a [`QTSplusSelector`]; used as the stock class is, with its own processor."""

    config: InternVLQTSplusConfig
    config_class = InternVLQTSplusConfig
    _no_split_modules = ["QTSplusSelector"]
    backbone_name = "InternVL"

    def __init__(self, config: InternVLQTSplusConfig):
        # The stock one would build a stock model first.
        super(InternVLForConditionalGeneration, self).__init__(config)
        self.model = InternVLQTSplusModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


class _ApartProcessor(InternVLProcessor):
    """[`InternVLProcessor`] that keeps images and videos apart."""

    video_placeholder_id: int
    grid_of: Any

    def __call__(self, images=None, text=None, videos=None, **kwargs):
        # The stock method would mix the pixels of images and videos.
        inputs = ProcessorMixin.__call__(self, images=images, text=text, videos=videos, **kwargs)
        if videos is not None and text is not None:
            inputs["input_ids"] = self._mark_videos(inputs["input_ids"])
        return inputs

    def _mark_videos(self, ids):
        if isinstance(ids, list):
            return [self._mark_videos(row) for row in ids]
        if isinstance(ids, int):
            return self.video_placeholder_id if ids == self.tokenizer.video_token_id else ids
        ids[ids == self.tokenizer.video_token_id] = self.video_placeholder_id
        return ids

    def _process_images(self, images, **kwargs):
        processed, texts = super()._process_images(images, **kwargs)
        processed["image_grid_thw"] = torch.cat([self.grid_of(int(tiles)) for tiles in processed.pop("num_patches")])
        return processed, texts

    def replace_video_token(self, video_inputs, video_idx, **kwargs):
        frame = f"{self.start_image_token}{self.video_token * self.image_seq_length}{self.end_image_token}"
        count = len(video_inputs["pixel_values_videos"][video_idx])
        return "\n".join(f"Frame{index + 1}: {frame}" for index in range(count))


class InternVLQTSplusProcessor(QTSplusFramesMixin, _ApartProcessor):
    r"""
    [`InternVLProcessor`] that also says which tokens are the question, and reads videos with their true times.

    Args:
        video_placeholder_id (`int`, *optional*): `config.video_token_id`; the tokenizer's `<|video_pad|>` if `None`, or
            its own placeholder of a video.
    """

    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        video_processor=None,
        image_seq_length: int = 256,
        chat_template=None,
        video_placeholder_id: int | None = None,
        **kwargs,
    ):
        super().__init__(image_processor, tokenizer, video_processor, image_seq_length, chat_template, **kwargs)
        if video_placeholder_id is None:
            unused = tokenizer.get_vocab().get("<|video_pad|>")
            video_placeholder_id = tokenizer.video_token_id if unused is None else unused
        self.video_placeholder_id = video_placeholder_id

    @property
    def tokens_per_side(self) -> int:
        return math.isqrt(self.image_seq_length)

    @property
    def placeholder_ids(self) -> list[int]:
        return [self.image_token_id, self.video_placeholder_id]

    def follow(self, config) -> None:
        self.video_placeholder_id = config.video_token_id

    @property
    def query_token_ids(self) -> dict[str, int | list[int]]:
        ids = super().query_token_ids
        special = {*ids["special_token_ids"], self.video_placeholder_id}
        return {
            **ids,
            "special_token_ids": sorted(special),
            "video_token_id": self.video_placeholder_id,
            "frame_text_token_ids": self.tokenizer("Frame1: ", add_special_tokens=False)["input_ids"][:1],
        }


InternVLQTSplusProcessor.register_for_auto_class()

__all__ = [
    "InternVLQTSplusConfig",
    "InternVLQTSplusForConditionalGeneration",
    "InternVLQTSplusModel",
    "InternVLQTSplusProcessor",
]
