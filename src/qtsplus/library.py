"""A library: the videos of a folder, encoded once and kept on disk, that every question searches as one memory."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import track

from .answers import placed
from .data.media import VIDEO_SUFFIXES
from .evidence import Interval, evidence_intervals
from .loading import load
from .output import check_folder, first_line, printable, require_space, size
from .ranking import Piece, Ranking, Scorer
from .results import Journal
from .session import Answer, answer_questions
from .storage import SAMPLING, fingerprint, load_video, save_video
from .videos import IN_MEMORY, EncodedVideo, encode

FAILURES = (ValueError, OSError, torch.OutOfMemoryError)  # of one video, and the others are indexed
_INDEX = "library.jsonl"
_MODEL, _VIDEOS = 0, 1  # the keys of the model's name and of the videos' folder; the others are names of videos
_DTYPES = ("auto", "float16", "bfloat16", "float32")


class Index(Journal):
    """What a library holds: by the name of each video the content of its file, and the `error` of a bad one."""

    def __init__(self, folder: Path, settings: dict[str, Any] | None = None):
        self.folder = folder
        if settings is None and not (folder / _INDEX).is_file():
            raise ValueError(
                f"There is no library in {str(folder)!r}; make one: `qtsplus index VIDEOS --out {folder}`."
            )
        super().__init__(folder / _INDEX, settings, begin_anew=False)

    @property
    def model(self) -> tuple[str | None, str | None]:
        """
        The name and the revision of the model that made it, no name for the bundled one; a `ValueError` if it is gone,
        or was not written yet.
        """
        if _MODEL not in self.done:
            raise ValueError(f"The library {self.folder} was only begun: run `qtsplus index` to its end.")
        name, revision = self.done[_MODEL]
        if name and os.path.isabs(name) and not os.path.isdir(name):
            raise ValueError(f"{self.folder} was made with the model in {name}, which is gone: name where it is now.")
        return name, revision

    @property
    def videos(self) -> Path:
        """The folder that was indexed last."""
        return Path(self.done.get(_VIDEOS, ""))

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """In the order of their names; of a video that has left, the journal says `None`."""
        entries = {name: self.done[name] for name in self.done if isinstance(name, str)}
        return {name: entries[name] for name in sorted(entries) if entries[name] is not None}

    @property
    def files(self) -> dict[str, Path]:
        """Where the features of each video lie that has been encoded."""
        files = {name: self.file(entry) for name, entry in self.entries.items()}
        return {name: file for name, file in files.items() if file.exists()}

    def file(self, entry: dict[str, Any]) -> Path:
        return self.folder / f"{entry['content'][:32]}.safetensors"

    def require(self, made_by: str) -> None:
        if self.settings.get("made_by") != made_by:
            raise ValueError(
                f"{self.folder} was made with another vision tower or processor than this model's, or with weights of "
                f"another dtype: name the model that made it, {self.done.get(_MODEL, [''])[0] or 'the bundled one'}, "
                "or index the videos into another folder."
            )


def index(
    videos: str | Path,
    folder: str | Path,
    model: Any,
    processor: Any,
    *,
    name: str | None = None,
    revision: str | None = None,
    fps: float | None = None,
    max_frames: int | None = None,
    dtype: str = "auto",
    say: Callable[[str], None] = print,
) -> Index:
    """
    Encodes the videos of a folder, and of those in it, that the library does not hold yet; each is on disk when the
    next begins. The content of a file decides: one that was moved is known again. What is gone leaves the library.

    Args:
        videos: the folder; a video is called by its path in it.
        folder: the library, which need not be there yet.
        name, revision: of the model, for [`Library.open`]; without a name the bundled one's.
        fps, max_frames: as for [`encode`].
        dtype: of the features on disk, `"float16"`, `"bfloat16"` or `"float32"`; `"auto"` is the model's.
        say: takes a line: what is to be done, and its size on disk.

    Raises:
        OSError: a folder that cannot be read.
        ValueError: no video; a library of another tower, settings or videos, or one that another process is writing; a
            folder of other files; a full disk.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(_DTYPES)}.")
    videos, folder = Path(videos), Path(folder)
    if not videos.is_dir():
        raise ValueError(f"There is no folder {str(videos)!r}; expected one with videos.")
    files = _find_videos(videos)
    if not files:
        raise ValueError(f"There is no video in {videos}; expected files such as {', '.join(VIDEO_SUFFIXES)}.")
    check_folder(folder).mkdir(parents=True, exist_ok=True)
    others = {path.name for path in folder.iterdir()} - {".lock"}
    if others and _INDEX not in others:
        raise ValueError(f"{folder} holds other files, such as {min(others)}: choose another folder for the library.")
    made_by, sampling = fingerprint(model, processor), {"fps": fps, "max_frames": max_frames}
    settings = {name: getattr(processor.video_processor, name, None) for name in SAMPLING}
    settings |= {name: value for name, value in sampling.items() if value is not None}
    try:
        with FileLock(folder / ".lock", timeout=0):
            if others and (folder / _INDEX).stat().st_size:
                Index(folder).require(made_by)
            made = Index(folder, {"made_by": made_by, "dtype": dtype, **settings})
            made.add(_MODEL, [str(Path(name).resolve()) if name and Path(name).is_dir() else name, revision])
            indexing = _Indexing(made, model, processor, sampling, say)
            indexing.recognise(files, same_folder=made.videos == videos.resolve())
            made.add(_VIDEOS, str(videos.resolve()))
            indexing.encode_all(indexing.measure(files))
            current = {made.file(entry) for entry in made.entries.values()}
            for left in set(folder.glob("*.safetensors")) - current:
                left.unlink()
    except Timeout as error:
        raise ValueError(f"Another process is writing {folder}; wait until it is done.") from error
    return made


