"""Draws the evidence of an answer: frames of the video that are dark where no token was kept."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps

from ..common.folders import whole_folder
from ..common.journals import write_json
from ..model.frames_qtsplus import image_paths, load_frames
from ..model.sampling_qtsplus import ROUNDING, choose_frames
from ..model.video_qtsplus import open_video
from ..video.encoded import NO_FILE, EncodedVideo
from .evidence import Interval
from .recall import Remembered
from .session import Answer

_DRAWN = 8  # the most intervals of evidence in one picture
_SIDE = 320  # pixels of the longer side of a frame in a picture
_CAPTION = 14  # pixels: the height of the bar with the seconds, on top of each frame


def dimmed_where_dropped(frame: np.ndarray, kept: np.ndarray) -> Image.Image:
    """The frame, `[H', W', 3]` uint8, dimmed where `kept`, bool `[H, W]`, says that a token was dropped."""
    image = Image.fromarray(frame)
    quarter_as_bright = Image.fromarray(frame >> 2)
    mask = Image.fromarray(kept).resize(image.size)
    return Image.composite(image, quarter_as_bright, mask)


def draw_evidence(
    answer: Answer,
    videos: Mapping[str, EncodedVideo],
    folder: str | Path,
) -> None:
    """
    Draws the evidence of an answer.

    The folder gets `answer.json`, which also lists the kept tokens, and for each video with evidence the picture of
    [`draw_spans`]: `frames.png`, or `frames-1.png`, `frames-2.png` ... if there are several videos. A video that was
    given as frames has no picture.

    Args:
        videos: the videos that the question was about, by name.
        folder: as for [`whole_folder`].

    Raises:
        FileExistsError: the folder holds files that no earlier call wrote.
        ValueError: a video of the answer is missing in `videos`, cannot be read any more, or is a stream, whose frames
            are gone.
    """
    for name in answer.keep_maps:
        if name not in videos:
            raise ValueError(f"The answer is about {name!r}, which is not among the videos; expected them all.")
        if isinstance(videos[name], Remembered):
            raise ValueError(f"{name!r} is a stream, whose frames are gone; expected an answer about stored videos.")
    with whole_folder(folder) as staging:
        descriptions = []
        for number, (name, kept) in enumerate(answer.keep_maps.items(), 1):
            video = videos[name]
            description = {
                "name": name,
                "start": video.about.start,
                "seconds_per_step": video.seconds_per_step,
                "grid": list(kept.shape),
                "kept": kept.flatten().nonzero()[:, 0].tolist(),
            }
            evidence = [interval for interval in answer.evidence if interval.name == name]
            if evidence and video.video != NO_FILE:
                picture = "frames.png"
                if len(videos) > 1:
                    picture = f"frames-{number}.png"  # a video without a picture takes a number too
                draw_spans(video, kept, evidence, staging / picture)
                description["frames"] = picture
            descriptions.append(description)
        content = answer.as_dict() | {"videos": descriptions}
        write_json(staging / "answer.json", content)


def draw_spans(
    video: EncodedVideo,
    kept: torch.Tensor,
    evidence: Sequence[Interval],
    path: str | Path,
) -> None:
    """
    Draws one frame for each interval of evidence, side by side in order of time.

    Each is the frame in the middle of its interval, dimmed where tokens were dropped, with a box around the evidence.

    Args:
        kept: bool `[T, H, W]`, whether each token was kept.
        evidence: at least one interval of this video, the one with the largest weight first. Their times are those that
            a player shows. The first eight are drawn.
        path: the file that the picture is written to.
    """
    panes = []
    for interval in sorted(evidence[:_DRAWN], key=lambda interval: interval.start):
        middle = (interval.start + interval.end) / 2
        step, _ = video.within(middle, middle)
        # If the last step is shorter than the rounding of `within`, that returns `count`, one past the last step.
        step = min(step, video.count - 1)
        frame = dimmed_where_dropped(frame_at(video, middle), kept[step].numpy())
        pane = ImageOps.contain(frame, (_SIDE, _SIDE))
        width, height = pane.size
        box = np.multiply(interval.box, (width, height, width, height))
        draw = ImageDraw.Draw(pane)
        draw.rectangle(box.tolist(), outline="orange", width=2)
        draw.rectangle((0, 0, _SIDE, _CAPTION), fill="black")
        draw.text((2, 2), f"{interval.start:.1f} to {interval.end:.1f} s, {interval.weight:.0%}")
        panes.append(np.asarray(pane))
    Image.fromarray(np.hstack(panes)).save(path)


def frame_at(video: EncodedVideo, seconds: float) -> np.ndarray:
    """
    The frame that a player shows at `seconds`, `[H, W, 3]` uint8.

    Raises:
        ValueError: a time outside the video, or a video without a file to read.
    """
    if video.video == NO_FILE:
        raise ValueError("The video has no file to read: it was given as frames, or its file is gone or was changed.")
    start = video.about.start
    end = start + video.length
    if not start <= seconds <= end:
        raise ValueError(f"seconds={seconds:g}; expected a second of the video, from {start:g} to {end:g}.")
    fps = video.about.metadata.fps
    # At its end a video shows its last frame. Both ways of reading a frame below add one rounding to the instant, which
    # must still be in the last frame; so it stays two roundings before the end.
    just_before_end = end - 2 * ROUNDING / fps
    instant = min(seconds, just_before_end)
    if Path(video.video).is_dir():
        index = int(instant * fps + ROUNDING)
        (frame,) = load_frames([image_paths(video.video)[index]])
        return frame
    opened = open_video(video.video, choose_frames, (instant, instant))
    return next(opened.decode())
