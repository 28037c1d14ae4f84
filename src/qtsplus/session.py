"""Encodes a video once, asks a model about it any number of times, and says what each answer rests on."""

import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedConfig
from transformers.generation.streamers import BaseStreamer

from .decoding_qtsplus import shown_name
from .encoding_qtsplus import Repeats
from .evidence import Interval, evidence_intervals, keep_maps
from .hub.folder import reading
from .methods_qtsplus import Method
from .output import first_line
from .two_passes import Large, TwoPasses, open_twice, second_pass, second_prompt

T = TypeVar("T")

_PROCESSOR = (("tokenizer.json", "tokenizer_config.json"), ("processor_config.json", "preprocessor_config.json"))
_A_QUESTION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What?"}]},
]


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
        start: when a player shows the first frame, in seconds.
        warnings: what is wrong with the file, such as an end that is missing; one sentence each.
        large: with two passes, the video at full size; features and grid are then those of the small one.
    """

    video: str
    features: torch.Tensor
    video_grid_thw: torch.Tensor
    second_per_grid_ts: list[float]
    metadata: Any
    seconds: float
    start: float = 0.0
    warnings: list[str] = field(default_factory=list)
    large: Large | None = None


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
        evidence: stretches of the video that show what was asked for, see [`Interval`]; the surest first.
        timings: seconds per stage. `encode` is reading and encoding the video, and missing where it was encoded before;
            `second_pass`, with two passes, is choosing regions and encoding them at full size.
            `first_token` and `generate` both count from the call of `generate`.
        keep_map: bool `[T, H, W]`, the kept tokens in the video's grid of tokens.
        warnings: what is wrong with the video, as in [`EncodedVideo`].
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
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """What `qtsplus ask --json` prints: all fields but the keep map."""
        fields = {name: value for name, value in vars(self).items() if name != "keep_map"}
        fields["evidence"] = [
            {"start": one.start, "end": one.end, "weight": one.weight, "box": list(one.box)} for one in self.evidence
        ]
        return fields


def load(
    model: str | Path, device: str | None = None, dtype: str = "auto", revision: str | None = None
) -> tuple[Any, Any]:
    """
    Loads a model and its processor as any Transformers user does, with `trust_remote_code=True`.

    Args:
        model: a folder or a Hub id.
        device: such as `"cuda"` or `"cpu"`; a GPU where there is one when absent.
        dtype: of the weights, such as `"bfloat16"`; `"auto"` is the checkpoint's.
        revision: of a model on the Hub: a branch, a tag or a commit.

    Raises:
        OSError: no such repository.
        ValueError: no such folder; one without a QTSplus model or its processor, or with a broken file; a device that
            cannot be used; a revision of a folder.
    """
    device = find_device(device)
    processor = load_processor(model, revision)
    with reading(f"The model {str(model)!r}"):
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            model, trust_remote_code=True, dtype=dtype, revision=revision
        )
    return loaded.to(device).eval(), processor


def load_processor(model: str | Path, revision: str | None = None) -> Any:
    """The processor alone, see [`load`]."""
    check_model(model, revision)
    with reading(f"The processor of {str(model)!r}"):
        processor = AutoProcessor.from_pretrained(model, trust_remote_code=True, revision=revision)
        processor.apply_chat_template(_A_QUESTION, add_generation_prompt=True)
    return processor


def stored_dtype(model: str | Path, revision: str | None = None) -> str:
    """What a model's configuration says of its weights, for vLLM: its own "auto" shortens float32."""
    config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
    return config.get("dtype") or config.get("torch_dtype") or "auto"


