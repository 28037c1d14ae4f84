"""The dataset that turns records of questions and answers about videos into a model's inputs, and their batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers.utils import logging

from ..asking.question import conversation
from ..data.formats import read_records
from ..data.media import AnyPath, is_readable
from ..data.records import SOURCES, VideoRecord
from ..model.question_qtsplus import find_places
from .features import VideoFeatures

logger = logging.get_logger(__name__)

IGNORED = -100
_VISUAL_INPUTS = ("pixel_values_videos", "video_features", "video_grid_thw", "second_per_grid_ts")


Inputs = dict[str, Any]


class VideoQADataset(Dataset):
    """
    Videos are decoded when an item is asked for, which is in the DataLoader's workers.

    Args:
        model_max_length: most text tokens of an example, prompt and answer; placeholders of visual tokens do not count,
            since most of them never reach the language model. Longer examples are cut at their end.
        processor_kwargs: for every call of the processor, such as `{"fps": 1, "max_frames": 64}`.
        features: of the videos, see [`encode_files`]; they take the place of the pixels.
    """

    def __init__(
        self,
        records: Sequence[VideoRecord],
        processor,
        model_max_length: int | None = None,
        processor_kwargs: Mapping | None = None,
        features: VideoFeatures | None = None,
    ):
        self.records = records
        self.features = features
        self.processor = processor
        self.model_max_length = model_max_length
        self.processor_kwargs = dict(processor_kwargs or {})
        self.end_of_turn: int = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.answer_header = processor.prompt_ids("<|im_start|>assistant\n")
        self.placeholders = torch.tensor(processor.placeholder_ids)

    @staticmethod
    def read(path: AnyPath, media_root: AnyPath | None = None) -> Sequence[VideoRecord]:
        """The records of a file that a recipe names, see [`read_records`]; a subclass may read more of each."""
        return read_records(path, media_root)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int | None) -> Inputs:
        """See [`example`](VideoQADataset.example); nothing at all, `{}`, is at the index `None`."""
        if index is None:
            return {}
        return self.example(self.records[index])

    def example(self, record: VideoRecord) -> Inputs:
        """
        A record, not necessarily of the dataset, as a model's inputs.

        Returns:
            `input_ids`, `labels` and `query_mask` `[S]`; `query_input_ids` `[L]` where the record has a query; its
            video's `pixel_values_videos` (or its `video_features` `[k, d]`), `video_grid_thw` `[1, 3]` and
            `second_per_grid_ts` `[1]`; and `source`. Only `skipped`, a list of the reason, for a video that cannot be
            read, and for a prompt that leaves no room for its answer; see [`warn_skipped`].
        """
        name = record.video or record.question
        try:
            inputs = self._process(record)
        except (ValueError, OSError) as error:
            if record.video is None or is_readable(record.video):
                # Not the file's fault: a wrong setting must not turn into an empty dataset.
                raise ValueError(f"The record of {name} cannot be used: {error}") from error
            return {"skipped": [f"Skipped {name}: {error}"]}

        prompt = inputs["input_ids"][0]
        answer = self.processor.text_ids(record.answer)
        target = torch.tensor(answer + [self.end_of_turn])
        input_ids = torch.cat([prompt, target])
        labels = torch.cat([self._earlier_answers(prompt), target])
        query_mask = F.pad(inputs["query_mask"][0], (0, len(target)))
        is_text = ~torch.isin(input_ids, self.placeholders)
        length = len(input_ids)
        if self.model_max_length is not None:
            length = int((is_text.cumsum(0) <= self.model_max_length).sum())
        if length <= len(prompt):
            most = self.model_max_length
            return {"skipped": [f"Skipped {name}: its prompt leaves no room for an answer within {most} tokens."]}
        example: Inputs = {
            "input_ids": input_ids[:length],
            "labels": labels[:length],
            "query_mask": query_mask[:length],
        }
        if "query_input_ids" in inputs:
            example["query_input_ids"] = inputs["query_input_ids"][0]
        for key in _VISUAL_INPUTS:
            if key in inputs:
                example[key] = torch.as_tensor(inputs[key])
        example["source"] = record.source
        return example

    def _process(self, record: VideoRecord) -> Inputs:
        """The prompt of a record as the processor gives it, with its video or the features that are stored of it."""
        names = []
        stored: Inputs = {}
        videos: Inputs = {}
        if record.video is not None:
            names.append(record.video)
            if self.features is not None:
                stored = self.features.load(record.video, record.fps) or {}
            if stored:  # the grid alone says where its tokens are
                videos["video_grid_thw"] = stored["video_grid_thw"]
                videos["second_per_grid_ts"] = stored["second_per_grid_ts"]
            else:
                videos = dict(self.processor_kwargs, videos=[record.video])
                if record.fps is not None:
                    videos["fps"] = record.fps
        if record.query is not None:
            videos["query"] = [record.query]
        messages = conversation(names, record.turns, [record.question])
        return dict(self.processor.conversation_inputs([messages], **videos)) | stored

    def _earlier_answers(self, prompt: Tensor) -> Tensor:
        """Labels `[S]` of a prompt: its answers with the tokens that end them; the last header has no answer yet."""
        labels = torch.full_like(prompt, IGNORED)
        for place in find_places(prompt, self.answer_header)[:-1]:
            start = place + len(self.answer_header)
            is_end = prompt[start:] == self.end_of_turn
            stop = start + 1 + int(is_end.int().argmax())
            labels[start:stop] = prompt[start:stop]
        return labels


def warn_skipped(inputs: Inputs) -> int:
    """
    Warns once, in the process that trains, of each record that an example or a batch had to leave out; their number.
    """
    reasons = inputs.get("skipped", ())
    for reason in reasons:
        logger.warning_once(reason)
    return len(reasons)


class VideoQACollator:
    """
    Pads examples of [`VideoQADataset`] on the right. Skipped records are left out, and the batch says why. A batch of
    nothing else becomes one row of text without a label, so that the processes of a distributed run stay in step. So
    does each empty example (`{}`), which counts as no record.
    """

    def __init__(self, processor):
        self.pad_token_id = processor.tokenizer.pad_token_id
        blank = torch.tensor(processor.prompt_ids("skipped"))
        self._blank = {
            "input_ids": blank,
            "labels": torch.full_like(blank, IGNORED),
            "query_mask": torch.zeros_like(blank),
            "source": SOURCES[0],
        }

    def __call__(self, examples: Sequence[Inputs]) -> Inputs:
        """
        Returns:
            `input_ids`, `attention_mask`, `labels`, `query_mask` `[B, S]`; `query_input_ids`, `query_attention_mask`
            `[B, L]` if any row has a query of its own (the others take theirs from `query_mask`); the pixels of all
            videos in order, or a list of their `video_features`; `source_ids` `[B]`, indices into [`SOURCES`]; and
            `skipped`, a list of the reasons for which records were left out.
        """
        rows = [dict(example or self._blank) for example in examples if "skipped" not in example]
        skipped = [reason for example in examples for reason in example.get("skipped", ())]
        if not rows:
            rows.append(dict(self._blank))
        padding = {
            "input_ids": self.pad_token_id,
            "attention_mask": 0,
            "labels": IGNORED,
            "query_mask": 0,
        }
        if any("query_input_ids" in row for row in rows):
            padding["query_input_ids"] = self.pad_token_id
            padding["query_attention_mask"] = 0
        for row in rows:
            is_question = row["query_mask"].bool()
            query = row.setdefault("query_input_ids", row["input_ids"][is_question])
            row["attention_mask"] = torch.ones_like(row["input_ids"])
            row["query_attention_mask"] = torch.ones_like(query)
        sources = [SOURCES.index(row["source"]) for row in rows]
        batch = {"skipped": skipped, "source_ids": torch.tensor(sources)}
        for name, value in padding.items():
            values = [row[name] for row in rows]
            batch[name] = pad_sequence(values, batch_first=True, padding_value=value)
        for name in _VISUAL_INPUTS:
            videos = [row[name] for row in rows if name in row]
            if videos:
                batch[name] = videos if name == "video_features" else torch.cat(videos)
        return batch
