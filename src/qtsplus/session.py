"""Asks a model about a video, and says what its answer rests on."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, BatchFeature
from transformers.generation.streamers import BaseStreamer

from .evidence import Interval, evidence_intervals, keep_maps


@dataclass(frozen=True)
class Answer:
    """
    What a model answered about one video, and what the answer rests on.

    Args:
        answer: the text.
        video: the path that was asked about.
        frames: frames that the model saw.
        seconds_of_video: length of the video.
        visual_tokens: M, the video's tokens before the selection.
        kept_tokens: n, those that the language model read.
        rho: the fraction that the selection aimed at.
        evidence: stretches of the video that the kept tokens came from.
        timings: seconds per stage. `first_token` and `generate` both count from the call of `generate`.
        keep_map: bool `[T, H, W]`, the kept tokens in the video's grid of tokens.
    """

    answer: str
    video: str
    frames: int
    seconds_of_video: float
    visual_tokens: int
    kept_tokens: int
    rho: float
    evidence: list[Interval]
    timings: dict[str, float]
    keep_map: torch.Tensor

    def as_dict(self) -> dict[str, Any]:
        """What `qtsplus ask --json` prints: all fields but the keep map."""
        fields = {name: value for name, value in vars(self).items() if name != "keep_map"}
        fields["evidence"] = [
            {name: value for name, value in asdict(interval).items() if name != "video"} for interval in self.evidence
        ]
        return fields


def load(model: str | Path, device: str | None = None, dtype: str = "auto") -> tuple[Any, Any]:
    """
    Loads a model and its processor as any Transformers user does, with `trust_remote_code=True`.

    Args:
        model: a folder or a Hub id.
        device: such as `"cuda"` or `"cpu"`; a GPU where there is one when absent.
        dtype: of the weights, such as `"bfloat16"`; `"auto"` is the checkpoint's.

    Raises:
        OSError: no such folder or repository.
        ValueError: a device that is not there.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"The device {device!r} cannot be used: {reason}") from error
    processor = AutoProcessor.from_pretrained(model, trust_remote_code=True)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(model, trust_remote_code=True, dtype=dtype)
    return loaded.to(device).eval(), processor


def prepare(processor: Any, video: str | Path, question: str, fps: float | None = None) -> BatchFeature:
    """
    Reads a video and makes the model's inputs for one question about it.

    Args:
        video: a video file, or a folder of frames.
        fps: of a file, frames to look at per second; of a folder, the rate at which its frames were taken.

    Returns:
        the model's inputs, and `video_metadata`, which the model does not take.

    Raises:
        ValueError: a video that cannot be read, a folder without `fps`, a question without a token.
    """
    if not question.strip():
        raise ValueError("The question is empty; expected some text.")
    content = [{"type": "video", "video": str(video)}, {"type": "text", "text": question}]
    processor_kwargs: dict[str, Any] = {"return_metadata": True}
    if fps is not None:
        processor_kwargs["fps"] = fps
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=processor_kwargs,
    )


def ask(
    model: Any,
    processor: Any,
    video: str | Path,
    question: str,
    *,
    fps: float | None = None,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    max_new_tokens: int = 128,
) -> Answer:
    """
    Asks one question about one video.

    Args:
        model, processor: as [`load`] gives them.
        video: a video file, or a folder of frames.
        question: the text.
        fps: of a file, frames to look at per second; of a folder, the rate at which its frames were taken.
        retention: fraction of the visual tokens to keep, in (0, 1]; predicted from the question when absent.
        max_visual_tokens: most visual tokens to keep.
        max_new_tokens: longest answer.

    Raises:
        ValueError: a video that cannot be read, a folder without `fps`, a retention out of its range.
    """
    started = time.perf_counter()
    inputs = prepare(processor, video, question, fps)
    prepared = time.perf_counter()
    answer = answer_prepared(
        model,
        processor,
        inputs,
        video,
        retention=retention,
        max_visual_tokens=max_visual_tokens,
        max_new_tokens=max_new_tokens,
    )
    answer.timings.update(preprocess=prepared - started)
    return answer


def answer_prepared(
    model: Any,
    processor: Any,
    inputs: BatchFeature,
    video: str | Path,
    *,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    max_new_tokens: int = 128,
) -> Answer:
    """Answers with inputs made by [`prepare`]; see [`ask`]."""
    model_inputs = {name: value for name, value in inputs.items() if name != "video_metadata"}
    clock = _FirstTokenClock()
    started = time.perf_counter()
    output = model.generate(
        **BatchFeature(model_inputs).to(model.device),
        retention=retention,
        max_visual_tokens=max_visual_tokens,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        streamer=clock,
    )
    finished = time.perf_counter()

    answer_ids = output.sequences[0, inputs["input_ids"].shape[1] :]
    metadata = inputs["video_metadata"][0]
    seconds_of_video = metadata.total_num_frames / metadata.fps
    merge_size = processor.video_processor.merge_size
    kept_indices, relevance = output.qtsplus.kept_indices[0], output.qtsplus.relevance[0]
    (keep_map,) = keep_maps(kept_indices, inputs["video_grid_thw"], merge_size)
    intervals = evidence_intervals(
        kept_indices, relevance, inputs["video_grid_thw"], inputs["second_per_grid_ts"], merge_size
    )
    return Answer(
        answer=processor.tokenizer.decode(answer_ids, skip_special_tokens=True).strip(),
        video=str(video),
        frames=len(metadata.frames_indices),
        seconds_of_video=seconds_of_video,
        visual_tokens=keep_map.numel(),
        kept_tokens=len(kept_indices),
        rho=float(output.qtsplus.rho[0]),
        # The last grid step is padded where the frames are odd in number.
        evidence=[Interval(i.start, min(i.end, seconds_of_video), i.weight) for i in intervals],
        timings={"first_token": clock.first_token - started, "generate": finished - started},
        keep_map=keep_map,
    )


class _FirstTokenClock(BaseStreamer):
    """Notes when the first new token comes; `generate` puts the prompt before it."""

    def __init__(self) -> None:
        self.puts = 0
        self.first_token = float("nan")

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_token = time.perf_counter()

    def end(self) -> None:
        pass