def find_device(device: str | None) -> str:
    """
    The device that was asked for, or else a GPU where there is one.

    Raises:
        ValueError: it cannot be used.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"The device {device!r} cannot be used: {first_line(error)}") from error
    if torch.device(device).type == "meta":
        raise ValueError("The device 'meta' holds no values and cannot answer; expected one such as 'cpu' or 'cuda'.")
    return device


def check_model(model: str | Path, revision: str | None) -> None:
    """Before anything is loaded: a `ValueError` for what cannot be a model with a selector; see [`load`]."""
    name = str(model)
    if revision is not None and Path(model).is_dir():
        raise ValueError(f"{name!r} is a folder, and revision={revision!r} is about a repository on the Hub.")
    if not name.strip():
        raise ValueError("The model's name is empty; expected a folder or a Hub id, such as ORG/NAME.")
    if not Path(model).is_dir():
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ValueError(f"There is no folder {name!r}; expected one, or a Hub id such as ORG/NAME.") from error
    config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
    if not config:
        raise ValueError(f"There is no config.json in {name!r}; expected the folder or repository of a QTSplus model.")
    if "qtsplus_config" not in config:
        raise ValueError(
            f"{name!r} is no QTSplus model: its model_type is {config.get('model_type')!r}. Make one of it with "
            f"`qtsplus convert {name} --out FOLDER`."
        )
    for names in _PROCESSOR:
        if Path(model).is_dir() and not any(Path(model, file).is_file() for file in names):
            raise ValueError(
                f"The folder {name!r} holds no processor; expected {names[0]} beside the weights. Save it there with "
                "`processor.save_pretrained`."
            )


def encode(
    model: Any,
    processor: Any,
    video: str | Path,
    *,
    fps: float | None = None,
    max_frames: int | None = None,
    frames_per_chunk: int | None = None,
    device: str | None = None,
    frame_tolerance: float | None = 0.0,
    two_passes: TwoPasses | None = None,
    progress: bool = False,
) -> EncodedVideo:
    """
    Reads a video of any length and encodes it, chunk by chunk: one is decoded while the one before it is encoded.

    Memory holds three chunks at most, and the features.

    Args:
        model, processor: as [`load`] gives them.
        video: a video file, an `http(s)` address (as a `str`), or a folder of frames.
        fps: of a file, frames to look at per second; of a folder, the rate at which its frames were taken.
        max_frames: of a file, the most that are looked at; as the processor has it when absent.
        frames_per_chunk: frames at a time; by default about 16,384 patches.
        device: where the features shall live, such as `"cpu"`; the model's when absent.
        frame_tolerance: frames that differ by no more from those before take their features and are not encoded again;
            see [`Repeats`]. 0 does so only with equal frames, `None` encodes every frame.
        two_passes: encode the video small, and let every question choose the regions that are encoded at full size.
        progress: show a bar on standard error while a video of several chunks is encoded.

    Raises:
        ValueError: a video that cannot be read, a folder without `fps`; two passes with a backbone that reads every
            frame at one size, or tiles with one that has to see whole frames.
    """
    started = time.perf_counter()
    chunks = processor.video_chunks(video, fps=fps, max_frames=max_frames, frames_per_chunk=frames_per_chunk)
    large = None
    if two_passes is not None:
        large, chunks = open_twice(model, processor, chunks, two_passes, frame_tolerance)
    tokens = int(chunks.video_grid_thw.prod()) // processor.video_processor.merge_size**2
    features, filled = torch.empty(0), 0
    repeats, console = Repeats(frame_tolerance), Console(stderr=True)
    bar: dict[str, Any] = {"console": console, "transient": True, "disable": not (progress and console.is_terminal)}
    with closing(read_ahead(chunks)) as ahead:
        for pixels, grid in track(ahead, "Encoding the video", len(chunks), **bar):
            (encoded,) = model.encode_videos(pixels, grid, device=device, repeats=repeats)
            if not filled:
                features = encoded.new_empty(tokens, encoded.shape[-1])
            features[filled : filled + len(encoded)] = encoded
            filled += len(encoded)
    return EncodedVideo(
        video=shown_name(str(video)),
        features=features,
        video_grid_thw=chunks.video_grid_thw,
        second_per_grid_ts=chunks.second_per_grid_ts,
        metadata=chunks.metadata,
        seconds=time.perf_counter() - started,
        start=getattr(chunks, "start", 0.0),  # a model brings its own code, which may be older
        warnings=chunks.warnings,
        large=large,
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
    selection: str | Method | None = None,
    two_passes: TwoPasses | None = None,
    max_new_tokens: int = 128,
) -> Answer:
    """
    Asks one question about one video.

    Args:
        model, processor: as [`load`] gives them.
        video: a video file, an `http(s)` address (as a `str`), or a folder of frames; or what [`encode`] has made of
            one, for another question.
        question: the text; special tokens in it, such as `<|im_end|>`, are text too.
        fps: of a file, frames to look at per second; of a folder, the rate at which its frames were taken.
        retention: fraction of the visual tokens to keep, in (0, 1]; predicted from the question when absent.
        max_visual_tokens: most visual tokens to keep; with `retention`, the smaller of both counts.
        selection: another way to choose them than the model's own: a name such as `"uniform"`, or a function from
            `Candidates` and a count to indices (`methods_qtsplus.py`).
        two_passes: as for [`encode`], of a video that was not encoded before.
        max_new_tokens: longest answer.

    Raises:
        ValueError: a question that is empty or longer than the model's positions, a video that cannot be read, a folder
            without `fps`, `fps` for a video that was encoded before, a retention out of its range.
    """
    _check_question(model, processor, question)
    timings: dict[str, float] = {}
    if not isinstance(video, EncodedVideo):
        video = encode(model, processor, video, fps=fps, two_passes=two_passes)
        timings["encode"] = video.seconds
    elif fps is not None or two_passes is not None:
        given = f"fps={fps:g}" if fps is not None else f"two_passes={two_passes}"
        raise ValueError(f"Got {given} for a video that was encoded before; give it to `encode`.")

    grid, second = video.video_grid_thw, None
    choice: dict[str, Any] = {"retention": retention, "max_visual_tokens": max_visual_tokens, "selection": selection}
    if video.large is not None:
        started = time.perf_counter()
        second = second_pass(model, video.large, small_prompt(processor, video, question), **choice)
        grid, choice["retention"] = video.large.chunks.video_grid_thw, [second.retention]
        timings["second_pass"] = time.perf_counter() - started
    inputs = processor.question_inputs(question, grid, [video.metadata]).to(model.device)
    inputs["second_per_grid_ts"] = video.second_per_grid_ts
    clock = _FirstTokenClock()
    started = time.perf_counter()
    answering: dict[str, Any] = {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True, "streamer": clock}
    if second is None:
        output = model.generate(**inputs, video_features=[video.features], **choice, **answering)
    else:
        output = model.generate_from(second_prompt(model, inputs, [second], **choice), **answering)
    timings.update(first_token=clock.first_token - started, generate=time.perf_counter() - started)

    answer_ids = output.sequences[0, inputs["input_ids"].shape[1] :]
    seconds_of_video = video.metadata.total_num_frames / video.metadata.fps
    merge_size = processor.video_processor.merge_size
    kept_indices = output.qtsplus.kept_indices[0]
    # None if the method computed no relevance.
    relevance = None if output.qtsplus.relevance is None else output.qtsplus.relevance[0]
    if second is not None:
        kept_indices, relevance = second.of_the_whole(kept_indices, relevance)
    (keep_map,) = keep_maps(kept_indices, grid, merge_size)
    intervals = evidence_intervals(kept_indices, relevance, grid, video.second_per_grid_ts, merge_size)
    return Answer(
        answer=processor.tokenizer.decode(answer_ids, skip_special_tokens=True).strip(),
        video=video.video,
        frames=len(video.metadata.frames_indices),
        seconds_of_video=seconds_of_video,
        visual_tokens=keep_map.numel(),
        kept_tokens=len(kept_indices),
        rho=float(output.qtsplus.rho[0]) if second is None else second.rho,
        evidence=[
            # The last grid step is padded where the frames are odd in number.
            replace(one, start=video.start + one.start, end=video.start + min(one.end, seconds_of_video))
            for one in intervals
        ],
        timings=timings,
        keep_map=keep_map,
        warnings=video.warnings,
    )


def _check_question(model: Any, processor: Any, question: str) -> None:
    if not question.strip():
        raise ValueError("The question is empty; expected some text.")
    tokens = len(processor.tokenizer(question, add_special_tokens=False)["input_ids"])
    most = model.config.get_text_config().max_position_embeddings
    if tokens >= most:
        raise ValueError(f"The question has {tokens} tokens; expected fewer than the model's {most} positions.")


def small_prompt(processor: Any, video: EncodedVideo, question: str) -> dict[str, Any]:
    """Inputs of the model for a question about the first of two passes."""
    inputs = processor.question_inputs(question, video.video_grid_thw, [video.metadata])
    asked = {name: inputs[name] for name in ("input_ids", "attention_mask", "query_mask")}
    grid, seconds = video.video_grid_thw, video.second_per_grid_ts
    return {**asked, "video_features": [video.features], "video_grid_thw": grid, "second_per_grid_ts": seconds}


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
