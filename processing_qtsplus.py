"""Processors: read videos with their true times and mark the question in the prompt.

Data flows as: paths, folders or frames -> frames with metadata -> the backbone's own processor -> the question's mask.
[`QTSplusProcessorMixin`] does it for any backbone; Qwen2.5-VL's processor stands at the end.
"""

import functools
import io
import itertools
import os
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen2_5_VLProcessor
from transformers.image_utils import SizeDict, load_image, make_flat_list_of_images
from transformers.utils import logging
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

from .encoding_qtsplus import PATCHES_PER_CHUNK
from .prompt_qtsplus import find_query_mask

try:  # optional, as torchcodec is: one of the two reads the videos
    import av
except ImportError:
    av = None

logger = logging.get_logger(__name__)

DEFAULT_FPS = 2.0  # Qwen's own rate, for a saved processor that names none
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
BYTES_PER_CHUNK = 2**28  # of decoded frames that are held at a time

# --------------------------------------------------------------------------------------------------------------------
# Which frames of a video are looked at
# --------------------------------------------------------------------------------------------------------------------


def choose_frames(
    total_num_frames: int,
    video_fps: float,
    fps: float | None = None,
    num_frames: int | None = None,
    min_frames: int = 4,
    max_frames: int = 768,
    temporal_patch_size: int = 2,
) -> np.ndarray:
    """
    Spreads the sampled frames evenly over a video.

    Args:
        total_num_frames: frames that the video has.
        video_fps: its frames per second.
        fps: frames to sample per second; the count is held between `min_frames` and `max_frames`.
        num_frames: frames to sample instead, as many as exist at most. With neither, all frames are taken.
        temporal_patch_size: the count is a multiple of it, unless the video is shorter.

    Returns:
        `[T]` int64, increasing frame indices.
    """
    if num_frames is not None:
        wanted = float(round(num_frames / temporal_patch_size) * temporal_patch_size)
    elif fps is not None:
        wanted = min(max(total_num_frames / video_fps * fps, min_frames), max_frames)
    else:
        return np.arange(total_num_frames)
    count = int(min(wanted, total_num_frames))
    count = count // temporal_patch_size * temporal_patch_size or min(temporal_patch_size, total_num_frames)
    return np.arange(count) * total_num_frames // count


# --------------------------------------------------------------------------------------------------------------------
# Reading video files
# --------------------------------------------------------------------------------------------------------------------


def read_video(path: str, choose: Callable[[int, float], np.ndarray]) -> tuple[np.ndarray, VideoMetadata]:
    """
    Reads the chosen frames of a video file or `http(s)` address.

    A variable frame rate is read as its mean rate: frame `i` is what the video shows at `i / fps` seconds, so times
    computed from the metadata hold for every file.

    Args:
        path: the file.
        choose: from (number of frames, frames per second) to the indices of the frames to read.

    Returns:
        `[T, H, W, 3]` uint8 RGB frames, upright, and the metadata of the whole video with `frames_indices`.

    Raises:
        ValueError: the file is missing, cannot be decoded, has no video stream or no frame.
        ImportError: neither torchcodec (with FFmpeg) nor PyAV is installed.
    """
    metadata, decode = open_video(path, choose)
    return np.stack(list(decode())), metadata


def open_video(
    path: str, choose: Callable[[int, float], np.ndarray]
) -> tuple[VideoMetadata, Callable[[], Iterator[np.ndarray]]]:
    """[`read_video`] frame by frame: the metadata, and a function that begins to decode, `[H, W, 3]` each."""
    source: str | io.BytesIO
    if path.startswith(("http://", "https://")):
        with urllib.request.urlopen(path) as response:
            source = io.BytesIO(response.read())
    else:
        source = path.removeprefix("file://")
        if not os.path.isfile(source):
            raise ValueError(
                f"There is no video at {path!r}; expected a video file, a folder of frames or an http(s) address."
            )
    backend = video_backend()
    open_with = {"torchcodec": _open_with_torchcodec, "pyav": _open_with_pyav}[backend]
    total, fps, indices, decode = open_with(source, path, choose)
    first = next(decode(), None)
    if first is None:
        raise _undecodable(path, "no frame could be decoded")
    metadata = VideoMetadata(
        total_num_frames=int(total),
        fps=float(fps),
        duration=float(total / fps),
        height=first.shape[0],
        width=first.shape[1],
        video_backend=backend,
        frames_indices=[int(index) for index in indices],
    )
    return metadata, decode


