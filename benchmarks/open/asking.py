"""Questions about worlds without a grid, asked of a model in many ways."""

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtsplus.asking.evidence import evidence_intervals
from qtsplus.model.question_qtsplus import tokenize_query
from qtsplus.training.dataset import IGNORED
from qtsplus.training.features import encode_files
from qtsplus.training.models import make_config, make_model, make_processor

from ..teaching.dataset import TinyWorldCollator, TinyWorldDataset, read_tinyworld
from ..world.open_questions import in_words
from ..world.openworld import OPEN_COLOURS

LADDER = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)


@dataclass
class Answers:
    """
    Of each question, in one way of asking.

    Attributes:
        right: whether the answer is right to its last word.
        kept: the visual tokens that the language model read.
        share: of as many tokens that hold the answer as could be kept, the part that was; NaN where there are none.
    """

    right: list[bool] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    share: list[float] = field(default_factory=list)


class OpenTest:
    """
    A set of `build_open`, one question a record, with its videos encoded once.

    Args:
        model, processor: any model with the tower that all models have which are asked.
        path: the JSONL file.
        limit: so many of the questions, drawn by chance; all if `None`.
    """

    batch = 32

    def __init__(self, model: Any, processor: Any, path: Path, limit: int | None = None):
        records, lines = read_tinyworld(path), path.read_text(encoding="utf-8").splitlines()
        chosen = np.sort(np.random.default_rng(0).permutation(len(records))[:limit])
        self.records: list[Any] = [records[index] for index in chosen]
        self.rows: list[dict[str, Any]] = [json.loads(lines[index]) for index in chosen]
        self.processor, self.collate = processor, TinyWorldCollator(processor)
        self.dataset = TinyWorldDataset(self.records, processor)
        self._folder = tempfile.TemporaryDirectory()
        videos = [(str(record.video), None) for record in self.records]
        self.dataset.features = encode_files(model, processor, videos, self._folder.name)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def kinds(self) -> np.ndarray:
        return np.array([row["kind"] for row in self.rows])

    @property
    def videos(self) -> np.ndarray:
        return np.array([row["video"] for row in self.rows])

    @property
    def needles(self) -> list[list[int]]:
        """Per question, the visual tokens that hold its answer."""
        return [row["needles"][0] for row in self.rows]

    @cached_property
    def totals(self) -> np.ndarray:
        """Per question, the visual tokens of its video."""
        return np.array([len(self.features(record)) for record in self.records])

    def features(self, record: Any) -> torch.Tensor:
        """`[M, d]` of a record's video."""
        example: Any = self.dataset.example(record)
        return example["video_features"]

    def batches(
        self, queries: Sequence[str] | None = None, texts: Sequence[str] | None = None
    ) -> Iterator[tuple[slice, dict[str, Any], torch.Tensor]]:
        """
        (rows, the model's inputs, labels) of each batch.

        Args:
            queries: questions to select by, in place of the prompts' own.
            texts: questions in place of the prompts'.
        """
        for first in range(0, len(self), self.batch):
            rows = slice(first, min(first + self.batch, len(self)))
            records = self.records[rows]
            if texts is not None:
                records = [_ask_otherwise(record, text) for record, text in zip(records, texts[rows], strict=True)]
            inputs = self.collate([self.dataset.example(record) for record in records])
            labels = inputs.pop("labels")
            for name in ("source_ids", "skipped", "token_words", "needles"):
                inputs.pop(name, None)
            if queries is not None:
                inputs.pop("query_mask", None)
                made = tokenize_query(self.processor.tokenizer, list(queries[rows]), like=None)
                inputs |= {name: torch.tensor(values) for name, values in made.items()}
            yield rows, inputs, labels

    @torch.no_grad()
    def ask(
        self,
        model: Any,
        queries: Sequence[str] | None = None,
        texts: Sequence[str] | None = None,
        **choice: Any,
    ) -> Answers:
        """
        Answers to all questions.

        Args:
            choice: `retention`, `max_visual_tokens`, `selection`, as in a call of the model.
        """
        answers = Answers()
        for rows, inputs, labels in self.batches(queries, texts):
            output = model(**inputs, use_cache=False, **choice)
            said = model.compact_labels(labels, inputs["input_ids"], output.qtsplus.columns)[:, 1:]
            right = ((output.logits[:, :-1].argmax(-1) == said) | (said == IGNORED)).all(1)
            answers.right += right.tolist()
            answers.kept += output.qtsplus.n.tolist()
            pairs = zip(output.qtsplus.kept_indices, self.needles[rows], strict=True)
            answers.share += [_part_of(wanted, kept.numpy()) for kept, wanted in pairs]
        return answers

    @torch.no_grad()
    def scores(self, model: Any) -> tuple[list[np.ndarray], list[float], list[set[int]]]:
        """Per question: relevance, the part that the null token did not take, the seconds that evidence names."""
        relevance, seen, seconds = [], [], []
        share = model.config.qtsplus_config.evidence_share
        for _, inputs, _ in self.batches():
            chosen = model(**inputs, use_cache=False).qtsplus
            relevance += [row.numpy() for row in chosen.relevance]
            seen += chosen.seen.tolist()
            grids, steps = inputs["video_grid_thw"], inputs["second_per_grid_ts"]
            for index, (kept, row) in enumerate(zip(chosen.kept_indices, chosen.relevance, strict=True)):
                step = [float(steps[index])]
                spans = evidence_intervals(kept, row, grids[index : index + 1], step, 2, share)
                seconds.append({second for span in spans for second in range(round(span.start), round(span.end))})
        return relevance, seen, seconds


