"""Draws what an answer rests on: frames and a video with the kept tokens lit."""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..common.folders import whole_folder
from ..model.sampling_qtsplus import MOST_FRAMES
from ..model.video_qtsplus import VideoFile, open_folder, open_video
from ..video.encoded import IN_MEMORY, EncodedVideo
from .evidence import ANSWER, Interval
from .recall import Remembered
from .session import Answer

_CLOCK = Fraction(1, 90_000)  # seconds between the times that a frame can have
_SLOWEST = Fraction(1, 1001)  # frames per second that a container can state
_DRAWN = 8  # stretches of evidence in one picture


def lit(frame: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """`[H', W', 3]` uint8 with the regions of the tokens dimmed that `kept` `[H, W]` leaves out."""
    height, width, _ = frame.shape
    row_count, column_count = kept.shape
    rows = np.arange(height) * row_count // height
    columns = np.arange(width) * column_count // width
    is_lit = kept[rows][:, columns]
    dimmed = frame >> 2
    dimmed[is_lit] = frame[is_lit]
    return dimmed


def draw_evidence(
    answer: Answer,
    videos: Mapping[str, EncodedVideo],
    folder: str | Path,
) -> None:
    """
    Draws what an answer rests on.

    The folder gets `answer.json`, with the kept tokens; and per video `frames.png`, the middle of each stretch of
    evidence with its box, and `kept.mp4`, these stretches as H.264, one behind the other, with the kept tokens lit.
    Those of several videos are numbered. A video that was given as frames has neither.

    Args:
        videos: those that were asked about, by name.
        folder: as for [`whole_folder`].

    Raises:
        FileExistsError: the folder holds files that no earlier call wrote.
        ValueError: a video that cannot be read any more, or is not among these; a stream, whose frames are gone.
    """
    for name in answer.keep_maps:
        if name not in videos or isinstance(videos[name], Remembered):
            raise ValueError(f"The answer is about {name!r}; expected it among the videos, which are no streams.")
    with whole_folder(folder) as staging:
        about = []
        for number, name in enumerate(answer.keep_maps, 1):
            suffix = f"-{number}" if len(answer.keep_maps) > 1 else ""
            about.append(_draw_video(answer, name, videos[name], staging, suffix))
        text = json.dumps(dict(answer.as_dict(), videos=about))
        (staging / ANSWER).write_text(text + "\n", encoding="utf-8")


def _draw_video(
    answer: Answer,
    name: str,
    video: EncodedVideo,
    folder: Path,
    suffix: str,
) -> dict[str, object]:
    """Draws the evidence of one video into a folder, and gives what `answer.json` says of it."""
    kept = answer.keep_maps[name]
    evidence = [interval for interval in answer.evidence if interval.name == name]
    (kept_indices,) = kept.flatten().nonzero(as_tuple=True)
    about: dict[str, object] = {
        "name": name,
        "start": video.about.start,
        "seconds_per_step": video.seconds_per_step,
        "grid": list(kept.shape),
        "kept": kept_indices.tolist(),
    }
    if video.video != IN_MEMORY and evidence:
        kept_video = f"kept{suffix}.mp4"
        frames = f"frames{suffix}.png"
        draw_kept_video(video, kept, folder / kept_video, evidence)
        draw_spans(video, kept, evidence, folder / frames)
        about |= {"kept_tokens": kept_video, "frames": frames}
    return about


def draw_spans(
    video: EncodedVideo,
    kept: torch.Tensor,
    evidence: Sequence[Interval],
    path: str | Path,
) -> None:
    """
    A picture with the frame in the middle of each stretch of evidence, its kept tokens lit, in a box; in order of time.

    Args:
        kept: bool `[T, H, W]`, tokens.
        evidence: stretches of this video on a player's clock, at least one, the surest first; eight are drawn.
    """
    spans = sorted(evidence[:_DRAWN], key=lambda interval: interval.start)
    middles = []
    indices = []
    for interval in spans:
        middle = (interval.start + interval.end) / 2
        seconds = middle - video.about.start
        middles.append(seconds)
        indices.append(int(seconds * video.about.metadata.fps))
    count = len(spans)
    figure = Figure(figsize=(2.4 * count, 2.6), layout="constrained")
    panes = figure.subplots(1, count, squeeze=False)[0]
    frames = _open(video, indices).decode()
    for axes, interval, middle, frame in zip(panes, spans, middles, frames, strict=False):
        kept_here = _kept_at(video, middle, kept)
        axes.imshow(lit(frame, kept_here))
        axes.add_patch(_box(interval, frame))
        axes.set_title(f"{interval.start:.1f} to {interval.end:.1f} s, {interval.weight:.0%}", fontsize=8)
        axes.axis("off")
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _box(interval: Interval, frame: np.ndarray) -> Rectangle:
    """The box of a stretch of evidence, in pixels of a frame."""
    height, width = frame.shape[:2]
    left, top, right, bottom = interval.box
    corner = (left * width, top * height)
    box_width = (right - left) * width
    box_height = (bottom - top) * height
    return Rectangle(corner, box_width, box_height, fill=False, color="tab:orange", linewidth=2)


def draw_kept_video(
    video: EncodedVideo,
    kept: torch.Tensor,
    path: str | Path,
    evidence: Sequence[Interval],
) -> None:
    """
    Stretches of a video, one behind the other, as H.264 with the kept tokens lit and the others dimmed.

    Args:
        kept: bool `[T, H, W]`, tokens.
        path: where the mp4 goes.
    """
    fps = video.about.metadata.fps
    indices = _frames_within(video, evidence)
    opened = _open(video, indices)
    with av.open(str(path), "w") as container:
        rate = max(Fraction(fps).limit_denominator(1001), _SLOWEST)
        stream = container.add_stream("libx264", rate=rate, options={"preset": "veryfast"})
        _, height, width = opened.shape
        stream.height = height // 2 * 2  # H.264 has no odd sides
        stream.width = width // 2 * 2
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = _CLOCK
        for number, (index, frame) in enumerate(zip(indices, opened.decode(), strict=False)):
            kept_here = _kept_at(video, index / fps, kept)
            shown = lit(frame, kept_here)
            even = np.ascontiguousarray(shown[: stream.height, : stream.width])
            picture = av.VideoFrame.from_ndarray(even, format="rgb24")
            picture.pts = round(number / fps / _CLOCK)
            picture.time_base = _CLOCK
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def _frames_within(video: EncodedVideo, evidence: Sequence[Interval]) -> list[int]:
    """The indices of the frames that some stretches of a video show, ascending; at least one for each stretch."""
    fps = video.about.metadata.fps
    every_index = range(video.about.metadata.total_num_frames or 0)
    indices: set[int] = set()
    for interval in evidence:
        first = round((interval.start - video.about.start) * fps)
        last = round((interval.end - video.about.start) * fps)
        shown = every_index[first : max(last, first + 1)]
        if len(indices) + len(shown) > MOST_FRAMES:
            raise ValueError(f"The evidence is more than {MOST_FRAMES:,} frames of the video, too many to draw.")
        indices.update(shown)
    return sorted(indices)


def frame_at(video: EncodedVideo, seconds: float) -> np.ndarray:
    """`[H, W, 3]` uint8: what a player shows of a video at a time; `ValueError` before and behind it."""
    if video.video == IN_MEMORY:
        raise ValueError("The video's file is gone or was changed since it was encoded.")
    end = video.about.start + video.length
    if not video.about.start <= seconds <= end:
        raise ValueError(f"seconds={seconds:g}; expected {video.about.start:g} to {end:g}, when the video is shown.")
    elapsed = seconds - video.about.start
    index = int(elapsed * video.about.metadata.fps + 1e-3)
    frames = _open(video, [index]).decode()
    return next(iter(frames))


def _open(video: EncodedVideo, indices: Sequence[int]) -> VideoFile:
    """The video's frames of these indices at its own rate, in order."""
    fps = video.about.metadata.fps
    if Path(video.video).is_dir():
        folder = open_folder(video.video, fps)
        return replace(folder, decode=lambda: _pick(folder, indices))

    def choose(total: int, _: float) -> np.ndarray:
        return np.clip(indices, 0, total - 1)

    half_a_frame = 0.5 / fps
    start = video.about.start
    return open_video(video.video, choose, (start, start + video.length - half_a_frame))


def _pick(folder: VideoFile, indices: Sequence[int]) -> Iterator[np.ndarray]:
    """The frames of these ascending indices, or the last one in place of those behind it."""
    last = folder.shape[0] - 1
    times_shown = Counter(np.minimum(indices, last).tolist())
    for index, frame in enumerate(folder.decode()):
        for _ in range(times_shown[index]):
            yield frame


def _kept_at(video: EncodedVideo, seconds: float, kept: torch.Tensor) -> np.ndarray:
    """`[H, W]`, the kept tokens of the step that shows a time from the first frame on."""
    steps_begun = bisect_right(video.steps, seconds + 1e-6)
    step = min(steps_begun, len(kept)) - 1
    return kept[step].numpy()