def _find_videos(root: Path) -> dict[str, Path]:
    """By its path in a folder each video in there, also behind links to folders."""

    def fail(error: OSError) -> None:
        raise error  # else what cannot be read would pass for what is gone

    files: dict[str, Path] = {}
    seen: set[str] = set()
    for place, folders, names in os.walk(root, onerror=fail, followlinks=True):
        if os.path.realpath(place) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(place))
        paths = [Path(place, name) for name in names]
        videos = [path for path in paths if path.suffix.lower() in VIDEO_SUFFIXES and path.is_file()]
        files |= {path.relative_to(root).as_posix(): path for path in videos}
    return {name: files[name] for name in sorted(files)}


@dataclass(frozen=True)
class _Indexing:
    """One run of [`index`]."""

    index: Index
    model: Any
    processor: Any
    sampling: dict[str, Any]
    say: Callable[[str], None]

    def recognise(self, files: dict[str, Path], same_folder: bool) -> None:
        """Notes the content of each file that is new or was changed, and forgets those that are not there any more."""
        known, changed, shared = self.index.entries, {}, False
        contents = {entry["content"] for entry in known.values()} - {""}
        for name, path in files.items():
            try:
                state = path.stat()
                entry: dict[str, Any] = {"size": state.st_size, "modified": state.st_mtime_ns}
                if known.get(name, {}).items() >= entry.items():
                    shared = True
                    continue
                changed[name] = {**entry, "content": _content(path)}
                shared |= changed[name]["content"] in contents
            except OSError as error:
                if name in known and self.index.file(known[name]).exists():
                    self.say(f"{printable(name)} cannot be read now, and stays as it was: {error.strerror}.")
                else:
                    changed[name] = {"content": "", "error": str(error.strerror)}
        if known and not (shared or (same_folder and known.keys() & files.keys())):
            folder = self.index.folder
            raise ValueError(f"{folder} holds {len(known)} videos, none of which is here: choose another folder.")
        for name, entry in changed.items():
            self.index.add(name, entry)
        if gone := sorted(known.keys() - files.keys()):
            names = ", ".join(map(printable, gone[:3])) + (", ..." if gone[3:] else "")
            self.say(f"{len(gone)} of {len(known)} videos leave the library, since they are not here: {names}")
        for name in gone:
            self.index.add(name, None)

    def measure(self, files: dict[str, Path]) -> dict[str, Path]:
        """The files that are to be encoded, once it is said how large that is."""
        waiting, tokens = {}, 0
        for name, entry in self.index.entries.items():
            if not entry["content"] or self._is_stored(name, entry):
                continue
            try:
                grid = self.processor.video_chunks(str(files[name]), **self.sampling).video_grid_thw
            except FAILURES as error:
                self._refuse(name, error)
                continue
            waiting[name] = files[name]
            tokens += int(grid.prod()) // self.processor.video_processor.merge_size**2
        if waiting:
            needed = tokens * self.model.model.token_width * self._dtype().itemsize
            what = f"{len(waiting)} of {len(files)} videos"
            self.say(f"Encoding {what}: {tokens:,} tokens, {size(needed)} in {self.index.folder}.")
            require_space(self.index.folder, needed, f"the features of {what}")
        return waiting

    def _is_stored(self, name: str, entry: dict[str, Any]) -> bool:
        """Whether its features are there; a damaged file goes."""
        file = self.index.file(entry)
        if not file.exists():
            return False
        try:
            load_video(file, self.index.settings["made_by"])
        except ValueError as error:
            if isinstance(error.__cause__, OSError):
                raise
            self.say(f"What was stored of {printable(name)} is damaged, and is made again.")
            file.unlink()
            return False
        return True

    def encode_all(self, waiting: dict[str, Path]) -> None:
        console = Console(stderr=True)
        for name, path in track(waiting.items(), "Encoding", console=console, disable=not console.is_terminal):
            entry = self.index.done[name]
            if self.index.file(entry).exists():  # a copy of one before
                continue
            try:
                encoded = self._encode(path)
            except FAILURES as error:
                self._refuse(name, error)
                continue
            save_video(encoded, self.index.file(entry), self.index.settings["made_by"])
            self.index.add(name, {key: entry[key] for key in entry if key != "error"})

    def _encode(self, path: Path) -> EncodedVideo:
        encoded = encode(self.model, self.processor, path, device="cpu", **self.sampling)
        features = encoded.features.to(self._dtype())
        if not features.isfinite().all():
            raise ValueError(f"Its features are too large for {features.dtype}; index with --dtype bfloat16.")
        return replace(encoded, features=features)

    def _refuse(self, name: str, error: BaseException) -> None:
        self.index.add(name, {**self.index.done[name], "error": first_line(error)})

    def _dtype(self) -> torch.dtype:
        wanted = self.index.settings["dtype"]
        return self.model.get_input_embeddings().weight.dtype if wanted == "auto" else getattr(torch, wanted)


