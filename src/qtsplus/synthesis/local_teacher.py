"""A video teacher in this process: a model of this package, or a stock one, asked in batches."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..data.media import UNREADABLE
from ..data.records import LETTERS, VideoRecord
from ..loading import find_device
from ..output import first_line
from ..session import EncodedVideo, encode
from ..training.models import load_model, load_processor
from .engine import ItemFailed, Ledger
from .video_steps import FREE_ANSWER, Question, Reply, Scoring, Verdict, read_letter, share_out

LETTER_TOKENS = 16  # of a reply whose letter is read


# A question, and up to how many tokens are written; `None` has the letters scored.
_Asked = tuple[VideoRecord, int | None]


@dataclass(frozen=True)
class _Outcome:
    """Log-probabilities of the letters or a reply, or why there is none; and the tokens of both sides."""

    logprobs: dict[str, float]
    reply: Reply
    prompt_tokens: int
    completion_tokens: int
    problem: str | None = None


def load_stock(weights: str, device: str | None = None, dtype: str = "auto") -> tuple[Any, Any]:
    """
    A model without a selector, in a folder or on the Hub, as one that keeps all tokens: its logits and answers to the
    bit. `"auto"` is bfloat16 on a GPU and float32 elsewhere.

    Raises:
        ValueError: no such model, or one of an unknown backbone.
    """
    where = find_device(device)
    automatic = "bfloat16" if where.startswith("cuda") else "float32"
    everything = {"selection": "all", "reencode_layers": 0}
    model = load_model(None, weights, everything, automatic if dtype == "auto" else dtype)
    return model.to(where).eval(), load_processor(None, weights, model.config)


@dataclass
class LocalTeacher:
    """A [`Teacher`] in this process; `name` stands for model and processor in the settings."""

    model: Any  # as `qtsplus.loading.load` gives them
    processor: Any
    name: str
    batch_size: int = 16  # questions at a time
    scoring: Scoring = "logprob"  # of options: by the log-probability of their letters, or by the letter that is said
    max_tokens: int = 128  # of an answer in words
    selection: str | None = None  # another way to choose visual tokens than the model's own
    fps: float | None = None  # for questions without one
    encoded: dict[str, EncodedVideo] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.fps is not None and not 0 < self.fps < float("inf"):
            raise ValueError(f"fps is {self.fps:g}; expected a finite number above 0.")
        tokenizer = self.processor.tokenizer
        tokenizer.padding_side = "left"
        ids = [tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in LETTERS]
        if self.scoring == "logprob" and any(len(tokens) != 1 for tokens in ids):
            raise ValueError(f"The tokenizer of {self.name} has no token for each of A, B, C and D: score by letter.")
        self.letter_ids = [tokens[0] for tokens in ids]

    def settings(self) -> dict[str, Any]:
        chosen = {"scoring": self.scoring, "max_tokens": self.max_tokens, "selection": self.selection}
        return {"model": self.name, **chosen, "fps": self.fps}

    async def __aenter__(self) -> "LocalTeacher":
        self.waiting: list[tuple[_Asked, asyncio.Future[_Outcome]]] = []
        self.turn = asyncio.Lock()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.encoded.clear()

    async def choose(self, question: Question, ledger: Ledger) -> Verdict:
        if self.scoring == "logprob":
            return share_out((await self._ask(question, question.text, None, ledger)).logprobs)
        outcome = await self._ask(question, question.text, LETTER_TOKENS, ledger)
        return Verdict(read_letter(outcome.reply.text), {}, outcome.reply.text)

    async def answer(self, question: Question, ledger: Ledger) -> Reply:
        return (await self._ask(question, f"{question.text}\n{FREE_ANSWER}", self.max_tokens, ledger)).reply

    async def _ask(self, question: Question, text: str, max_tokens: int | None, ledger: Ledger) -> _Outcome:
        record = VideoRecord(question.video, text, "", query=question.query, fps=question.fps or self.fps)
        outcome = await self._in_batch((record, max_tokens))
        ledger.spend(1, outcome.prompt_tokens, outcome.completion_tokens)
        if outcome.problem is not None:
            ledger.reasons.append(outcome.problem)
            raise ItemFailed
        return outcome

    async def _in_batch(self, asked: _Asked) -> _Outcome:
        """Whoever comes first asks the model for all who wait; the others come while it computes."""
        future: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
        self.waiting.append((asked, future))
        async with self.turn:
            await asyncio.sleep(0)
            if not future.done():
                batch, self.waiting = self.waiting[: self.batch_size], self.waiting[self.batch_size :]
                replies = await asyncio.to_thread(self._tell, [one for one, _ in batch])
                for (_, waits), one in zip(batch, replies, strict=True):
                    waits.set_result(one)
        return future.result()

    @torch.inference_mode()
    def _tell(self, batch: Sequence[_Asked]) -> list[_Outcome]:
        problems = self._encode([record for record, _ in batch])
        replies: dict[int, _Outcome] = {}
        together: dict[tuple[bool, int | None], list[int]] = {}
        for index, (record, max_tokens) in enumerate(batch):
            if record.video in problems:
                replies[index] = _Outcome({}, Reply("", False), 0, 0, problems[record.video])
            else:
                together.setdefault((record.video is None, max_tokens), []).append(index)
        for (_, max_tokens), indices in together.items():
            records = [batch[index][0] for index in indices]
            answers = self._score(records) if max_tokens is None else self._write(records, max_tokens)
            replies.update(zip(indices, answers, strict=True))
        return [replies[index] for index in range(len(batch))]

    def _encode(self, records: Sequence[VideoRecord]) -> dict[str | None, str]:
        """Encodes the videos of a batch, those that the batch before had are there. Returns why some cannot be read."""
        rates = {record.video: record.fps for record in records if record.video is not None}
        self.encoded = {video: encoded for video, encoded in self.encoded.items() if video in rates}
        problems: dict[str | None, str] = {}
        for video, fps in rates.items():
            if video not in self.encoded:
                try:
                    self.encoded[video] = encode(self.model, self.processor, video, fps=fps)
                except UNREADABLE as error:
                    problems[video] = f"The video cannot be read: {first_line(error)}"
        return problems

    def _inputs(self, records: Sequence[VideoRecord]) -> dict[str, Any]:
        """One prompt for each record, padded on the left; all that a record says is text."""
        videos = [self.encoded[record.video] for record in records if record.video is not None]
        seen: dict[str, Any] = {}
        if videos:
            seen["video_grid_thw"] = torch.cat([video.video_grid_thw for video in videos])
            seen["video_metadata"] = [video.metadata for video in videos]
        queries = [record.query or record.question for record in records]
        conversations = [_conversation(record) for record in records]
        inputs = self.processor.conversation_inputs(conversations, query=queries, **seen)
        inputs = dict(inputs.to(self.model.device))
        if videos:
            seconds = torch.cat([torch.as_tensor(video.second_per_grid_ts) for video in videos])
            inputs["second_per_grid_ts"] = seconds.to(self.model.device)
            inputs["video_features"] = [video.features for video in videos]
        return inputs

    def _score(self, records: Sequence[VideoRecord]) -> list[_Outcome]:
        inputs = self._inputs(records)
        logits = self.model(**inputs, selection=self.selection, logits_to_keep=1).logits[:, -1].float()
        letters = logits.log_softmax(-1)[:, self.letter_ids].tolist()
        prompts = inputs["attention_mask"].sum(1).tolist()
        scores = [dict(zip(LETTERS, row, strict=True)) for row in letters]
        return [_Outcome(row, Reply("", True), tokens, 1) for row, tokens in zip(scores, prompts, strict=True)]

    def _write(self, records: Sequence[VideoRecord], max_tokens: int) -> list[_Outcome]:
        inputs = self._inputs(records)
        ids = self.model.generate(**inputs, selection=self.selection, max_new_tokens=max_tokens, do_sample=False)
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        replies = []
        prompts = inputs["attention_mask"].sum(1).tolist()
        for row, tokens in zip(ids[:, inputs["input_ids"].shape[1] :].tolist(), prompts, strict=True):
            stop = next((index for index, token in enumerate(row) if token in ends), None)
            text = self.processor.tokenizer.decode(row[:stop], skip_special_tokens=True).strip()
            replies.append(_Outcome({}, Reply(text, stop is not None), tokens, len(row[:stop]) + (stop is not None)))
        return replies


def _conversation(record: VideoRecord) -> list[dict[str, Any]]:
    video = [] if record.video is None else [{"type": "video"}]
    return [{"role": "user", "content": [*video, {"type": "text", "text": record.question}]}]
