"""Batches of examples of different lengths."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..data.records import SOURCES
from .dataset import IGNORED, SkippedRecord


class VideoQACollator:
    """
    Pads examples of [`VideoQADataset`] on the right. Skipped records are left out and listed in the batch. A batch of
    nothing else becomes one row of text without a label, so that the processes of a distributed run stay in step.
    """

    def __init__(self, processor: Any):
        tokenizer = processor.tokenizer
        self.pad_token_id = tokenizer.pad_token_id
        blank = torch.tensor(tokenizer("skipped", add_special_tokens=False)["input_ids"])
        self._blank = {
            "input_ids": blank,
            "labels": torch.full_like(blank, IGNORED),
            "query_mask": torch.zeros_like(blank),
            "source": SOURCES[0],
        }

    def __call__(self, examples: Sequence[dict[str, Any] | SkippedRecord]) -> dict[str, Any]:
        """
        Returns:
            `input_ids`, `attention_mask`, `labels`, `query_mask` `[B, S]`; `query_input_ids`, `query_attention_mask`
            `[B, L]` if any row has a query of its own (the others take theirs from `query_mask`); the pixels of all
            videos in order, or a list of their `video_features`; a list of the rows' `attention` `[M]` if any row has
            a target (empty for the others); `source_ids` `[B]`, indices into [`SOURCES`]; and `skipped`, a list of
            [`SkippedRecord`].
        """
        rows = [example for example in examples if not isinstance(example, SkippedRecord)] or [self._blank]
        batch: dict[str, Any] = {
            "skipped": [example for example in examples if isinstance(example, SkippedRecord)],
            "source_ids": torch.tensor([SOURCES.index(row["source"]) for row in rows]),
            "labels": self._pad([row["labels"] for row in rows], IGNORED),
            "query_mask": self._pad([row["query_mask"] for row in rows], 0),
            **self._pad_ids("", [row["input_ids"] for row in rows]),
        }
        if any("query_input_ids" in row for row in rows):
            own = [row.get("query_input_ids", row["input_ids"][row["query_mask"].bool()]) for row in rows]
            batch |= self._pad_ids("query_", own)
        for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "video_features"):
            if parts := [row[name] for row in rows if name in row]:
                batch[name] = parts if name == "video_features" else torch.cat(parts)
        if any("attention" in row for row in rows):
            batch["attention"] = [row.get("attention", torch.zeros(0)) for row in rows]
        return batch

    def _pad_ids(self, prefix: str, rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        masks = [torch.ones_like(row) for row in rows]
        ids = self._pad(rows, self.pad_token_id)
        return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": self._pad(masks, 0)}

    @staticmethod
    def _pad(rows: list[torch.Tensor], value: int) -> torch.Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=value)
