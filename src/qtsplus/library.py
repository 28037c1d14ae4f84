"""A library: the videos of a folder, encoded once and kept on disk, that every question searches as one memory."""

import fnmatch
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Discriminator, Tag, with_config
from typing_extensions import NotRequired, TypedDict

from .answers import placed
from .data.media import VIDEO_SUFFIXES
from .evidence import Interval, evidence_intervals
from .loading import load
from .nearest import Nearest
from .output import counted, printable
from .ranking import Piece, Ranking, Scorer
from .results import STORED, Journal, Key, Line, Schema
from .session import Answer, answer_questions
from .settings import check_count, check_path, show
from .storage import Digest, State, Stored, film_state, fingerprint, load_video, measure
from .videos import IN_MEMORY, EncodedVideo

Names = Sequence[str] | None  # of videos
Window = tuple[float, float]  # seconds on a player's clock
EVER = (-math.inf, math.inf)
INDEX = "library.jsonl"
KEPT = 1024  # videos that stay open
FEW = 0.05  # of the videos: as fast as an index they are read whole
MADE = 0  # the key of what it was made of; the others are names of videos


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or "\0" in name or ".." in path.parts or path.suffix.lower() not in VIDEO_SUFFIXES:
        raise ValueError(f"is {show(name)}; expected the path of a video inside the folder that was indexed")
    return name


def known_model(made_by: str, name: str, revision: str | None) -> Path:
    """
    The empty file that is there once this user has indexed with a model of this [`fingerprint`] and name: a library
    from elsewhere can have no other loaded.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    digest = hashlib.sha256(json.dumps([made_by, name, revision]).encode()).hexdigest()
    return Path(cache, "qtsplus", "models", digest)


def refuse_links(folder: Path) -> None:
    """Raises `ValueError` for a library with links, which could lead out of it."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink():
            raise ValueError(f"{str(path)!r} is a link; expected a library, which holds none: remove it.")


@with_config(STORED)
class Entry(State):
    """What a library knows of a film: its file's state and content, and its features or why there are none."""

    content: Digest | None
    error: str | None
    features: Stored | None
    labels: NotRequired[dict[str, str]]  # the user's, such as of a camera


@with_config(STORED)
class Made(TypedDict):
    """What a library was made of: a model, where no name stands for the bundled one, and a folder of films."""

    model: str | None
    revision: str | None
    videos: str


@with_config(STORED)
class _Settings(TypedDict):
    made_by: Digest
    dtype: Literal["auto"]
    fps: float | None
    num_frames: int | None
    min_frames: int | None
    max_frames: int | None
    start: float | None
    end: float | None
    max_pixels: int | None


_Film = Line[Annotated[str, AfterValidator(_inside)], Entry | None]  # of a film that has left, `None`
_Line = Annotated[
    Annotated[Line[Literal[0], Made], Tag("made")] | Annotated[_Film, Tag("film")],
    Discriminator(lambda line: "made" if line.get("key") == MADE else "film"),
]


class Index(Journal):
    """What a library holds: by the name of each video what is known of it."""

    def __init__(self, folder: Path, settings: dict[str, Any] | None = None, mend: bool = False):
        self.folder = folder
        refuse_links(folder)
        if settings is None and not (folder / INDEX).is_file():
            raise ValueError(f"There is no library in {str(folder)!r}; make it: `qtsplus index VIDEOS --out {folder}`.")
        schema = Schema(_Settings, _Line, remedy="run `qtsplus index` again")
        super().__init__(folder / INDEX, settings, schema, mend=mend)

    @property
    def made(self) -> Made:
        """A `ValueError` if it was not written yet."""
        if MADE not in self.done:
            raise ValueError(f"The library {self.folder} was only begun: run `qtsplus index` to its end.")
        return self.done[MADE]

    @property
    def model(self) -> tuple[str | None, str | None]:
        """
        The name and the revision of the model that made it, as this user has indexed with it, no name for the bundled
        one; a `ValueError` for any other, whose name is only a stranger's word, and for one that is gone.
        """
        name, revision = self.made["model"], self.made["revision"]
        if name is None:
            return None, None
        if not known_model(self.settings["made_by"], name, revision).is_file():
            raise ValueError(
                f"{self.folder} was made with the model {name!r}, with which nothing was indexed on this machine: name "
                "it with --model if you trust it."
            )
        if os.path.isabs(name) and not os.path.isdir(name):
            raise ValueError(f"{self.folder} was made with the model in {name}, which is gone: name where it is now.")
        return name, revision

    @property
    def videos(self) -> Path:
        """The folder that was indexed last."""
        return Path(self.made["videos"])

    def add(self, key: Key, value: Any) -> None:
        super().add(key, value)
        self.__dict__.pop("entries", None)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """In the order of their names."""
        entries = {name: self.done[name] for name in self.done if isinstance(name, str)}
        return {name: entries[name] for name in sorted(entries) if entries[name] is not None}

    @property
    def files(self) -> dict[str, Path]:
        """Where the features of each video lie that has been encoded; a `ValueError` for a damaged file."""
        files = {}
        for name, entry in self.entries.items():
            if entry["features"] is not None and (file := self.file(entry)).exists():
                if file.stat().st_size != entry["features"]["size"]:
                    raise ValueError(f"{file}, what was stored of {name}, is damaged: run `qtsplus index` again.")
                files[name] = file
        return files

    def file(self, entry: Entry) -> Path:
        return self.folder / f"{str(entry['content'])[:32]}.safetensors"

    def require(self, made_by: str) -> None:
        if self.settings["made_by"] != made_by:
            raise ValueError(
                f"{self.folder} was made with another vision tower or processor than this model's, or with weights of "
                f"another dtype: name the model that made it, {self.made['model'] or 'the bundled one'}, "
                "or index the videos into another folder."
            )


