"""Subtitles of a video, from a file beside it or a track within it, and which of them a prompt has room for."""

import codecs
import html
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
MAX_SUBTITLE_BYTES = 2**20  # of one of them: signs that are drawn in ASS have some 100,000

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


def read_subtitles(video: Any) -> list[Subtitle]:
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
    for path in [*full, video, *forced]:
        subtitles = _read_file(path, is_video=path == video)
        if subtitles:
            return sorted(subtitles, key=lambda subtitle: subtitle.start)
    raise ValueError(f"No subtitles are in {str(video)!r}; expected {video.stem}.srt beside the video, or a track.")


def _read_file(path: Path, is_video: bool) -> list[Subtitle]:
    try:
        source = str(path) if is_video else _as_utf8(path)
        if isinstance(source, io.BytesIO) and not source.getvalue().strip(_BLANK):
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
    neighbours = list(video.parent.iterdir())
    other_videos = {path.stem for path in neighbours if path.suffix.lower() in VIDEO_SUFFIXES} - {video.stem}
    files = []
    for path in neighbours:
        begins_like_it = f"{path.stem}.".startswith(f"{video.stem}.")
        if path.suffix.lower() not in SUFFIXES or not begins_like_it or path.stem in other_videos:
            continue
        parts = path.stem[len(video.stem) :].lower().split(".")[1:]
        if all(map(_tells_of_subtitles, parts)):
            files.append(path)
    return sorted(files, key=lambda path: (len(path.name), path.name))


def _tells_of_subtitles(part: str) -> bool:
    """Whether a part of a file's name is a language or a kind of subtitles."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE  # names such as "english"

    language = _REGION.sub("", part)
    is_code = re.fullmatch("[a-z]{2}", language) or language in _CODES_OF_3_LETTERS.split()
    return bool(is_code) or part in _KINDS or part in TO_LANGUAGE_CODE


def _is_forced(path: Path) -> bool:
    """Whether a file says that it has foreign speech and signs alone."""
    return not {"forced", "foreign"}.isdisjoint(path.stem.lower().split("."))


def _full_track(tracks: Iterable[Any]) -> Any:
    """The default track of text or the first, of those that have all speech if there are any; `None` if none is."""
    flags = av.stream.Disposition
    decodable = [track for track in tracks if track.codec_context is not None]
    texts = [track for track in decodable if track.codec_context.name not in _BITMAPS]
    by_preference = sorted(
        texts, key=lambda track: (bool(track.disposition & flags.forced), not track.disposition & flags.default)
    )
    return by_preference[0] if by_preference else None


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


def _lines(container: Any, track: Any) -> Iterator[Subtitle]:
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
        if packet.size > MAX_SUBTITLE_BYTES:
            raise ValueError(f"the subtitle at {start:.1f} s has {packet.size:,} bytes; at most 1 MiB is read")
        codec = track.codec_context.name
        for written in _texts(packet, codec):
            text = _plain_text(written)
            if codec == "webvtt":
                text = html.unescape(text)
            if text:
                yield Subtitle(start, end, text)


def _texts(packet: Any, codec: str) -> Iterator[str]:
    """The texts of a packet, with their markup."""
    content = bytes(packet)
    if codec == "mov_text":  # how long the text is, the text, and boxes about its style
        length = int.from_bytes(content[:2], "big")
        content = content[2 : 2 + length]
    if codec not in _WRITTEN:
        for event in packet.decode():
            yield event.ass.decode("utf-8", "replace").split(",", _ASS_FIELDS)[-1]
    else:
        yield content.decode("utf-8", "replace")


def _plain_text(written: str) -> str:
    """The words of a subtitle, in one line, without tags and without what ASS draws."""
    words: list[str] = []
    draws = False
    for part in _BLOCK.split(written):
        if not _BLOCK.fullmatch(part):
            words += [] if draws else [part]
            continue
        scales = _DRAWING.findall(part)
        if scales:
            draws = int(scales[-1]) > 0
    text = _BREAK.sub(" ", "".join(words))
    return " ".join(_TAG.sub("", text).split())


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