def _content(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _clock(seconds: float) -> str:
    """As a player shows it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{name}={count!r}: expected a number, at least 1.")


class Library:
    """Videos that [`index`] has encoded. Questions read their features from disk and never the videos."""

    def __init__(self, folder: str | Path, model: Any, processor: Any):
        self.folder, self.model, self.processor = Path(folder), model, processor
        self.index, self.made_by = Index(self.folder), fingerprint(model, processor)
        self.index.require(self.made_by)
        self.files = self.index.files
        self.names = list(self.files)  # the videos' paths in the folder that was indexed
        # Those that are neither encoded nor known to be bad, as after an index that was interrupted.
        entries = self.index.entries
        self.missing = [name for name in entries if name not in self.files and "error" not in entries[name]]
        if not self.files:
            raise ValueError(f"The library {folder} holds no video yet: run `qtsplus index` to its end.")

    @classmethod
    def open(cls, folder: str | Path, device: str | None = None) -> "Library":
        """A library with the model that made it; as [`Library`] and `load`."""
        from .hub.files import bundled_model

        name, revision = Index(Path(folder)).model
        return cls(folder, *load(name or bundled_model(), device, revision=revision))

    def find(self, question: str, top: int = 10) -> list[Interval]:
        """
        The `top` moments that matter most for a question, best first, on a player's clock; without the language model.
        Their `weight` is the relevance of the best token among all tokens of the library.
        """
        _check_count("top", top)
        scorer, ranking = self._rank(question)
        moments = [moment for piece in ranking.pieces[:top] for moment in self._moments(scorer, piece, ranking.total)]
        return sorted(moments, key=lambda moment: -moment.weight)[:top]

    def ask(self, question: str, pieces: int = 1, **generation: Any) -> Answer:
        """
        Answers a question from the video that ranks first, or from several, whose tokens compete for one budget.

        Args:
            pieces: from how many, where long videos count by their pieces. The bundled model has learned from prompts
                of one video, and from more it answers worse.
            generation: as for `answer_questions`. Evidence and keep maps are those of whole files.
        """
        _check_count("pieces", pieces)
        _, ranking = self._rank(question)
        return self.ask_pieces(question, ranking.pieces[:pieces], **generation)

    def ask_pieces(self, question: str, pieces: list[Piece], **generation: Any) -> Answer:
        """Answers a question from these pieces alone, which stand in the prompt with their names and times."""
        pieces = sorted(pieces, key=lambda piece: (piece.name, piece.first))
        videos = {piece.name: self._video(piece.name) for piece in pieces}
        parts: dict[str, EncodedVideo] = {}
        for piece in pieces:
            part = piece.cut(videos[piece.name])
            label = f"{printable(piece.name)}, {_clock(part.start)} to {_clock(part.start + part.length)}"
            parts[label if label not in parts else f"{label} ({len(parts) + 1})"] = part
        (answer,) = answer_questions(self.model, self.processor, parts, [question], **generation)
        maps: dict[str, torch.Tensor] = {}
        for piece, kept in zip(pieces, answer.keep_maps.values(), strict=True):
            steps = int(videos[piece.name].video_grid_thw[0, 0])
            maps.setdefault(piece.name, kept.new_zeros(steps, *kept.shape[1:]))[piece.first : piece.last] = kept
        evidence = [replace(one, name=pieces[one.video].name) for one in answer.evidence]
        return replace(answer, video=", ".join(maps), evidence=evidence, keep_maps=maps)

    def film(self, name: str) -> EncodedVideo:
        """A video with the path of its file, to be drawn; that is [`IN_MEMORY`] where it is gone or was changed."""
        path, content = self.index.videos / name, self.index.entries[name]["content"]
        there = path.is_file() and _content(path) == content
        return replace(self._video(name), video=str(path) if there else IN_MEMORY)

    def _video(self, name: str) -> EncodedVideo:
        return replace(load_video(self.files[name], self.made_by), video=name)

    @torch.no_grad()
    def _rank(self, question: str) -> tuple[Scorer, Ranking]:
        def features() -> Iterator[torch.Tensor]:
            return (self._video(name).features for name in self.files)

        scorer = Scorer(self.model, self.processor, question, features)
        return scorer, scorer.rank((name, self._video(name)) for name in self.files)

    @torch.no_grad()
    def _moments(self, scorer: Scorer, piece: Piece, total: float) -> list[Interval]:
        part = piece.cut(self._video(piece.name))
        relevance, seconds = scorer.relevance(part.features), part.second_per_grid_ts
        every, merge_size = torch.arange(len(relevance)), self.processor.video_processor.merge_size
        shares = (relevance - relevance.max()).exp()
        strong_share, moments = self.model.config.qtsplus_config.evidence_share, []
        for one in evidence_intervals(every, shares, part.video_grid_thw, seconds, merge_size, strong_share):
            steps = slice(round(one.start / seconds[0]), round(one.end / seconds[0]))
            peak = relevance.unflatten(0, (int(part.video_grid_thw[0, 0]), -1))[steps].max()
            moments.append(placed(replace(one, weight=float((peak - total).exp())), piece.name, part))
        return moments
