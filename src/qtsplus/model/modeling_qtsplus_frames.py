"""The models whose vision tower sees one frame at a time, all of one size, with the query-aware selector: InternVL (2.5
and 3), LLaVA-OneVision and LLaVA-Video; configurations, models and processors. Their grids count tokens.

Stock InternVL knows only images. Here a video is a sequence of frames, each with "Frame1: " and so on in front, and
its placeholders have an id of their own. LLaVA-OneVision ends a video with a newline, LLaVA-Video every row of every
frame; newlines are never scored, and one stays where a token that it ends stays.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers.models.internvl.configuration_internvl import InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLForConditionalGeneration, InternVLModel
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.configuration_llava_onevision import LlavaOnevisionConfig
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionModel,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.processing_utils import ProcessorMixin

from .fields_qtsplus import Ids, QTSplusConfigMixin
from .generation_qtsplus import QTSplusPreTrainedMixin
from .mixin_qtsplus import QTSplusHeadMixin, QTSplusModelMixin
from .processor_mixin_qtsplus import QTSplusProcessorMixin
from .video_qtsplus import Chunk

NEWLINES = ("video", "row")


class FramesQTSplusModelMixin(QTSplusModelMixin):
    """What the models have in common: one-dimensional positions, and a row of pixels for each frame."""

    rope_axes = 1
    fixed_arguments = (
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "vision_aspect_ratio",
        "image_sizes",
        "image_sizes_videos",
        "batch_num_images",
    )

    def pixel_rows(self, grid_thw: Tensor) -> list[int]:
        return grid_thw[:, 0].tolist()


class QTSplusFramesMixin(QTSplusProcessorMixin):
    """
    The processors' side: `pixel_values_videos` are the frames of all videos, `[frames, 3, height, width]`. A backbone
    supplies `tokens_per_side` and `text_of_video`.
    """

    native_resolution = False
    tokens_per_side: int
    text_of_video: Callable[[int], str]  # from the number of frames to the placeholders, with what is between frames

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.video_processor.merge_size = 1
        self.video_processor.temporal_patch_size = 1

    def _process_videos(self, videos, **kwargs):
        video_metadata = kwargs.pop("video_metadata", None)
        kwargs.update(return_tensors="pt", return_metadata=False)
        clips = []
        texts = []
        grids = []
        for video in videos:
            clip = self._clip(video, kwargs)
            clips.append(clip)
            texts.append(self.text_of_video(len(clip)))
            grids.append(self.grid_of(len(clip)))
        processed = {
            "pixel_values_videos": torch.cat(clips),
            "video_grid_thw": torch.cat(grids),
            "video_metadata": video_metadata,
            "second_per_grid_ts": [1 / metadata.sampled_fps for metadata in video_metadata],
        }
        return processed, texts

    def _clip(self, video, options: dict) -> Tensor:
        if torch.is_tensor(video) and video.is_meta:
            return video
        return self.video_processor(videos=[video], **options)["pixel_values_videos"][0]

    def grid_of(self, num_frames: int, *size: int, **options) -> Tensor:
        side = self.tokens_per_side
        return torch.tensor([[num_frames, side, side]])

    def frame_size(self, num_frames: int, height: int, width: int, **options) -> tuple[int, int]:
        blank = torch.empty(1, 3, height, width, dtype=torch.uint8, device="meta")
        options.update(do_center_crop=False, do_sample_frames=False, device="meta", return_tensors="pt")
        resized = self.video_processor(videos=[blank], **options)["pixel_values_videos"]
        return resized.shape[-2], resized.shape[-1]

    def preprocess_frames(self, frames: np.ndarray, grid: Tensor) -> Chunk:
        clip = self._clip(frames, {"do_sample_frames": False, "return_tensors": "pt"})
        return clip, self.grid_of(len(clip))

    def blank_video(
        self,
        t: int,
        h: int,
        w: int,
    ) -> Tensor:
        return torch.empty(t, 3, 1, 1, device="meta")


# --- InternVL ---


class InternVLQTSplusConfig(QTSplusConfigMixin, InternVLConfig):
    """Configuration of [`InternVLQTSplusForConditionalGeneration`]: see [`QTSplusConfigMixin`]."""

    model_type = "internvl_qtsplus"

    video_token_id: int = 151656  # a video's placeholder, which no text has; by default Qwen2.5's `<|video_pad|>`
    special_token_ids: Ids = tuple(range(151643, 151674))
    frame_text_token_ids: Ids = ()  # open the text in front of a frame (`Frame`)

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.video_token_id >= self.text_config.vocab_size or self.video_token_id == self.image_token_id:
            raise ValueError(
                f"video_token_id={self.video_token_id}: expected an id below {self.text_config.vocab_size}, the size "
                f"of the vocabulary, that no text has and that is not image_token_id ({self.image_token_id})."
            )


class InternVLQTSplusModel(FramesQTSplusModelMixin, QTSplusPreTrainedMixin, InternVLModel):
    """InternVL without a head, with a [`QTSplusSelector`] as `qtsplus`."""

    config: InternVLQTSplusConfig
    frames_apart = True

    @property
    def patches_per_row(self) -> int:
        vision = self.config.vision_config
        height, width = vision.image_size
        patch_height, patch_width = vision.patch_size
        return (height // patch_height) * (width // patch_width)

    def encode_pixels(
        self,
        pixels: Tensor,
        grid_thw: Tensor,
    ) -> list[Tensor]:
        tokens = self.get_image_features(pixels, return_dict=True).pooler_output
        return [frames.flatten(0, 1) for frames in tokens.split(self.pixel_rows(grid_thw))]


class InternVLQTSplusForConditionalGeneration(
    QTSplusHeadMixin, QTSplusPreTrainedMixin, InternVLForConditionalGeneration
):
    """InternVL that reads a video through a [`QTSplusSelector`]; used as the stock class is, with its own processor."""

    config: InternVLQTSplusConfig
    stock_class = InternVLForConditionalGeneration
    model_class = InternVLQTSplusModel
    backbone_name = "InternVL"


class _ApartProcessor(InternVLProcessor):
    """[`InternVLProcessor`] that keeps images and videos apart."""

    video_placeholder_id: int

    def __call__(self, images=None, text=None, videos=None, **kwargs):
        # The stock method would mix the pixels of images and videos.
        inputs = ProcessorMixin.__call__(self, images=images, text=text, videos=videos, **kwargs)
        if videos is not None and text is not None:
            ids = inputs["input_ids"]
            token = self.tokenizer.video_token_id
            if isinstance(ids, list):
                inputs["input_ids"] = [[self.video_placeholder_id if i == token else i for i in row] for row in ids]
            else:
                ids[ids == token] = self.video_placeholder_id
        return inputs

    def _check_special_mm_tokens(self, text, text_inputs, modalities):
        # The tokens of videos are marked later; the model counts them.
        super()._check_special_mm_tokens(text, text_inputs, [name for name in modalities if name != "video"])

    def validate_inputs(self, *inputs, text=None, **kwargs):
        # The stock method asks for a text, which frames that are only encoded do not have.
        if text is not None:
            super().validate_inputs(*inputs, text=text, **kwargs)

    def _process_images(self, images, **kwargs):
        processed, texts = super()._process_images(images, **kwargs)
        tiles = torch.as_tensor(processed.pop("num_patches"))
        sides = torch.full_like(tiles, math.isqrt(self.image_seq_length))
        processed["image_grid_thw"] = torch.stack([tiles, sides, sides], dim=1)
        return processed, texts


class InternVLQTSplusProcessor(QTSplusFramesMixin, _ApartProcessor):
    """
    [`InternVLProcessor`] that also says which tokens are the question, and reads videos with their true times;
    `video_placeholder_id` is `config.video_token_id`, or what the tokenizer has for it.
    """

    frame_text = "Frame1: "

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
    def tokens_per_side(self) -> int:  # type: ignore[override]
        return math.isqrt(self.image_seq_length)

    @property
    def video_token_id(self) -> int:  # type: ignore[override]
        return self.video_placeholder_id

    def text_of_video(self, num_frames: int) -> str:
        frame = f"{self.start_image_token}{self.video_token * self.image_seq_length}{self.end_image_token}"
        return "\n".join(f"Frame{number}: {frame}" for number in range(1, num_frames + 1))

    def follow(self, config) -> None:
        self.video_placeholder_id = config.video_token_id


# --- LLaVA-OneVision and LLaVA-Video ---


class LlavaOnevisionQTSplusConfig(QTSplusConfigMixin, LlavaOnevisionConfig):
    """Configuration of [`LlavaOnevisionQTSplusForConditionalGeneration`]: see [`QTSplusConfigMixin`]."""

    model_type = "llava_onevision_qtsplus"

    # What a newline ends: the "video" in LLaVA-OneVision, every "row" in LLaVA-Video (mm_newline_position="grid").
    video_newline: str = "video"
    special_token_ids: Ids = tuple(range(151643, 151648))

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.video_newline not in NEWLINES:
            raise ValueError(f"video_newline={self.video_newline!r}: expected one of {NEWLINES}.")


class LlavaOnevisionQTSplusModel(FramesQTSplusModelMixin, QTSplusPreTrainedMixin, LlavaOnevisionModel):
    """LLaVA-OneVision without a head, with a [`QTSplusSelector`] as `qtsplus`; it takes no images."""

    config: LlavaOnevisionQTSplusConfig

    @property
    def patches_per_row(self) -> int:
        return (self.config.vision_config.image_size // self.config.vision_config.patch_size) ** 2

    def line_length(self, grid: tuple[int, int, int]) -> int:
        return math.prod(grid) if self.config.video_newline == "video" else grid[2]

    @property
    def line_end(self) -> Tensor:  # type: ignore[override]
        with self._newline_in_place():
            return self.image_newline

    @contextmanager
    def _newline_in_place(self) -> Iterator[None]:
        """Brings an offloaded newline back outside `forward` too, whose hook would."""
        is_away = self.image_newline.is_meta and hasattr(self, "_hf_hook")
        if is_away:
            self._hf_hook.pre_forward(self)  # type: ignore[operator]
        yield
        if is_away:
            self._hf_hook.post_forward(self, None)  # type: ignore[operator]

    def encode_pixels(
        self,
        pixels: Tensor,
        grid_thw: Tensor,
    ) -> list[Tensor]:
        with self._newline_in_place():
            (tokens,) = self.get_video_features(pixels[None], return_dict=True).pooler_output
        sizes = grid_thw.prod(-1).tolist()
        return list(tokens[: sum(sizes)].split(sizes))


class LlavaOnevisionQTSplusForConditionalGeneration(
    QTSplusHeadMixin, QTSplusPreTrainedMixin, LlavaOnevisionForConditionalGeneration
):
    """LLaVA-OneVision or LLaVA-Video that reads a video through a [`QTSplusSelector`], with its own processor."""

    config: LlavaOnevisionQTSplusConfig
    stock_class = LlavaOnevisionForConditionalGeneration
    model_class = LlavaOnevisionQTSplusModel
    backbone_name = "LLaVA-OneVision"


class LlavaOnevisionQTSplusProcessor(QTSplusFramesMixin, LlavaOnevisionProcessor):
    """
    [`LlavaOnevisionProcessor`] that also says which tokens are the question, and reads videos with their true times;
    `video_newline` is the configuration's.
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
    def tokens_per_side(self) -> int:  # type: ignore[override]
        return math.ceil(math.isqrt(self.num_image_tokens) / 2)

    def _process_images(self, images, **kwargs):
        raise ValueError(
            "LLaVA-OneVision and LLaVA-Video read videos alone here: expected no images; ask a Qwen-VL or InternVL."
        )

    def text_of_video(self, num_frames: int) -> str:
        rows = num_frames * self.tokens_per_side
        newlines = 1 if self.video_newline == "video" else rows
        return self.video_token * (rows * self.tokens_per_side + newlines)


__all__ = [
    "InternVLQTSplusConfig",
    "InternVLQTSplusForConditionalGeneration",
    "InternVLQTSplusModel",
    "InternVLQTSplusProcessor",
    "LlavaOnevisionQTSplusConfig",
    "LlavaOnevisionQTSplusForConditionalGeneration",
    "LlavaOnevisionQTSplusModel",
    "LlavaOnevisionQTSplusProcessor",
]
