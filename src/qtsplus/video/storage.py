"""Encoded videos on disk: their features as safetensors, and all else about them as JSON in the same file's header."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, with_config
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.video_utils import VideoMetadata
from typing_extensions import TypedDict

from ..common.files import first_line, naming_full_disk, whole_file
from ..common.journals import STORED, check_stored, is_plain_file
from ..data.records import String
from .encoded import IN_MEMORY, EncodedVideo
from .subtitles import Subtitle

LARGE = 1e15  # as no model computes: its square would be infinite in a sum
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
_ONE = Field(min_length=1, max_length=1)
Count = Annotated[int, Field(ge=1, le=2**40)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
_When = Annotated[float, Field(ge=-1e9, le=1e9)]  # seconds on a player's clock

_KEY_RANKS = {"codes": 2, "low": 1, "step": 1}
SAMPLING = ("fps", "num_frames", "min_frames", "max_frames")  # a stored video says its own


def digest_of(tensors: Mapping[str, Tensor], settings=None) -> str:
    """A hash of tensors by name, in their order, and of settings that JSON can hold."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(model, processor) -> str:
    """A hash of everything that decides features: the vision tower's weights and settings, and the processor's."""
    vision = model.config.vision_config.to_dict()
    vision["transformers_version"] = None
    pixels = processor.video_processor.to_dict()
    for name in (*SAMPLING, "do_sample_frames"):
        pixels.pop(name, None)
    weights = {}
    for name, weight in model.model.state_dict().items():
        if not name.startswith(("language_model.", "qtsplus.")):
            weights[name] = weight
    return digest_of(weights, {"vision": vision, "pixels": pixels})


@with_config(STORED)
class Stored(TypedDict):
    """Size and digest of a file of features, noted elsewhere, by which any damage to the file is found."""

    size: Annotated[int, Field(gt=0)]
    digest: Digest


@with_config(STORED)
class _Metadata(TypedDict):
    total_num_frames: Count
    fps: Annotated[float, Field(ge=1e-6, le=1e6)]
    width: Count | None
    height: Count | None
    duration: Seconds | None
    video_backend: str | None
    frames_indices: Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(min_length=1)]


@with_config(STORED)
class _Said(TypedDict):
    """A subtitle."""

    start: _When
    end: _When
    text: String


@with_config(STORED)
class _About(TypedDict):
    """The header of a stored video, without the [`fingerprint`] of the model and processor that encoded it."""

    seconds: Seconds
    start: _When
    warnings: list[str]
    sound: bool
    subtitles: list[_Said]
    video_grid_thw: Annotated[list[Annotated[list[Count], Field(min_length=3, max_length=3)]], _ONE]
    second_per_grid_ts: Annotated[list[Annotated[float, Field(ge=1e-6, le=1e9)]], _ONE]
    metadata: _Metadata


@contextmanager
def saved_video(encoded: EncodedVideo, path: Path, made_by: str) -> Iterator[Stored]:
    """
    Writes an encoded video to one file, with the [`fingerprint`] of its model and processor. The file is at `path` once
    the context ends; within the context, its size and digest can be noted.
    """
    tensors = {"features": encoded.features}
    header = {"made_by": made_by, "about": _about(encoded)}
    with _whole_tensors(path, tensors, header) as part:
        yield measure(part)


@contextmanager
def _whole_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> Iterator[Path]:
    """Writes tensors to a file that is at `path` once the context ends; yields its place until then."""
    with whole_file(path, "wb") as part:
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            with naming_full_disk(path):
                save_file(on_cpu, part.name, header)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {first_line(error)}") from error
        yield Path(part.name)


