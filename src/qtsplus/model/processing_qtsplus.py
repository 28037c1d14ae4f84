"""Processors: bring videos and images to a backbone's own processor, and mark the question in the prompt.

[`QTSplusProcessorMixin`] comes before any backbone's processor class; the classes of the Qwen-VL models are at the end.
"""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin, Qwen2_5_VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor
from transformers.image_utils import make_flat_list_of_images
from transformers.video_utils import VideoMetadata

from .configuration_qtsplus import PATCHES_PER_CHUNK
from .question_qtsplus import find_places, find_query_mask, tokenize_query
from .video_qtsplus import (
    FrameChoice,
    VideoChunks,
    VideoFile,
    check_frames,
    choose_frames,
    describe_frames,
    flatten_videos,
    frame_choice,
    naming,
    open_folder,
    open_video,
    per_video,
    read_keys,
    read_messages,
    require_count,
    require_positive,
    resize_frame,
    shrink,
)

_LEAST_TOKENS = 128  # of a frame, the fewest to which qwen-vl-utils holds the frames of a video by `total_pixels`
_BLANK = "\ue000"  # the place of a text in a rendered chat template; a character for private use


@dataclass(frozen=True)
class _VideoOptions:
    """How one call asks for its videos to be read."""

    num_frames: int | None
    do_sample_frames: bool | None
    samples_given_frames: bool  # whether frames that come with metadata are sampled
    bounds: dict  # `min_frames`, `max_frames` and `temporal_patch_size`; `None` where the call has none
    processor_options: dict  # arguments of the video processor
    resizes_singly: bool  # whether the frames of a file are resized as they are decoded