@functools.lru_cache
def video_backend() -> str:
    """
    Names the decoder in use: `"torchcodec"` where it loads and has found FFmpeg, `"pyav"` (which brings its own)
    otherwise. Decided and logged once.

    Raises:
        ImportError: there is neither.
    """
    try:
        import torchcodec
        import torchcodec.decoders  # noqa: F401

        # From 0.16 on torchcodec imports without FFmpeg and says so here; before, the import fails.
        missing = "found no FFmpeg" if getattr(torchcodec, "ffmpeg_major_version", "") is None else None
    except (ImportError, RuntimeError, OSError) as error:
        missing = f"does not load: {str(error).strip().splitlines()[0]}"
    if missing is None:
        logger.warning("Decoding videos with torchcodec.")
        return "torchcodec"
    if av is None:
        raise ImportError(
            f"Reading a video needs PyAV (`pip install av`), or torchcodec with FFmpeg. torchcodec {missing}."
        )
    logger.warning(f"Decoding videos with PyAV: torchcodec {missing}.")
    return "pyav"


def _open_with_pyav(source, name, choose):
    try:
        start, total, fps = _scan_with_pyav(source, name)
    except av.error.FFmpegError as error:
        raise _undecodable(name, error) from error
    indices = choose(total, fps)

    def decode():
        try:
            yield from _decode_with_pyav(source, start, fps, _instants(indices, fps))
        except av.error.FFmpegError as error:
            raise _undecodable(name, error) from error

    return total, fps, indices, decode


def _scan_with_pyav(source, name):
    """Start in seconds (`None` where the file has no timestamps), number of frames and mean frames per second.

    Read from the packets, without decoding: containers may state no frame count, and a wrong mean rate.
    """
    with _pyav_container(source) as container:
        if not container.streams.video:
            raise _undecodable(name, "it has no video stream")
        stream = container.streams.video[0]
        times = [packet.pts for packet in container.demux(stream) if packet.size and not packet.is_discard]
        stated_fps = stream.average_rate or stream.guessed_rate
        if None in times:
            return None, len(times), _mean_fps(name, len(times), 0.0, stated_fps)
        first, last = (float(time * stream.time_base) for time in (min(times, default=0), max(times, default=0)))
        return first, len(times), _mean_fps(name, len(times), last - first, stated_fps)


def _decode_with_pyav(source, start, fps, instants):
    """The frames shown at `instants`, increasing seconds from the video's start."""
    shown, given = None, 0
    # One for this video: PyAV 19's own serves all, and a process forked later would wait for its threads forever.
    reformatter = av.video.reformatter.VideoReformatter()
    with _pyav_container(source) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for number, frame in enumerate(container.decode(stream)):
            time = number / fps if start is None or frame.pts is None else float(frame.pts * frame.time_base) - start
            # Until this frame appears the one before it is shown.
            before = int(np.searchsorted(instants, time))
            if shown is not None and before > given:
                yield from itertools.repeat(_upright(shown, reformatter), before - given)
                given = before
            shown = frame
            if given == len(instants):
                return
    if shown is not None:
        yield from itertools.repeat(_upright(shown, reformatter), len(instants) - given)


def _pyav_container(source):
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return av.open(source)


def _upright(frame, reformatter):
    """`[H, W, 3]` uint8: phones store a portrait video lying down, with an angle to turn it by, counterclockwise."""
    pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
    return np.rot90(pixels, k=round(frame.rotation / 90))


def _open_with_torchcodec(source, name, choose):
    try:
        from torchcodec.decoders import VideoDecoder
    except ImportError as error:
        raise ImportError("Reading a video with torchcodec needs `pip install torchcodec`.") from error

    try:
        decoder = VideoDecoder(source, dimension_order="NHWC", num_ffmpeg_threads=0)
    except (RuntimeError, ValueError) as error:
        raise _undecodable(name, error) from error
    try:
        total, start = decoder.metadata.num_frames or 0, decoder.metadata.begin_stream_seconds
        span = decoder.get_frame_at(total - 1).pts_seconds - start if total > 1 else 0.0
    except RuntimeError as error:
        raise _undecodable(name, error) from error
    fps = _mean_fps(name, total, span, decoder.metadata.average_fps)
    indices = choose(total, fps)
    # An instant past the end of the last frame is an error here.
    seconds = np.minimum(start + _instants(indices, fps), decoder.metadata.end_stream_seconds - 1e-6).tolist()

    def decode():
        try:
            for begin in range(0, len(seconds), 16):
                yield from decoder.get_frames_played_at(seconds=seconds[begin : begin + 16]).data.numpy()
        except RuntimeError as error:
            raise _undecodable(name, error) from error

    return total, fps, indices, decode


