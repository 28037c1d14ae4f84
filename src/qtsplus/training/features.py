"""Videos encoded once: with a frozen vision tower, training need not decode and encode them again and again."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..common.tensors import TensorFormat, TensorKind, digest_of
from ..data.media import UNREADABLE, AnyPath, media_state
from ..video.encoded import with_bar
from .freezing import vision_modules

Tensors = dict[str, Tensor]  # by name
Video = tuple[str, float | None]  # a file, an address or a folder of frames, and the `fps` of its record
REMEDY = "remove the file, and it is made again"
FEATURES = TensorFormat(
    what="stored features",
    remedy=REMEDY,
    tensors={
        "video_features": TensorKind(("k", "d")),
        "video_grid_thw": TensorKind((1, 3), (torch.int64,)),
        "second_per_grid_ts": TensorKind((1,), (torch.float32, torch.float64)),
    },
)
_CLASSES = ("auto_map", "processor_class")  # which a stage adds to the processor that it saves
_PIXELS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


@dataclass(frozen=True)
class VideoFeatures:
    """
    A folder with a safetensors file for every encoded video: `video_features` `[k, d]`, `video_grid_thw` `[1, 3]` and
    `second_per_grid_ts` `[1]`. The folder's name stands for the vision tower and the settings that made them.
    """

    folder: Path

    def file(self, video: str, fps: float | None) -> Path:
        """Where a video's features are kept; a file that was changed since, or read at another rate, is another."""
        name = video
        if os.path.exists(video):
            name = os.path.abspath(video)
        identity = json.dumps([name, media_state(video), fps])
        digest = hashlib.sha256(identity.encode()).hexdigest()
        return self.folder / f"{digest[:32]}.safetensors"

    def load(
        self,
        video: str,
        fps: float | None,
    ) -> Tensors | None:
        """A video's features; `None` where it could not be read."""
        return read_tensors(self.file(video, fps), FEATURES)


def encode_files(
    model,
    processor,
    videos: Sequence[Video],
    folder: AnyPath,
    processor_kwargs: Mapping | None = None,
    workers: int = 0,
) -> VideoFeatures:
    """
    Encodes what `folder` does not hold yet; every process of a distributed run takes its share.

    Args:
        videos: what cannot be read is left out.
        folder: one that may be shared by runs; features of another vision tower are never mistaken for this one's.
        processor_kwargs: for every call of the processor, such as `{"fps": 1, "max_frames": 64}`.
        workers: processes that decode.
    """
    kwargs = dict(processor_kwargs or {})
    reading = processor.video_processor.to_dict()
    for name in _CLASSES:
        reading.pop(name, None)
    weights = nn.ModuleDict(vision_modules(model)).state_dict()
    digest = digest_of(weights, [reading, kwargs])
    features = VideoFeatures(Path(folder) / digest[:16])
    state = PartialState()
    missing = [video for video in sorted(set(videos), key=str) if not features.file(*video).exists()]
    state.wait_for_everyone()  # all have to share out the same list, before anybody shortens it
    mine: Any = missing[state.process_index :: state.num_processes]
    decode = partial(_decode, features, processor, kwargs)
    decoded = DataLoader(mine, batch_size=None, num_workers=workers, collate_fn=decode)
    for place, inputs in with_bar(decoded, "Encoding videos", state.is_main_process):
        if inputs is None:
            continue
        pixels = inputs.pop("pixel_values_videos")
        (encoded,) = model.encode_videos(pixels, inputs["video_grid_thw"], device="cpu")
        inputs["video_features"] = encoded
        FEATURES.write(place, inputs, {})
    state.wait_for_everyone()
    return features


def _decode(
    features: VideoFeatures,
    processor,
    processor_kwargs: Mapping,
    video: Video,
) -> tuple[Path, Tensors | None]:
    """Where a video's features are to be kept, and its pixels; `None` where they cannot be read."""
    name, fps = video
    settings = dict(processor_kwargs)
    if fps is not None:
        settings["fps"] = fps
    place = features.file(name, fps)
    try:
        inputs = processor(text=[processor.video_token], videos=[name], return_tensors="pt", **settings)
    except UNREADABLE:
        return place, None  # the dataset finds out why, and says so
    return place, {name: torch.as_tensor(inputs[name]) for name in _PIXELS}


def read_tensors(path: Path, kind: TensorFormat) -> Tensors | None:
    """The tensors of a file; `None` without a file, a `ValueError` for damage."""
    if not path.exists():
        return None
    with kind.reading(path) as file:
        return file.tensors
