"""LLaVA-OneVision and LLaVA-Video with the query-aware selector: configuration, model and processor.

The two lay a video out alike, 14 x 14 pooled tokens per frame, but for their newlines: LLaVA-OneVision ends the video
with one, LLaVA-Video every row of every frame. Newlines are never scored; one stays where a token that it ends stays.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llava_onevision.configuration_llava_onevision import LlavaOnevisionConfig
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionModel,
    image_size_to_num_patches,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from .configuration_qtsplus import as_selector_config, with_selector
from .mixin_qtsplus import QTSplusHeadMixin, QTSplusModelMixin, QTSplusPreTrainedMixin
from .processing_qtsplus import QTSplusFramesMixin
from .prompt_qtsplus import IMAGE, VIDEO

NEWLINES = ("video", "row")


class LlavaOnevisionQTSplusConfig(LlavaOnevisionConfig):
    r"""
    Configuration of [`LlavaOnevisionQTSplusForConditionalGeneration`]: LLaVA-OneVision's, and a [`QTSplusConfig`].

    Args:
        qtsplus_config (`QTSplusConfig` or `dict`, *optional*): the selector; its defaults where absent.
        video_newline (`str`): what a newline ends: the `"video"` in LLaVA-OneVision, every `"row"` in LLaVA-Video
            (its `mm_newline_position="grid"`).
        user_turn_token_ids, turn_end_token_id, special_token_ids: as in [`Qwen2_5_VLQTSplusConfig`].

    Raises:
        ValueError: another `video_newline`; `select_images`, for the newlines of an image lie among its tokens.
    """

    model_type = "llava_onevision_qtsplus"
    keys_to_ignore_at_inference = ["past_key_values", "qtsplus"]
    sub_configs, sub_configs_defaults = with_selector(LlavaOnevisionConfig)

    qtsplus_config: dict | PreTrainedConfig | None = None
    video_newline: str = "video"
    user_turn_token_ids: list[int] | tuple[int, ...] = (151644, 872)
    turn_end_token_id: int = 151645
    special_token_ids: list[int] | tuple[int, ...] = tuple(range(151643, 151648))

    def __post_init__(self, **kwargs):
        self.qtsplus_config = as_selector_config(self.qtsplus_config)
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)
        if self.video_newline not in NEWLINES:
            raise ValueError(f"video_newline={self.video_newline!r}: expected one of {NEWLINES}.")
        if self.qtsplus_config.select_images:
            raise ValueError("select_images=True: expected False, LLaVA-OneVision's images have newlines among them.")


class LlavaOnevisionQTSplusModel(QTSplusModelMixin, QTSplusPreTrainedMixin, LlavaOnevisionModel):
    """
    LLaVA-OneVision without a head, with a [`QTSplusSelector`] as `qtsplus`.

    `video_grid_thw` counts tokens; `image_grid_thw` is (crops, height, width) of an image before it was cut.
    """

    config: LlavaOnevisionQTSplusConfig
    config_class = LlavaOnevisionQTSplusConfig
    _no_split_modules = ["QTSplusSelector"]
    rope_axes = 1

    def __init__(self, config: LlavaOnevisionQTSplusConfig):
        super().__init__(config)
        self.qtsplus = self.build_selector(config)
        self.post_init()

    def merged_grid(self, grid_thw: torch.Tensor, modality: int = VIDEO) -> list[tuple[int, int, int]]:
        if modality == VIDEO:
            return [(t, h, w) for t, h, w in grid_thw.tolist()]
        # How many tokens an image becomes is asked of the stock packing, with features without values.
        vision = self.config.vision_config
        side, newline = vision.image_size // vision.patch_size, torch.empty(1, device="meta")
        blank = [torch.empty(crops, side * side, 1, device="meta") for crops, _, _ in grid_thw.tolist()]
        aspect = self.config.vision_aspect_ratio
        packed, _ = self.pack_image_features(blank, grid_thw[:, 1:].cpu(), newline, vision_aspect_ratio=aspect)
        return [(1, 1, len(image)) for image in packed]

    def pixel_rows(self, grid_thw: torch.Tensor) -> list[int]:
        return grid_thw[:, 0].tolist()

    @property
    def patches_per_row(self) -> int:
        return (self.config.vision_config.image_size // self.config.vision_config.patch_size) ** 2

    def line_length(self, modality: int, grid: tuple[int, int, int]) -> int:
        if modality == IMAGE:
            return 0
        return math.prod(grid) if self.config.video_newline == "video" else grid[2]

    @property
    def line_end(self) -> torch.Tensor:
        return self.image_newline

    def encode_pixels(self, modality: int, pixels: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        if modality == VIDEO:
            tokens = self.get_video_features(pixels[None], return_dict=True).pooler_output[0]
            return list(tokens[: int(grid_thw.prod(-1).sum())].split(grid_thw.prod(-1).tolist()))
        features = []
        for crops, (count, *size) in zip(pixels.split(self.pixel_rows(grid_thw)), grid_thw.tolist(), strict=True):
            # The stock method cuts an image that is the only one of its prompt.
            size, alone = torch.tensor([size]), torch.tensor([1 if count > 1 else 2])
            features += self.get_image_features(crops, size, batch_num_images=alone, return_dict=True).pooler_output
        return features


class LlavaOnevisionQTSplusForConditionalGeneration(
    QTSplusHeadMixin, QTSplusPreTrainedMixin, LlavaOnevisionForConditionalGeneration
):
    """LLaVA-OneVision or LLaVA-Video that reads a video through a [`QTSplusSelector`], with its own processor."""

    config: LlavaOnevisionQTSplusConfig
    config_class = LlavaOnevisionQTSplusConfig
    _no_split_modules = ["QTSplusSelector"]
    backbone_name = "LLaVA-OneVision"

    def __init__(self, config: LlavaOnevisionQTSplusConfig):
        # The stock one would build a stock model first.
        super(LlavaOnevisionForConditionalGeneration, self).__init__(config)
        self.model = LlavaOnevisionQTSplusModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


class LlavaOnevisionQTSplusProcessor(QTSplusFramesMixin, LlavaOnevisionProcessor):
    r"""
    [`LlavaOnevisionProcessor`] that also says which tokens are the question, and reads videos with their true times.

    Args:
        video_newline (`str`): as in [`LlavaOnevisionQTSplusConfig`].
    """

    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        video_processor=None,
        num_image_tokens=None,
        vision_feature_select_strategy=None,
        chat_template=None,
        image_token="<image>",
        video_token="<video>",
        vision_aspect_ratio="anyres_max_9",
        video_newline: str = "video",
        **kwargs,
    ):
        super().__init__(
            image_processor,
            tokenizer,
            video_processor,
            num_image_tokens=num_image_tokens,
            vision_feature_select_strategy=vision_feature_select_strategy,
            chat_template=chat_template,
            image_token=image_token,
            video_token=video_token,
            vision_aspect_ratio=vision_aspect_ratio,
            **kwargs,
        )
        self.video_newline = video_newline

    def follow(self, config) -> None:
        self.video_newline = config.video_newline

    @property
    def tokens_per_side(self) -> int:
        return math.ceil(math.isqrt(self.num_image_tokens) / 2)

    def _process_images(self, images, **kwargs):
        processed, texts = super()._process_images(images, **kwargs)
        sizes = torch.as_tensor(processed.pop("image_sizes")).tolist()
        alone = [count == 1 for count in processed.pop("batch_num_images") for _ in range(count)]
        pinpoints, side = self.image_processor.image_grid_pinpoints, processed["pixel_values"][0].shape[-1]
        crops = [
            image_size_to_num_patches(size, pinpoints, side) if cut else 1
            for size, cut in zip(sizes, alone, strict=True)
        ]
        pairs = zip(processed["pixel_values"], crops, strict=True)
        processed["pixel_values"] = torch.cat([torch.as_tensor(pixels[:count]) for pixels, count in pairs])
        processed["image_grid_thw"] = torch.tensor([[count, *size] for count, size in zip(crops, sizes, strict=True)])
        return processed, texts

    def replace_video_token(self, video_inputs, video_idx, **kwargs):
        frames, side = len(video_inputs["pixel_values_videos"][video_idx]), self.tokens_per_side
        newlines = 1 if self.video_newline == "video" else frames * side
        return self.video_token * (frames * side * side + newlines)


LlavaOnevisionQTSplusProcessor.register_for_auto_class()

__all__ = [
    "LlavaOnevisionQTSplusConfig",
    "LlavaOnevisionQTSplusForConditionalGeneration",
    "LlavaOnevisionQTSplusModel",
    "LlavaOnevisionQTSplusProcessor",
]
