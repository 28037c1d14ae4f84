"""A library: the videos of a folder, encoded once and kept on disk, that every question searches as one memory."""

import fnmatch
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Discriminator, Tag, with_config
from torch import Tensor
from typing_extensions import TypedDict

from ..asking.answers import placed
from ..asking.evidence import Interval, evidence_intervals
from ..asking.ranking import Piece, Ranking, Scorer, keys_fingerprint
from ..asking.session import Answer, answer_questions
from ..common.files import clock, counted, path_of, printable
from ..common.journals import STORED, Journal, Key, Line, Schema, State, file_state
from ..common.validation import check_count, check_path, show
from ..data.media import VIDEO_SUFFIXES
from ..hub.loading import load
from ..model.containers_qtsplus import open_file
from ..video.encoded import IN_MEMORY, EncodedVideo
from ..video.sampling import SamplingOptions
from ..video.storage import Digest, KeyedVideo, Stored, fingerprint, load_keys, load_video, measure

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


def refuse_links(folder: Path) -> None:
    """Raises `ValueError` for a library with links, which could lead out of it."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_symlink():
            raise ValueError(f"{str(path)!r} is a link; expected a library, which holds none: remove it.")


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

    def __init__(self, folder: Path, settings: dict | None = None, mend: bool = False):
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
        The name and the revision of the model that made the library; no name for the bundled one. A `ValueError` for a
        model with which this user has not indexed, since a stranger may have written its name, and for a missing one.
        """
        name = self.made["model"]
        revision = self.made["revision"]
        if name is None:
            return None, None
        known = known_model(self.settings["made_by"], name, revision)
        if not known.is_file():
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

    def add(self, key: Key, value: object) -> None:
        super().add(key, value)
        self.__dict__.pop("entries", None)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """In the order of their names."""
        entries = {}
        for name, entry in self.done.items():
            if name != MADE and entry is not None:
                entries[str(name)] = entry
        return dict(sorted(entries.items()))

    @property
    def files(self) -> dict[str, Path]:
        """The file with the features of each video that was encoded; a `ValueError` for a damaged file."""
        files = {}
        for name, entry in self.entries.items():
            file = self.file(entry)
            features = entry["features"]
            if features is None or not file.exists():
                continue
            if file.stat().st_size != features["size"]:
                raise ValueError(f"{file}, what was stored of {name}, is damaged: run `qtsplus index` again.")
            files[name] = file
        return files

    def file(self, entry: Entry) -> Path:
        """Where the features of a video are."""
        content = str(entry["content"])
        return self.folder / f"{content[:32]}.safetensors"

    def keys_file(self, entry: Entry) -> Path:
        """Where the keys of a video are, which a selector compares with a question; in 8 bits."""
        return self.file(entry).with_suffix(".keys")

    def load_keys(self, entry: Entry, model, selector: str | None) -> KeyedVideo | None:
        """
        The keys of a video for a model's selector, by its [`keys_fingerprint`]; `None` where there are none, a
        `ValueError` for damaged ones.
        """
        path = self.keys_file(entry)
        features = entry["features"]
        if selector is None or features is None or not path.exists():
            return None
        made_from = {"made_by": selector, "features": features["digest"]}
        layer = model.model.qtsplus.scoring_layers[-1]
        return load_keys(path, model, layer.k_proj.out_features, made_from)

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
        self.files = self.index.files
        self.names = list(self.files)  # the videos' paths in the folder that was indexed
        if not self.files:
            raise ValueError(f"The library {folder} holds no video: run `qtsplus index` to its end; see what it says.")
        # Neither encoded nor known to be bad, as after an index that was interrupted.
        self.missing = []
        for name, entry in self.index.entries.items():
            if name not in self.files and entry["error"] is None:
                self.missing.append(name)
        self.warnings: list[str] = []  # of every answer
        if self.missing:
            waiting = counted(len(self.missing), "video")
            self.warnings.append(f"Not encoded yet: {waiting} of the library. Run `qtsplus index` again.")
        self._whole: set[str] = set()  # videos whose every byte was checked
        self._read_once = lru_cache(maxsize=KEPT)(self._read)
        self._read_keys_once = lru_cache(maxsize=KEPT)(self._read_keys)
        self._contents: dict[tuple, Digest] = {}  # of files of videos, by their names and states

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
        or of the videos of `names`, that are shown in a window of seconds. Keys in 8 bits estimate it.
        """
        check_count("top", top, "moments")
        scorer, ranking = self._rank(question, names, window, top)
        moments: list[Interval] = []
        for piece in ranking.pieces[:top]:
            best_weight = math.exp(piece.peak - ranking.total)
            if len(moments) == top and moments[-1].weight >= best_weight:
                break  # nothing in it, or in those behind it, is better
            moments += self._moments(scorer, piece, ranking.total)
            moments.sort(key=lambda moment: -moment.weight)
            moments = moments[:top]
        return moments

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
        _, ranking = self._rank(question, names, window, pieces)
        return self.ask_pieces(question, ranking.pieces[:pieces], **options)

    def ask_pieces(self, question: str, pieces: list[Piece], **generation) -> Answer:
        """Answers a question from these pieces alone; the prompt has their names and times."""
        pieces = sorted(pieces, key=lambda piece: (piece.name, piece.first))
        parts: dict[str, EncodedVideo] = {}
        for piece in pieces:
            part = piece.cut(self.stored(piece.name))
            start = part.about.start
            begin = clock(start)
            end = clock(start + part.length)
            label = f"{printable(piece.name)}, {begin} to {end}"
            if label in parts:
                label += f" ({len(parts) + 1})"
            parts[label] = part
        (answer,) = answer_questions(self.model, self.processor, parts, [question], **generation)
        maps: dict[str, Tensor] = {}  # of whole videos
        for piece, kept in zip(pieces, answer.keep_maps.values(), strict=True):
            if piece.name not in maps:
                steps = self.stored(piece.name).count
                maps[piece.name] = kept.new_zeros(steps, *kept.shape[1:])
            maps[piece.name][piece.first : piece.last] = kept
        evidence = []
        for interval in answer.evidence:
            name = pieces[interval.video].name
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

    @contextmanager
    def opened(self, name: str) -> Iterator[EncodedVideo]:
        """
        A video with a path of its open file, to be drawn until the context ends; with [`IN_MEMORY`] if the file is gone
        or was changed.
        """
        video = replace(self.stored(name), video=IN_MEMORY)
        try:
            file = open_file(str(self.index.videos / name))
        except (OSError, ValueError):
            yield video
            return
        with file, path_of(file) as path:
            if self._is_indexed(name, file.fileno(), path):
                video = replace(video, video=path)
            yield video

    def _is_indexed(self, name: str, descriptor: int, path: str) -> bool:
        """Whether an open file, which a stranger may have put there, has the content that was indexed."""
        entry = self.index.entries[name]
        state = file_state(descriptor)
        if not state.items() <= entry.items():
            return False
        key = (name, tuple(state.values()))
        if key not in self._contents:
            self._contents[key] = measure(Path(path))["digest"]
        return self._contents[key] == entry["content"]

    def stored(self, name: str) -> EncodedVideo:
        """A video without its file."""
        return self._read_once(name, _state_of(self.files[name]))

    def _read(self, name: str, state: tuple) -> EncodedVideo:
        stored = None
        if name not in self._whole:
            stored = self.index.entries[name]["features"]
        video = load_video(self.files[name], self.made_by, self.model, stored)
        self._whole.add(name)
        return replace(video, video=name)

    def _read_keys(self, name: str, state: tuple) -> KeyedVideo | None:
        entry = self.index.entries[name]
        return self.index.load_keys(entry, self.model, self.selector)

    def _searched(self, name: str) -> EncodedVideo | KeyedVideo:
        """The keys of a video, or its features if it has no keys for this selector."""
        keys_file = self.index.keys_file(self.index.entries[name])
        keyed = self._read_keys_once(name, _state_of(keys_file))
        if keyed is None:
            return self.stored(name)
        return keyed

    @torch.no_grad()
    def _rank(
        self,
        question: str,
        names: Names = None,
        window: Window = EVER,
        top: int = 1,
    ) -> tuple[Scorer, Ranking]:
        """The `top` pieces of the videos, best first, and the others that had to be read to know them."""
        if names is None:
            names = self.names
        names = list(dict.fromkeys(names))
        if not names or not set(names) <= set(self.names):
            raise ValueError(f"names={show(names)}; expected some of the library's videos, as its `names` lists them.")

        def tokens() -> Iterator[Tensor | KeyedVideo]:
            for piece, video in self._pieces(names, window):
                yield piece.tokens(video)

        scorer = Scorer(self.model, self.processor, question, tokens)
        ranking = scorer.rank(self._pieces(names, window))
        if not ranking.pieces:
            begin, end = window
            raise ValueError(f"No video shows anything from second {begin} to {end}.")
        pieces = scorer.refine(ranking.pieces, top, self.stored)
        return scorer, Ranking(pieces, ranking.total)

    def _pieces(
        self,
        names: Sequence[str],
        window: Window,
    ) -> Iterator[tuple[Piece, EncodedVideo | KeyedVideo]]:
        """The piece of each video that a player shows in a window of seconds."""
        for name in names:
            searched = self._searched(name)
            video = searched.video if isinstance(searched, KeyedVideo) else searched
            first, last = video.within(*window)
            if first < last:
                yield Piece(name, first, last, 0.0), searched

    @torch.no_grad()
    def _moments(self, scorer: Scorer, piece: Piece, total: float) -> list[Interval]:
        """The stretches of a piece that hold strong tokens."""
        part = piece.cut(self.stored(piece.name))
        share = self.model.config.qtsplus_config.evidence_share
        seconds = part.seconds_per_step
        relevance = scorer.relevance(part.features)
        relevance = relevance.unflatten(0, (part.count, -1))
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
            weight = (relevance[first:last].max() - total).exp()
            interval = replace(interval, weight=min(1.0, float(weight)))
            moments.append(placed(interval, piece.name, part))
        return moments


def _state_of(file: Path) -> tuple:
    """The [`file_state`] as a key, so that a file that was cut off is read again; empty for a missing file."""
    if not file.exists():
        return ()
    return tuple(file_state(file).values())
