"""Subtitles of a video, from a file beside it or a track within it, and which of them a prompt has room for."""

import codecs
import html
import io
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import av
import torch
from transformers.utils import logging

from ..common.files import first_line
from ..common.validation import check_count
from ..data.media import VIDEO_SUFFIXES
from ..model.containers_qtsplus import open_container, open_file
from .grids import keep_maps

if TYPE_CHECKING:
    from .encoded import EncodedVideo

logger = logging.get_logger(__name__)

SUFFIXES = (".srt", ".vtt", ".ass", ".ssa")
MAX_FILE_BYTES = 16 * 2**20
MAX_SUBTITLES = 100_000  # a day of one per second has 86,400

_BLANK = codecs.BOM_UTF8 + b" \t\r\n"  # what an empty file may have
_BITMAPS = ("pgssub", "dvdsub", "dvbsub", "xsub")  # codecs of pictures, which have no text
# FFmpeg brings other formats to ASS: eight fields, then a text with blocks of `{\\tags}`.
_ASS_FIELDS = 8
_BLOCK = re.compile(r"(\{\\[^{}]*\})")  # an override of ASS; other braces are text
_DRAWING = re.compile(r"\\p(\d+)")
_BREAK = re.compile(r"\\[Nnh]|<br ?/?>")
# The tags of SubRip and WebVTT, and WebVTT's timestamps; anything else between angle brackets is text.
_TAG = re.compile(
    r"</?(?:b|i|u|s|c|v|font|ruby|rt|lang|span|em|strong)(?:[.\s][^<>]*)?>|<\d[\d:]*\.\d+>", re.IGNORECASE
)
# Codecs whose packets have the text as it was written. FFmpeg's decoders drop `<3 you, 5 >`, which is like a tag.
_WRITTEN = ("subrip", "srt", "webvtt", "text", "mov_text")

# The parts of a name that tell of the subtitles, not of another video: film.en.srt, film.pt-BR.sdh.srt, film.ger.cc.vtt
_KINDS = ("sdh", "cc", "hi", "forced", "foreign", "default", "full")
_CODES_OF_3_LETTERS = (
    "afr alb ara arm baq bel ben bos bul bur cat ces chi cmn cze dan deu dut ell eng est eus fas fil fin fra fre gai "
    "geo ger gle glg gre guj heb hin hrv hun hye ice ind isl ita jav jpn kan kat kaz khm kor lao lav lit mac mal mar "
    "may mkd mon msa mya nep nld nob nor pan per pol por ron rum rus sin slk slo slv som spa sqi srp swa swe tam tel "
    "tgl tha tur ukr und urd uzb vie wel yue zho zul"
)
_REGION = re.compile(r"[-_](?:[a-z]{2,8}|\d{3})")


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
    The subtitles of a video, in order of time: of `talk.srt` or `talk.en.sdh.vtt` beside it, or else those within it,
    the default track or the first. A file of forced subtitles, which has foreign speech alone, comes last.

    Raises:
        ValueError: no subtitles, or subtitles that cannot be read; what is not a file.
    """
    if not isinstance(video, (str, Path)) or not os.path.isfile(video):
        raise ValueError("Subtitles are read from a file beside the video, or from within it; expected its path.")
    video = Path(video)
    files = _files_beside(video)
    full = [path for path in files if not _is_forced(path)]
    forced = [path for path in files if _is_forced(path)]
    for path in full + [video] + forced:
        subtitles = _read_file(path, is_video=path == video)
        if subtitles:
            return sorted(subtitles, key=lambda subtitle: subtitle.start)
    raise ValueError(f"No subtitles are in {str(video)!r}; expected {video.stem}.srt beside the video, or a track.")


def _read_file(path: Path, is_video: bool) -> list[Subtitle]:
    try:
        source: str | io.BytesIO = str(path)
        if not is_video:
            source = _as_utf8(path)
            if not source.getvalue().strip(_BLANK):
                return []
        with open_container(source) as container:
            track = _full_track(container.streams.subtitles)
            return [] if track is None else list(_lines(container, track))
    except av.error.FFmpegError as error:
        raise ValueError(f"The subtitles of {str(path)!r} cannot be read: {error.strerror}.") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"The subtitles of {str(path)!r} cannot be read: {first_line(error)}.") from error


def _files_beside(video: Path) -> list[Path]:
    """The files of a video's subtitles, those with the shortest names first."""
    files = []
    other_videos = set()
    for path in video.parent.iterdir():
        suffix = path.suffix.lower()
        if suffix in VIDEO_SUFFIXES and path.stem != video.stem:
            other_videos.add(path.stem)
        if suffix in SUFFIXES and f"{path.stem}.".startswith(f"{video.stem}."):
            parts = path.stem.removeprefix(video.stem).lower().split(".")
            if all(map(_tells_of_subtitles, parts[1:])):
                files.append(path)
    own_files = [path for path in files if path.stem not in other_videos]
    return sorted(own_files, key=lambda path: (len(path.name), path.name))


