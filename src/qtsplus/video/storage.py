"""Encoded videos on disk: their features as safetensors, and all else about them as JSON in the same file's header."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from huggingface_hub.utils.sha import sha_fileobj
from pydantic import Field, with_config
from torch import Tensor
from transformers.video_utils import VideoMetadata
from typing_extensions import TypedDict

from ..common.journals import STORED
from ..common.tensors import TensorFormat, TensorKind, digest_of, in_place
from ..common.validation import validated
from ..data.records import String
from ..model.video_qtsplus import AboutVideo
from .encoded import NO_FILE, EncodedVideo
from .subtitles import Subtitle

Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
Count = Annotated[int, Field(ge=1, le=2**40)]
Index = Annotated[int, Field(ge=0, le=2**40)]
Moment = Annotated[float, Field(ge=-1e9, le=1e9)]  # seconds on a player's clock
Step = Annotated[float, Field(ge=1e-6, le=1e9)]  # seconds, or frames per second
Grid = Annotated[list[Count], Field(min_length=3, max_length=3)]
ONE = Field(min_length=1, max_length=1)

SAMPLING = ("fps", "num_frames", "min_frames", "max_frames")  # a stored video says its own

# Who stores a video notes the digest of its file elsewhere: the features are read when they are looked at.
FEATURES = TensorFormat(
    what="stored video",
    remedy="remove it, and encode the video again",
    tensors={"features": TensorKind(("M", "d"))},
    texts=frozenset(["made_by", "about"]),
    has_digest=False,
)
KEYS = TensorFormat(
    what="stored keys",
    remedy="remove it, and run `qtsplus index` again",
    tensors={
        "codes": TensorKind(("M", "key_width"), (torch.uint8,)),
        "low": TensorKind(("key_width",), (torch.float32,)),
        "step": TensorKind(("key_width",), (torch.float32,)),
    },
    texts=frozenset(["made_by", "features", "about"]),
)


def fingerprint(model, processor) -> str:
    """A hash of everything that decides features: the vision tower's weights and settings, and the processor's."""
    vision = model.config.vision_config.to_dict()
    vision["transformers_version"] = None
    pixels = processor.video_processor.to_dict()
    for name in SAMPLING + ("do_sample_frames",):
        pixels.pop(name, None)
    others = ("language_model", "qtsplus")
    with in_place(part for name, part in model.model.named_modules() if not name.startswith(others)):
        weights = {name: weight for name, weight in model.model.state_dict().items() if not name.startswith(others)}
        return digest_of(weights, {"vision": vision, "pixels": pixels})


@with_config(STORED)
class Stored(TypedDict):
    """Size and digest of a file of features, noted elsewhere, by which any damage to the file is found."""

    size: Annotated[int, Field(gt=0)]
    digest: Digest


@with_config(STORED)
class _Metadata(TypedDict):
    total_num_frames: Count
    fps: Step
    width: Count | None
    height: Count | None
    duration: Moment | None
    video_backend: str | None
    frames_indices: Annotated[list[Index], Field(min_length=1)]


@with_config(STORED)
class _Subtitle(TypedDict):
    start: Moment
    end: Moment
    text: String


@with_config(STORED)
class _About(TypedDict):
    """The fields of an [`AboutVideo`]."""

    start: Moment
    warnings: list[str]
    sound: bool
    metadata: _Metadata


@with_config(STORED)
class _Header(_About):
    """What is stored of a video except its tensor."""

    seconds: Moment
    subtitles: list[_Subtitle]
    video_grid_thw: Annotated[list[Grid], ONE]
    second_per_grid_ts: Annotated[list[Step], ONE]


@contextmanager
def saved_video(encoded: EncodedVideo, path: Path, made_by: str) -> Iterator[Stored]:
    """
    Writes an encoded video to one file, with the [`fingerprint`] of its model and processor. The file is at `path` once
    the context ends; within the context, its size and digest can be noted.
    """
    texts = {"made_by": made_by, "about": _header(encoded)}
    with FEATURES.writing(path, {"features": encoded.features}, texts) as part:
        yield measure(part)


def measure(path: Path) -> Stored:
    """The size and the digest of a file, which is read to its end."""
    with path.open("rb") as file:
        digest = sha_fileobj(file).hex()
        return {"size": file.tell(), "digest": digest}


def _header(encoded: EncodedVideo) -> str:
    """Everything that is stored of a video except its tensor, as JSON."""
    about = asdict(encoded.about)
    header = {
        "seconds": encoded.seconds,
        "video_grid_thw": encoded.video_grid_thw.tolist(),
        "second_per_grid_ts": [float(encoded.seconds_per_step)],
        "subtitles": [vars(line) for line in encoded.subtitles],
    }
    return json.dumps(about | header)


def load_video(path: Path, made_by: str, model, stored: Stored | None = None) -> EncodedVideo:
    """
    Reads a video that [`saved_video`] wrote with a model's vision tower; a `ValueError` for a damaged file or another
    vision tower. The result does not name the video's file.

    Args:
        stored: size and digest that were noted for the file; `None` for one that was checked before.
    """
    with FEATURES.reading(path) as file:
        features = file.tensors["features"]
        if file.texts["made_by"] != made_by:
            raise ValueError("it was made with another vision tower or processor")
        if stored is not None and measure(path) != stored:
            raise ValueError("it was changed since it was written")
        return _video(file.texts["about"], features, model, model.model.token_width)


def _video(header: str, features: Tensor, model, width: int) -> EncodedVideo:
    """The video that the header of a file describes; a `ValueError` for tensors that do not fit it."""
    content = validated(_Header, json.loads(header))
    about = {name: content[name] for name in _About.__annotations__}
    about["metadata"] = VideoMetadata(**content["metadata"])
    grid = torch.tensor(content["video_grid_thw"])
    steps, rows, columns = model.model.merged_grid(grid)[0]
    expected = [steps * rows * columns, width]
    if list(features.shape) != expected:
        raise ValueError(f"features are {list(features.shape)}; expected {expected}, by video_grid_thw")
    frames = len(content["metadata"]["frames_indices"])
    if frames < steps:
        raise ValueError(f"metadata.frames_indices are {frames}; expected some for each of {steps} steps")
    (seconds_per_step,) = content["second_per_grid_ts"]
    return EncodedVideo(
        video=NO_FILE,
        features=features,
        video_grid_thw=grid,
        seconds_per_step=seconds_per_step,
        about=AboutVideo(**about),
        seconds=content["seconds"],
        subtitles=[Subtitle(**line) for line in content["subtitles"]],
    )


@dataclass(frozen=True)
class KeyedVideo:
    """
    A video with the keys that a selector compares with the words of a question, in place of its features.

    Args:
        video: its `features` are codes, `[M, key_width]` of 8 bits.
        low, step: `[key_width]` float32; the key of a code is `low + step * code`, to half a step.
    """

    video: EncodedVideo
    low: Tensor
    step: Tensor


def save_keys(path: Path, encoded: EncodedVideo, keys: Tensor, made_from: Mapping[str, str]) -> None:
    """
    Writes the keys of a video's tokens in 8 bits, each column on a scale of its own.

    Args:
        keys: `[M, key_width]` float32.
        made_from: digests of what the keys depend on, by name.
    """
    low, high = keys.aminmax(dim=0)
    step = (high - low).clamp(min=1e-6) / 255
    steps = (keys - low) / step
    codes = steps.round().clamp(0, 255).byte()
    texts = dict(made_from, about=_header(encoded))
    KEYS.write(path, {"codes": codes, "low": low, "step": step}, texts)


def load_keys(path: Path, model, key_width: int, made_from: Mapping[str, str]) -> KeyedVideo | None:
    """
    Reads the keys that [`save_keys`] wrote; `None` for keys that were made from something else, a `ValueError` for
    damaged keys.
    """
    with KEYS.reading(path) as file:
        header = file.texts.pop("about")
        if file.texts != made_from:
            return None
        video = _video(header, file.tensors["codes"], model, key_width)
        return KeyedVideo(video, file.tensors["low"], file.tensors["step"])