def _mean_fps(name, total, span, stated_fps):
    """Frames per second from the seconds between the first and the last; the last lasts as long as the mean."""
    if total == 0:
        raise ValueError(f"The video {name!r} is empty: it has 0 frames.")
    if span > 0:
        return (total - 1) / span
    if not stated_fps:
        raise ValueError(f"The video {name!r} states neither times nor a frame rate; pass its frames, with `fps=`.")
    return float(stated_fps)


def _instants(indices, fps):
    # A quarter of a frame later, since containers round timestamps.
    return (np.asarray(indices) + 0.25) / fps


def _undecodable(name, reason):
    return ValueError(f"Cannot decode {name!r} as a video: {reason}. Expected a complete file with a video stream.")


# --------------------------------------------------------------------------------------------------------------------
# Frames that are given
# --------------------------------------------------------------------------------------------------------------------


def load_frames(folder: str | list[str]) -> np.ndarray:
    """
    Loads a video that is stored as images.

    Args:
        folder: a folder of images, read in natural order (`frame2.jpg` before `frame10.jpg`), or a list of images, read
            as listed.

    Returns:
        `[T, H, W, 3]` uint8 RGB.

    Raises:
        ValueError: no image in the folder, one that cannot be read, or images of different sizes.
    """
    frames = []
    for path in _image_paths(folder) if isinstance(folder, str) else folder:
        try:
            frames.append(load_image(path.removeprefix("file://")))
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot read the frame {path!r} as an image: {error}.") from error
    return _stack_frames(frames)


def _image_paths(folder):
    names = [name for name in os.listdir(folder) if name.lower().endswith(IMAGE_SUFFIXES)]
    if not names:
        raise ValueError(f"The folder {folder!r} holds no frames; expected images ({', '.join(IMAGE_SUFFIXES)}).")
    return [os.path.join(folder, name) for name in sorted(names, key=_natural_order)]


def _natural_order(name):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _stack_frames(frames):
    """One video from a list of its frames: PIL images, arrays or tensors."""
    frames = [np.asarray(frame.convert("RGB")) if hasattr(frame, "convert") else frame for frame in frames]
    shapes = {tuple(frame.shape) for frame in frames}
    if len(shapes) > 1:
        raise ValueError(f"The frames of one video differ in shape: {sorted(shapes)}; expected one shape.")
    return torch.stack(frames) if torch.is_tensor(frames[0]) else np.stack(frames)


def _is_frame(item):
    return hasattr(item, "convert") or (_is_array(item) and item.ndim == 3)


def _is_array(item):
    return isinstance(item, (np.ndarray, torch.Tensor))


def _is_image_path(item):
    return isinstance(item, (str, os.PathLike)) and str(item).lower().endswith(IMAGE_SUFFIXES)


def flatten_videos(videos) -> list:
    """
    Flattens every nesting that a processor is called with, a list of videos per row or a single video.

    A list of frames, or of paths of images, is one video; any other list is a list of videos.

    Returns:
        Per video a path, or `[T, H, W, C]` or `[T, C, H, W]` frames as an array or tensor.

    Raises:
        ValueError: an item is no video, or there is none.
    """
    flat = _flatten(videos)
    if not flat:
        raise ValueError("Got an empty video (0 frames); expected at least one frame.")
    return flat


def _flatten(videos):
    if isinstance(videos, (str, os.PathLike)):
        path = os.fspath(videos)
        return [load_frames(path)] if os.path.isdir(path) else [path]
    if _is_array(videos) and videos.ndim in (3, 4, 5):
        return list(videos) if videos.ndim == 5 else [videos if videos.ndim == 4 else videos[None]]
    if hasattr(videos, "convert"):
        return [_stack_frames([videos])]
    if not isinstance(videos, (list, tuple)):
        given = f"shape {tuple(videos.shape)}" if _is_array(videos) else f"type {type(videos).__name__}"
        raise ValueError(
            f"Got a video of {given}; expected a path, or frames as an array or tensor [T, H, W, C] or list of images."
        )
    if videos and all(map(_is_frame, videos)):
        return [_stack_frames(videos)]
    if videos and all(map(_is_image_path, videos)):
        return [load_frames([os.fspath(path) for path in videos])]
    return [flat for video in videos for flat in _flatten(video)]


