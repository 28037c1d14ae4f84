"""Videos that are given as frames: images in a folder or a list, arrays and tensors; and the times of such frames."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from transformers.image_utils import load_image
from transformers.video_utils import VideoMetadata

from .addresses_qtsplus import download, is_address, local_path
from .numbers_qtsplus import require_positive

ARRAYS = (np.ndarray, torch.Tensor)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
FRAME_SUFFIXES = IMAGE_SUFFIXES + (".gif",)  # in a folder; elsewhere a GIF is a video

# --- Images ---


def load_frames(paths: Sequence[str]) -> np.ndarray:
    """
    A video that is stored as images, `[T, H, W, 3]` uint8 RGB. `ValueError` for images that are missing, cannot be read
    or differ in size.
    """
    return stack_frames([_load_frame(path) for path in paths])


def _load_frame(path: str) -> Image.Image:
    path = local_path(path)
    try:
        source = download(path) if is_address(path) else path
        with Image.open(source) as image:
            return load_image(image)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"Cannot read the frame {path!r} as an image: {error}.") from error


def decode_images(paths: Sequence[str], size: tuple[int, int]) -> Iterator[np.ndarray]:
    """
    The images one after another, `[H, W, 3]` uint8 RGB. `ValueError` for one that has another size (height, width), or
    cannot be read.
    """
    for path in paths:
        frame = np.array(_load_frame(path))  # torch warns of an array that is a view of the image
        size_of_frame = frame.shape[:2]
        if size_of_frame != size:
            raise ValueError(
                f"The frame {path!r} is {size_of_frame} pixels, the first one {size}; expected frames of one size."
            )
        yield frame


def image_paths(folder: str) -> list[str]:
    """The images of a folder in natural order (`frame2.jpg` before `frame10.jpg`); a `ValueError` if there is none."""
    visible = [name for name in os.listdir(folder) if not name.startswith(".")]
    names = [name for name in visible if name.lower().endswith(FRAME_SUFFIXES)]
    if not names:
        raise ValueError(
            f"The folder {folder!r} holds no frames; expected images, such as .png (`qtsplus index` reads videos)."
        )
    names.sort(key=_natural_order)
    return [os.path.join(folder, name) for name in names]


def _natural_order(name: str) -> tuple[list[int | str], str]:
    """Numbers by value; `²` and the like are letters. Names that differ in leading zeros only keep one order."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if part.isdecimal() else part for part in parts], name


# --- Frames in memory ---


def stack_frames(frames: Sequence):
    """One video from a list of its frames: PIL images, arrays or tensors."""
    arrays: list = [np.asarray(frame.convert("RGB")) if hasattr(frame, "convert") else frame for frame in frames]
    shapes = {tuple(array.shape) for array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"The frames of one video differ in shape: {sorted(shapes)}; expected one shape.")
    if torch.is_tensor(arrays[0]):
        return torch.stack(arrays)
    return np.stack(arrays)


def check_frames(frames, rescaled: bool):
    """The same frames, laid out as torch can read them: an array may be a view that runs backwards (BGR to RGB)."""
    if 0 in frames.shape:
        raise ValueError(f"Got frames of shape {tuple(frames.shape)}; expected some pixels.")
    if isinstance(frames, np.ndarray):
        frames = np.ascontiguousarray(frames)
    values = torch.as_tensor(frames, device="cpu")
    if values.is_floating_point() and not torch.isfinite(values).all():
        raise ValueError("The frames of a video hold NaN or infinite pixels; expected finite values.")
    if rescaled and values.dtype != torch.uint8:
        lowest, highest = torch.stack(values.aminmax()).tolist()
        if values.is_floating_point() and 0 < highest <= 1:
            raise ValueError("The frames of a video are numbers from 0 to 1; expected 0 to 255, or `do_rescale=False`.")
        if lowest < 0 or highest > 255:
            raise ValueError(f"The frames of a video are numbers from {lowest:g} to {highest:g}; expected 0 to 255.")
    return frames


def describe_frames(frames, metadata: Mapping | None, fps: float | None) -> VideoMetadata:
    """The metadata of frames that were sampled already, from what the caller says about them."""
    count = len(frames)
    if metadata is None and fps is None:
        raise ValueError(
            f"Got frames ({count}) without their times. Pass the rate at which they were sampled as `fps=...`"
            ' (on the command line `--fps`), or `{"fps": ..., "total_num_frames": ..., "frames_indices": [...]}` as'
            " `metadata=` of `encode`, or in a list as `video_metadata=` of the processor."
        )
    given = metadata or {"fps": fps}
    try:
        described = VideoMetadata(**dict({"total_num_frames": None}, **given))
    except TypeError as error:
        raise ValueError(f"video_metadata={metadata!r} is not a dictionary of the fields of one: {error}.") from error
    described.fps = require_positive("the `fps` of `video_metadata`", described.fps)
    total = described.total_num_frames
    indices = np.arange(count)
    if described.frames_indices is not None:
        indices = np.asarray(described.frames_indices, np.int64)
    elif total not in (None, count):
        raise ValueError(
            f"Got {count} frames of a video of {total} without `frames_indices` in their `video_metadata`;"
            " expected the index of each frame."
        )
    gaps = np.diff(indices)
    if len(indices) != count or indices[0] < 0 or (gaps < 0).any():
        raise ValueError(f"Got frames_indices={indices[:8]}... of {count} frames; expected as many, ascending from 0.")
    covered = int(indices[-1] - indices[0])
    if total is None:
        typical_gap = np.median(gaps) if count > 1 else 1
        total = covered + max(int(typical_gap), 1)  # the last frame lasts as long as most
    if total <= covered:
        raise ValueError(f"total_num_frames={total}: `frames_indices` go over {covered + 1} frames.")
    described.frames_indices = indices.tolist()
    described.total_num_frames = total
    return described
