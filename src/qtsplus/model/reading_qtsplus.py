"""Reads the videos and images of one call of a processor, at the size that the model needs."""

import functools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.video_utils import VideoMetadata

from .configuration_qtsplus import PATCHES_PER_CHUNK
from .frames_qtsplus import check_frames, describe_frames
from .messages_qtsplus import flatten_videos, per_video
from .sampling_qtsplus import FrameChoice, VideoRequest, choose_frames, frame_choice, read_keys
from .video_qtsplus import VideoChunks, VideoFile, naming, open_folder, open_video, resize_frame, shrink

if TYPE_CHECKING:
    from .processing_qtsplus import QTSplusProcessorMixin

_LEAST_TOKENS = 128  # of a frame, the fewest to which qwen-vl-utils holds the frames of a video by `total_pixels`
_COUNTS = ("num_frames", "min_frames", "max_frames")
# What a call says about sampling; the video processor gets frames that are sampled already.
_SAMPLING = ("fps", "num_frames", "do_sample_frames", "video_metadata")


def read_videos(processor: "QTSplusProcessorMixin", videos, kwargs: dict) -> tuple[list, dict]:
    """
    The frames of every video of a call, and its keywords with their metadata and nothing left to sample.

    Args:
        videos, kwargs: as in a call of the processor.
    """
    nested = dict(kwargs.get("videos_kwargs") or {})
    given = nested | kwargs
    requests = flatten_videos(videos)
    settings = processor.video_processor
    rates = per_video("fps", given.get("fps"), len(requests))
    metadata = per_video("video_metadata", given.get("video_metadata"), len(requests))
    counts = {name: given.get(name) for name in _COUNTS}
    samples = given.get("do_sample_frames")
    samples_given_frames = samples
    if samples is None:
        samples_given_frames = given.get("fps") or given.get("num_frames")

    names = set(settings.valid_kwargs.__annotations__).difference(_SAMPLING, ["input_data_format"])
    resizing = {name: value for name, value in given.items() if name in names}
    do_rescale = resizing.get("do_rescale", settings.do_rescale)
    # The frames of a file are resized one by one, since all of them at their original size may not fit into memory. The
    # exceptions: beside given frames, since the video processor resizes all videos of a call or none, and where the
    # caller says whether or where to resize.
    only_files = all(isinstance(request.video, str) for request in requests)
    resizes_singly = only_files and "do_resize" not in resizing and "device" not in resizing
    if not resizes_singly:
        resizing = {"do_resize": False}

    frames_of_videos = []
    metadata_of_videos = []
    for request, rate, about in zip(requests, rates, metadata, strict=True):
        by_call = read_keys(counts | {"fps": rate})
        whole = request.over(VideoRequest(request.video, **by_call))
        choose = frame_choice(settings, whole)
        if samples is False and not request.samples:
            choose = choose_frames  # without a rate or a count it takes all frames
        if isinstance(request.video, str):
            frames, described = _read_file(processor, whole, choose, resizing)
        else:
            described = describe_frames(request.video, about, whole.fps)
            frames = check_frames(request.video, do_rescale)
            if about is not None and samples_given_frames:
                chosen = choose(len(frames), described.sampled_fps)
                frames = frames[chosen]
                described.frames_indices = np.asarray(described.frames_indices)[chosen].tolist()
        fewest = settings.temporal_patch_size
        if len(frames) < fewest:  # a single frame, which Qwen3-VL cannot size
            frames = frames[[0] * fewest]
        frames_of_videos.append(frames)
        metadata_of_videos.append(described)
    times = {"video_metadata": metadata_of_videos, "do_sample_frames": False}
    if resizes_singly:
        times["do_resize"] = False
    return frames_of_videos, _with_videos_kwargs(kwargs, times)


def _with_videos_kwargs(kwargs: dict, more: dict) -> dict:
    """The keywords of a call, with `more` for the video processor in place of what they say about sampling."""
    rest = {name: value for name, value in kwargs.items() if name not in _SAMPLING}
    nested = dict(kwargs.get("videos_kwargs") or {})
    for name in _SAMPLING:
        nested.pop(name, None)
    rest["videos_kwargs"] = nested | more
    return rest


