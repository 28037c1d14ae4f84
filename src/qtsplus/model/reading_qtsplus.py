"""
Reads the videos and images of one call of a processor, at the size that the model needs ([`size_for`]). Which frames of
a video are taken is decided in sampling_qtsplus.py.
"""

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.video_utils import VideoMetadata

from .addresses_qtsplus import local_path
from .configuration_qtsplus import PATCHES_PER_CHUNK
from .frames_qtsplus import check_frames, describe_frames
from .messages_qtsplus import flatten_videos, per_video
from .numbers_qtsplus import require_count
from .prompt_qtsplus import check_grid
from .sampling_qtsplus import FrameChoice, VideoRequest, choose_frames, frame_choice, read_keys, shrink
from .video_qtsplus import VideoChunks, VideoFile, naming, open_folder, open_video, resize_frame

if TYPE_CHECKING:
    from .processor_mixin_qtsplus import QTSplusProcessorMixin

# What a call says about sampling; the video processor gets frames that are sampled already.
_SAMPLING = ("fps", "num_frames", "do_sample_frames", "video_metadata")


def read_videos(processor: "QTSplusProcessorMixin", videos, kwargs: dict) -> tuple[list, dict]:
    """
    The frames of every video of a call, and its keywords with their metadata and nothing left to sample.

    Args:
        videos, kwargs: as in a call of the processor.
    """
    given = (kwargs.get("videos_kwargs") or {}) | kwargs
    requests = flatten_videos(videos)
    rates = per_video("fps", given.get("fps"), len(requests))
    metadata = per_video("video_metadata", given.get("video_metadata"), len(requests))
    counts = {name: given.get(name) for name in ("num_frames", "min_frames", "max_frames")}
    resizing = _resizing_of_files(processor, requests, given)
    fewest = processor.video_processor.temporal_patch_size

    frames_of_videos = []
    metadata_of_videos = []
    for request, rate, about in zip(requests, rates, metadata, strict=True):
        whole = request.over(VideoRequest(request.video, **read_keys(counts | {"fps": rate})))
        choose = frame_choice(processor.video_processor, whole)
        if given.get("do_sample_frames") is False and not request.samples:
            choose = choose_frames  # without a rate or a count it takes all frames
        if isinstance(request.video, str):
            frames, described = _read_file(processor, whole, choose, resizing)
        else:
            frames, described = _take_frames(processor, whole, about, choose, given)
        if len(frames) < fewest:  # a single frame, which Qwen3-VL cannot size
            frames = frames[[0] * fewest]
        frames_of_videos.append(frames)
        metadata_of_videos.append(described)
    options = {"video_metadata": metadata_of_videos, "do_sample_frames": False}
    if resizing is not None:
        options["do_resize"] = False
    return frames_of_videos, _with_video_options(kwargs, options)


def _resizing_of_files(
    processor: "QTSplusProcessorMixin",
    requests: list[VideoRequest],
    given: dict,
) -> dict | None:
    """
    The options by which the frames of files are resized one by one, since all of them at their original size may not
    fit into memory.

    Returns:
        `None` where the video processor resizes them: beside given frames, since it resizes all videos of a call or
        none, and where the caller says whether or where to resize.
    """
    are_files = [isinstance(request.video, str) for request in requests]
    if "do_resize" in given or "device" in given or not all(are_files):
        return None
    names = set(processor.video_processor.valid_kwargs.__annotations__)
    names.difference_update(_SAMPLING, ["input_data_format"])
    return {name: given[name] for name in names.intersection(given)}


def _read_file(
    processor: "QTSplusProcessorMixin",
    request: VideoRequest,
    choose: FrameChoice,
    resizing: dict | None,
) -> tuple[np.ndarray, VideoMetadata]:
    """The chosen frames of a file, at the size that the model needs if there are options for resizing."""
    if resizing is None:
        resizing = {"do_resize": False}
    opened = open_video(request.video, choose, request.within)
    size = size_for(processor, opened, request, **resizing)
    resize = functools.partial(resize_frame, processor.video_processor, size, resample=resizing.get("resample"))
    return np.stack(list(map(resize, opened.decode()))), opened.about.metadata


def _take_frames(
    processor: "QTSplusProcessorMixin",
    request: VideoRequest,
    metadata,
    choose: FrameChoice,
    given: dict,
) -> tuple[np.ndarray, VideoMetadata]:
    """The frames that a caller gives and their metadata; sampled if they have some and the call asks for that."""
    frames = check_frames(request.video, given.get("do_rescale", processor.video_processor.do_rescale))
    described = describe_frames(frames, metadata, request.fps)
    samples = given.get("do_sample_frames")
    if samples is None:
        samples = given.get("fps") or given.get("num_frames")
    if metadata is not None and samples:
        chosen = choose(len(frames), described.sampled_fps)
        frames = frames[chosen]
        described.frames_indices = np.asarray(described.frames_indices)[chosen].tolist()
    return frames, described