class QTSplusProcessorMixin(ProcessorMixin):
    r"""
    Added to a backbone's processor: says which tokens are the question, and reads videos with their true times.

    The chat template works as usual: `apply_chat_template(..., tokenize=True, return_dict=True)`. Arguments that are
    not part of messages belong into its `processor_kwargs`, e.g. `processor_kwargs={"query": "Where?"}`.
    """

    _auto_class = "AutoProcessor"  # as `register_for_auto_class` sets it
    user_turn = "<|im_start|>user"  # the chat template opens a user's turn with it
    turn_end = "<|im_end|>"
    tool_response = ("<tool_response>", "</tool_response>")  # around a tool's response in a turn of the user
    native_resolution = True  # larger frames become more tokens
    states_times = False  # whether a prompt has the seconds of a video's frames as text

    # Every backbone's processor has these.
    image_token: str
    image_token_id: int
    video_token: str
    video_token_id: int

    @property
    def model_input_names(self) -> list[str]:
        names = ["second_per_grid_ts", "query_mask", "query_input_ids", "query_attention_mask"]
        return list(dict.fromkeys(super().model_input_names + names))

    @property
    def query_token_ids(self) -> dict:
        """The ids by which [`find_query_mask`] finds the question, named as in the model's configuration."""
        tokenizer = self.tokenizer
        special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        return {
            "user_turn_token_ids": self._ids(self.user_turn),
            "turn_end_token_id": tokenizer.convert_tokens_to_ids(self.turn_end),
            "special_token_ids": sorted(special.union(tokenizer.all_special_ids)),
            "tool_response_token_ids": self._tool_response_token_ids,
        }

    @property
    def _tool_response_token_ids(self) -> list[list[int]]:
        """The ids of `tool_response`, as they are in a turn that a chat template writes."""
        begin, end = self.tool_response
        header = len(self._ids(self.user_turn))
        opening = self._ids(f"{self.user_turn}\n{begin}\n")[header + 1 : -1]
        closing = self._ids(f"{self.turn_end}{end}{self.turn_end}")[1:-1]
        if opening and closing:
            return [opening, closing]
        return []

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def placeholder_ids(self) -> list[int]:
        """The ids that stand for the tokens of images and of videos."""
        return [self.image_token_id, self.video_token_id]

    def follow(self, config) -> None:
        """Adopts what the model's configuration decides about a prompt's layout; most backbones have nothing to do."""

    def __call__(
        self,
        images=None,
        text: str | list[str] | None = None,
        videos=None,
        query: str | list[str] | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Sequence[float] | Tensor | None = None,
        **kwargs,
    ) -> BatchFeature:
        """
        Prepares the model's inputs.

        Args:
            images: as in the backbone's processor: images, their paths, addresses or base64, flat or in a list per row.
            text (`str` or `list[str]`): prompts made with the chat template, one per row.
            videos: per video a path (file, `http(s)` address, or folder of frames), or its frames: `[T, H, W, C]` or
                `[T, C, H, W]` as an array or tensor, or a list of images; or one of these as `video` of a dictionary,
                beside `VIDEO_KEYS`. Alone, in a list, or in a list per row.
            query (`str` or `list[str]`, *optional*): the question to select by, one per row or one for all rows, where
                it is not the text of the last turn that a user wrote.
            video_grid_thw (`Tensor`, *optional*): `[videos, 3]`, the grids of videos that were encoded before, in
                place of `videos`; for `model.generate(..., video_features=...)`. Where the prompt states the times of
                frames, it needs `video_metadata` or `second_per_grid_ts`.
            second_per_grid_ts (`list[float]`, *optional*): `[videos]`, seconds per temporal patch of those videos.
            fps (`float` or `list[float]`, *optional*): for a video file, frames to sample per second, bounded by
                `min_frames` and `max_frames`; by default the video processor's `fps`, or else 2. For frames without
                `video_metadata` the rate at which they were sampled: they are used as they are.
            num_frames (`int`, *optional*): frames to sample instead, as many as there are at most.
            do_sample_frames (`bool`, *optional*): `False` takes all frames. Frames that are given are sampled only when
                they come with `video_metadata` and this call asks for it by `fps`, `num_frames` or `True`.
            video_metadata (`list[dict]`, *optional*): per video, of given frames the `fps` of the video that they come
                from, its `total_num_frames`, and their `frames_indices` in it.
            kwargs: as in the backbone's processor.

        Returns:
            `BatchFeature` with the backbone's inputs and `query_mask` `[B, S]`, 1 on the question's tokens. With
            `query` also `query_input_ids` and `query_attention_mask`, `[B, L]`, padded on the right.

        Raises:
            ValueError: a video that cannot be read; frames without their times, or with NaN or infinite pixels; `fps`
                and `num_frames` together or not above 0; more or fewer placeholders in the text than videos or images;
                an empty `query`, or not one per row.
        """
        if videos is not None:
            videos, kwargs = self._read_videos(videos, kwargs)
            _check_placeholders(text, self.video_token, len(videos), "videos", kwargs)
        if images is not None:
            images = _fetch_images(self.image_processor, images)
            flat: Any = make_flat_list_of_images(images)
            _check_placeholders(text, self.image_token, len(flat), "images", kwargs)
        if video_grid_thw is not None:
            if videos is not None or text is None or kwargs.get("return_tensors") not in (None, "pt"):
                raise ValueError('`video_grid_thw` goes in place of `videos`, with `text` and `return_tensors="pt"`.')
            _check_placeholders(text, self.video_token, len(video_grid_thw), "videos", kwargs)
            videos, kwargs = self._stand_ins(video_grid_thw, second_per_grid_ts, kwargs)
        inputs = super().__call__(images=images, text=text, videos=videos, **kwargs)
        if video_grid_thw is not None:  # both would be those of the stand-ins
            inputs.pop("pixel_values_videos")
            inputs.pop("second_per_grid_ts")

        rows = None
        if text is not None:
            rows = len(inputs["input_ids"])
            inputs["query_mask"] = self._query_mask(inputs["input_ids"])
        if query is not None:
            inputs.update(tokenize_query(self.tokenizer, query, rows, like=inputs.get("input_ids")))
        return inputs

    def apply_chat_template(self, conversation, *args, **kwargs):
        """
        As stock, but `video_url` and the `VIDEO_KEYS` of a video take effect, and other keys are a `ValueError`. With
        `tokenize` and `return_dict` the question is the last message of the role `user`, however tools are rendered.
        """
        conversation = read_messages(conversation, kwargs.get("tokenize", False))
        inputs = super().apply_chat_template(conversation, *args, **kwargs)
        if isinstance(inputs, BatchFeature):
            turns = self._question_turns(conversation, *args, **kwargs)
            inputs["query_mask"] = self._query_mask(inputs["input_ids"], turns)
        return inputs

    def _question_turns(self, conversation, *args, **kwargs) -> list[int | None]:
        """
        Per conversation, which of the turns that the chat template writes as a user's is the last message of a user, as
        [`find_query_mask`] takes it; `args` and `kwargs` are those of `apply_chat_template`.
        """
        conversations = [conversation]
        if isinstance(conversation, (list, tuple)):
            first = conversation[0]
            if isinstance(first, (list, tuple)) or hasattr(first, "messages"):
                conversations = list(conversation)
        turns: list[int | None] = []
        for member in conversations:
            messages = getattr(member, "messages", member)
            last = -1
            for index, message in enumerate(messages):
                role = message["role"] if isinstance(message, Mapping) else message.role
                if role == "user":
                    last = index
            if last < 0:
                turns.append(None)
            elif last == len(messages) - 1:
                turns.append(-1)
            else:
                turn = self._count_user_turns(messages[: last + 1], *args, **kwargs) - 1
                if self.tokenizer.truncation_side == "left":  # turns at the beginning may be cut off
                    turn -= self._count_user_turns(messages, *args, **kwargs)
                turns.append(turn)
        return turns

    def _count_user_turns(self, messages: list, *args, **kwargs) -> int:
        """How many turns are written as a user's in the prompt of these messages."""
        if kwargs.pop("sanitize_control_tokens", False):  # then a header in a message's text is text
            messages = _without(self.user_turn, messages)
        for name in (
            "tokenize",
            "return_dict",
            "add_generation_prompt",
            "continue_final_message",
            "return_assistant_tokens_mask",
        ):
            kwargs[name] = False
        template_tools_documents = args[:3]
        prompt = super().apply_chat_template(messages, *template_tools_documents, **kwargs)
        headers = find_places(torch.tensor(self._ids(prompt)), self._ids(self.user_turn))
        return len(headers)

    def conversation_inputs(self, conversations: Sequence[list[dict]], **kwargs) -> BatchFeature:
        """
        The inputs of conversations in which every text is plain text: `<|im_end|>` in it ends no turn, and
        `<|video_pad|>` is no placeholder. Text without special tokens gets the ids of `apply_chat_template`.

        Args:
            conversations: messages as `apply_chat_template` takes them; a video is only `{"type": "video"}`. Each ends
                where an answer begins.
            kwargs: as in a call, such as `query`, and `videos` or `video_grid_thw`.

        Returns:
            The model's inputs as tensors, padded; no `mm_token_type_ids`.
        """
        added = list(self.tokenizer.added_tokens_decoder.values())
        prompts: list[str] = []
        ids_of_texts: list[list[list[int]]] = []  # per conversation the ids of the texts that hold special tokens
        question_turns: list[int | None] = []
        for messages in conversations:
            ids_of_texts.append([])
            blanked = [self._blank_texts(message, added, ids_of_texts[-1]) for message in messages]
            prompts.append(self.apply_chat_template(blanked, tokenize=False, add_generation_prompt=True))
            question_turns += self._question_turns(blanked)

        # A special token holds the place of such a text, so that its neighbours are tokenized separately from it.
        candidates = [self.tokenizer.pad_token]
        candidates += [token.content for token in added if token.special]
        written = "".join(prompts)
        blank = next(token for token in candidates if token not in written)
        prompts = [prompt.replace(_BLANK, blank) for prompt in prompts]
        inputs = self(text=prompts, padding=True, return_tensors="pt", **kwargs)
        inputs.pop("mm_token_type_ids", None)  # the model does not need them
        if any(ids_of_texts):
            inputs.update(self._fill_blanks(inputs, blank, ids_of_texts))
        inputs["query_mask"] = self._query_mask(inputs["input_ids"], question_turns)
        return inputs

    def _fill_blanks(self, inputs: BatchFeature, blank: str, ids_of_texts: list[list[list[int]]]) -> BatchFeature:
        """The `input_ids` and `attention_mask` of prompts with the ids of their texts in place of the blanks."""
        blank_id = self.tokenizer.convert_tokens_to_ids(blank)
        rows = []
        for ids, mask, texts in zip(inputs["input_ids"], inputs["attention_mask"], ids_of_texts, strict=True):
            remaining = iter(texts)
            row: list[int] = []
            for token in ids[mask.bool()].tolist():
                if token == blank_id:
                    row.extend(next(remaining))
                else:
                    row.append(token)
            rows.append(row)
        return self.tokenizer.pad({"input_ids": rows}, padding=True, return_tensors="pt")

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text, such as an answer; none of them is a special token."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _blank_texts(self, message: dict, added: list[AddedToken], texts: list[list[int]]) -> dict:
        """A message with a blank for every text that holds special tokens; the ids of those texts go to `texts`."""

        def without(text: str) -> str:
            # This quick test clears most texts before the tokenizer has to look at them.
            may_hold_token = any(token.normalized or token.content in text for token in added)
            if _BLANK not in text and not may_hold_token:
                return text
            ids = self.text_ids(text)
            if _BLANK not in text and ids == self._ids(text):
                return text
            texts.append(ids)
            return _BLANK

        content = message["content"]
        if isinstance(content, str):
            return message | {"content": without(content)}
        parts = []
        for part in content:
            if "text" in part:
                part = part | {"text": without(part["text"])}
            parts.append(part)
        return message | {"content": parts}

    def video_chunks(
        self,
        video: str | os.PathLike,
        fps: float | None = None,
        num_frames: int | None = None,
        min_frames: int | None = None,
        max_frames: int | None = None,
        frames_per_chunk: int | None = None,
        **part: float | None,
    ) -> VideoChunks:
        """
        Opens a long video for reading in chunks of the pixel values that a call with `videos=` gives.

        Args:
            video: a file, an `http(s)` address, or a folder of frames.
            fps, num_frames, min_frames, max_frames: as in a call; of a folder, `fps` is that of its frames.
            frames_per_chunk: frames at a time, cut down to whole temporal patches; by default about 16,384 patches.
            part: `video_start` and `video_end` of a file, and `max_pixels` and `total_pixels`, as in a message.

        Raises:
            ValueError: a video that is missing or cannot be decoded; a folder without `fps`; rates and counts that are
                not above 0, or both given.
        """
        path = os.fspath(video)
        temporal = self.video_processor.temporal_patch_size
        if fps is not None:
            require_positive("fps", fps)
        for name, given in (("num_frames", num_frames), ("frames_per_chunk", frames_per_chunk)):
            if given is not None:
                require_count(name, given)
        part = read_keys(part)
        within = (part.get("video_start"), part.get("video_end"))
        if os.path.isdir(path):
            if within != (None, None) or (num_frames, min_frames, max_frames) != (None,) * 3:
                raise ValueError(f"Got a start, an end or a count for the folder {path!r}; all frames are looked at.")
            opened = open_folder(path, fps)
        else:
            bounds = {"min_frames": min_frames, "max_frames": max_frames, "temporal_patch_size": None}
            opened = open_video(path, frame_choice(self.video_processor, fps, num_frames, bounds), within)

        size = self._size_of(opened, part)
        grid = self.grid_of(opened.shape[0], *size, do_resize=not self.native_resolution)
        if frames_per_chunk is None:
            frames_per_chunk = PATCHES_PER_CHUNK // int(grid[0, 1] * grid[0, 2]) * temporal
        return VideoChunks(
            **vars(opened),
            video_grid_thw=grid,
            second_per_grid_ts=[temporal / opened.about.metadata.sampled_fps],
            frames_per_chunk=max(int(frames_per_chunk) // temporal, 1) * temporal,
            resize=functools.partial(resize_frame, self.video_processor, size),
            preprocess=functools.partial(self.preprocess_frames, grid=grid),
        )

    def grid_of(self, num_frames: int, height: int, width: int, **options) -> Tensor:
        """`[1, 3]`: the grid of a video, which the video processor itself makes of a video without values."""
        frames = max(num_frames, self.video_processor.temporal_patch_size)
        blank = torch.empty(frames, 3, height, width, dtype=torch.uint8, device="meta")
        options |= {"do_sample_frames": False, "device": "meta", "return_tensors": "pt"}
        return self.video_processor(videos=[blank], **options)["video_grid_thw"]

    def frame_size(self, num_frames: int, height: int, width: int, **options) -> tuple[int, int]:
        """The height and width to which the video processor, called with `options`, brings the frames of a video."""
        if not options.get("do_resize", self.video_processor.do_resize):
            return height, width
        patch_size = options.get("patch_size") or self.video_processor.patch_size
        _, rows, columns = self.grid_of(num_frames, height, width, **options)[0].tolist()
        return rows * patch_size, columns * patch_size

    def _size_of(self, video: VideoFile, part: dict, **options) -> tuple[int, int]:
        """[`frame_size`], or smaller where a message limits the pixels of the video."""
        with naming(video.name):
            size = self.frame_size(*video.shape, **options)
        if "max_pixels" not in part and "total_pixels" not in part:
            return size
        if not (self.native_resolution and options.get("do_resize", True)):
            raise ValueError("max_pixels and total_pixels of a video have no effect on frames of one size.")
        processor = self.video_processor
        side = processor.patch_size * processor.merge_size
        most = part.get("max_pixels", math.inf)
        if "total_pixels" in part:
            share_of_total = part["total_pixels"] * processor.temporal_patch_size / video.shape[0]
            most = min(most, max(share_of_total, int(1.05 * _LEAST_TOKENS * side**2)))
        return shrink(size, most, side)

    def preprocess_frames(self, frames: np.ndarray, grid: Tensor) -> tuple[Tensor, Tensor]:
        """
        Pixel values and grid of some frames of a video, `[T, H, W, 3]` uint8, brought to the height and width of `grid`
        `[1, 3]`; without `native_resolution` to the model's own.
        """
        processor = self.video_processor
        height, width = (grid[0, 1:] * processor.patch_size).tolist()
        resized = np.stack([resize_frame(processor, (height, width), frame) for frame in frames])
        video = torch.from_numpy(resized).permute(0, 3, 1, 2)
        inputs = processor(videos=[video], do_resize=False, do_sample_frames=False, return_tensors="pt")
        return inputs["pixel_values_videos"], inputs["video_grid_thw"]

    def _stand_ins(
        self,
        video_grid_thw: Tensor,
        second_per_grid_ts: Sequence[float] | Tensor | None,
        kwargs: dict,
    ) -> tuple[list[Tensor], dict]:
        """Videos of the given grids without values, by which the backbone's processor counts placeholders."""
        videos = [self._blank(*grid) for grid in torch.as_tensor(video_grid_thw).tolist()]
        kwargs = dict(kwargs)
        videos_kwargs = dict(kwargs.get("videos_kwargs") or {})
        metadata = kwargs.pop("video_metadata", videos_kwargs.get("video_metadata"))
        if not metadata:
            if second_per_grid_ts is None and self.states_times:
                raise ValueError(
                    "Got video_grid_thw without second_per_grid_ts: the prompt states the seconds of the frames, so "
                    "give second_per_grid_ts or video_metadata of those videos."
                )
            metadata = self._stand_in_metadata(videos, second_per_grid_ts)
        videos_kwargs |= {"video_metadata": metadata, "do_sample_frames": False, "do_resize": False, "device": "meta"}
        kwargs["videos_kwargs"] = videos_kwargs
        return videos, kwargs

    def _stand_in_metadata(
        self,
        videos: list[Tensor],
        second_per_grid_ts: Sequence[float] | Tensor | None,
    ) -> list[VideoMetadata]:
        """The times of stand-ins: by the seconds of their temporal patches, or else any, for prompts without times."""
        rates = [1.0] * len(videos)
        if second_per_grid_ts is not None:
            rates = [self.video_processor.temporal_patch_size / float(seconds) for seconds in second_per_grid_ts]
        metadata = []
        for video, rate in zip(videos, rates, strict=True):
            count = len(video)
            metadata.append(VideoMetadata(total_num_frames=count, fps=rate, frames_indices=list(range(count))))
        return metadata

    def _blank(self, t: int, h: int, w: int) -> Tensor:
        processor = self.video_processor
        frames = t * processor.temporal_patch_size
        height = h * processor.patch_size
        width = w * processor.patch_size
        return torch.empty(frames, 3, height, width, dtype=torch.uint8, device="meta")

    def _read_videos(self, videos, kwargs: dict) -> tuple[list, dict]:
        """Frames of every video, and `kwargs` with their metadata and nothing left to sample."""
        kwargs = dict(kwargs)
        videos_kwargs = dict(kwargs.pop("videos_kwargs", None) or {})
        parts = flatten_videos(videos)
        call_fps = _take(kwargs, videos_kwargs, "fps")
        call_metadata = _take(kwargs, videos_kwargs, "video_metadata")
        options = self._take_options(parts, call_fps, kwargs, videos_kwargs)
        rates = per_video("fps", call_fps, len(parts))
        given_metadata = per_video("video_metadata", call_metadata, len(parts))

        fewest = self.video_processor.temporal_patch_size
        frames_of_videos = []
        metadata_of_videos = []
        for part, rate, metadata in zip(parts, rates, given_metadata, strict=True):
            if isinstance(part["video"], str):
                frames, metadata = self._read_file(part, rate, options)
            else:
                frames, metadata = self._take_frames(part, rate, metadata, options)
            if len(frames) < fewest:  # a single frame, which Qwen3-VL cannot size
                frames = frames[[0] * fewest]
            frames_of_videos.append(frames)
            metadata_of_videos.append(metadata)
        kwargs.update(video_metadata=metadata_of_videos, do_sample_frames=False)
        if options.resizes_singly:
            videos_kwargs["do_resize"] = False
        if videos_kwargs:
            kwargs["videos_kwargs"] = videos_kwargs
        return frames_of_videos, kwargs

    def _take_options(self, parts: list[dict], call_fps, kwargs: dict, videos_kwargs: dict) -> _VideoOptions:
        """Takes what a call says about sampling out of its keywords, and reads what it says about resizing."""
        num_frames = _take(kwargs, videos_kwargs, "num_frames")
        do_sample_frames = _take(kwargs, videos_kwargs, "do_sample_frames")
        if num_frames is not None:
            require_count("num_frames", num_frames)
        # The bounds remain in the keywords too: the video processor accepts them and, with nothing to sample, reads
        # only the last.
        bounds = {}
        for name in ("min_frames", "max_frames", "temporal_patch_size"):
            bounds[name] = kwargs.get(name, videos_kwargs.get(name))
        names = set(self.video_processor.valid_kwargs.__annotations__) - {"input_data_format"}
        processor_options = {name: value for name, value in (kwargs | videos_kwargs).items() if name in names}
        # The frames of a file are resized one by one, since all of them at their original size may not fit into memory.
        # The exceptions: beside given frames, since the video processor resizes all videos of a call or none, and where
        # the caller says whether or where to resize.
        only_files = all(isinstance(part["video"], str) for part in parts)
        return _VideoOptions(
            num_frames=num_frames,
            do_sample_frames=do_sample_frames,
            samples_given_frames=bool(do_sample_frames or (do_sample_frames is None and (call_fps or num_frames))),
            bounds=bounds,
            processor_options=processor_options,
            resizes_singly=only_files and not {"do_resize", "device"} & processor_options.keys(),
        )

    def _choice_of(self, part: dict, rate: float | None, options: _VideoOptions) -> FrameChoice:
        """Which frames of a video are looked at; what its message says takes precedence over the call."""
        num_frames = options.num_frames
        message_samples = "fps" in part or "num_frames" in part
        if message_samples:
            rate = part.get("fps")
            num_frames = part.get("num_frames")
        if rate is not None:
            require_positive("fps", rate)
        bounds = {name: part.get(name, bound) for name, bound in options.bounds.items()}
        choice = frame_choice(self.video_processor, rate, num_frames, bounds)
        if options.do_sample_frames is False and not message_samples:
            return choose_frames  # without a rate or a count it takes all frames
        return choice

    def _read_file(self, part: dict, rate: float | None, options: _VideoOptions) -> tuple[np.ndarray, VideoMetadata]:
        """The chosen frames of a file, at the size that the model needs if they are resized singly."""
        within = (part.get("video_start"), part.get("video_end"))
        opened = open_video(part["video"], self._choice_of(part, rate, options), within)
        resizing = options.processor_options if options.resizes_singly else {"do_resize": False}
        size = self._size_of(opened, part, **resizing)
        frames = []
        for frame in opened.decode():
            frames.append(resize_frame(self.video_processor, size, frame, resizing.get("resample")))
        return np.stack(frames), opened.about.metadata

    def _take_frames(self, part: dict, rate: float | None, metadata, options: _VideoOptions):
        """The frames that a caller gives, sampled if the call asks for that, and their metadata."""
        choose = self._choice_of(part, rate, options)
        others = sorted(part.keys() - {"video", "fps"})
        if others:
            raise ValueError(f"Got frames with {others}; expected the frames to look at, and fps alone.")
        do_rescale = options.processor_options.get("do_rescale", self.video_processor.do_rescale)
        frames = check_frames(part["video"], do_rescale)
        described = describe_frames(frames, metadata, part.get("fps", rate))
        if metadata is not None and options.samples_given_frames:
            chosen = choose(len(frames), described.sampled_fps)
            frames = frames[chosen]
            described.frames_indices = np.asarray(described.frames_indices)[chosen].tolist()
        return frames, described

    def _process_videos(self, videos, **kwargs):
        """As the backbone's own, with the seconds of a temporal patch, which not all backbones give."""
        kwargs["return_metadata"] = True
        processed, texts = super()._process_videos(videos, **kwargs)
        if "second_per_grid_ts" not in processed:
            step = self.video_processor.temporal_patch_size
            seconds = [step / metadata.sampled_fps for metadata in processed["video_metadata"]]
            processed["second_per_grid_ts"] = seconds
        return processed, texts

    def _query_mask(self, input_ids, question_turns: Sequence[int | None] | None = None):
        """
        `[B, S]` like `input_ids`, whose rows have different lengths if they are lists; padding is special.
        `question_turns` are those of [`find_query_mask`].
        """
        token_ids = self.query_token_ids
        if torch.is_tensor(input_ids):
            return find_query_mask(input_ids, None, **token_ids, question_turns=question_turns)
        masks = []
        for row, ids in enumerate(input_ids):
            turns = None if question_turns is None else question_turns[row : row + 1]
            mask = find_query_mask(torch.as_tensor(ids)[None], None, **token_ids, question_turns=turns)
            masks.append(mask[0].tolist())
        return masks


def _take(kwargs: dict, videos_kwargs: dict, name: str) -> Any:
    """Takes an argument that is given directly or in `videos_kwargs`; the direct one counts."""
    nested = videos_kwargs.pop(name, None)
    return kwargs.pop(name, nested)


def _without(words: str, value: Any) -> Any:
    """A message, or a list of them, without these words in any of its texts."""
    if isinstance(value, str):
        while words in value:  # what is left may form them again
            value = value.replace(words, "")
        return value
    if isinstance(value, dict):
        return {name: _without(words, inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without(words, inner) for inner in value]
    return value


def _fetch_images(image_processor, images):
    """Images by path, address or base64 as pixels; others as they are."""
    try:
        return image_processor.fetch_images(images)
    # torchvision raises the RuntimeError for a text that is not a path but can be read as base64.
    except (RuntimeError, Image.DecompressionBombError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"Cannot read {str(images)[:500]!r} as images; expected files that exist: {reason}") from error


def _check_placeholders(text: str | list[str] | None, token: str, count: int, kind: str, kwargs: dict) -> None:
    # With `sanitize_control_tokens` the text holds marked tokens that only the tokenizer can tell apart.
    if text is None or kwargs.get("sanitize_control_tokens"):
        return
    rows = [text] if isinstance(text, str) else text
    placeholders = sum(row.count(token) for row in rows)
    if placeholders != count:
        raise ValueError(f"Got {count} {kind} and {placeholders} placeholders {token} in the text; expected as many.")


class Qwen2_5_VLQTSplusProcessor(QTSplusProcessorMixin, Qwen2_5_VLProcessor):
    r"""[`Qwen2_5_VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""

    stock_class = Qwen2_5_VLProcessor


class Qwen2VLQTSplusProcessor(QTSplusProcessorMixin, Qwen2VLProcessor):
    r"""[`Qwen2VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""

    stock_class = Qwen2VLProcessor


class Qwen3VLQTSplusProcessor(QTSplusProcessorMixin, Qwen3VLProcessor):
    r"""[`Qwen3VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""

    stock_class = Qwen3VLProcessor
    states_times = True

    @property
    def query_token_ids(self) -> dict:
        token_ids = super().query_token_ids
        token_ids["video_token_id"] = self.video_token_id
        token_ids["frame_text_token_ids"] = self._ids("<0.5 seconds>")[:1]
        return token_ids

    def _calculate_timestamps(self, indices, *times):
        # A copy, because stock's appends a frame to an odd number of indices.
        return super()._calculate_timestamps(list(indices), *times)


class Qwen3_5QTSplusProcessor(Qwen3VLQTSplusProcessor):
    r"""As [`Qwen3VLQTSplusProcessor`]: Qwen3.5 has the same stock class."""


__all__ = [
    "QTSplusProcessorMixin",
    "Qwen2VLQTSplusProcessor",
    "Qwen2_5_VLQTSplusProcessor",
    "Qwen3VLQTSplusProcessor",
    "Qwen3_5QTSplusProcessor",
]