def _read_file(
    processor: "QTSplusProcessorMixin",
    request: VideoRequest,
    choose: FrameChoice,
    resizing: dict,
) -> tuple[np.ndarray, VideoMetadata]:
    """The chosen frames of a file, at the size that `resizing` gives them."""
    opened = open_video(request.video, choose, request.within)
    size = size_for(processor, opened, request, **resizing)
    resample = resizing.get("resample")
    frames = [resize_frame(processor.video_processor, size, frame, resample) for frame in opened.decode()]
    return np.stack(frames), opened.about.metadata


def open_chunks(
    processor: "QTSplusProcessorMixin",
    request: VideoRequest,
    frames_per_chunk: int | None,
) -> VideoChunks:
    """[`QTSplusProcessorMixin.video_chunks`] of a file, an address or a folder."""
    temporal = processor.video_processor.temporal_patch_size
    if os.path.isdir(request.video):
        counts = (request.num_frames, request.min_frames, request.max_frames)
        if any(limit is not None for limit in counts + request.within):
            raise ValueError(
                f"Got a start, an end or a count for the folder {request.video!r}; all frames are looked at."
            )
        opened = open_folder(request.video, request.fps)
    else:
        opened = open_video(request.video, frame_choice(processor.video_processor, request), request.within)
    size = size_for(processor, opened, request)
    grid = processor.grid_of(opened.shape[0], *size, do_resize=not processor.native_resolution)
    if frames_per_chunk is None:
        patches_per_step = int(grid[0, 1] * grid[0, 2])
        frames_per_chunk = PATCHES_PER_CHUNK // patches_per_step * temporal
    steps_per_chunk = max(int(frames_per_chunk) // temporal, 1)
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
    if request.max_pixels is None and request.total_pixels is None:
        return size
    if not (processor.native_resolution and options.get("do_resize", True)):
        raise ValueError("max_pixels and total_pixels of a video have no effect on frames of one size.")
    settings = processor.video_processor
    side = settings.patch_size * settings.merge_size
    most = request.max_pixels or math.inf
    if request.total_pixels is not None:
        share_of_total = request.total_pixels * settings.temporal_patch_size / video.shape[0]
        floor = int(1.05 * _LEAST_TOKENS * side**2)
        most = min(most, max(share_of_total, floor))
    return shrink(size, most, side)


def stand_ins(
    processor: "QTSplusProcessorMixin",
    video_grid_thw: Tensor,
    second_per_grid_ts: Sequence[float] | Tensor | None,
    kwargs: dict,
) -> tuple[list[Tensor], dict]:
    """
    Videos of the given grids without values, by which the backbone's processor counts placeholders; and the keywords
    of the call for them. Without seconds or metadata they have any times, for prompts that state none.
    """
    videos = [processor.blank_video(*grid) for grid in torch.as_tensor(video_grid_thw).tolist()]
    nested = kwargs.get("videos_kwargs") or {}
    metadata = kwargs.get("video_metadata") or nested.get("video_metadata")
    if not metadata:
        if second_per_grid_ts is None and processor.states_times:
            raise ValueError(
                "Got video_grid_thw without second_per_grid_ts: the prompt states the seconds of the frames, so give "
                "second_per_grid_ts or video_metadata of those videos."
            )
        temporal = processor.video_processor.temporal_patch_size
        steps = [temporal] * len(videos) if second_per_grid_ts is None else second_per_grid_ts
        metadata = [
            describe_frames(video, None, temporal / float(seconds))
            for video, seconds in zip(videos, steps, strict=True)
        ]
    stand_in = {"video_metadata": metadata, "do_sample_frames": False, "do_resize": False, "device": "meta"}
    return videos, _with_videos_kwargs(kwargs, stand_in)


def fetch_images(image_processor, images):
    """Images by path, address or base64 as pixels; others as they are."""
    try:
        return image_processor.fetch_images(images)
    # torchvision raises the RuntimeError for a text that is not a path but can be read as base64.
    except (RuntimeError, Image.DecompressionBombError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"Cannot read {str(images)[:500]!r} as images; expected files that exist: {reason}") from error


def check_placeholders(text: str, token: str, given, kind: str) -> None:
    """Raises a `ValueError` unless the text has a placeholder for each image, or for each video."""
    placeholders = text.count(token)
    if placeholders != len(given):
        raise ValueError(
            f"Got {len(given)} {kind} and {placeholders} placeholders {token} in the text; expected as many."
        )
