"""What every processor with the selector shares: it brings videos and images to a backbone's own processor, and marks
the question in the prompt. [`QTSplusProcessorMixin`] comes before any backbone's processor class. Videos and images are
read in reading_qtsplus.py, and conversations in conversation_qtsplus.py.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin
from transformers.image_utils import make_flat_list_of_images

from .conversation_qtsplus import Question, find_question, plain_inputs, unmark_template
from .messages_qtsplus import read_messages
from .question_qtsplus import check_text, find_query_mask, tokenize_query
from .reading_qtsplus import check_placeholders, fetch_images, open_chunks, read_videos, stand_ins
from .sampling_qtsplus import VideoRequest, read_keys
from .video_qtsplus import Chunk, VideoChunks, resize_frame


class QTSplusProcessorMixin(ProcessorMixin):
    r"""
    Added to a backbone's processor: says which tokens are the question, and reads videos with their true times.

    The chat template works as usual: `apply_chat_template(..., tokenize=True, return_dict=True)`. Arguments that are
    not part of messages belong into its `processor_kwargs`, e.g. `processor_kwargs={"query": "Where?"}`.
    """

    conversation_inputs = plain_inputs
    _auto_class = "AutoProcessor"  # as `register_for_auto_class` sets it
    user_turn = "<|im_start|>user"  # the chat template opens a user's turn with it
    turn_end = "<|im_end|>"
    tool_response = ("<tool_response>", "</tool_response>")  # around a tool's response in a turn of the user
    frame_text = ""  # in front of each frame of a video, such as "Frame1: "
    native_resolution = True  # larger frames become more tokens

    # Every backbone's processor has these.
    image_token: str
    image_token_id: int
    video_token: str
    video_token_id: int

    @property
    def query_token_ids(self) -> dict:
        """The ids by which [`find_query_mask`] finds the question, named as in the model's configuration."""
        begin, end = self.tool_response
        # A template writes a line break behind the first tag, which may be one token with its last character.
        tags = [self.prompt_ids(f"{begin}\n")[:-1], self.prompt_ids(end)]
        return dict(self.turn_token_ids, tool_response_token_ids=tags if all(tags) else [])

    @property
    def turn_token_ids(self) -> dict:
        """Those of the ids that suffice where it is known which of the user's turns the question is."""
        tokenizer = self.tokenizer
        added = tokenizer.added_tokens_decoder
        special = {index for index, token in added.items() if token.special}
        special.update(tokenizer.all_special_ids, self.placeholder_ids)
        ids = {
            "user_turn_token_ids": self.prompt_ids(self.user_turn),
            "turn_end_token_id": tokenizer.convert_tokens_to_ids(self.turn_end),
            "special_token_ids": sorted(special),
        }
        if self.frame_text:
            ids["video_token_id"] = self.video_token_id
            ids["frame_text_token_ids"] = self.prompt_ids(self.frame_text)[:1]
        return ids

    def prompt_ids(self, text: str) -> list[int]:
        """The ids of a text that a chat template wrote, with its special tokens."""
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
        questions: Sequence[Question] | None = None,
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
                place of `videos`; for `model.generate(..., video_features=...)`. It needs `video_metadata` or
                `second_per_grid_ts` beside it.
            second_per_grid_ts (`list[float]`, *optional*): `[videos]`, seconds per temporal patch of those videos.
            questions (`list[Question]`, *optional*): where the question of each row is, as `find_question` found it in
                the messages; by default it is found in the ids.
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
        if video_grid_thw is not None:
            if videos is not None or text is None or kwargs.get("return_tensors") not in (None, "pt"):
                raise ValueError('`video_grid_thw` goes in place of `videos`, with `text` and `return_tensors="pt"`.')
            videos, kwargs = stand_ins(self, video_grid_thw, second_per_grid_ts, kwargs)
        elif videos is not None:
            videos, kwargs = read_videos(self, videos, kwargs)
        if images is not None:
            images = fetch_images(self.image_processor, images)
        # With `sanitize_control_tokens` the text holds marked tokens that only the tokenizer can tell apart.
        if text is not None and not kwargs.get("sanitize_control_tokens"):
            written = check_text("text", "".join(text))
            pictures = [] if images is None else make_flat_list_of_images(images)
            check_placeholders(written, self.video_token, videos or [], "videos")
            check_placeholders(written, self.image_token, pictures, "images")
        inputs = super().__call__(images=images, text=text, videos=videos, **kwargs)
        if video_grid_thw is not None:  # both would be those of the stand-ins
            inputs.pop("pixel_values_videos")
            inputs.pop("second_per_grid_ts")

        if text is not None:
            inputs["query_mask"] = self.query_mask(inputs["input_ids"], questions)
        if query is not None:
            inputs.update(tokenize_query(self.tokenizer, query, inputs.get("input_ids")))
        return inputs

    def apply_chat_template(self, conversation, chat_template=None, **kwargs):  # type: ignore[override]
        """
        As stock, but `video_url` and the `VIDEO_KEYS` of a video take effect, and other keys are a `ValueError`. With
        `tokenize` and `return_dict` the question is what the last message of the role `user` says, wherever the
        template writes it in a turn of the user.
        """
        conversation = read_messages(conversation, kwargs.get("tokenize", False))
        kwargs["chat_template"] = chat_template
        inputs = super().apply_chat_template(conversation, **kwargs)
        if isinstance(inputs, BatchFeature):
            conversations = [conversation] if isinstance(conversation[0], Mapping) else conversation
            questions = [find_question(self, messages, **kwargs) for messages in conversations]
            inputs["query_mask"] = self.query_mask(inputs["input_ids"], questions)
        return inputs

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text, such as an answer; none of them is a special token."""
        check_text("text", text)
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def video_chunks(
        self,
        video: str | os.PathLike,
        frames_per_chunk: int | None = None,
        **keys: float | None,
    ) -> VideoChunks:
        """
        Opens a long video for reading in chunks of the pixel values that a call with `videos=` gives.

        Args:
            video: a file, an `http(s)` address, or a folder of frames.
            frames_per_chunk: frames at a time, cut down to whole temporal patches; by default about 16,384 patches.
            keys: `VIDEO_KEYS`, such as `fps`, as in a message; of a folder, `fps` is that of its frames.

        Raises:
            ValueError: a video that is missing or cannot be decoded; a folder without `fps`; rates and counts that are
                not above 0, or both given.
        """
        request = VideoRequest(os.fspath(video), **read_keys(keys))
        return open_chunks(self, request, frames_per_chunk)

    def grid_of(self, num_frames: int, height: int, width: int, **options) -> Tensor:
        """`[1, 3]`: the grid of a video, which the video processor itself makes of a video without values."""
        num_frames = max(num_frames, self.video_processor.temporal_patch_size)
        blank = torch.empty(num_frames, 3, height, width, dtype=torch.uint8, device="meta")
        options |= {"do_sample_frames": False, "device": "meta", "return_tensors": "pt"}
        return self.video_processor(videos=[blank], **options)["video_grid_thw"]

    def frame_size(self, num_frames: int, height: int, width: int, **options) -> tuple[int, int]:
        """The height and width to which the video processor, called with `options`, brings the frames of a video."""
        if not options.get("do_resize", self.video_processor.do_resize):
            return height, width
        patch_size = options.get("patch_size") or self.video_processor.patch_size
        (grid,) = self.grid_of(num_frames, height, width, **options)
        _, rows, columns = grid.tolist()
        return rows * patch_size, columns * patch_size

    def preprocess_frames(self, frames: np.ndarray, grid: Tensor) -> Chunk:
        """
        Pixel values and grid of some frames of a video, `[T, H, W, 3]` uint8, brought to the height and width of `grid`
        `[1, 3]`; without `native_resolution` to the model's own.
        """
        processor = self.video_processor
        _, height, width = (grid[0] * processor.patch_size).tolist()
        resized = [resize_frame(processor, (height, width), frame) for frame in frames]
        video = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)
        inputs = processor(videos=[video], do_resize=False, do_sample_frames=False, return_tensors="pt")
        return inputs["pixel_values_videos"], inputs["video_grid_thw"]

    def blank_video(
        self,
        t: int,
        h: int,
        w: int,
    ) -> Tensor:
        """The frames of a video with a grid, without values."""
        processor = self.video_processor
        num_frames = t * processor.temporal_patch_size
        side = processor.patch_size
        return torch.empty(num_frames, 3, h * side, w * side, dtype=torch.uint8, device="meta")

    def _process_videos(self, videos, **kwargs):
        """As the backbone's own, with the seconds of a temporal patch, which not all backbones give."""
        kwargs["return_metadata"] = True
        processed, texts = super()._process_videos(videos, **kwargs)
        if "second_per_grid_ts" not in processed:
            step = self.video_processor.temporal_patch_size
            about = processed["video_metadata"]
            processed["second_per_grid_ts"] = [step / metadata.sampled_fps for metadata in about]
        return processed, texts

    def query_mask(self, input_ids, questions: Sequence[Question] | None):
        """
        `[B, S]` like `input_ids`, whose rows have different lengths if they are lists; padding is special.
        Where the conversations are known, `questions` says where each one's is.
        """
        token_ids = self.query_token_ids if questions is None else self.turn_token_ids
        masks = []
        for ids, question in zip_longest(input_ids, questions or ()):
            row_ids = torch.as_tensor(ids, device="cpu")
            turns = None if question is None else [question.turn]
            (mask,) = find_query_mask(row_ids[None], None, **token_ids, question_turns=turns)
            if question is not None and any(question.surroundings):
                unmark_template(self, row_ids, mask, question.surroundings)
            masks.append(mask)
        if torch.is_tensor(input_ids):
            return torch.stack(masks)
        return [mask.tolist() for mask in masks]