def _part_of(wanted: list[int], kept: np.ndarray) -> float:
    """Of as many as could be kept; NaN of none."""
    return float(np.isin(wanted, kept).sum() / min(len(wanted), len(kept))) if wanted else float("nan")


def _ask_otherwise(record: Any, text: str) -> Any:
    return type(record)(**{**vars(record), "question": text})


def open_test(folder: str | Path, path: Path, limit: int | None = None) -> OpenTest:
    """A test set, its videos encoded by the model in a folder."""
    return OpenTest(load(folder), make_processor(None, str(folder), make_config(None, str(folder), {})), path, limit)


def load(folder: str | Path, **selector: Any) -> Any:
    return make_model(None, str(folder), selector).eval()


# --- Questions that ask for something else, or the same otherwise ---


def of_other_videos(test: OpenTest) -> list[str]:
    """For each question one of another video, of another text."""
    rng, order = np.random.default_rng(3), []
    for row in test.rows:
        while True:
            other = test.rows[int(rng.integers(len(test)))]
            if other["video"] != row["video"] and other["question"] != row["question"]:
                order.append(other["question"])
                break
    return order


def of_the_same_video(test: OpenTest) -> list[str]:
    """For each question another one about the same video; its own where there is no other."""
    rng = np.random.default_rng(6)
    chosen = []
    for row in test.rows:
        others = [
            other["question"]
            for other in test.rows
            if other["video"] == row["video"] and other["question"] != row["question"]
        ]
        chosen.append(others[int(rng.integers(len(others)))] if others else row["question"])
    return chosen


def with_another_word(test: OpenTest) -> list[str]:
    """With another colour; where a question names none, another shape, or last for first."""
    rng, changed = np.random.default_rng(4), []
    names = {"colour": list(OPEN_COLOURS), "shape": ["circle", "square", "triangle", "cross", "ring"]}
    swaps = {"first": "last", "last": "first"}
    for row in test.rows:
        text = row["question"]
        for words in names.values():
            found = re.search(rf"\b({'|'.join(words)})\b", text)
            if found:
                others = [word for word in words if word != found.group()]
                text = text.replace(found.group(), others[int(rng.integers(len(others)))])
                break
        else:
            text = re.sub(r"\b(first|last)\b", lambda match: swaps[match.group()], text)
        changed.append(text)
    return changed


def otherwise(test: OpenTest) -> dict[str, list[str]]:
    """Every question in lower case, and in words that it was never asked in."""
    return {
        "in lower case": [row["question"].lower() for row in test.rows],
        "in other words": [in_words(row["kind"], row["question"], -1) for row in test.rows],
    }