def _check_frames(frames):
    """The same frames, laid out as torch can read them: an array may be a view that runs backwards (BGR to RGB)."""
    if len(frames) == 0:
        raise ValueError("Got an empty video (0 frames); expected at least one frame.")
    frames = np.ascontiguousarray(frames) if isinstance(frames, np.ndarray) else frames
    values = torch.as_tensor(frames)
    if values.is_floating_point() and not torch.isfinite(values).all():
        raise ValueError("The frames of a video hold NaN or infinite pixels; expected finite values.")
    return frames


def _describe_frames(frames, metadata, fps):
    """The metadata of frames that were sampled already, from what the caller says about them."""
    if metadata is None and fps is None:
        raise ValueError(
            f"Got {len(frames)} frames without their times. Pass the rate at which they were sampled as `fps=...`, or"
            ' `video_metadata=[{"fps": ..., "total_num_frames": ..., "frames_indices": [...]}]`, one per video.'
        )
    given = {"fps": fps} if metadata is None else dict(metadata)
    if given.get("fps") is None:
        raise ValueError(f"The `video_metadata` of {len(frames)} frames has no `fps`; expected frames per second.")
    _require_positive("the `fps` of `video_metadata`", given["fps"])
    if given.get("frames_indices") is None:
        if given.get("total_num_frames") not in (None, len(frames)):
            raise ValueError(
                f"Got {len(frames)} frames of a video of {given['total_num_frames']} without `frames_indices` in their"
                " `video_metadata`; expected the index of each frame."
            )
        given["frames_indices"] = range(len(frames))
    given["frames_indices"] = [int(index) for index in given["frames_indices"]]
    if len(given["frames_indices"]) != len(frames):
        raise ValueError(
            f"Got {len(frames)} frames and {len(given['frames_indices'])} `frames_indices`; expected one per frame."
        )
    if given.get("total_num_frames") is None:
        given["total_num_frames"] = len(frames)
    return VideoMetadata(**given)


def _require_positive(name, value):
    if not (value > 0 and np.isfinite(value)):
        raise ValueError(f"Got {name}={value!r}; expected a finite number above 0.")


