"""Subtitles of a film, from a file beside it or a track within it, and those of them that a prompt has room for."""

import codecs
import io
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import torch
from transformers.utils import logging

from .decoding_qtsplus import TAGS
from .evidence import keep_maps
from .settings import check_count

if TYPE_CHECKING:
    from .videos import EncodedVideo

logger = logging.get_logger(__name__)

SUFFIXES = (".srt", ".vtt", ".ass", ".ssa")
_MARKUP = re.compile(r"\{[^}]*\}|<[^>]*>")  # of ASS, to which FFmpeg brings all others, and of HTML


@dataclass(frozen=True)
class Subtitle:
    """A text that is said or shown, from one second to another on a player's clock."""

    start: float
    end: float
    text: str

    def __str__(self) -> str:
        return f"[{self.start:.1f} s] {self.text}"


def read_subtitles(film: Any) -> list[Subtitle]:
    """
    The subtitles of a film, in order of time: of `film.srt` or `film.en.vtt` beside it, or else those within it, the
    default track or the first.

    Raises:
        ValueError: no subtitles, or some that cannot be read; what is no file.
    """
    if not isinstance(film, (str, Path)) or not os.path.isfile(film):
        raise ValueError("Subtitles are read from a file beside the film, or from within it; expected the film's path.")
    film = Path(film)
    own = re.compile(re.escape(film.stem) + r"(\.[\w-]+)?")
    files = [path for path in film.parent.iterdir() if path.suffix.lower() in SUFFIXES and own.fullmatch(path.stem)]
    path = min(files, key=lambda path: (len(path.name), path.name), default=film)
    try:
        options = {"protocol_whitelist": "file"}
        with av.open(_as_utf8(path) if files else str(path), options=options, **TAGS) as container:
            tracks = container.streams.subtitles
            track = next((one for one in tracks if one.disposition.default), tracks[0] if tracks else None)
            lines = [] if track is None else sorted(_lines(container, track), key=lambda line: line.start)
    except av.error.FFmpegError as error:
        raise ValueError(f"The subtitles of {str(path)!r} cannot be read: {error.strerror}.") from error
    if not lines:
        raise ValueError(f"No subtitles are in {str(path)!r}; expected {film.stem}.srt beside the film, or a track.")
    return lines


def _as_utf8(path: Path) -> io.BytesIO:
    content = path.read_bytes()
    try:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            content = content.decode("utf-16").encode()
        content.decode("utf-8-sig")
    except UnicodeDecodeError:
        logger.warning(f"{path} is not UTF-8 and is read as Windows-1252.")
        content = content.decode("cp1252", "replace").encode()
    return io.BytesIO(content)


def _lines(container: Any, track: Any) -> Iterator[Subtitle]:
    for packet in container.demux(track):
        if packet.pts is None:
            continue
        start = float(packet.pts * packet.time_base)
        end = start + float((packet.duration or 0) * packet.time_base)
        for line in packet.decode():
            text = getattr(line, "dialogue", b"").decode("utf-8", "replace")  # none of a track of pictures
            if text := " ".join(_MARKUP.sub("", text.replace(r"\N", " ")).split()):
                yield Subtitle(start, end, text)


def check_subtitles(most: int | None, videos: Iterable["EncodedVideo"]) -> None:
    """A `ValueError` where no video has the subtitles of which so many tokens are wanted."""
    if most is None:
        return
    check_count("subtitles", most, "tokens")
    if not any(video.subtitles for video in videos):
        raise ValueError("No video was encoded with its subtitles; give `subtitles=True` to `encode` or `add`.")


def near(kept_indices: torch.Tensor, videos: Mapping[str, "EncodedVideo"], processor: Any, most: int) -> str:
    """
    The subtitles that fit into `most` tokens, those nearest in time to kept tokens first, in their order.

    Args:
        kept_indices: `[n]`, among the tokens of all videos.
    """
    grids, found = torch.cat([video.video_grid_thw for video in videos.values()]), []
    maps = keep_maps(kept_indices, grids, processor.video_processor.merge_size)
    for number, (video, kept) in enumerate(zip(videos.values(), maps, strict=True)):
        step = float(video.second_per_grid_ts[0])
        seconds = [video.start + (row + 0.5) * step for row in kept.any(2).any(1).nonzero()[:, 0].tolist()]
        for line in video.subtitles:
            place = bisect_left(seconds, line.start)
            beside = seconds[max(place - 1, 0) : place + 1]
            apart = min((max(line.start - one, one - line.end, 0.0) for one in beside), default=line.start)
            found.append((apart, number, line))
    chosen: list[tuple[int, Subtitle]] = []
    for _, number, line in sorted(found, key=lambda one: (one[0], one[1], one[2].start)):
        most -= len(processor.text_ids(f"{line}\n"))
        if most < 0:
            break
        chosen.append((number, line))
    texts = ["Subtitles:"] + [str(line) for _, line in sorted(chosen, key=lambda one: (one[0], one[1].start))]
    return "\n".join(texts) + "\n" if chosen else ""
