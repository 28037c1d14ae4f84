"""Draws what an answer rests on: frames with the kept tokens lit."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps

from ..common.folders import whole_folder
from ..common.journals import write_json
from ..model.frames_qtsplus import image_paths, load_frames
from ..model.video_qtsplus import open_video
from ..video.encoded import IN_MEMORY, EncodedVideo
from .evidence import Interval
from .recall import Remembered
from .session import Answer

_DRAWN = 8  # stretches of evidence in one picture
_SIDE = 320  # pixels of a frame's longer side in it


def lit(frame: np.ndarray, kept: np.ndarray) -> Image.Image:
    """A frame `[H', W', 3]` uint8 with the regions of the tokens dimmed that `kept` bool `[H, W]` leaves out."""
    image = Image.fromarray(frame)
    dimmed = Image.fromarray(frame >> 2)
    mask = Image.fromarray(kept)
    return Image.composite(image, dimmed, mask.resize(image.size))


def draw_evidence(
    answer: Answer,
    videos: Mapping[str, EncodedVideo],
    folder: str | Path,
) -> None:
    """
    Draws what an answer rests on.

    The folder gets `answer.json`, with the kept tokens, and a picture `frames.png`: the middle of each stretch of
    evidence, with its kept tokens lit, in a box. The pictures of several videos are numbered. A video that was given as
    frames has none.

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
        for name, kept in answer.keep_maps.items():
            video = videos[name]
            row: dict[str, object] = {
                "name": name,
                "start": video.about.start,
                "seconds_per_step": video.seconds_per_step,
                "grid": list(kept.shape),
                "kept": kept.flatten().nonzero()[:, 0].tolist(),
            }
            about.append(row)
            evidence = [interval for interval in answer.evidence if interval.name == name]
            if evidence and video.video != IN_MEMORY:
                picture = f"frames-{len(about)}.png" if len(videos) > 1 else "frames.png"
                draw_spans(video, kept, evidence, staging / picture)
                row["frames"] = picture
        write_json(staging / "answer.json", dict(answer.as_dict(), videos=about))


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
    panes = []
    for interval in sorted(evidence[:_DRAWN], key=lambda interval: interval.start):
        middle = (interval.start + interval.end) / 2
        step, _ = video.within(middle + 1e-6, middle)
        frame = lit(frame_at(video, middle), kept[step].numpy())
        pane = ImageOps.contain(frame, (_SIDE, _SIDE))
        draw = ImageDraw.Draw(pane)
        box = np.multiply(interval.box, pane.size * 2)
        draw.rectangle(box.tolist(), outline="orange", width=2)
        draw.rectangle((0, 0, _SIDE, 14), fill="black")
        seconds = f"{interval.start:.1f} to {interval.end:.1f} s"
        draw.text((2, 2), f"{seconds}, {interval.weight:.0%}")
        panes.append(np.asarray(pane))
    Image.fromarray(np.hstack(panes)).save(path)


def frame_at(video: EncodedVideo, seconds: float) -> np.ndarray:
    """`[H, W, 3]` uint8: what a player shows of a video at a time; `ValueError` before and behind it."""
    if video.video == IN_MEMORY:
        raise ValueError("The video's file is gone or was changed since it was encoded.")
    start = video.about.start
    end = start + video.length
    if not start <= seconds <= end:
        raise ValueError(f"seconds={seconds:g}; expected {start:g} to {end:g}, when the video is shown.")
    fps = video.about.metadata.fps
    elapsed = seconds - start
    index = int(elapsed * fps + 1e-3)
    if Path(video.video).is_dir():
        paths = image_paths(video.video)
        last = min(index, len(paths) - 1)
        (frame,) = load_frames([paths[last]])
        return frame

    def choose(total: int, _: float) -> list[int]:
        return [min(index, total - 1)]

    return next(open_video(video.video, choose, (start, end - 0.5 / fps)).decode())
