"""A library: the videos of a folder, encoded once and kept on disk, that every question searches as one memory."""

import fnmatch
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Discriminator, Tag, with_config
from torch import Tensor
from typing_extensions import TypedDict

from ..asking.answers import placed
from ..asking.evidence import Interval, evidence_intervals
from ..asking.ranking import Piece, Scorer, keys_fingerprint, scoring_layer
from ..asking.session import Answer, answer_questions
from ..common.files import clock, counted, printable
from ..common.journals import STORED, Journal, Line, Schema, State, file_state
from ..common.validation import check_count, check_path, show
from ..data.media import VIDEO_SUFFIXES
from ..hub.loading import load
from ..video.encoded import IN_MEMORY, EncodedVideo
from ..video.sampling import SamplingOptions
from ..video.storage import Digest, KeyedVideo, Stored, fingerprint, load_keys, load_video

Names = Sequence[str] | None  # of videos
Window = tuple[float, float]  # seconds on a player's clock
EVER = (-math.inf, math.inf)
INDEX = "library.jsonl"
KEPT = 2**14  # videos that stay open
MADE = 0  # the key of the line on what the library was made of; the other keys are names of videos


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    is_inside = not path.is_absolute() and ".." not in path.parts and "\0" not in name
    if not is_inside or path.suffix.lower() not in VIDEO_SUFFIXES:
        raise ValueError(f"is {show(name)}; expected the path of a video inside the folder that was indexed")
    return name


def known_model(made_by: str, name: str, revision: str | None) -> Path:
    """
    The empty file that exists once this user has indexed with a model of this [`fingerprint`] and name. A library from
    elsewhere cannot make us load any other model.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    identity = json.dumps([made_by, name, revision])
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return Path(cache, "qtsplus", "models", digest)


@with_config(STORED)
class Entry(State):
    """What a library knows about a video: its file's state and content, and its features or why there are none."""

    content: Digest | None
    error: str | None
    features: Stored | None


@with_config(STORED)
class Made(TypedDict):
    """What a library was made of: a model, the bundled one if it has no name, and a folder of videos."""

    model: str | None
    revision: str | None
    videos: str


@with_config(STORED)
class _Settings(SamplingOptions):
    made_by: Digest
    dtype: Literal["auto"]
    num_frames: int | None
    min_frames: int | None


_Film = Line[Annotated[str, AfterValidator(_inside)], Entry | None]  # `None` for a video that was removed
_Line = Annotated[
    Annotated[Line[Literal[0], Made], Tag("made")] | Annotated[_Film, Tag("film")],
    Discriminator(lambda line: "made" if line.get("key") == MADE else "film"),
]


class Index(Journal):
    """What a library holds: by the name of each video what is known of it."""

    def __init__(self, folder: Path, settings: dict | None = None):
        self.folder = folder
        if settings is None and not (folder / INDEX).is_file():
            raise ValueError(f"There is no library in {str(folder)!r}; make it: `qtsplus index VIDEOS --out {folder}`.")
        schema = Schema(_Settings, _Line, remedy="remove the line, and run `qtsplus index` again")
        super().__init__(folder / INDEX, settings, schema)

    @property
    def made(self) -> Made:
        """A `ValueError` if it was not written yet."""
        if MADE not in self.done:
            raise ValueError(f"The library {self.folder} was only begun: run `qtsplus index` to its end.")
        return self.done[MADE]

    @property
    def model(self) -> tuple[str | None, str | None]:
        """
        The name and the revision of the model that made the library; no name for the bundled one. A `ValueError` for a
        model with which this user has not indexed, since a stranger may have written its name.
        """
        name = self.made["model"]
        revision = self.made["revision"]
        if name is not None and not known_model(self.settings["made_by"], name, revision).is_file():
            raise ValueError(
                f"{self.folder} was made with the model {name!r}, with which nothing was indexed on this machine: name "
                "it with --model if you trust it."
            )
        return name, revision

    @property
    def videos(self) -> Path:
        """The folder that was indexed last."""
        return Path(self.made["videos"])

    @property
    def entries(self) -> dict[str, Entry]:
        """By the names of the videos, in their order."""
        entries = {}
        for name, entry in self.done.items():
            if name != MADE and entry is not None:
                entries[str(name)] = entry
        return dict(sorted(entries.items()))

    @property
    def files(self) -> dict[str, Path]:
        """The file with the features of each video that was encoded."""
        files = {}
        for name, entry in self.entries.items():
            file = self.file(entry)
            if entry["features"] is not None and file.exists():
                files[name] = file
        return files

    def file(self, entry: Entry) -> Path:
        """Where the features of a video are."""
        content = str(entry["content"])
        return self.folder / f"{content[:32]}.safetensors"

    def keys_file(self, entry: Entry) -> Path:
        """Where the keys of a video are, which a selector compares with a question; in 8 bits."""
        return self.file(entry).with_suffix(".keys")

    def load_keys(self, entry: Entry, model, selector: str) -> KeyedVideo | None:
        """
        The keys of a video for a model's selector, by its [`keys_fingerprint`]; `None` where there are none, a
        `ValueError` for damaged ones.
        """
        path = self.keys_file(entry)
        features = entry["features"]
        if features is None or not path.exists():
            return None
        made_from = {"made_by": selector, "features": features["digest"]}
        return load_keys(path, model, scoring_layer(model).k_proj.out_features, made_from)

    def require(self, made_by: str) -> None:
        if self.settings["made_by"] != made_by:
            model = self.made["model"] or "the bundled one"
            raise ValueError(
                f"{self.folder} was made with another vision tower or processor than this model's, or with weights of "
                f"another dtype: name the model that made it, {model}, or index the videos into another folder."
            )


