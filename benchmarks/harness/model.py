"""`python -m benchmarks.harness --model qtsplus`: our models, and stock ones, behind lmms-eval's chat interface."""

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import groupby
from pathlib import PurePath
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from rich.console import Console
from rich.progress import track

from qtsplus.asking import session
from qtsplus.common.files import first_line
from qtsplus.hub.loading import find_device

from .answers import AnswerLog, SampleAnswer
from .loading import Options, load_evaluated


@dataclass
class VisualTokenCounts(TokenCounts):
    """What a sample's log says under `token_counts`."""

    answered: SampleAnswer | None = None

    def to_dict(self) -> dict[str, Any]:
        if self.answered is None:
            return super().to_dict()
        return self.answered.model_dump(exclude={"text"})


@dataclass(frozen=True)
class _Request:
    """One prompt: the messages of its chat template, what it shows, how it is answered."""

    key: str
    messages: list[dict[str, Any]]
    videos: list[str]
    images: list[Any]
    query: str | None
    generation: Mapping[str, Any]

    @property
    def names(self) -> str:
        return ",".join(PurePath(video).name for video in self.videos)


class QTSplus(lmms):
    """
    A QTSplus model, or a stock one whose backbone we have. Frames, their size and their times come from our processor
    for all of them. `until` is left alone, as in lmms-eval's own chat classes.

    Args:
        pretrained, revision, dtype: as for `qtsplus.hub.loading.load`.
        device: such as `"cuda"`; with several processes on GPUs, each takes the one of its rank.
        answers: a folder that keeps every answer as it is given; what it holds is not asked again.
        options: the fields of [`Options`].
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str,
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        answers: str | None = None,
        **options: Any,
    ):
        super().__init__()
        if unknown := sorted(set(options) - {field.name for field in fields(Options)}):
            known = ", ".join(field.name for field in fields(Options))
            raise ValueError(f"There is no option {', '.join(unknown)}; expected some of {known}.")
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size!r}; expected a whole number, at least 1.")
        self.batch_size = int(batch_size)
        self._rank, self._world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if device in (None, "cuda") and torch.cuda.is_available():
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        settings = {"pretrained": str(pretrained), "revision": revision, "dtype": dtype, **options}
        self.log = AnswerLog(answers, self._rank, settings)
        self.model, self.processor, self.options = load_evaluated(
            str(pretrained), revision, find_device(device), dtype, Options(**options)
        )
        self.options.apply(self.processor)
        self._encode = lru_cache(self.batch_size)(self._read)  # several questions are about one video

    @property
    def device(self) -> torch.device:
        return self.model.device

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("The model qtsplus answers in words; choose a task of the type generate_until.")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError("The model qtsplus answers once; choose a task of the type generate_until.")

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """One answer per request, in order; what the log holds is not asked again."""
        keys = [self._key(instance) for instance in requests]
        waiting = {key: instance for key, instance in zip(keys, requests, strict=True) if key not in self.log.found}
        # A random choice is drawn for each prompt by itself: the same one in any batch, process and second run.
        drawn = self.options.selection == "random"
        batches = _batches(waiting, 1 if drawn else self.batch_size)
        for batch in track(batches, "Asking", console=Console(stderr=True), disable=self._rank != 0):
            asked = [self._request(key, waiting[key]) for key in batch]
            with torch.random.fork_rng(enabled=drawn):
                if drawn:
                    torch.manual_seed(zlib.crc32(asked[0].key.encode()))
                self.log.add(self._answer(asked))
        return [
            GenerationResult(answered.text, VisualTokenCounts(output_tokens=answered.output_tokens, answered=answered))
            for answered in map(self.log.found.__getitem__, keys)
        ]

    def _key(self, instance: Instance) -> str:
        prompt, _, generation, doc_id, task, split = instance.args
        doc = self.task_dict[task][split][doc_id]
        asked = {name: value for name, value in doc.items() if isinstance(value, (str, int, float))}
        return self.log.key(f"{task}/{split}", doc_id, {"prompt": prompt, **asked}, generation)

    def _request(self, key: str, instance: Instance) -> _Request:
        _, doc_to_messages, generation, doc_id, task, split = instance.args
        doc = self.task_dict[task][split][doc_id]
        messages, videos, images, query = [], [], [], None
        for message in doc_to_messages(doc):
            content = []
            for part in message["content"]:
                kind = part["type"]
                if kind == "text":
                    query = part.get("query", query)
                    content.append({"type": "text", "text": part["text"]})
                elif kind == "video" and part.get("start_time") is None and part.get("end_time") is None:
                    videos.append(str(part["url"]))
                    content.append({"type": "video"})
                elif kind == "image":
                    images.append(part["url"])
                    content.append({"type": "image"})
                else:
                    raise ValueError(f"{task} {doc_id}: expected text, images and whole videos, got {part!r}.")
            messages.append({"role": message["role"], "content": content})
        return _Request(key, messages, videos, images, query, generation)

    def _answer(self, batch: Sequence[_Request]) -> dict[str, SampleAnswer]:
        """Answers to prompts of one kind of generation; those whose videos cannot be read fail, the others do not."""
        answers, readable = {}, []
        for request in batch:
            found = [self._encode(video) for video in request.videos]
            reasons = [reason for reason in found if isinstance(reason, str)]
            if reasons:
                answers[request.key] = SampleAnswer(text="", video=request.names, failed="; ".join(reasons))
            else:
                readable.append((request, [video for video in found if not isinstance(video, str)]))
        return {**answers, **(self._generate(readable) if readable else {})}

    def _read(self, video: str) -> session.EncodedVideo | str:
        """A video's features, or why it cannot be read."""
        try:
            return session.encode(self.model, self.processor, video)
        except (ValueError, OSError) as error:
            return first_line(error)

    def _generate(self, asked: Sequence[tuple[_Request, list[session.EncodedVideo]]]) -> dict[str, SampleAnswer]:
        requests = [request for request, _ in asked]
        videos = [video for _, found in asked for video in found]
        messages, images = [one.messages for one in requests], [one.images for one in requests if one.images]
        some = any(request.query for request in requests)
        query = [one.query or _question(one.messages) for one in requests] if some else None
        selecting = ("selection", "retention", "max_visual_tokens", "reencode")
        options = {name: getattr(self.options, name) for name in selecting}
        options |= _generation(requests[0].generation)
        new, chosen = answer(self.model, self.processor, messages, videos, query, images, **options)
        texts = self.processor.batch_decode(new, skip_special_tokens=True)
        padding = self.processor.tokenizer.pad_token_id
        return {
            request.key: SampleAnswer(
                text=texts[row],
                output_tokens=int((new[row] != padding).sum()),
                video=request.names,
                frames=sum(video.frames for video in found),
                visual_tokens=sum(len(video.features) for video in found),
                kept_visual_tokens=len(chosen.kept_indices[row]) if found else 0,
            )
            for row, (request, found) in enumerate(asked)
        }