# --------------------------------------------------------------------------------------------------------------------
# Long videos
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class VideoChunks:
    """
    A long video, decoded and preprocessed chunk by chunk while one iterates over it.

    Iterating gives `pixel_values_videos` `[k, d]` and `video_grid_thw` `[1, 3]` of each chunk. Joined, the pixel values
    are those of the whole video; nothing is kept of a chunk that was given out.

    Args:
        video_grid_thw: `[1, 3]`, of the whole video.
        second_per_grid_ts: `[1]`, seconds per temporal patch.
        metadata: of the whole video, with the indices of the frames that are looked at.
        frames_per_chunk: a multiple of the temporal patch size.
    """

    preprocess: Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]]
    decode: Callable[[], Iterator[np.ndarray]]
    video_grid_thw: torch.Tensor
    second_per_grid_ts: list[float]
    metadata: VideoMetadata
    frames_per_chunk: int

    def __len__(self) -> int:
        return -(-len(self.metadata.frames_indices) // self.frames_per_chunk)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        frames = self.decode()
        while chunk := list(itertools.islice(frames, self.frames_per_chunk)):
            yield self.preprocess(_stack_frames(chunk))


# --------------------------------------------------------------------------------------------------------------------
# The processor
# --------------------------------------------------------------------------------------------------------------------


class QTSplusProcessorMixin:
    r"""
    In front of a backbone's processor: says which tokens are the question, and reads videos with their true times.

    It replaces nothing of the chat template: `apply_chat_template(..., tokenize=True, return_dict=True)` works as
    usual. What goes beyond messages belongs into its `processor_kwargs`, e.g. `processor_kwargs={"query": "Where?"}`.
    """

    user_turn = "<|im_start|>user"  # what the chat template opens and closes a turn with
    turn_end = "<|im_end|>"
    native_resolution = True  # larger frames become more tokens

    @property
    def model_input_names(self):
        names = ["second_per_grid_ts", "query_mask", "query_input_ids", "query_attention_mask"]
        return list(dict.fromkeys([*super().model_input_names, *names]))

    @property
    def query_token_ids(self) -> dict[str, int | list[int]]:
        """The ids by which [`find_query_mask`] finds the question, named as in the model's configuration."""
        tokenizer = self.tokenizer
        special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        return {
            "user_turn_token_ids": tokenizer(self.user_turn, add_special_tokens=False)["input_ids"],
            "turn_end_token_id": tokenizer.convert_tokens_to_ids(self.turn_end),
            "special_token_ids": sorted(special.union(tokenizer.all_special_ids)),
        }

    @property
    def placeholder_ids(self) -> list[int]:
        """The ids that stand for the tokens of images and of videos."""
        return [self.image_token_id, self.video_token_id]

    def follow(self, config) -> None:
        """Takes over what the model's configuration decides of a prompt's layout; nothing for most backbones."""

    def __call__(self, images=None, text=None, videos=None, query=None, video_grid_thw=None, **kwargs):
        """
        Prepares the model's inputs.

        Args:
            images: as in the backbone's processor.
            text (`str` or `list[str]`): prompts made with the chat template, one per row.
            videos: per video a path (file, `http(s)` address, or folder of frames), or its frames: `[T, H, W, C]` or
                `[T, C, H, W]` as an array or tensor, or a list of images. Alone, in a list, or in a list per row.
            query (`str` or `list[str]`, *optional*): the question to select by, one per row or one for all rows, where
                it is not the text of the last user turn.
            video_grid_thw (`torch.Tensor`, *optional*): `[videos, 3]`, the grids of videos that were encoded before, in
                the place of `videos`; for `model.generate(..., video_features=...)`. With `video_metadata`, where the
                prompt tells the times of its frames.
            fps (`float` or `list[float]`, *optional*): for a video file, frames to sample per second, bounded by
                `min_frames` and `max_frames`; by default the video processor's `fps`, or else 2. For frames without
                `video_metadata` the rate at which they were sampled: they are used as they are.
            num_frames (`int`, *optional*): frames to sample instead, as many as there are at most.
            do_sample_frames (`bool`, *optional*): `False` takes all frames. Frames that are given are sampled only when
                they come with `video_metadata` and this call asks for it by `fps`, `num_frames` or `True`.
            video_metadata (`list[dict]`, *optional*): per video, what the given frames are: `fps` of the video that
                they come from, its `total_num_frames`, and their `frames_indices` in it. `None`, or ignored, for files.
            kwargs: as in the backbone's processor.

        Returns:
            `BatchFeature` with the backbone's inputs and `query_mask` `[B, S]`, 1 on the question's tokens. With
            `query` also `query_input_ids` `[B, L]` and `query_attention_mask` `[B, L]`, padded on the right. They come
            in the form of `input_ids`: tensors with `return_tensors="pt"`, lists without.

        Raises:
            ValueError: a video that is missing, cannot be decoded or has no frame; frames without their times, or with
                NaN or infinite pixels; `fps` and `num_frames` together or not above 0; more or fewer placeholders in
                the text than videos or images; an empty `query`, or not one per row.
        """
        if videos is not None:
            videos, kwargs = self._read_videos(videos, kwargs)
            self._require_placeholders(text, self.video_token, len(videos), "videos", kwargs)
        if images is not None:
            count = len(make_flat_list_of_images(images))
            self._require_placeholders(text, self.image_token, count, "images", kwargs)
        if video_grid_thw is not None:
            if videos is not None or text is None or kwargs.get("return_tensors") not in (None, "pt"):
                raise ValueError(
                    'Got `video_grid_thw`; expected it in the place of `videos`, with `text` and `return_tensors="pt"`.'
                )
            self._require_placeholders(text, self.video_token, len(video_grid_thw), "videos", kwargs)
            videos, kwargs = self._stand_ins(video_grid_thw, kwargs)
        inputs = super().__call__(images=images, text=text, videos=videos, **kwargs)
        if video_grid_thw is not None:
            for name in ("pixel_values_videos", "second_per_grid_ts"):  # the stand-ins' own
                inputs.pop(name)

        if text is not None:
            inputs["query_mask"] = self._query_mask(inputs["input_ids"], inputs.get("attention_mask"))
        if query is not None:
            rows = len(inputs["input_ids"]) if text is not None else None
            inputs.update(self._tokenize_query(query, rows, like=inputs.get("input_ids")))
        return inputs

    def video_chunks(
        self,
        video: str | os.PathLike,
        fps: float | None = None,
        num_frames: int | None = None,
        min_frames: int | None = None,
        max_frames: int | None = None,
        frames_per_chunk: int | None = None,
    ) -> VideoChunks:
        """
        Opens a long video for reading in chunks: the frames and pixel values that a call with `videos=` gives, without
        holding them all.

        Args:
            video: a file, an `http(s)` address, or a folder of frames.
            fps, num_frames, min_frames, max_frames: as in a call; of a folder, `fps` is the rate at which its frames
                were taken.
            frames_per_chunk: frames at a time, cut down to whole temporal patches; by default about 16,384 patches
                (or tokens, where the grid counts those), and no more than 256 MB of decoded frames.

        Raises:
            ValueError: a video that is missing or cannot be decoded; a folder without `fps`; rates and counts that are
                not above 0, or both given.
        """
        if not isinstance(video, (str, os.PathLike)):
            raise ValueError(f"Got a video of type {type(video).__name__}; expected a path. Frames need no chunks.")
        path, processor = os.fspath(video), self.video_processor
        temporal = processor.temporal_patch_size
        for name, given in (("fps", fps), ("num_frames", num_frames), ("frames_per_chunk", frames_per_chunk)):
            if given is not None:
                _require_positive(name, given)
        if os.path.isdir(path):
            paths = _image_paths(path)
            metadata = _describe_frames(paths, None, fps)
            height, width = load_frames(paths[:1]).shape[1:3]

            def decode():
                return (load_frames([one])[0] for one in paths)
        else:
            bounds = {"min_frames": min_frames, "max_frames": max_frames, "temporal_patch_size": None}
            metadata, decode = open_video(path, self._frame_choice(fps, num_frames, bounds))
            height, width = metadata.height, metadata.width

        grid = self.grid_of(len(metadata.frames_indices), height, width)
        if frames_per_chunk is None:
            patches = int(grid[0, 1] * grid[0, 2])
            frames_per_chunk = min(PATCHES_PER_CHUNK // patches * temporal, BYTES_PER_CHUNK // (3 * height * width))
        return VideoChunks(
            preprocess=functools.partial(self.preprocess_frames, grid=grid),
            decode=decode,
            video_grid_thw=grid,
            second_per_grid_ts=[temporal / metadata.sampled_fps],
            metadata=metadata,
            frames_per_chunk=max(int(frames_per_chunk) // temporal, 1) * temporal,
        )

    def _frame_choice(self, fps, num_frames, bounds):
        """[`choose_frames`] with what the call leaves open taken from the video processor."""
        if fps is not None and num_frames is not None:
            raise ValueError(f"Got `fps={fps!r}` and `num_frames={num_frames!r}`; expected one of them.")
        if fps is None and num_frames is None:
            num_frames = getattr(self.video_processor, "num_frames", None)
        fps = fps or getattr(self.video_processor, "fps", None) or DEFAULT_FPS
        bounds = {
            name: getattr(self.video_processor, name, None) if value is None else value
            for name, value in bounds.items()
        }
        bounds = {name: value for name, value in bounds.items() if value is not None}
        return functools.partial(choose_frames, fps=fps, num_frames=num_frames, **bounds)

    def grid_of(self, num_frames: int, height: int, width: int) -> torch.Tensor:
        """`[1, 3]`: the grid of a video, asked of the video processor itself with a video without values."""
        blank = torch.empty(num_frames, 3, height, width, dtype=torch.uint8, device="meta")
        options = {"do_sample_frames": False, "device": "meta", "return_tensors": "pt"}
        return self.video_processor(videos=[blank], **options)["video_grid_thw"]

    def preprocess_frames(self, frames: np.ndarray, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Pixel values and grid of some frames of a video.

        Args:
            frames: `[T, H, W, 3]` uint8.
            grid: `[1, 3]`, whose height and width the frames shall have; ignored without `native_resolution`.
        """
        processor, video = self.video_processor, torch.from_numpy(frames).permute(0, 3, 1, 2)
        height, width = (grid[0, 1:] * processor.patch_size).tolist()
        if video.shape[2:] != (height, width):
            # Qwen's own resizing would look at the number of frames, which is the chunk's and not the video's.
            size = SizeDict(height=height, width=width)
            video = BaseVideoProcessor.resize(processor, image=video, size=size, resample=processor.resample)
        inputs = processor(videos=[video], do_resize=False, do_sample_frames=False, return_tensors="pt")
        return inputs["pixel_values_videos"], inputs["video_grid_thw"]

    def _stand_ins(self, video_grid_thw, kwargs):
        """Videos of the given grids without values, by which the backbone's processor counts placeholders."""
        videos = [self._blank(*grid) for grid in torch.as_tensor(video_grid_thw).tolist()]
        counts = [len(video) for video in videos]
        given = dict(kwargs.get("videos_kwargs") or {})
        metadata = kwargs.get("video_metadata", given.get("video_metadata")) or [
            VideoMetadata(total_num_frames=count, fps=1.0, frames_indices=list(range(count))) for count in counts
        ]
        kwargs = {name: value for name, value in kwargs.items() if name != "video_metadata"}
        as_they_are = {"video_metadata": metadata, "do_sample_frames": False, "do_resize": False, "device": "meta"}
        return videos, {**kwargs, "videos_kwargs": {**given, **as_they_are}}

    def _blank(self, t: int, h: int, w: int) -> torch.Tensor:
        processor = self.video_processor
        size = (t * processor.temporal_patch_size, 3, h * processor.patch_size, w * processor.patch_size)
        return torch.empty(*size, dtype=torch.uint8, device="meta")

    def _read_videos(self, videos, kwargs):
        """Frames of every video, and `kwargs` with their metadata and nothing left to sample."""
        kwargs = dict(kwargs)
        videos_kwargs = dict(kwargs.pop("videos_kwargs", None) or {})

        def take(name):  # given directly or in `videos_kwargs`
            nested = videos_kwargs.pop(name, None)
            return kwargs.pop(name, nested)

        videos = flatten_videos(videos)
        call_fps, num_frames, do_sample_frames = take("fps"), take("num_frames"), take("do_sample_frames")
        if num_frames is not None:
            _require_positive("num_frames", num_frames)
        rates = _per_video("fps", call_fps, len(videos))
        metadata_list = _per_video("video_metadata", take("video_metadata"), len(videos))
        asked_to_sample = do_sample_frames or (do_sample_frames is None and (call_fps or num_frames))
        # Left in place too: the video processor takes them and, with nothing to sample, reads only the last.
        bounds = {
            name: kwargs.get(name, videos_kwargs.get(name))
            for name in ("min_frames", "max_frames", "temporal_patch_size")
        }

        frames_list, described = [], []
        for video, rate, metadata in zip(videos, rates, metadata_list, strict=True):
            if rate is not None:
                _require_positive("fps", rate)
            choose = self._frame_choice(rate, num_frames, bounds)
            if isinstance(video, str):
                frames, metadata = read_video(video, choose_frames if do_sample_frames is False else choose)
            else:
                frames = _check_frames(video)
                sample = metadata is not None and asked_to_sample
                metadata = _describe_frames(frames, metadata, rate)
                if sample:
                    picked = choose(len(frames), metadata.sampled_fps)
                    frames = frames[picked]
                    metadata.frames_indices = [metadata.frames_indices[index] for index in picked]
            frames_list.append(frames)
            described.append(metadata)
        kwargs.update(video_metadata=described, do_sample_frames=False)
        if videos_kwargs:
            kwargs["videos_kwargs"] = videos_kwargs
        return frames_list, kwargs

    def _process_videos(self, videos, **kwargs):
        """As the backbone's own, with the seconds of a temporal patch, which not all give."""
        processed, texts = super()._process_videos(videos, **{**kwargs, "return_metadata": True})
        if "second_per_grid_ts" not in processed:
            step, described = self.video_processor.temporal_patch_size, processed["video_metadata"]
            processed["second_per_grid_ts"] = [step / metadata.sampled_fps for metadata in described]
        return processed, texts

    def _require_placeholders(self, text, token, count, kind, kwargs):
        # With `sanitize_control_tokens` the text holds marked tokens that only the tokenizer can tell apart.
        if text is None or kwargs.get("sanitize_control_tokens"):
            return
        given = sum(row.count(token) for row in ([text] if isinstance(text, str) else text))
        if given != count:
            raise ValueError(f"Got {count} {kind} and {given} placeholders {token} in the text; expected as many.")

    def _query_mask(self, input_ids, attention_mask):
        """`[B, S]` like `input_ids`, whose rows have different lengths where they are lists."""
        ids = self.query_token_ids
        if torch.is_tensor(input_ids):
            return find_query_mask(input_ids, attention_mask, **ids)
        rows = []
        for row, row_ids in enumerate(input_ids):
            row_mask = None if attention_mask is None else torch.as_tensor(attention_mask[row])[None]
            rows.append(find_query_mask(torch.as_tensor(row_ids)[None], row_mask, **ids)[0].tolist())
        return np.array(rows) if isinstance(input_ids, np.ndarray) else rows

    def _tokenize_query(self, query, rows, like):
        queries = [query] * (rows or 1) if isinstance(query, str) else list(query)
        if rows is not None and len(queries) != rows:
            raise ValueError(f"Got {len(queries)} queries for {rows} rows of text; expected one per row, or a str.")
        tokens = self.tokenizer(queries, add_special_tokens=False)["input_ids"]
        for row, ids in enumerate(tokens):
            if not ids or not queries[row].strip():
                raise ValueError(f"The query {queries[row]!r} of row {row} has no token; expected a question.")
        length = max(map(len, tokens))
        padded = {
            "query_input_ids": [ids + [self.tokenizer.pad_token_id] * (length - len(ids)) for ids in tokens],
            "query_attention_mask": [[1] * len(ids) + [0] * (length - len(ids)) for ids in tokens],
        }
        if torch.is_tensor(like):
            return {name: torch.tensor(values) for name, values in padded.items()}
        return {name: np.array(values) for name, values in padded.items()} if isinstance(like, np.ndarray) else padded


def _per_video(name, value, count):
    """One entry per video: a single number holds for all, nested lists are read in order."""
    if isinstance(value, Mapping):
        value = [value]
    elif not isinstance(value, (list, tuple)):
        value = [value] * count
    elif any(isinstance(entry, (list, tuple)) for entry in value):
        value = [entry for entries in value for entry in entries]
    if len(value) != count:
        raise ValueError(f"Got {len(value)} entries of `{name}` for {count} videos; expected one per video.")
    return list(value)


class QTSplusFramesMixin(QTSplusProcessorMixin):
    """
    For a backbone whose encoder looks at one frame at a time, all of one size. `pixel_values_videos` are the frames of
    all videos, `[frames, 3, height, width]`, so that videos may differ in length; grids count tokens.

    A backbone supplies `tokens_per_side`, and `replace_video_token` where its stock processor's is another one.
    """

    native_resolution = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.video_processor.merge_size = self.video_processor.temporal_patch_size = 1

    @property
    def tokens_per_side(self) -> int:
        raise NotImplementedError

    @property
    def model_input_names(self):
        return [*super().model_input_names, "image_grid_thw", "pixel_values_videos", "video_grid_thw"]

    def _process_videos(self, videos, video_metadata=None, **kwargs):
        options = {**kwargs, "return_tensors": "pt", "return_metadata": False}
        clips = [self._clip(video, options) for video in videos]
        grids = torch.cat([self.grid_of(len(clip)) for clip in clips])
        processed = {"pixel_values_videos": clips, "video_grid_thw": grids, "video_metadata": video_metadata}
        texts = [self.replace_video_token(processed, index) for index in range(len(clips))]
        seconds = [1 / metadata.sampled_fps for metadata in video_metadata]
        return {**processed, "pixel_values_videos": torch.cat(clips), "second_per_grid_ts": seconds}, texts

    def _clip(self, video, options):
        if torch.is_tensor(video) and video.is_meta:
            return video
        return self.video_processor(videos=[video], **options)["pixel_values_videos"][0]

    def grid_of(self, num_frames: int, *size: int) -> torch.Tensor:
        return torch.tensor([[num_frames, self.tokens_per_side, self.tokens_per_side]])

    def preprocess_frames(self, frames, grid):
        clip = self._clip(frames, {"do_sample_frames": False, "return_tensors": "pt"})
        return clip, self.grid_of(len(clip))

    def _blank(self, t: int, h: int, w: int) -> torch.Tensor:
        return torch.empty(t, 3, 1, 1, device="meta")


class Qwen2_5_VLQTSplusProcessor(QTSplusProcessorMixin, Qwen2_5_VLProcessor):
    r"""[`Qwen2_5_VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""


Qwen2_5_VLQTSplusProcessor.register_for_auto_class()

__all__ = ["QTSplusFramesMixin", "QTSplusProcessorMixin", "Qwen2_5_VLQTSplusProcessor"]
