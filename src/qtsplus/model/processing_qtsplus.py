"""Processors: bring videos and images to a backbone's own processor, and mark the question in the prompt.

[`QTSplusProcessorMixin`] stands in front of any backbone's processor; those of the Qwen-VL models stand at the end.
"""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import BatchFeature, ProcessorMixin, Qwen2_5_VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor
from transformers.image_utils import make_flat_list_of_images
from transformers.video_utils import VideoMetadata

from .configuration_qtsplus import PATCHES_PER_CHUNK
from .prompt_qtsplus import find_places, find_query_mask, tokenize_query
from .video_qtsplus import (
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
    require_positive,
    resize_frame,
    shrink,
)

_BLANK = "\ue000"  # where a text stands in a rendered chat template; a character of private use


class QTSplusProcessorMixin(ProcessorMixin):
    r"""
    In front of a backbone's processor: says which tokens are the question, and reads videos with their true times.

    It replaces nothing of the chat template: `apply_chat_template(..., tokenize=True, return_dict=True)` works as
    usual. What goes beyond messages belongs into its `processor_kwargs`, e.g. `processor_kwargs={"query": "Where?"}`.
    """

    _auto_class = "AutoProcessor"  # as `register_for_auto_class` has it
    user_turn = "<|im_start|>user"  # what the chat template opens and closes a turn with
    turn_end = "<|im_end|>"
    tool_response = ("<tool_response>", "</tool_response>")  # what begins and ends it in a turn of the user
    native_resolution = True  # larger frames become more tokens

    # Every backbone's processor has these.
    image_token: str
    image_token_id: int
    video_token: str
    video_token_id: int

    @property
    def model_input_names(self) -> list[str]:
        names = ["second_per_grid_ts", "query_mask", "query_input_ids", "query_attention_mask"]
        return list(dict.fromkeys([*super().model_input_names, *names]))

    @property
    def query_token_ids(self) -> dict[str, Any]:
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
        """The ids of `tool_response`, as they stand in a turn that a chat template writes."""
        begin, end = self.tool_response
        header = len(self._ids(self.user_turn))
        opening = self._ids(f"{self.user_turn}\n{begin}\n")[header + 1 : -1]
        closing = self._ids(f"{self.turn_end}{end}{self.turn_end}")[1:-1]
        return [opening, closing] if opening and closing else []

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def placeholder_ids(self) -> list[int]:
        """The ids that stand for the tokens of images and of videos."""
        return [self.image_token_id, self.video_token_id]

    def follow(self, config: Any) -> None:
        """Takes over what the model's configuration decides of a prompt's layout; nothing for most backbones."""

    def __call__(
        self,
        images: Any = None,
        text: str | list[str] | None = None,
        videos: Any = None,
        query: str | list[str] | None = None,
        video_grid_thw: torch.Tensor | None = None,
        second_per_grid_ts: Sequence[float] | torch.Tensor | None = None,
        **kwargs: Any,
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
            video_grid_thw (`torch.Tensor`, *optional*): `[videos, 3]`, the grids of videos that were encoded before, in
                place of `videos`; for `model.generate(..., video_features=...)`. Where the prompt tells the times of
                frames, they come from `video_metadata` or from `second_per_grid_ts`.
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
        if video_grid_thw is not None:
            for name in ("pixel_values_videos", "second_per_grid_ts"):  # the stand-ins' own
                inputs.pop(name)

        if text is not None:
            inputs["query_mask"] = self._query_mask(inputs["input_ids"])
        if query is not None:
            rows = len(inputs["input_ids"]) if text is not None else None
            inputs.update(tokenize_query(self.tokenizer, query, rows, like=inputs.get("input_ids")))
        return inputs

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """
        As stock; `video_url`, and the `VIDEO_KEYS` of a video, take effect, and other keys are a `ValueError`. With
        `tokenize` and `return_dict` the question is the last message of the role `user`, however tools are rendered.
        """
        conversation = read_messages(conversation, kwargs.get("tokenize", False))
        inputs = super().apply_chat_template(conversation, *args, **kwargs)
        if isinstance(inputs, BatchFeature):
            turns = self._question_turns(conversation, *args, **kwargs)
            inputs["query_mask"] = self._query_mask(inputs["input_ids"], turns)
        return inputs

    def _question_turns(self, conversation: Any, *args: Any, **kwargs: Any) -> list[int | None]:
        """
        Per conversation, which of the turns that the chat template writes as a user's is the last message of a user, as
        [`find_query_mask`] takes it; `args` and `kwargs` are those of `apply_chat_template`.
        """
        is_list = isinstance(conversation, (list, tuple))
        is_batch = is_list and (isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages"))
        turns: list[int | None] = []
        for one in conversation if is_batch else [conversation]:
            messages = getattr(one, "messages", one)
            roles = [message["role"] if isinstance(message, Mapping) else message.role for message in messages]
            written = [index for index, role in enumerate(roles) if role == "user"]
            if not written:
                turns.append(None)
            elif written[-1] == len(messages) - 1:
                turns.append(-1)
            else:
                turns.append(self._count_user_turns(messages[: written[-1] + 1], *args, **kwargs) - 1)
        return turns

    def _count_user_turns(self, messages: list[dict[str, Any]], *args: Any, **kwargs: Any) -> int:
        """How many turns are written as a user's in the prompt of these messages."""
        if kwargs.pop("sanitize_control_tokens", False):  # then a header in a message's text is text
            messages = _without(self.user_turn, messages)
        ends = ("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask")
        plain = {**kwargs, **dict.fromkeys(("tokenize", "return_dict", *ends), False)}
        template_tools_documents = args[:3]
        prompt = super().apply_chat_template(messages, *template_tools_documents, **plain)
        return len(find_places(torch.tensor(self._ids(prompt)), self._ids(self.user_turn)))

    def conversation_inputs(self, conversations: Sequence[list[dict[str, Any]]], **kwargs: Any) -> BatchFeature:
        """
        The inputs of conversations, all of whose text is text: `<|im_end|>` in it ends no turn, `<|video_pad|>` stands
        for no video. Text without special tokens gets the ids of `apply_chat_template`.

        Args:
            conversations: messages as `apply_chat_template` takes them; a video is only `{"type": "video"}`. Each ends
                where an answer begins.
            kwargs: as in a call, such as `query`, and `videos` or `video_grid_thw`.

        Returns:
            The model's inputs as tensors, padded; no `mm_token_type_ids`.
        """
        texts: list[list[list[int]]] = []  # per conversation the ids of the texts that hold special tokens
        prompts, added = [], list(self.tokenizer.added_tokens_decoder.values())
        question_turns: list[int | None] = []
        for messages in conversations:
            texts.append([])
            blanked = [self._blank_texts(message, added, texts[-1]) for message in messages]
            prompts.append(self.apply_chat_template(blanked, tokenize=False, add_generation_prompt=True))
            question_turns += self._question_turns(blanked)
        # A special token keeps the place of such a text: whatever stands beside it is tokenized apart from it.
        special = [token.content for token in added if token.special]
        blank = next(token for token in [self.tokenizer.pad_token, *special] if token not in "".join(prompts))
        prompts = [prompt.replace(_BLANK, blank) for prompt in prompts]
        inputs = self(text=prompts, padding=True, return_tensors="pt", **kwargs)
        inputs.pop("mm_token_type_ids", None)  # the model does not need them
        if any(texts):
            blank_id, rows = self.tokenizer.convert_tokens_to_ids(blank), []
            for row, mask, ids in zip(inputs["input_ids"], inputs["attention_mask"], texts, strict=True):
                tokens, left = row[mask.bool()].tolist(), iter(ids)
                rows.append([one for token in tokens for one in (next(left) if token == blank_id else [token])])
            inputs.update(self.tokenizer.pad({"input_ids": rows}, padding=True, return_tensors="pt"))
        inputs["query_mask"] = self._query_mask(inputs["input_ids"], question_turns)
        return inputs

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text, such as an answer, none of which is a special token."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _blank_texts(self, message: dict[str, Any], added: list[AddedToken], texts: list[list[int]]) -> dict[str, Any]:
        """A message with a blank for every text that holds special tokens; the ids of those texts go to `texts`."""

        def without(text: str) -> str:
            # Most hold none, which this says sooner than the tokenizer.
            if _BLANK not in text and not any(token.normalized or token.content in text for token in added):
                return text
            ids = self.text_ids(text)
            if _BLANK not in text and ids == self.tokenizer(text, add_special_tokens=False)["input_ids"]:
                return text
            texts.append(ids)
            return _BLANK

        if isinstance(message["content"], str):
            return {**message, "content": without(message["content"])}
        parts = [{**part, "text": without(part["text"])} if "text" in part else part for part in message["content"]]
        return {**message, "content": parts}

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
            part: of a file `video_start` and `video_end`, of any `max_pixels` and `total_pixels`, as in a message.

        Raises:
            ValueError: a video that is missing or cannot be decoded; a folder without `fps`; rates and counts that are
                not above 0, or both given.
        """
        path = os.fspath(video)
        temporal = self.video_processor.temporal_patch_size
        for name, given in (("fps", fps), ("num_frames", num_frames), ("frames_per_chunk", frames_per_chunk)):
            if given is not None:
                require_positive(name, given)
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
            second_per_grid_ts=[temporal / opened.metadata.sampled_fps],
            frames_per_chunk=max(int(frames_per_chunk) // temporal, 1) * temporal,
            resize=functools.partial(resize_frame, self.video_processor, size),
            preprocess=functools.partial(self.preprocess_frames, grid=grid),
        )

    def grid_of(self, num_frames: int, height: int, width: int, **options: Any) -> torch.Tensor:
        """`[1, 3]`: the grid of a video, asked of the video processor itself with a video without values."""
        frames = max(num_frames, self.video_processor.temporal_patch_size)
        blank = torch.empty(frames, 3, height, width, dtype=torch.uint8, device="meta")
        options = {**options, "do_sample_frames": False, "device": "meta", "return_tensors": "pt"}
        return self.video_processor(videos=[blank], **options)["video_grid_thw"]

    def frame_size(self, num_frames: int, height: int, width: int, **options: Any) -> tuple[int, int]:
        """The height and width to which the video processor, called with `options`, brings the frames of a video."""
        if not options.get("do_resize", self.video_processor.do_resize):
            return height, width
        patch_size = options.get("patch_size") or self.video_processor.patch_size
        _, rows, columns = self.grid_of(num_frames, height, width, **options)[0].tolist()
        return rows * patch_size, columns * patch_size

    def _size_of(self, video: VideoFile, part: dict[str, Any], **options: Any) -> tuple[int, int]:
        """[`frame_size`], or smaller by what a message says of the video."""
        processor, frames = self.video_processor, video.shape[0]
        with naming(video.name):
            size = self.frame_size(*video.shape, **options)
        if not part.keys() & {"max_pixels", "total_pixels"}:
            return size
        if not (self.native_resolution and options.get("do_resize", True)):
            raise ValueError("max_pixels and total_pixels of a video have no effect on frames of one size.")
        most = part.get("total_pixels", math.inf) * processor.temporal_patch_size / frames
        return shrink(size, min(most, part.get("max_pixels", math.inf)), processor.patch_size * processor.merge_size)

    def preprocess_frames(self, frames: np.ndarray, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        video_grid_thw: torch.Tensor,
        second_per_grid_ts: Sequence[float] | torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Videos of the given grids without values, by which the backbone's processor counts placeholders."""
        videos = [self._blank(*grid) for grid in torch.as_tensor(video_grid_thw).tolist()]
        counts = [len(video) for video in videos]
        given = dict(kwargs.get("videos_kwargs") or {})
        step = self.video_processor.temporal_patch_size
        rates = [1.0] * len(counts) if second_per_grid_ts is None else [step / float(one) for one in second_per_grid_ts]
        metadata = kwargs.get("video_metadata", given.get("video_metadata")) or [
            VideoMetadata(total_num_frames=count, fps=rate, frames_indices=list(range(count)))
            for count, rate in zip(counts, rates, strict=True)
        ]
        kwargs = {name: value for name, value in kwargs.items() if name != "video_metadata"}
        as_they_are = {"video_metadata": metadata, "do_sample_frames": False, "do_resize": False, "device": "meta"}
        return videos, {**kwargs, "videos_kwargs": {**given, **as_they_are}}

    def _blank(self, t: int, h: int, w: int) -> torch.Tensor:
        processor = self.video_processor
        size = (t * processor.temporal_patch_size, 3, h * processor.patch_size, w * processor.patch_size)
        return torch.empty(*size, dtype=torch.uint8, device="meta")

    def _read_videos(self, videos: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Frames of every video, and `kwargs` with their metadata and nothing left to sample."""
        kwargs = dict(kwargs)
        videos_kwargs = dict(kwargs.pop("videos_kwargs", None) or {})

        def take(name: str) -> Any:  # given directly or in `videos_kwargs`
            nested = videos_kwargs.pop(name, None)
            return kwargs.pop(name, nested)

        parts = flatten_videos(videos)
        call_fps, num_frames, do_sample_frames = take("fps"), take("num_frames"), take("do_sample_frames")
        if num_frames is not None:
            require_positive("num_frames", num_frames)
        rates = per_video("fps", call_fps, len(parts))
        metadata_list = per_video("video_metadata", take("video_metadata"), len(parts))
        asked_to_sample = do_sample_frames or (do_sample_frames is None and (call_fps or num_frames))
        # Left in place too: the video processor takes them and, with nothing to sample, reads only the last.
        bounds = {
            name: kwargs.get(name, videos_kwargs.get(name))
            for name in ("min_frames", "max_frames", "temporal_patch_size")
        }

        # A file's frames are brought to their size one by one: all of them, as large as in the video, may not fit into
        # memory. Not beside given frames, since the video processor resizes all videos of a call or none, nor where the
        # caller says how to resize, or where.
        names = set(self.video_processor.valid_kwargs.__annotations__) - {"input_data_format"}
        options = {name: value for name, value in {**kwargs, **videos_kwargs}.items() if name in names}
        singly = all(isinstance(part["video"], str) for part in parts) and not {"do_resize", "device"} & options.keys()

        frames_list, described = [], []
        for part, rate, metadata in zip(parts, rates, metadata_list, strict=True):
            video, count, samples = part["video"], num_frames, "fps" in part or "num_frames" in part
            if samples:
                rate, count = part.get("fps"), part.get("num_frames")
            if rate is not None:
                require_positive("fps", rate)
            own = {name: part.get(name, value) for name, value in bounds.items()}
            choose = frame_choice(self.video_processor, rate, count, own)
            if isinstance(video, str):
                everything = do_sample_frames is False and not samples
                within = (part.get("video_start"), part.get("video_end"))
                opened = open_video(video, choose_frames if everything else choose, within)
                metadata = opened.metadata
                how = options if singly else {"do_resize": False}
                resize = functools.partial(resize_frame, self.video_processor, self._size_of(opened, part, **how))
                frames = np.stack([resize(frame, how.get("resample")) for frame in opened.decode()])
            elif others := sorted(part.keys() - {"video", "fps"}):
                raise ValueError(f"Got frames with {others}; expected the frames to look at, and fps alone.")
            else:
                frames = check_frames(video, options.get("do_rescale", self.video_processor.do_rescale))
                sample = metadata is not None and asked_to_sample
                metadata = describe_frames(frames, metadata, rate)
                if sample:
                    picked = choose(len(frames), metadata.sampled_fps)
                    frames = frames[picked]
                    metadata.frames_indices = np.asarray(metadata.frames_indices)[picked].tolist()
            if len(frames) < self.video_processor.temporal_patch_size:  # one, which Qwen3-VL cannot size
                frames = frames[[0] * self.video_processor.temporal_patch_size]
            frames_list.append(frames)
            described.append(metadata)
        kwargs.update(video_metadata=described, do_sample_frames=False)
        if singly:
            videos_kwargs["do_resize"] = False
        if videos_kwargs:
            kwargs["videos_kwargs"] = videos_kwargs
        return frames_list, kwargs

    def _process_videos(self, videos: Any, **kwargs: Any) -> Any:
        """As the backbone's own, with the seconds of a temporal patch, which not all give."""
        processed, texts = super()._process_videos(videos, **{**kwargs, "return_metadata": True})
        if "second_per_grid_ts" not in processed:
            step, described = self.video_processor.temporal_patch_size, processed["video_metadata"]
            processed["second_per_grid_ts"] = [step / metadata.sampled_fps for metadata in described]
        return processed, texts

    def _query_mask(self, input_ids: Any, question_turns: Sequence[int | None] | None = None) -> Any:
        """
        `[B, S]` like `input_ids`, whose rows have different lengths where they are lists; padding is special.
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


def _without(words: str, value: Any) -> Any:
    """A message, or a list of them, without these words in any of its texts."""
    if isinstance(value, str):
        return value.replace(words, "")
    if isinstance(value, dict):
        return {name: _without(words, inner) for name, inner in value.items()}
    return [_without(words, inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _fetch_images(image_processor: Any, images: Any) -> Any:
    """Images by path, address or base64 as pixels; others as they are."""
    try:
        return image_processor.fetch_images(images)
    # torchvision's RuntimeError is about a text that is no path but can be read as base64.
    except (RuntimeError, Image.DecompressionBombError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"Cannot read {str(images)[:500]!r} as images; expected files that exist: {reason}") from error


def _check_placeholders(text: str | list[str] | None, token: str, n: int, kind: str, kwargs: dict[str, Any]) -> None:
    # With `sanitize_control_tokens` the text holds marked tokens that only the tokenizer can tell apart.
    if text is None or kwargs.get("sanitize_control_tokens"):
        return
    given = sum(row.count(token) for row in ([text] if isinstance(text, str) else text))
    if given != n:
        raise ValueError(f"Got {n} {kind} and {given} placeholders {token} in the text; expected as many.")


class Qwen2_5_VLQTSplusProcessor(QTSplusProcessorMixin, Qwen2_5_VLProcessor):
    r"""[`Qwen2_5_VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""

    stock_class = Qwen2_5_VLProcessor


class Qwen2VLQTSplusProcessor(QTSplusProcessorMixin, Qwen2VLProcessor):
    r"""[`Qwen2VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""

    stock_class = Qwen2VLProcessor


class Qwen3VLQTSplusProcessor(QTSplusProcessorMixin, Qwen3VLProcessor):
    r"""[`Qwen3VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""

    stock_class = Qwen3VLProcessor

    @property
    def query_token_ids(self) -> dict[str, int | list[int]]:
        return {
            **super().query_token_ids,
            "video_token_id": self.video_token_id,
            "frame_text_token_ids": self.tokenizer("<0.5 seconds>", add_special_tokens=False)["input_ids"][:1],
        }

    def _calculate_timestamps(self, indices, *times):  # stock's adds a frame to them where they are odd in number
        return super()._calculate_timestamps(list(indices), *times)


class Qwen3_5QTSplusProcessor(Qwen3VLQTSplusProcessor):
    r"""As [`Qwen3VLQTSplusProcessor`], whose stock class Qwen3.5 has too."""


__all__ = [
    "QTSplusProcessorMixin",
    "Qwen2VLQTSplusProcessor",
    "Qwen2_5_VLQTSplusProcessor",
    "Qwen3VLQTSplusProcessor",
    "Qwen3_5QTSplusProcessor",
]
