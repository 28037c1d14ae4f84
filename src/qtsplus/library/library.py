"""A library: the videos of a folder, encoded once and kept on disk, that every question searches as one memory."""

import fnmatch
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Discriminator, Tag, with_config
from typing_extensions import TypedDict

from ..asking.evidence import Interval, evidence_intervals, placed
from ..asking.ranking import Piece, Scorer, Tokens, keys_fingerprint, scoring_layer
from ..asking.session import Answer, answer_questions
from ..common.files import clock, counted, printable
from ..common.journals import STORED, Journal, Line, Schema, State, file_state
from ..common.validation import check_inside, check_path, show, validated
from ..model.numbers_qtsplus import require_count
from ..model.question_qtsplus import check_text
from ..model.sampling_qtsplus import SamplingOptions
from ..video.encoded import NO_FILE, EncodedVideo
from ..video.storage import Digest, KeyedVideo, Stored, fingerprint, load_keys, load_video

Names = Sequence[str] | None  # of videos
Window = tuple[float, float]  # seconds on a player's clock
EVER = (-math.inf, math.inf)
INDEX = "library.jsonl"
KEPT = 2**14  # videos that stay open
MADE = 0  # the key of the line on what the library was made of; the other keys are names of videos


@with_config(STORED)
class Entry(State):
    """What a library knows about a video: its file's state and content, and its features or why there are none."""

    content: Digest | None
    error: str | None
    features: Stored | None


@with_config(STORED)
class Made(TypedDict):
    """What a library was made of: a model, which messages name, and a folder of videos."""

    model: str
    videos: str


@with_config(STORED)
class _Settings(SamplingOptions):
    made_by: Digest
    num_frames: int | None
    min_frames: int | None


_Name = Annotated[str, AfterValidator(check_inside)]
_LineOfVideo = Line[_Name, Entry | None]  # `None` for a video that was removed
_LineOfLibrary = Line[Literal[0], Made]
_Line = Annotated[
    Annotated[_LineOfLibrary, Tag("made")] | Annotated[_LineOfVideo, Tag("video")],
    Discriminator(lambda line: "made" if line.get("key") == MADE else "video"),
]