def _about(encoded: EncodedVideo) -> str:
    """Everything that is stored of a video except its tensor, as JSON."""
    about = {
        "seconds": encoded.seconds,
        "start": encoded.start,
        "warnings": encoded.warnings,
        "sound": encoded.sound,
        "video_grid_thw": encoded.video_grid_thw.tolist(),
        "second_per_grid_ts": [float(seconds) for seconds in encoded.second_per_grid_ts],
        "metadata": vars(encoded.metadata),
        "subtitles": [vars(line) for line in encoded.subtitles],
    }
    return json.dumps(about)


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


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Writes tensors and texts with a digest of both, by which [`load_tensors`] finds any damage."""
    ordered = dict(sorted(tensors.items()))
    with _whole_tensors(path, ordered, {**header, "digest": digest_of(ordered, dict(header))}):
        pass


def load_tensors(path: Path, ranks: Mapping[str, int]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """
    The tensors and the texts that [`save_tensors`] wrote.

    Args:
        ranks: how many dimensions each tensor has, by its name.

    Raises:
        OSError, SafetensorError, ValueError: a file that is none, holds other tensors, or was changed.
    """
    if not is_plain_file(path):
        raise ValueError("it is no file")
    with safe_open(path, "pt") as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    digest = header.pop("digest", None)
    if digest != digest_of(tensors, header):
        raise ValueError("it was changed since it was written")
    if ranks != {name: tensor.ndim for name, tensor in tensors.items()}:
        raise ValueError("it holds other tensors")
    return tensors, header


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
    tensors = {"codes": codes, "low": low, "step": step}
    header = {**made_from, "about": _about(replace(encoded, subtitles=[], warnings=[]))}
    save_tensors(path, tensors, header)


def load_keys(path: Path, model, key_width: int, made_from: Mapping[str, str]) -> KeyedVideo | None:
    """
    Reads the keys that [`save_keys`] wrote; `None` for keys that were made from something else, a `ValueError` for
    damaged keys. The codes stay on disk until they are looked at.
    """
    try:
        tensors, header = load_tensors(path, _KEY_RANKS)
        about = header.pop("about", "")
        if header != made_from:
            return None
        video = _build(json.loads(about), tensors["codes"], model, key_width, (torch.uint8,))
        _check_scale("low", tensors["low"], key_width)
        _check_scale("step", tensors["step"], key_width)
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        reason = first_line(error).removesuffix(".")
        raise ValueError(
            f"The stored keys {str(path)!r} cannot be used: {reason}; run `qtsplus index` again."
        ) from error
    return KeyedVideo(video, tensors["low"], tensors["step"])


def _check_scale(name: str, scale: Tensor, key_width: int) -> None:
    is_float = scale.shape == (key_width,) and scale.dtype == torch.float32
    if not is_float or not (scale.abs() < LARGE).all():
        kind = f"{list(scale.shape)} {scale.dtype}"
        raise ValueError(f"{name} is {kind}; expected {[key_width]} finite numbers of 32 bits")


def measure(path: Path) -> Stored:
    """The size and the digest of a file, which is read to its end."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            digest.update(block)
            size += len(block)
    return {"size": size, "digest": digest.hexdigest()}


def load_video(path: Path, made_by: str, model, stored: Stored | None = None) -> EncodedVideo:
    """
    Reads a video that [`saved_video`] wrote with a model's vision tower; a `ValueError` for a damaged file or another
    vision tower. The features stay on disk until they are looked at. The result does not name the video's file.

    Args:
        stored: size and digest that were noted for the file; with them every byte and every feature is checked.
    """
    try:
        if not is_plain_file(path):
            raise ValueError("it is no file")
        if stored is not None and (path.stat().st_size != stored["size"] or measure(path) != stored):
            raise ValueError("it was changed since it was written")
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            features = file.get_tensor("features")
        if header.keys() != {"made_by", "about"}:
            raise ValueError("it is no stored video")
        if header["made_by"] == made_by:
            video = _build(json.loads(header["about"]), features, model, model.model.token_width, _DTYPES)
            if stored is not None:
                _check_numbers(features)
            return video
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        reason = first_line(error).removesuffix(".")
        raise ValueError(f"The stored video {str(path)!r} cannot be used: {reason}; encode the video again.") from error
    raise ValueError(f"{str(path)!r} was made with another vision tower or processor; encode the video again.")


def _check_numbers(features: Tensor) -> None:
    for part in features.split(4096):
        if not (part.abs() < LARGE).all():
            raise ValueError("features hold NaN, infinity or numbers that are too large")


def _build(
    content,
    features: Tensor,
    model,
    width: int,
    dtypes: Collection[torch.dtype],
) -> EncodedVideo:
    """The video that the header of a file describes; a `ValueError` for tensors that do not fit it."""
    about = check_stored(_About, content)
    grid = torch.tensor(about["video_grid_thw"])
    metadata = VideoMetadata(**about["metadata"])
    steps, rows, columns = model.model.merged_grid(grid)[0]
    expected = steps * rows * columns
    merge = getattr(model.config.vision_config, "spatial_merge_size", 1)
    if grid.tolist() != [[steps, rows * merge, columns * merge]]:
        raise ValueError(f"video_grid_thw is {grid.tolist()}; expected multiples of {merge}")
    if not expected or features.shape != (expected, width) or features.dtype not in dtypes:
        kind = f"{list(features.shape)} {features.dtype}"
        expected_dtypes = " or ".join(map(str, dtypes))
        raise ValueError(f"features are {kind}; expected {[expected, width]} of {expected_dtypes}, by video_grid_thw")
    frames = len(metadata.frames_indices or ())
    if frames < steps:
        raise ValueError(f"metadata.frames_indices are {frames}; expected some for each of {steps} steps")
    return EncodedVideo(
        video=IN_MEMORY,
        features=features,
        video_grid_thw=grid,
        second_per_grid_ts=about["second_per_grid_ts"],
        metadata=metadata,
        seconds=about["seconds"],
        start=about["start"],
        warnings=about["warnings"],
        sound=about["sound"],
        subtitles=[Subtitle(**line) for line in about["subtitles"]],
    )