def clock(seconds: float) -> str:
    """As a player shows it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Library:
    """Videos that [`index`] has encoded. Questions read their features from disk and never the videos."""

    def __init__(self, folder: str | Path, model: Any, processor: Any):
        self.folder, self.model, self.processor = Path(check_path("folder", folder)), model, processor
        self.index, self.made_by = Index(self.folder), fingerprint(model, processor)
        self.index.require(self.made_by)
        self.files = self.index.files
        self._whole: set[str] = set()  # those whose every byte was checked, as they are read for the first time
        self._kept = lru_cache(maxsize=KEPT)(self._read)
        self._content = lru_cache(maxsize=None)(lambda path, changed: measure(path)["digest"])
        self.names = list(self.files)  # the videos' paths in the folder that was indexed
        entries = self.index.entries
        self.digests = {name: noted["digest"] for name in self.names if (noted := entries[name]["features"])}
        # Those that are neither encoded nor known to be bad, as after an index that was interrupted.
        self.missing = [name for name in entries if name not in self.files and entries[name]["error"] is None]
        waiting = f"Not encoded yet: {counted(len(self.missing), 'video')} of the library. Run `qtsplus index` again."
        self.warnings = [waiting] if self.missing else []  # of every answer
        if not self.files:
            raise ValueError(f"The library {folder} holds no video: run `qtsplus index` to its end; see what it says.")

    @classmethod
    def open(cls, folder: str | Path, device: str | None = None) -> "Library":
        """A library with the model that made it; as [`Library`] and `load`."""
        from .hub.files import bundled_model

        name, revision = Index(Path(folder)).model
        return cls(folder, *load(name or bundled_model(), device, revision=revision))

    @cached_property
    def nearest(self) -> Nearest:
        return Nearest(self.folder, self.model)

    def select(self, pattern: str = "*", labels: Mapping[str, str] | None = None) -> list[str]:
        """The names of the videos that are like `"door/*"`, and have these labels of [`index`]."""
        entries, wanted = self.index.entries, (labels or {}).items()
        return [one for one in fnmatch.filter(self.names, pattern) if wanted <= entries[one].get("labels", {}).items()]

    def find(self, question: str, top: int = 10, names: Names = None, window: Window = EVER) -> list[Interval]:
        """
        The `top` moments that matter most for a question, best first, on a player's clock; without the language model.
        Their `weight` is the relevance of the best token among all tokens that are asked about, which are those of the
        library, of the videos of `names`, and shown in a window of seconds. An index estimates it.
        """
        check_count("top", top, "moments")
        scorer, ranking = self._rank(question, names, window, top)
        moments: list[Interval] = []
        for piece in ranking.pieces[:top]:
            if len(moments) == top and moments[-1].weight >= math.exp(piece.peak - ranking.total):
                break  # nothing in it, or in those behind it, is better
            moments += self._moments(scorer, piece, ranking.total)
            moments = sorted(moments, key=lambda moment: -moment.weight)[:top]
        return moments

    def ask(self, question: str, pieces: int = 1, names: Names = None, window: Window = EVER, **options: Any) -> Answer:
        """
        Answers a question from the video that ranks first, or from several, whose tokens compete for one budget.

        Args:
            pieces: from how many, where long videos count by their pieces. The bundled model has learned from prompts
                of one video, and from more it answers worse.
            names, window: what is asked about, as for [`find`].
            options: as for `answer_questions`. Evidence and keep maps are those of whole files.
        """
        check_count("pieces", pieces, "videos or pieces of them")
        _, ranking = self._rank(question, names, window, pieces)
        return self.ask_pieces(question, ranking.pieces[:pieces], **options)

    def ask_pieces(self, question: str, pieces: list[Piece], **generation: Any) -> Answer:
        """Answers a question from these pieces alone, which stand in the prompt with their names and times."""
        pieces = sorted(pieces, key=lambda piece: (piece.name, piece.first))
        videos = {piece.name: self.stored(piece.name) for piece in pieces}
        parts: dict[str, EncodedVideo] = {}
        for piece in pieces:
            part = piece.cut(videos[piece.name])
            label = f"{printable(piece.name)}, {clock(part.start)} to {clock(part.start + part.length)}"
            parts[label if label not in parts else f"{label} ({len(parts) + 1})"] = part
        (answer,) = answer_questions(self.model, self.processor, parts, [question], **generation)
        maps: dict[str, torch.Tensor] = {}
        for piece, kept in zip(pieces, answer.keep_maps.values(), strict=True):
            steps = int(videos[piece.name].video_grid_thw[0, 0])
            maps.setdefault(piece.name, kept.new_zeros(steps, *kept.shape[1:]))[piece.first : piece.last] = kept
        evidence = [replace(one, name=pieces[one.video].name) for one in answer.evidence]
        warnings = [*answer.warnings, *self.warnings]
        return replace(answer, video=", ".join(maps), evidence=evidence, keep_maps=maps, warnings=warnings)

    def film(self, name: str) -> EncodedVideo:
        """A video with the path of its file, to be drawn; that is [`IN_MEMORY`] where it is gone or was changed."""
        path, entry = self.index.videos / name, self.index.entries[name]
        there = path.is_file() and film_state(path).items() <= entry.items()
        # The path may be a stranger's word: a film that he has not seen is not shown.
        there = there and self._content(path, path.stat().st_ctime_ns) == entry["content"]
        return replace(self.stored(name), video=str(path) if there else IN_MEMORY)

    def stored(self, name: str) -> EncodedVideo:
        """A video without its file."""
        file = self.files[name]
        return self._kept(name, file.exists() and file.stat().st_ctime_ns)  # what was cut off must not be looked at

    def _read(self, name: str, changed: int) -> EncodedVideo:
        stored = None if name in self._whole else self.index.entries[name]["features"]
        video = load_video(self.files[name], self.made_by, self.model, stored)
        self._whole.add(name)
        return replace(video, video=name)

    @torch.no_grad()
    def _rank(self, question: str, names: Names = None, window: Window = EVER, top: int = 1) -> tuple[Scorer, Ranking]:
        """The `top` pieces of those videos that are in the index, and all pieces of the others."""
        names = self.names if names is None else list(dict.fromkeys(names))
        if not names or not set(names) <= set(self.names):
            raise ValueError(f"names={show(names)}; expected some of the library's videos, as its `names` lists them.")
        copies: dict[str, list[str]] = {}
        for name in names:
            copies.setdefault(self.digests[name], []).append(name)
        searched = self.nearest if len(names) > FEW * len(self.names) else None

        def films() -> Iterator[tuple[Piece, EncodedVideo]]:
            indexed = searched.films if searched else ()
            for name in names:
                if self.digests[name] in indexed:
                    continue
                video = self.stored(name)
                first, last = video.within(*window)
                if first < last:
                    yield Piece(name, first, last, 0.0), video

        scorer = Scorer(self.model, self.processor, question, lambda: (one.cut(film).features for one, film in films()))
        found = searched.rank(scorer, copies, window, top, self.stored) if searched else Ranking([], -math.inf)
        ranking = scorer.rank(films())
        pieces = sorted([*ranking.pieces, *found.pieces], key=lambda piece: -piece.peak)
        ranking = Ranking(pieces, float(np.logaddexp(ranking.total, found.total)))
        if not ranking.pieces:
            raise ValueError(f"No video shows anything from second {window[0]} to {window[1]}.")
        return scorer, ranking

    @torch.no_grad()
    def _moments(self, scorer: Scorer, piece: Piece, total: float) -> list[Interval]:
        """Those of a piece, or where an index names steps of it those that some of these are in: no others are read."""
        part, share = piece.cut(self.stored(piece.name)), self.model.config.qtsplus_config.evidence_share
        features, seconds = part.features.unflatten(0, (piece.last - piece.first, -1)), part.second_per_grid_ts
        wanted, relevance = torch.full([len(features)], not piece.steps), torch.full(features.shape[:2], -torch.inf)
        wanted[[step - piece.first for step in piece.steps]] = True
        inside = wanted
        while (near := (F.max_pool1d(inside[None].float(), 33, 1, 16)[0] > 0) & relevance[:, 0].isinf()).any():
            relevance[near] = scorer.relevance(features[near].flatten(0, 1)).view(-1, relevance.shape[1])
            strong = relevance.amax(1) >= relevance.max() + math.log(share)
            stretch = (~strong).cumsum(0)  # of steps of one stretch the same
            inside = strong & torch.isin(stretch, stretch[strong & wanted])
        relevance[~inside] = -torch.inf
        every, shares = torch.arange(relevance.numel()), (relevance - relevance.max()).exp().flatten()
        merge_size, moments = self.processor.video_processor.merge_size, []
        for one in evidence_intervals(every, shares, part.video_grid_thw, seconds, merge_size, share):
            peak = relevance[round(one.start / seconds[0]) : round(one.end / seconds[0])].max()
            moments.append(placed(replace(one, weight=min(1.0, float((peak - total).exp()))), piece.name, part))
        return moments
