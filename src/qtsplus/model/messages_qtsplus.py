"""Videos as calls and messages name them, in the ways of Transformers, Qwen, vLLM and OpenAI."""

import os
from collections.abc import Mapping
from dataclasses import replace

from .addresses_qtsplus import local_path
from .frames_qtsplus import ARRAYS, IMAGE_SUFFIXES, image_paths, load_frames, stack_frames
from .sampling_qtsplus import VideoRequest, read_keys

_SOURCES = ("video", "url", "path")
_KINDS = {"text": "text", "image": "image", "video": "video", "image_url": "image", "video_url": "video"}
# Those that torch computes with.
_PIXEL_TYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_IMAGE_KEYS = {"type", "image", "url", "path", "base64"}


def flatten_videos(videos) -> list[VideoRequest]:
    """
    Flattens every nesting that a processor is called with: per video a dictionary with a video and `VIDEO_KEYS`, a
    path, or its frames, `[T, H, W, C]` or `[T, C, H, W]`, as an array or tensor. A list of frames, or of paths of
    images, is one video.

    Raises:
        ValueError: an item is not a video, or there is none.
    """
    requests = _flatten(videos)
    if not requests:
        raise ValueError("Got an empty video (0 frames); expected at least one frame.")
    for request in requests:
        if not isinstance(request.video, str):
            _check_given(request)
    return requests


def _check_given(request: VideoRequest) -> None:
    """Raises a `ValueError` for frames that are no pixels, or of which a message says more than their rate."""
    others = sorted(request.asked.keys() - {"fps"})
    if others:
        raise ValueError(f"Got frames with {others}; expected the frames to look at, and fps alone.")
    dtype = str(request.video.dtype).removeprefix("torch.")
    if dtype not in _PIXEL_TYPES:
        raise ValueError(
            f"Got frames of the type {dtype}; expected pixels from 0 to 255, such as uint8: scale and convert them."
        )
    shape = tuple(request.video.shape)
    if len(shape) != 4 or not {shape[1], shape[3]} & {1, 3}:
        raise ValueError(
            f"Got frames of the shape {shape}; expected [T, H, W, C] or [T, C, H, W] with 1 or 3 channels."
        )


def _flatten(videos) -> list[VideoRequest]:
    if isinstance(videos, (str, os.PathLike)):
        video = os.fspath(videos)
        folder = local_path(video)
        if os.path.isdir(folder):
            video = load_frames(image_paths(folder))
        return [VideoRequest(video)]
    if isinstance(videos, Mapping):
        return [_read_video(videos)]
    if isinstance(videos, ARRAYS):
        return [VideoRequest(videos)]
    if not isinstance(videos, (list, tuple)):
        raise ValueError(
            f"Got a video of type {type(videos).__name__}; expected a path, or frames: an array or tensor [T, H, W, C],"
            " or images."
        )
    if videos and all(map(_is_frame, videos)):
        return [VideoRequest(stack_frames(videos))]
    if videos and all(map(_is_image_path, videos)):
        return [VideoRequest(load_frames(list(map(os.fspath, videos))))]
    requests = []
    for video in videos:
        requests += _flatten(video)
    return requests


def _is_frame(item) -> bool:
    if isinstance(item, ARRAYS):
        return item.ndim == 3
    return hasattr(item, "convert")


def _is_image_path(item) -> bool:
    return isinstance(item, (str, os.PathLike)) and os.fspath(item).lower().endswith(IMAGE_SUFFIXES)


def _read_video(part: Mapping) -> VideoRequest:
    """The video of a message, with what that says of it; `ValueError` for what would have no effect."""
    requests = []
    keys = {}
    for key, value in part.items():
        if key not in _SOURCES:
            keys[key] = value
        elif value is not None:
            requests += _flatten(value)
    if len(requests) != 1:
        raise ValueError(f"A video of a message is {len(requests)} videos; expected one.")
    keys.pop("type", None)
    return replace(requests[0], **read_keys(keys))


def read_messages(messages, loads: bool):
    """
    Messages as Transformers takes them, from those that name images and videos as Qwen, vLLM and OpenAI do; `loads` if
    they are not only written out. `ValueError` for what would be ignored.
    """
    if isinstance(messages, (list, tuple)):
        if not messages:
            raise ValueError("Got a conversation without a message; expected at least one.")
        return [read_messages(message, loads) for message in messages]
    if not isinstance(messages, Mapping):
        return messages
    content = messages.get("content")
    if not isinstance(content, (list, tuple)):
        if loads and content is not None and not isinstance(content, str):
            raise ValueError(f"A message has the content {content!r}; expected a str, or a list of parts.")
        return messages
    parts = [_read_content(part, loads) for part in content]
    return dict(messages, content=parts)


def _read_content(part, loads: bool) -> dict:
    if not isinstance(part, Mapping):
        raise ValueError(
            f"A message has {part!r} in a list; expected parts, such as a dictionary of `type` and `text`."
        )
    part = dict(part)
    name = part.pop("type", None)
    if not name:
        name = next((known for known in _KINDS if known in part), None)
    if name not in _KINDS:
        raise ValueError(f"A message has content of type {name!r}; expected one of {', '.join(_KINDS)}.")
    kind = _KINDS[name]
    address_key = f"{kind}_url"
    if address_key in part:
        address = part.pop(address_key)
        if not isinstance(address, Mapping):  # the address itself; by others, {"url": ...}
            address = {"url": address}
        part.update(address)
    given = [key for key, value in part.items() if value is not None]
    ignored = [repr(key) for key in given if key not in _IMAGE_KEYS]
    if loads and kind == "image" and ignored:
        raise ValueError(f"A message has {', '.join(ignored)} of an image, which no processor takes from there.")
    names_video = not set(_SOURCES).isdisjoint(given)
    if loads and kind == "video" and names_video:
        return {"type": kind, "video": part}
    return {"type": kind} | part


def per_video(name: str, value, count: int) -> list:
    """One entry per video: a single number holds for all, nested lists are read in order."""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return [value] * count
    entries: list = []
    for entry in value:
        if isinstance(entry, (list, tuple)):
            entries.extend(entry)
        else:
            entries.append(entry)
    if len(entries) != count:
        raise ValueError(f"Got {len(entries)} entries of `{name}` for {count} videos; expected one per video.")
    return entries
