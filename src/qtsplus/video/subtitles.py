"""Subtitles of a video, from a file beside it or a track within it, and which of them a prompt has room for."""

import html
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
import torch
from transformers.utils import logging

from ..common.files import first_line, listed
from ..data.media import VIDEO_SUFFIXES
from ..model.containers_qtsplus import open_container, open_file, read_packets
from ..model.numbers_qtsplus import require_count
from .grids import keep_maps

if TYPE_CHECKING:
    from .encoded import EncodedVideo

logger = logging.get_logger(__name__)

SUFFIXES = (".srt", ".vtt", ".ass", ".ssa")
# What a file's name may have behind the video's: a language, and that it describes sounds, as in talk.pt-BR.sdh.srt.
_LANGUAGE = r"(?i:(\.[a-z]{2,3}([-_][a-z\d]+)?)?(\.(sdh|cc|hi))?)"

_BITMAPS = ("pgssub", "dvdsub", "dvbsub", "xsub")  # codecs of pictures, which have no text
# FFmpeg brings other formats to ASS: eight fields, then a text with blocks of `{\\tags}`.
_ASS_FIELDS = 8
_BLOCK = re.compile(r"\{\\[^{}]*\}")  # an override of ASS; other braces are text
_DRAWING = re.compile(r"\{[^{}]*\\p[1-9][^{}]*\}.*?(\{[^{}]*\\p0[^{}]*\}|$)")  # from one override to another
_BREAK = re.compile(r"\\[Nnh]|<br ?/?>")
# The tags of SubRip and WebVTT, and WebVTT's timestamps; anything else between angle brackets is text.
_TAG = re.compile(
    r"</?(?:b|i|u|s|c|v|font|ruby|rt|lang|span|em|strong)(?:[.\s][^<>]*)?>|<\d[\d:]*\.\d+>", re.IGNORECASE
)
# Codecs whose packets have the text as it was written. FFmpeg's decoders drop `<3 you, 5 >`, which is like a tag.
_WRITTEN = ("subrip", "srt", "webvtt", "text")


@dataclass(frozen=True)
class Subtitle:
    """A text that is said or shown, from one second to another on a player's clock."""

    start: float
    end: float
    text: str

    def __str__(self) -> str:
        return f"[{self.start:.1f} s] {self.text}"


def read_subtitles(video) -> list[Subtitle]:
    """
    The subtitles of a video, in order of time: of `talk.srt` or `talk.en.srt` beside it, or else those within it, the
    default track or the first that has all speech.

    Raises:
        ValueError: no subtitles, or subtitles that cannot be read; what is not a file.
    """
    if not isinstance(video, (str, Path)) or not os.path.isfile(video):
        raise ValueError("Subtitles are read from a file beside the video, or from within it; expected its path.")
    video = Path(video)
    files = _files_beside(video) + [video]
    for path in files:
        subtitles = _read_file(path, is_video=path == video)
        if subtitles:
            return sorted(subtitles, key=lambda subtitle: subtitle.start)
    names = [path.name for path in files]
    raise ValueError(
        f"No subtitles are in {listed(names)}; expected text in {video.stem}.srt beside the video, or a track."
    )


def _files_beside(video: Path) -> list[Path]:
    """The files of a video's subtitles, those with the shortest names first."""
    files = sorted(video.parent.iterdir(), key=lambda path: (len(path.name), path))
    other_videos = {path.stem for path in files if path.suffix.lower() in VIDEO_SUFFIXES}
    other_videos.discard(video.stem)
    name = re.compile(re.escape(video.stem) + _LANGUAGE)
    beside = []
    for path in files:
        is_named = name.fullmatch(path.stem) and path.stem not in other_videos
        if is_named and path.suffix.lower() in SUFFIXES and not path.is_dir():
            beside.append(path)
    return beside


def _read_file(path: Path, is_video: bool) -> list[Subtitle]:
    try:
        source: str | io.BytesIO = str(path)
        if not is_video:
            text = _read_text(path).strip("\ufeff \t\r\n")
            if not text:
                return []
            source = io.BytesIO(text.encode())
        with open_container(source) as container:
            track = _full_track(container.streams.subtitles)
            return [] if track is None else list(_lines(container, track))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ValueError(f"The subtitles of {str(path)!r} cannot be read: {reason}.") from error


