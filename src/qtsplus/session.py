"""Encodes a video once, asks a model about it any number of times, and says what each answer rests on."""

import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.generation.streamers import BaseStreamer

from .evidence import Interval, evidence_intervals, keep_maps

T = TypeVar("T")


@dataclass(frozen=True)
class EncodedVideo:
    """
    A video that [`encode`] has read, for any number of questions.

    Args:
        video: the path.
        features: `[M, d]`, all its visual tokens.
        video_grid_thw: `[1, 3]`, its grid in patches.
        second_per_grid_ts: `[1]`, seconds per temporal patch.
        metadata: `VideoMetadata`, with the indices of the frames that were looked at.
        seconds: what reading and encoding took.
    """

    video: str
    features: torch.Tensor
    video_grid_thw: torch.Tensor
    second_per_grid_ts: list[float]
    metadata: Any
    seconds: float


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
        timings: seconds per stage. `encode` is reading and encoding the video, and missing where it was encoded before;
            `first_token` and `generate` both count from the call of `generate`.
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


def encode(
    model: Any,
    processor: Any,
    video: str | Path,
    *,
    fps: float | None = None,
    frames_per_chunk: int | None = None,
    device: str | None = None,
    progress: bool = False,
) -> EncodedVideo:
    """
    Reads a video of any length and encodes it, chunk by chunk: one is decoded while the one before it is encoded.

    Memory holds three chunks at most, and the features.

    Args:
        model, processor: as [`load`] gives them.
        video: a video file, or a folder of frames.
        fps: of a file, frames to look at per second; of a folder, the rate at which its frames were taken.
        frames_per_chunk: frames at a time; by default about 16,384 patches.
        device: where the features shall live, such as `"cpu"`; the model's when absent.
        progress: show a bar on standard error while a video of several chunks is encoded.

    Raises:
        ValueError: a video that cannot be read, a folder without `fps`.
    """
    started = time.perf_counter()
    chunks = processor.video_chunks(video, fps=fps, frames_per_chunk=frames_per_chunk)
    tokens = int(chunks.video_grid_thw.prod()) // processor.video_processor.merge_size**2
    features, filled = torch.empty(0), 0
    console = Console(stderr=True)
    quiet = not (progress and console.is_terminal and len(chunks) > 1)
    with closing(read_ahead(chunks)) as ahead:
        for pixels, grid in track(
            ahead, "Encoding the video", len(chunks), console=console, transient=True, disable=quiet
        ):
            (encoded,) = model.encode_videos(pixels, grid, device=device)
            if not filled:
                features = encoded.new_empty(tokens, encoded.shape[-1])
            features[filled : filled + len(encoded)] = encoded
            filled += len(encoded)
    return EncodedVideo(
        video=str(video),
        features=features,
        video_grid_thw=chunks.video_grid_thw,
        second_per_grid_ts=chunks.second_per_grid_ts,
        metadata=chunks.metadata,
        seconds=time.perf_counter() - started,
    )


def read_ahead(items: Iterable[T]) -> Generator[T, None, None]:
    """The same items; a thread gets the next one, and no more, while the caller works on one. Its errors are raised."""
    source = iter(items)
    nothing: Any = object()
    with ThreadPoolExecutor(1, thread_name_prefix="qtsplus-read-ahead") as reader:
        coming = reader.submit(next, source, nothing)
        while (item := coming.result()) is not nothing:
            coming = reader.submit(next, source, nothing)
            yield item


def ask(
    model: Any,
    processor: Any,
    video: str | Path | EncodedVideo,
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
        video: a video file, or a folder of frames; or what [`encode`] has made of one, for another question.
        question: the text; special tokens in it, such as `<|im_end|>`, are text too.
        fps: of a file, frames to look at per second; of a folder, the rate at which its frames were taken.
        retention: fraction of the visual tokens to keep, in (0, 1]; predicted from the question when absent.
        max_visual_tokens: most visual tokens to keep.
        max_new_tokens: longest answer.

    Raises:
        ValueError: an empty question, a video that cannot be read, a folder without `fps`, `fps` for a video that was
            encoded before, a retention out of its range.
    """
    if not question.strip():
        raise ValueError("The question is empty; expected some text.")
    timings: dict[str, float] = {}
    if not isinstance(video, EncodedVideo):
        video = encode(model, processor, video, fps=fps)
        timings["encode"] = video.seconds
    elif fps is not None:
        raise ValueError(f"Got fps={fps:g} for a video that was encoded before; give it to `encode`.")

    inputs = processor.question_inputs(question, video.video_grid_thw, [video.metadata]).to(model.device)
    clock = _FirstTokenClock()
    started = time.perf_counter()
    output = model.generate(
        **inputs,
        video_features=[video.features],
        second_per_grid_ts=video.second_per_grid_ts,
        retention=retention,
        max_visual_tokens=max_visual_tokens,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        streamer=clock,
    )
    timings.update(first_token=clock.first_token - started, generate=time.perf_counter() - started)

    answer_ids = output.sequences[0, inputs["input_ids"].shape[1] :]
    seconds_of_video = video.metadata.total_num_frames / video.metadata.fps
    merge_size = processor.video_processor.merge_size
    kept_indices, relevance = output.qtsplus.kept_indices[0], output.qtsplus.relevance[0]
    (keep_map,) = keep_maps(kept_indices, video.video_grid_thw, merge_size)
    intervals = evidence_intervals(kept_indices, relevance, video.video_grid_thw, video.second_per_grid_ts, merge_size)
    return Answer(
        answer=processor.tokenizer.decode(answer_ids, skip_special_tokens=True).strip(),
        video=video.video,
        frames=len(video.metadata.frames_indices),
        seconds_of_video=seconds_of_video,
        visual_tokens=keep_map.numel(),
        kept_tokens=len(kept_indices),
        rho=float(output.qtsplus.rho[0]),
        # The last grid step is padded where the frames are odd in number.
        evidence=[Interval(i.start, min(i.end, seconds_of_video), i.weight) for i in intervals],
        timings=timings,
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
