"""The model that lmms-eval asks, the frames that it sees, and how it selects among their tokens."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.video_utils import VideoMetadata

from ... import loading, session
from ...methods_qtsplus import METHODS
from ...training import models
from ..baselines import fewer_frames

FEWER_FRAMES = "fewer_frames"  # not a selection among tokens: the others are never encoded


@dataclass(frozen=True)
class Selecting:
    """
    As for `generate`, with one more `selection`: `"fewer_frames"`, as many whole frames as `retention` of the tokens
    allow. A stock model keeps all tokens where none is named.

    Raises:
        ValueError: an unknown selection, a retention out of its range, both a retention and a maximum, or one of them
            with a selection that keeps everything.
    """

    selection: str | None = None
    retention: float | None = None
    max_visual_tokens: int | None = None
    reencode: bool = True

    def __post_init__(self) -> None:
        if self.selection is not None and self.selection not in (*METHODS, FEWER_FRAMES):
            raise ValueError(f"selection is {self.selection!r}; expected one of {', '.join([*METHODS, FEWER_FRAMES])}.")
        if self.retention is not None and not 0 < self.retention <= 1:
            raise ValueError(f"retention is {self.retention!r}; expected a fraction in (0, 1].")
        if self.max_visual_tokens is not None and self.max_visual_tokens < 1:
            raise ValueError(f"max_visual_tokens is {self.max_visual_tokens!r}; expected at least 1.")
        if self.retention is not None and self.max_visual_tokens is not None:
            raise ValueError("Got retention and max_visual_tokens; expected one of them.")
        if self.selection == "all" and (self.retention or self.max_visual_tokens):
            raise ValueError("selection=all keeps every token; leave out retention and max_visual_tokens.")
        if self.selection == FEWER_FRAMES and self.retention is None:
            raise ValueError("selection=fewer_frames goes by a retention; give one, such as retention=0.1.")

    def call(self) -> dict[str, Any]:
        """The arguments of `generate`."""
        if self.selection == FEWER_FRAMES:
            return {"selection": "all", "reencode": self.reencode}
        return dict(vars(self))


@dataclass(frozen=True)
class Reading:
    """
    Which frames are looked at, and how large they are; as the processor has it where it is left out. `min_pixels` and
    `max_pixels` are for a backbone that reads frames in their own resolution.

    Raises:
        ValueError: a value that is not above 0, a rate or a maximum beside a number, or fewer pixels than the fewest.
    """

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value!r}; expected a finite number above 0.")
        for name in ("fps", "max_frames"):
            if getattr(self, name) is not None and self.num_frames is not None:
                raise ValueError(f"Got {name} and num_frames; expected one of them.")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels is {self.min_pixels} and max_pixels {self.max_pixels}; expected no fewer.")

    def apply(self, processor: Any) -> None:
        """Sets a processor up to read every video like this."""
        video_processor = processor.video_processor
        if self.fps is not None:
            video_processor.fps, video_processor.num_frames = self.fps, None
        for name in ("num_frames", "max_frames"):
            if getattr(self, name) is not None:
                setattr(video_processor, name, getattr(self, name))
        pixels = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        given = {name: value for name, value in pixels.items() if value is not None}
        if given and not processor.native_resolution:
            raise ValueError(f"{type(processor).__name__} has frames of one size; leave out min_pixels and max_pixels.")
        if given:
            video_processor.size = {**dict(video_processor.size), **given}


def load(
    pretrained: str, revision: str | None, device: str, dtype: str, selecting: Selecting
) -> tuple[Any, Any, Selecting]:
    """
    A model, its processor and how it selects: a QTSplus model as everybody loads it, a stock model in our class, with
    all tokens unless another selection is asked for, and without a re-encoder.

    Raises:
        ValueError: a stock model is to select by a selector that it does not have.
    """
    config, _ = PreTrainedConfig.get_config_dict(pretrained, revision=revision)
    if "qtsplus_config" in config:
        return *loading.load(pretrained, device, dtype, revision=revision), selecting
    if selecting.selection == "qtsplus":
        raise ValueError(f"{pretrained!r} has no selector; make one with `qtsplus convert`, or choose a selection.")
    if selecting.selection is None and (selecting.retention or selecting.max_visual_tokens):
        raise ValueError(f"{pretrained!r} has no selector: say how it is to choose, such as selection=uniform.")
    if revision is not None:
        raise ValueError(f"{pretrained!r} is a stock model: download the revision, and name its folder.")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    model = models.load_model(None, pretrained, {"reencode_layers": 0}, str(stored) if dtype == "auto" else dtype)
    processor = models.load_processor(None, pretrained, model.config)
    return model.to(device).eval(), processor, replace(selecting, selection=selecting.selection or "all")


def read_video(model: Any, processor: Any, video: str, selecting: Selecting) -> session.EncodedVideo:
    """A video's features, for the selection that is made among them; a `ValueError` where it cannot be read."""
    if selecting.selection != FEWER_FRAMES:
        return session.encode(model, processor, video)
    assert selecting.retention is not None
    pixels = fewer_frames(processor, video, selecting.retention)
    grid, seconds = pixels["video_grid_thw"], float(pixels["second_per_grid_ts"][0])
    with torch.no_grad():
        (features,) = model.encode_videos(pixels["pixel_values_videos"], grid)
    step = processor.video_processor.temporal_patch_size
    frames = step * int(grid[0, 0])
    metadata = VideoMetadata(total_num_frames=frames, fps=step / seconds, frames_indices=list(range(frames)))
    return session.EncodedVideo(video, features, grid, [seconds], metadata, 0.0)