def _read_text(path: Path) -> str:
    with open_file(str(path)) as file:
        content = file.read()
    # UTF-16 has a null byte in the second character, which is one of ASCII in all formats, also where the first is a
    # byte order mark.
    encoding = "utf-8"
    if content[2:3] == b"\0":
        encoding = "utf-16-be"
    elif content[3:4] == b"\0":
        encoding = "utf-16-le"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        if encoding != "utf-8":
            raise
        logger.warning(f"{path} is not UTF-8 and is read as Windows-1252.")
        text = content.decode("cp1252", "replace")
    if "\0" in text:
        raise ValueError("it has null characters; expected text in UTF-8 or UTF-16")
    return text


def _full_track(tracks: Iterable):
    """The default track of text or the first, of those that have all speech if there are any; `None` if none is."""
    flags = av.stream.Disposition
    texts = [track for track in tracks if track.codec_context is not None and track.codec_context.name not in _BITMAPS]
    full = [track for track in texts if not track.disposition & flags.forced] or texts
    defaults = [track for track in full if track.disposition & flags.default]
    return next(iter(defaults or full), None)


def _lines(container, track) -> Iterator[Subtitle]:
    """The subtitles of a track, a line each, without tags and without what ASS draws."""
    for packet in read_packets(container, track):
        if packet.pts is None:
            continue
        start = float(packet.pts * packet.time_base)
        end = start + float((packet.duration or 0) * packet.time_base)
        for written in _texts(packet, track.codec_context.name):
            undrawn = _BLOCK.sub("", _DRAWING.sub("", written))
            text = " ".join(_TAG.sub("", _BREAK.sub(" ", undrawn)).split())
            if text:
                yield Subtitle(start, end, text)


def _texts(packet, codec: str) -> Iterator[str]:
    """The texts of a packet, with their markup."""
    if codec not in _WRITTEN:
        for event in packet.decode():
            yield event.ass.decode("utf-8", "replace").split(",", _ASS_FIELDS)[-1]
        return
    text = bytes(packet).decode("utf-8", "replace")
    yield html.unescape(text) if codec == "webvtt" else text


def check_subtitles(most: int | None, videos: Iterable["EncodedVideo"]) -> None:
    """A `ValueError` where no video has the subtitles of which so many tokens are wanted."""
    if most is None:
        return
    require_count("subtitles", most)
    if not any(video.subtitles for video in videos):
        raise ValueError("No video was encoded with its subtitles; give `subtitles=True` to `encode` or `add`.")


def near(kept_indices: torch.Tensor, videos: Mapping[str, "EncodedVideo"], processor, most: int) -> str:
    """
    The subtitles that fit into `most` tokens, those nearest in time to kept tokens first, in their order.

    Args:
        kept_indices: `[n]`, among the tokens of all videos.
    """
    grids = torch.cat([video.video_grid_thw for video in videos.values()])
    maps = keep_maps(kept_indices, grids, processor.video_processor.merge_size)
    candidates = []  # seconds to the nearest kept tokens, and where the subtitle is
    for number, (video, kept) in enumerate(zip(videos.values(), maps, strict=True)):
        has_kept = kept.flatten(1).any(1)
        middles = (video.edges[:-1] + video.edges[1:]) / 2
        seconds = middles[has_kept.numpy()]
        for index, line in enumerate(video.subtitles):
            distance = line.start
            if len(seconds):
                outside = np.maximum(line.start - seconds, seconds - line.end)
                distance = max(outside.min(), 0.0)
            candidates.append((distance, number, index, f"{line}\n"))
    chosen = []
    for _, number, index, text in sorted(candidates):
        most -= len(processor.text_ids(text))
        if most < 0:
            break
        chosen.append((number, index, text))
    if not chosen:
        return ""
    texts = [text for _, _, text in sorted(chosen)]
    return "".join(["Subtitles:\n"] + texts)