class Index(Journal):
    """What a library holds: by the name of each video what is known of it."""

    def __init__(self, folder: Path, settings: dict | None = None):
        self.folder = folder
        path = folder / INDEX
        if settings is None and not path.is_file():
            raise ValueError(f"There is no library in {str(folder)!r}; make it: `qtsplus index VIDEOS --out {folder}`.")
        schema = Schema(
            settings=_Settings,
            line=_Line,
            remedy="remove the line, and run `qtsplus index` again",
        )
        super().__init__(path, settings, schema)

    @property
    def made(self) -> Made:
        """What the library was made of; a `ValueError` if that was not written yet."""
        if MADE not in self.done:
            raise ValueError(f"The library {self.folder} was only begun: run `qtsplus index` to its end.")
        return self.done[MADE]

    @property
    def entries(self) -> dict[str, Entry]:
        """By the names of the videos, in their order."""
        entries = {str(name): entry for name, entry in self.done.items() if name != MADE and entry is not None}
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

    def load_keys(
        self,
        entry: Entry,
        model,
        selector: str,
    ) -> KeyedVideo | None:
        """
        The keys of a video for a model's selector, by its [`keys_fingerprint`]; `None` if there are none for this
        selector, a `ValueError` for damaged keys.
        """
        path = self.keys_file(entry)
        features = entry["features"]
        if features is None or not path.exists():
            return None
        made_from = {"made_by": selector, "features": features["digest"]}
        return load_keys(path, model, scoring_layer(model).k_proj.out_features, made_from)

    def require(self, made_by: str) -> None:
        if self.settings["made_by"] != made_by:
            model = self.made["model"]
            raise ValueError(
                f"{self.folder} was made with another vision tower or processor than this model's, or with weights of "
                f"another dtype: name the model that made it ({model!r}) with --model, or index the videos into "
                "another folder."
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
        self.names = list(self.index.files)  # the videos' paths in the folder that was indexed
        if not self.names:
            raise ValueError(
                f"The library {folder} holds no video: run `qtsplus index` to its end, and see which errors it reports."
            )
        # These were neither encoded nor found to be bad, as after an interrupted `qtsplus index`.
        good = [name for name, entry in self.entries.items() if entry["error"] is None]
        self.missing = [name for name in good if name not in self.names]
        self.warnings: list[str] = []  # of every answer
        if self.missing:
            waiting = counted(len(self.missing), "video")
            self.warnings.append(f"Not encoded yet: {waiting} of the library. Run `qtsplus index` again.")
        self.video = lru_cache(maxsize=KEPT)(self._read)  # an encoded video, which names no file
        self._keys = lru_cache(maxsize=KEPT)(self._read_keys)

    def select(self, pattern: str) -> list[str]:
        """The names of the videos that match a pattern, such as `"door/*"`."""
        return fnmatch.filter(self.names, check_text("pattern", pattern))

    def find(
        self,
        question: str,
        top: int = 10,
        names: Names = None,
        window: Window = EVER,
    ) -> list[Interval]:
        """
        The `top` moments that matter most for a question, best first, on a player's clock. The language model is not
        asked. The search covers the library, or the videos of `names`, within a window of seconds. A moment's `weight`
        is the relevance of its best token among all tokens that are searched. Keys in 8 bits say which videos are
        looked at.
        """
        top = require_count("top", top)
        scorer, pieces = self.rank(question, names, window)
        moments = [moment for piece in pieces[:top] for moment in self._moments(scorer, piece)]
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
            pieces: how many videos to read, or pieces of long ones. The bundled model has learned from prompts with one
                video, and answers worse from several.
            names, window: what is searched, as for [`find`].
            options: as for `answer_questions`. Evidence and keep maps are those of whole files.
        """
        pieces = require_count("pieces", pieces)
        _, ranking = self.rank(question, names, window)
        chosen = sorted(ranking[:pieces])  # by their names and times
        parts = {}
        for piece in chosen:
            part = piece.cut(self.video(piece.name))
            start = part.about.start
            name = f"{printable(piece.name)}, {clock(start)} to {clock(start + part.length)}"
            parts[name] = part
        (answer,) = answer_questions(
            self.model,
            self.processor,
            parts,
            [question],
            **options,
        )
        maps: dict = {}  # of whole videos
        for piece, kept in zip(chosen, answer.keep_maps.values(), strict=True):
            nothing = kept.new_zeros(self.video(piece.name).count, *kept.shape[1:])
            maps.setdefault(piece.name, nothing)[piece.first : piece.last] = kept
        evidence = [replace(interval, name=chosen[interval.video].name) for interval in answer.evidence]
        return replace(
            answer,
            video=", ".join(maps),
            evidence=evidence,
            keep_maps=maps,
            warnings=answer.warnings + self.warnings,
        )

    def with_file(self, name: str) -> EncodedVideo:
        """A video with the path of its file, to be drawn; with [`NO_FILE`] if the file is gone or was changed."""
        path = Path(self.index.made["videos"], name)
        place = NO_FILE
        if os.path.exists(path) and file_state(path).items() <= self.entries[name].items():
            place = str(path)
        return replace(self.video(name), video=place)

    def rank(
        self,
        question: str,
        names: Names = None,
        window: Window = EVER,
    ) -> tuple[Scorer, list[Piece]]:
        """A scorer, and the pieces of the videos within a window of seconds, best first by their keys."""
        if names is None:
            names = self.names
        chosen = list(names) if isinstance(names, Iterable) else []
        unknown = [name for name in chosen if name not in self.names]
        if unknown or not chosen:
            raise ValueError(f"names={show(names)}; expected a list of names, some of the library's `names`.")
        begin, end = validated(Window, window, "window (start, end) ")
        pieces = []
        for name in dict.fromkeys(chosen):
            searched = self._searched(name)
            video = searched.video if isinstance(searched, KeyedVideo) else searched
            first, last = video.within(begin, end)
            if first < last:
                pieces.append(Piece(name, first, last))
        if not pieces:
            raise ValueError(f"No video shows anything from second {begin:g} to {end:g}.")
        scorer = Scorer(
            self.model,
            self.processor,
            question,
            self._tokens(pieces),
        )
        by_piece = map(scorer.peaks, pieces, self._tokens(pieces))
        return scorer, sorted(chain.from_iterable(by_piece), key=lambda piece: -piece.peak)

    def _tokens(self, pieces: Sequence[Piece]) -> Iterator[Tokens]:
        """The tokens of each piece, read when they are looked at."""
        for piece in pieces:
            yield piece.tokens(self._searched(piece.name))

    def _searched(self, name: str) -> EncodedVideo | KeyedVideo:
        """The keys of a video, or its features if it has no keys for this selector."""
        return self._keys(name) or self.video(name)

    def _read(self, name: str) -> EncodedVideo:
        entry = self.entries[name]
        video = load_video(self.index.file(entry), self.made_by, self.model, entry["features"])
        return replace(video, video=name)

    def _read_keys(self, name: str) -> KeyedVideo | None:
        return self.index.load_keys(self.entries[name], self.model, self.selector)

    def _moments(self, scorer: Scorer, piece: Piece) -> list[Interval]:
        """The stretches of a piece that hold strong tokens."""
        part = piece.cut(self.video(piece.name))
        seconds = part.seconds_per_step
        relevance = scorer.relevance(part.features)
        peaks = relevance.unflatten(0, (part.count, -1)).amax(1)
        intervals = evidence_intervals(
            torch.arange(len(relevance), device="cpu"),
            (relevance - relevance.max()).exp(),
            part.video_grid_thw,
            [seconds],
            self.processor.video_processor.merge_size,
            self.model.config.qtsplus_config.evidence_share,
        )
        moments = []
        for interval in intervals:
            first = round(interval.start / seconds)
            last = round(interval.end / seconds)
            best = peaks[first:last].max()
            interval = replace(interval, weight=min(1.0, float(best.exp())))
            moments.append(placed(interval, piece.name, part))
        return moments