class Library:
    """Videos that [`index`] has encoded. Questions read their features from disk and never the videos."""

    def __init__(self, folder: str | Path, model, processor):
        self.folder = Path(check_path("folder", folder))
        self.model = model
        self.processor = processor
        self.index = Index(self.folder)
        self.made_by = fingerprint(model, processor)
        self.selector = keys_fingerprint(model)
        self.index.require(self.made_by)
        self.entries = self.index.entries
        self.files = self.index.files
        self.names = list(self.files)  # the videos' paths in the folder that was indexed
        if not self.files:
            raise ValueError(f"The library {folder} holds no video: run `qtsplus index` to its end; see what it says.")
        # Neither encoded nor known to be bad, as after an index that was interrupted.
        self.missing = []
        for name, entry in self.entries.items():
            if name not in self.files and entry["error"] is None:
                self.missing.append(name)
        self.warnings: list[str] = []  # of every answer
        if self.missing:
            waiting = counted(len(self.missing), "video")
            self.warnings.append(f"Not encoded yet: {waiting} of the library. Run `qtsplus index` again.")
        self.stored = lru_cache(maxsize=KEPT)(self._read)  # a video without its file
        self._keys = lru_cache(maxsize=KEPT)(self._read_keys)

    @classmethod
    def open(cls, folder: str | Path, device: str | None = None) -> "Library":
        """A library with the model that made it; as [`Library`] and `load`."""
        from ..hub.files import bundled_model

        name, revision = Index(Path(folder)).model
        model, processor = load(name or bundled_model(), device, revision=revision)
        return cls(folder, model, processor)

    def select(self, pattern: str) -> list[str]:
        """The names of the videos that are like a pattern, such as `"door/*"`."""
        return fnmatch.filter(self.names, pattern)

    def find(
        self,
        question: str,
        top: int = 10,
        names: Names = None,
        window: Window = EVER,
    ) -> list[Interval]:
        """
        The `top` moments that matter most for a question, best first, on a player's clock; without the language model.
        Their `weight` is the relevance of the best token among all tokens that are asked about: those of the library,
        or of the videos of `names`, that are shown in a window of seconds. Keys in 8 bits say which videos are looked
        at.
        """
        check_count("top", top, "moments")
        scorer, pieces = self.rank(question, names, window)
        moments: list[Interval] = []
        for piece in pieces[:top]:
            moments += self._moments(scorer, piece)
        moments.sort(key=lambda moment: -moment.weight)
        return moments[:top]

    def ask(
        self,
        question: str,
        pieces: int = 1,
        names: Names = None,
        window: Window = EVER,
        **options,
    ) -> Answer:
        """
        Answers a question from the video that ranks first, or from several, whose tokens compete for one budget.

        Args:
            pieces: from how many, where long videos count by their pieces. The bundled model has learned from prompts
                of one video, and from more it answers worse.
            names, window: what is asked about, as for [`find`].
            options: as for `answer_questions`. Evidence and keep maps are those of whole files.
        """
        check_count("pieces", pieces, "videos or pieces of them")
        _, ranking = self.rank(question, names, window)
        chosen = sorted(ranking[:pieces], key=lambda piece: (piece.name, piece.first))
        parts: dict[str, EncodedVideo] = {}
        for piece in chosen:
            part = piece.cut(self.stored(piece.name))
            start = part.about.start
            end = start + part.length
            parts[f"{printable(piece.name)}, {clock(start)} to {clock(end)}"] = part
        (answer,) = answer_questions(self.model, self.processor, parts, [question], **options)
        maps: dict[str, Tensor] = {}  # of whole videos
        for piece, kept in zip(chosen, answer.keep_maps.values(), strict=True):
            if piece.name not in maps:
                steps = self.stored(piece.name).count
                maps[piece.name] = kept.new_zeros(steps, *kept.shape[1:])
            maps[piece.name][piece.first : piece.last] = kept
        evidence = []
        for interval in answer.evidence:
            name = chosen[interval.video].name
            evidence.append(replace(interval, name=name))
        return replace(
            answer,
            video=", ".join(maps),
            evidence=evidence,
            keep_maps=maps,
            warnings=answer.warnings + self.warnings,
        )

    def film(self, name: str) -> EncodedVideo:
        """A video, as a session has it."""
        return self.stored(name)

    def with_file(self, name: str) -> EncodedVideo:
        """A video with the path of its file, to be drawn; with [`IN_MEMORY`] if the file is gone or was changed."""
        video = self.stored(name)
        path = self.index.videos / name
        try:
            is_indexed = file_state(path).items() <= self.entries[name].items()
        except OSError:
            is_indexed = False
        return replace(video, video=str(path) if is_indexed else IN_MEMORY)

    def rank(self, question: str, names: Names = None, window: Window = EVER) -> tuple[Scorer, list[Piece]]:
        """The pieces of the videos that a player shows in a window of seconds, best first by their keys."""
        names = self.names if names is None else list(dict.fromkeys(names))
        if not names or not set(names) <= set(self.names):
            raise ValueError(f"names={show(names)}; expected some of the library's videos, as its `names` lists them.")
        pieces = []
        for name in names:
            searched = self._searched(name)
            video = searched.video if isinstance(searched, KeyedVideo) else searched
            first, last = video.within(*window)
            if first < last:
                pieces.append(Piece(name, first, last))
        if not pieces:
            begin, end = window
            raise ValueError(f"No video shows anything from second {begin} to {end}.")
        tokens = (piece.tokens(self._searched(piece.name)) for piece in pieces)
        scorer = Scorer(self.model, self.processor, question, tokens)
        return scorer, scorer.rank((piece, self._searched(piece.name)) for piece in pieces)

    def _searched(self, name: str) -> EncodedVideo | KeyedVideo:
        """The keys of a video, or its features if it has no keys for this selector."""
        return self._keys(name) or self.stored(name)

    def _read(self, name: str) -> EncodedVideo:
        video = load_video(self.files[name], self.made_by, self.model, self.entries[name]["features"])
        return replace(video, video=name)

    def _read_keys(self, name: str) -> KeyedVideo | None:
        return self.index.load_keys(self.entries[name], self.model, self.selector)

    def _moments(self, scorer: Scorer, piece: Piece) -> list[Interval]:
        """The stretches of a piece that hold strong tokens."""
        part = piece.cut(self.stored(piece.name))
        share = self.model.config.qtsplus_config.evidence_share
        seconds = part.seconds_per_step
        relevance = scorer.relevance(part.features).unflatten(0, (part.count, -1))
        strongest = relevance.max()
        is_weak = relevance.amax(1) < strongest + math.log(share)
        relevance[is_weak] = -torch.inf
        shares = (relevance - strongest).exp().flatten()
        every_token = torch.arange(len(shares))
        merge_size = self.processor.video_processor.merge_size
        moments = []
        for interval in evidence_intervals(every_token, shares, part.video_grid_thw, [seconds], merge_size, share):
            first = round(interval.start / seconds)
            last = round(interval.end / seconds)
            weight = relevance[first:last].max().exp()
            interval = replace(interval, weight=min(1.0, float(weight)))
            moments.append(placed(interval, piece.name, part))
        return moments