def _tells_of_subtitles(part: str) -> bool:
    """Whether a part of a file's name is a language or a kind of subtitles."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE  # names such as "english"

    language = _REGION.sub("", part)
    is_code = re.fullmatch("[a-z]{2}", language) or language in _CODES_OF_3_LETTERS.split()
    return bool(is_code) or part in _KINDS or part in TO_LANGUAGE_CODE


def _is_forced(path: Path) -> bool:
    """Whether a file says that it has foreign speech and signs alone."""
    parts = path.stem.lower().split(".")
    return "forced" in parts or "foreign" in parts


def _full_track(tracks: Iterable):
    """The default track of text or the first, of those that have all speech if there are any; `None` if none is."""
    flags = av.stream.Disposition
    texts = []
    for track in tracks:
        if track.codec_context is not None and track.codec_context.name not in _BITMAPS:
            texts.append(track)

    def preference(track) -> tuple[bool, bool]:
        is_forced = bool(track.disposition & flags.forced)
        is_default = bool(track.disposition & flags.default)
        return is_forced, not is_default

    return min(texts, key=preference, default=None)


def _as_utf8(path: Path) -> io.BytesIO:
    with open_file(str(path)) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES // 2**20} MiB, which no file of subtitles is")
    try:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            content = content.decode("utf-16").encode()
        content.decode("utf-8-sig")
    except UnicodeDecodeError:
        logger.warning(f"{path} is not UTF-8 and is read as Windows-1252.")
        content = content.decode("cp1252", "replace").encode()
    return io.BytesIO(content)


def _lines(container, track) -> Iterator[Subtitle]:
    codec = track.codec_context.name
    count = 0
    total_bytes = 0
    for packet in container.demux(track):
        if packet.pts is None:
            continue
        count += 1
        total_bytes += packet.size
        if count > MAX_SUBTITLES:
            raise ValueError(f"it has more than {MAX_SUBTITLES:,} subtitles")
        if total_bytes > MAX_FILE_BYTES:
            raise ValueError(f"its subtitles have more than {MAX_FILE_BYTES // 2**20} MiB")
        start = float(packet.pts * packet.time_base)
        end = start + float((packet.duration or 0) * packet.time_base)
        for written in _texts(packet, codec):
            text = _plain_text(written)
            if codec == "webvtt":
                text = html.unescape(text)
            if text:
                yield Subtitle(start, end, text)


def _texts(packet, codec: str) -> Iterator[str]:
    """The texts of a packet, with their markup."""
    content = bytes(packet)
    if codec == "mov_text":  # how long the text is, the text, and boxes about its style
        length = int.from_bytes(content[:2], "big")
        content = content[2 : 2 + length]
    if codec in _WRITTEN:
        yield content.decode("utf-8", "replace")
        return
    for event in packet.decode():
        fields = event.ass.decode("utf-8", "replace").split(",", _ASS_FIELDS)
        yield fields[-1]


def _plain_text(written: str) -> str:
    """The words of a subtitle, in one line, without tags and without what ASS draws."""
    text = ""
    draws = False
    for part in _BLOCK.split(written):
        scales = _DRAWING.findall(part)
        if not _BLOCK.fullmatch(part):
            if not draws:
                text += part
        elif scales:
            draws = int(scales[-1]) > 0
    words = _TAG.sub("", _BREAK.sub(" ", text))
    return " ".join(words.split())


def check_subtitles(most: int | None, videos: Iterable["EncodedVideo"]) -> None:
    """A `ValueError` where no video has the subtitles of which so many tokens are wanted."""
    if most is None:
        return
    check_count("subtitles", most, "tokens")
    if not any(video.subtitles for video in videos):
        raise ValueError("No video was encoded with its subtitles; give `subtitles=True` to `encode` or `add`.")


@dataclass(frozen=True, order=True)
class _Candidate:
    """A subtitle that a prompt may have; the nearest to what was kept comes first."""

    distance: float  # seconds to the nearest kept tokens
    video: int  # its number in the prompt
    start: float
    text: str = field(compare=False)


def near(kept_indices: torch.Tensor, videos: Mapping[str, "EncodedVideo"], processor, most: int) -> str:
    """
    The subtitles that fit into `most` tokens, those nearest in time to kept tokens first, in their order.

    Args:
        kept_indices: `[n]`, among the tokens of all videos.
    """
    grids = torch.cat([video.video_grid_thw for video in videos.values()])
    maps = keep_maps(kept_indices, grids, processor.video_processor.merge_size)
    candidates = []
    for number, (video, kept) in enumerate(zip(videos.values(), maps, strict=True)):
        (kept_steps,) = kept.flatten(1).any(1).nonzero(as_tuple=True)
        middles = [video.about.start + (step + 0.5) * video.seconds_per_step for step in kept_steps.tolist()]
        for line in video.subtitles:
            candidates.append(_Candidate(_distance(line, middles), number, line.start, str(line)))
    chosen = []
    for candidate in sorted(candidates):
        most -= len(processor.text_ids(f"{candidate.text}\n"))
        if most < 0:
            break
        chosen.append(candidate)
    if not chosen:
        return ""
    chosen.sort(key=lambda candidate: (candidate.video, candidate.start))
    texts = [candidate.text for candidate in chosen]
    return "\n".join(["Subtitles:"] + texts) + "\n"


def _distance(line: Subtitle, seconds: Sequence[float]) -> float:
    """How far a subtitle is from the nearest of some ascending times."""
    place = bisect_left(seconds, line.start)
    neighbours = seconds[max(place - 1, 0) : place + 1]
    distances = [max(line.start - second, second - line.end, 0.0) for second in neighbours]
    return min(distances, default=line.start)