@torch.no_grad()
def answer(
    model: Any,
    processor: Any,
    conversations: Sequence[list[dict[str, Any]]],
    videos: Sequence[session.EncodedVideo],
    query: Sequence[str] | None = None,
    images: Sequence[Any] = (),
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """
    The ids `[B, T]` that a model answers conversations with, and the `QTSplusOutput` that says what they rest on. The
    videos are those of all conversations, in order; the images a list for each that has some.
    """
    given: dict[str, Any] = {"query": query} if query else {}
    if images:
        given["images"] = images
    if videos:
        given["video_grid_thw"] = torch.cat([video.video_grid_thw for video in videos])
        given["video_metadata"] = [video.about.metadata for video in videos]
        options["video_features"] = [video.features for video in videos]
        options["second_per_grid_ts"] = [video.seconds_per_step for video in videos]
    inputs = processor.conversation_inputs(conversations, **given)
    output = model.generate(**inputs.to(model.device), **options, return_dict_in_generate=True)
    return output.sequences[:, inputs["input_ids"].shape[1] :], output.qtsplus


def _batches(waiting: Mapping[str, Instance], size: int) -> list[list[str]]:
    """The keys in order, and no batch with two kinds of generation."""
    alike = [list(keys) for _, keys in groupby(waiting, lambda key: waiting[key].args[2])]
    return [keys[start : start + size] for keys in alike for start in range(0, len(keys), size)]


def _generation(given: Mapping[str, Any]) -> dict[str, Any]:
    """lmms-eval's arguments as `generate` takes them: greedy, unless a temperature is asked for."""
    chosen = {"max_new_tokens": given.get("max_new_tokens", 128), "num_beams": given.get("num_beams", 1)}
    if not given.get("temperature"):
        return {**chosen, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    sampled = {name: given[name] for name in ("temperature", "top_p", "top_k") if given.get(name) is not None}
    return {**chosen, "do_sample": True, **sampled}


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last user turn."""
    turn = next(message for message in reversed(messages) if message["role"] == "user")
    return "\n".join(part["text"] for part in turn["content"] if part["type"] == "text")