def _with_video_options(kwargs: dict, options: dict) -> dict:
    """The keywords of a call, with options for the video processor in place of what they say about sampling."""
    rest = dict(kwargs)
    nested = dict(kwargs.get("videos_kwargs") or {})
    for name in _SAMPLING:
        rest.pop(name, None)
        nested.pop(name, None)
    rest["videos_kwargs"] = nested | options
    return rest


def open_chunks(
    processor: "QTSplusProcessorMixin",
    request: VideoRequest,
    frames_per_chunk: int | None,
) -> VideoChunks:
    """[`QTSplusProcessorMixin.video_chunks`] of a file, an address or a folder."""
    temporal = processor.video_processor.temporal_patch_size
    folder = local_path(request.video)
    if os.path.isdir(folder):
        limits = request.asked.keys() - {"fps", "max_pixels"}
        if limits:
            raise ValueError(
                f"Got a start, an end or a count for the folder {request.video!r}; all frames are looked at."
            )
        opened = open_folder(folder, request.fps)
    else:
        choose = frame_choice(processor.video_processor, request)
        opened = open_video(request.video, choose, request.within)
    size = size_for(processor, opened, request)
    grid = processor.grid_of(opened.shape[0], *size, do_resize=not processor.native_resolution)
    if frames_per_chunk is None:
        _, rows, columns = grid[0].tolist()
        frames_per_chunk = PATCHES_PER_CHUNK // (rows * columns) * temporal
    else:
        frames_per_chunk = require_count("frames_per_chunk", frames_per_chunk)
    steps_per_chunk = max(frames_per_chunk // temporal, 1)
    return VideoChunks(
        **vars(opened),
        video_grid_thw=grid,
        second_per_grid_ts=[temporal / opened.about.metadata.sampled_fps],
        frames_per_chunk=steps_per_chunk * temporal,
        resize=functools.partial(resize_frame, processor.video_processor, size),
        preprocess=functools.partial(processor.preprocess_frames, grid=grid),
    )


def size_for(
    processor: "QTSplusProcessorMixin",
    video: VideoFile,
    request: VideoRequest,
    **options,
) -> tuple[int, int]:
    """The height and width of a video's frames for the model, or smaller where a message limits their pixels."""
    with naming(video.name):
        size = processor.frame_size(*video.shape, **options)
    if request.max_pixels is None:
        return size
    if not (processor.native_resolution and options.get("do_resize", True)):
        raise ValueError("max_pixels of a video has no effect on frames of one size.")
    settings = processor.video_processor
    return shrink(size, request.max_pixels, settings.patch_size * settings.merge_size)


def stand_ins(
    processor: "QTSplusProcessorMixin",
    video_grid_thw: Tensor,
    second_per_grid_ts: Sequence[float] | Tensor | None,
    kwargs: dict,
) -> tuple[list[Tensor], dict]:
    """
    Videos of the given grids without values, by which the backbone's processor counts placeholders; and the keywords
    of the call for them.
    """
    grids = check_grid("video_grid_thw", torch.as_tensor(video_grid_thw))
    videos = [processor.blank_video(*grid) for grid in grids.tolist()]
    nested = kwargs.get("videos_kwargs") or {}
    metadata = kwargs.get("video_metadata") or nested.get("video_metadata")
    if not metadata:
        if second_per_grid_ts is None:
            raise ValueError(
                "Got video_grid_thw without times: give second_per_grid_ts or video_metadata of those videos too."
            )
        temporal = processor.video_processor.temporal_patch_size
        times = zip(videos, second_per_grid_ts, strict=True)
        metadata = [describe_frames(video, None, temporal / float(seconds)) for video, seconds in times]
    stand_in = {
        "video_metadata": metadata,
        "device": "meta",
        "do_sample_frames": False,
        "do_resize": False,
        "do_rescale": False,
        "do_normalize": False,
    }
    return videos, _with_video_options(kwargs, stand_in)


def fetch_images(image_processor, images):
    """Images by path, address or base64 as pixels; others as they are."""
    try:
        return image_processor.fetch_images(images)
    # torchvision raises the RuntimeError for a text that is not a path but can be read as base64.
    except (RuntimeError, Image.DecompressionBombError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"Cannot read {str(images)[:500]!r} as images; expected files that exist: {reason}") from error


def check_placeholders(
    text: str,
    token: str,
    given,
    kind: str,
) -> None:
    """Raises a `ValueError` unless the text has a placeholder for each image, or for each video."""
    placeholders = text.count(token)
    if placeholders != len(given):
        raise ValueError(
            f"Got {len(given)} {kind} and {placeholders} placeholders {token} in the text; expected as many."
        )
