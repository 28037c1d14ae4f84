"""Encodes the videos of a folder into a library, and keeps the library as the folder is."""

import fnmatch
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from typing_extensions import Unpack

from ..asking.evidence import ANSWER
from ..asking.ranking import keys_fingerprint, token_keys
from ..common.files import check_folder, counted, first_line, listed, printable, require_space, size, working_in
from ..common.folders import read_json
from ..common.journals import State, file_state
from ..data.media import VIDEO_SUFFIXES
from ..video.encoded import FAILURES, encode, open_chunks
from ..video.sampling import Sampling, SamplingOptions
from ..video.storage import SAMPLING, fingerprint, load_video, measure, save_keys, saved_video
from .library import INDEX, MADE, Entry, Index, known_model, refuse_links

_PARTS = re.compile(r"\.(library\.jsonl|[0-9a-f]{32}\.(safetensors|keys))(\.[\w-]+)+\.part")  # of one that was killed


def index(
    videos: str | Path,
    folder: str | Path,
    model: Any,
    processor: Any,
    *,
    name: str | None = None,
    revision: str | None = None,
    prune: bool = False,
    labels: Mapping[str, str] | None = None,
    pattern: str | None = None,
    say: Callable[[str], None] = print,
    **options: Unpack[SamplingOptions],
) -> Index:
    """
    Encodes the videos of a folder, and of those in it, that the library does not hold yet; hidden files and folders are
    passed over. Each is on disk when the next begins. The content of a file decides: one that was moved is known again.
    What is gone leaves the library, and what was damaged is made anew.

    Args:
        videos: the folder; a video is called by its path in it.
        folder: the library, which need not be there yet.
        name, revision: of the model, for [`Library.open`]; without a name the bundled one's.
        prune: let go of what is gone, also where that is most of the library.
        labels: of the videos that are new, or of all that are like `pattern`, such as `"door/*"`; for
            [`Library.select`].
        say: takes a line: what is to be done, and its size on disk.
        options: as for [`encode`], the fields of [`Sampling`], such as `fps`.

    Raises:
        OSError: a folder that cannot be read; a disk that is full.
        ValueError: no video; a library of another tower, settings or videos, or one that another process is writing; a
            folder of other files; most videos are gone; a disk without room for the features.
    """
    videos = Path(videos)
    folder = Path(folder)
    files = _check_videos(videos, folder, pattern, say)
    is_new = _check_library_folder(folder)
    made_by = fingerprint(model, processor)
    sampling = Sampling(**options)
    if name and Path(name).is_dir():
        name = str(Path(name).resolve())
    with working_in(folder):
        _remove_parts(folder)
        if not is_new and (folder / INDEX).stat().st_size:
            _check_earlier(folder, made_by, say)
        settings = {
            "made_by": made_by,
            "dtype": "auto",  # the model's
            **_sampling(processor, sampling),
        }
        library = Index(folder, settings)
        indexing = _Indexing(library, model, processor, sampling, labels or {}, pattern, say)
        indexing.recognise(files, str(videos.resolve()), prune)
        made = {
            "model": name,
            "revision": revision,
            "videos": str(videos.resolve()),
        }
        library.add(MADE, made)
        if name:
            _note_model(known_model(made_by, name, revision), say)
        waiting = indexing.measure(files)
        indexing.encode_all(waiting)
        indexing.store_keys()
    return library


def _check_videos(
    videos: Path,
    library: Path,
    pattern: str | None,
    say: Callable[[str], None],
) -> dict[str, Path]:
    """The videos of a folder, by their paths in it; a `ValueError` if there are none, or none like the pattern."""
    if not videos.is_dir():
        raise ValueError(f"There is no folder {str(videos)!r}; expected one with videos.")
    found = _find_videos(videos, library)
    files = found.videos
    if found.others:
        count = counted(len(found.others), "file")
        say(f"Left out {count} without the name of a video: {listed(found.others)}")
    if found.drawn:
        count = counted(len(found.drawn), "video")
        say(f"Left out {count} that `ask --evidence` drew: {listed(found.drawn)}")
    if not files:
        suffixes = ", ".join(VIDEO_SUFFIXES)
        raise ValueError(f"There is no video in {videos}; expected files such as {suffixes}.")
    if pattern is not None and not fnmatch.filter(files, pattern):
        example = next(iter(files))
        raise ValueError(f"No video of {videos} is like {pattern!r}, but for example {example!r}.")
    return files


def _check_library_folder(folder: Path) -> bool:
    """Makes the folder; returns whether it was empty. A `ValueError` for one with other files, or with links."""
    check_folder(folder).mkdir(parents=True, exist_ok=True)
    others = {path.name for path in folder.iterdir()}
    others.discard(".lock")
    if others and INDEX not in others:
        example = min(others)
        raise ValueError(f"{folder} holds other files, such as {example}: choose another folder for the library.")
    refuse_links(folder)
    return not others


def _sampling(processor: Any, stated: Sampling) -> dict:
    """How frames are sampled: as the processor does, unless [`index`] was told otherwise."""
    sampling = {name: getattr(processor.video_processor, name, None) for name in SAMPLING}
    for name, value in vars(stated).items():
        if value is not None or name not in sampling:
            sampling[name] = value
    return sampling


def _remove_parts(folder: Path) -> None:
    for path in folder.iterdir():
        if _PARTS.fullmatch(path.name):
            path.unlink()


def _check_earlier(folder: Path, made_by: str, say: Callable[[str], None]) -> None:
    """Raises `ValueError` for a library of another vision tower; leaves damaged lines out of its journal."""
    earlier = Index(folder, mend=True)
    earlier.require(made_by)
    if earlier.damaged:
        lines = counted(earlier.damaged, "line")
        say(f"Left out of {INDEX} {lines} that cannot be used. Labels of theirs are to be given again.")


def _note_model(known: Path, say: Callable[[str], None]) -> None:
    """Remembers that this user has indexed with this model, so that questions to the library can load it."""
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
    except OSError as error:
        consequence = "questions to the library will have to name the model with --model"
        say(f"{error.filename} cannot be written: {consequence}.")


@dataclass(frozen=True)
class _Found:
    """The files of a folder, by their paths in it: without hidden ones, and without the library's own."""

    videos: dict[str, Path]
    others: list[str]  # without the name of a video
    drawn: list[str]  # videos that are pictures of an answer


def _find_videos(root: Path, library: Path) -> _Found:
    """The files of a folder and of those in it, also behind links to folders."""

    def fail(error: OSError) -> None:
        raise error  # else what cannot be read would pass for what is gone

    videos = {}
    others = []
    drawn = []
    seen: set[str] = set()
    for place, folders, names in os.walk(root, onerror=fail, followlinks=True):
        real_place = os.path.realpath(place)
        if real_place in seen:
            folders.clear()
            continue
        seen.add(real_place)
        folders[:] = [name for name in folders if not name.startswith(".")]
        evidence = _evidence_videos(Path(place, ANSWER)) if ANSWER in names else set()
        for file_name in names:
            path = Path(place, file_name)
            if file_name.startswith(".") or not path.is_file():
                continue
            name = path.relative_to(root).as_posix()
            if file_name in evidence:
                drawn.append(name)
            elif path.suffix.lower() in VIDEO_SUFFIXES:
                videos[name] = path
            elif library.resolve() not in path.resolve().parents:
                others.append(name)
    return _Found(dict(sorted(videos.items())), sorted(others), sorted(drawn))


def _evidence_videos(answer: Path) -> set[str]:
    """The names of the videos beside an `answer.json` that were drawn with it; none for a file of another kind."""
    try:
        entries = read_json(answer).get("videos")
    except ValueError:
        return set()
    names = set()
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            names.add(str(entry.get("kept_tokens")))
    return names


@dataclass(frozen=True)
class _Indexing:
    """One run of [`index`]."""

    index: Index
    model: Any
    processor: Any
    sampling: Sampling
    labels: Mapping[str, str]
    pattern: str | None
    say: Callable[[str], None]

    def recognise(self, files: dict[str, Path], folder: str, prune: bool) -> None:
        """Notes the content of each file that is new or was changed, and forgets those that are not there any more."""
        known = self.index.entries
        encoded = {}
        for entry in known.values():
            if entry["features"]:
                encoded[entry["content"]] = entry
        after: dict[str, Entry] = {}
        for name, path in files.items():
            entry = self._look(name, path, encoded)
            after[name] = self._labelled(name, entry, encoded)
        contents = {entry["content"] for entry in after.values() if entry["content"]}
        gone = [name for name in known if name not in files]
        self._forget(gone, contents, folder, prune)
        for name, entry in after.items():
            earlier = known.get(name)
            if entry != earlier:
                self._leave(earlier, contents)
                self.index.add(name, entry)

    def _look(self, name: str, path: Path, encoded: Mapping[str | None, Entry]) -> Entry:
        """The entry of a file as it is now; the earlier one where the file is unchanged, or cannot be read."""
        earlier = self.index.entries.get(name)
        try:
            state = file_state(path)
            if earlier and state.items() <= earlier.items():
                return earlier
            content = measure(path)["digest"]
        except OSError as error:
            reason = str(error.strerror)
            if earlier and earlier["features"]:
                self.say(f"{printable(name)} cannot be read now, and stays as it was: {reason}.")
                return earlier
            unread: State = {"size": 0, "modified": 0, "inode": 0, "changed": 0}
            return {**unread, "content": None, "error": reason, "features": None}
        features = encoded[content]["features"] if content in encoded else None
        return {**state, "content": content, "error": None, "features": features}

    def _labelled(self, name: str, entry: Entry, encoded: Mapping[str | None, Entry]) -> Entry:
        """An entry with its earlier labels, which follow the content of a moved file, and with the new ones."""
        known = self.index.entries
        earlier = known.get(name) or encoded.get(entry["content"], entry)
        labels: dict[str, str] = earlier.get("labels", {})
        is_meant = name not in known
        if self.pattern is not None:
            is_meant = fnmatch.fnmatch(name, self.pattern)
        if is_meant:
            labels = {**labels, **self.labels}
        if not labels:
            return entry
        return {**entry, "labels": labels}

    def _forget(self, gone: list[str], contents: set[str], folder: str, prune: bool) -> None:
        """Lets those videos go that are not here, unless they are too many."""
        known = self.index.entries
        place = self.index.folder
        good = {name for name, entry in known.items() if entry["error"] is None}
        held = counted(len(good), "video")
        was_finished = MADE in self.index.done
        same_folder = was_finished and folder == str(self.index.videos) and len(gone) < len(known)
        has_common = any(entry["content"] in contents for entry in known.values())
        if known and not same_folder and not has_common:
            raise ValueError(f"{place} holds {held} and nothing of what is here: choose another folder.")
        lost = []
        for name in gone:
            if name in good and known[name]["content"] not in contents:
                lost.append(name)
        most_are_lost = len(lost) > max(1, len(good) / 2)
        is_strange = most_are_lost or (lost and not same_folder)
        if is_strange and not prune:
            raise ValueError(
                f"{len(lost)} of {len(good)} videos of {place} are not in {folder}: {listed(lost)}. Nothing was "
                "changed. Is another folder to be mounted there? To let them go, run the same command with --prune."
            )
        if lost:
            self.say(f"The library loses {len(lost)} of {held}, not here any more: {listed(lost)}")
        for name in gone:
            self._leave(known[name], contents)
            self.index.add(name, None)

    def _leave(self, entry: Entry | None, contents: set[str]) -> None:
        """Removes the features and keys of an entry, if no other video has its content."""
        if entry and entry["features"] and entry["content"] not in contents:
            self.index.file(entry).unlink(missing_ok=True)
            self.index.keys_file(entry).unlink(missing_ok=True)

    def measure(self, files: dict[str, Path]) -> dict[str, Path]:
        """The files that are to be encoded, once it is said how large that is."""
        waiting = {}
        contents = set()
        tokens = 0
        for name, entry in self.index.entries.items():
            if not entry["content"] or self._is_stored(name, entry):
                continue
            try:
                grid = open_chunks(self.processor, files[name], self.sampling).video_grid_thw
            except FAILURES as error:
                self._refuse(name, error)
                continue
            waiting[name] = files[name]
            if entry["content"] not in contents:  # copies share what is stored
                tokens += int(grid.prod()) // self.processor.video_processor.merge_size**2
            contents.add(entry["content"])
        if waiting:
            bytes_per_token = self.model.model.token_width * self.model.dtype.itemsize
            if self.selector is not None:
                bytes_per_token += self._scoring_layer.k_proj.out_features
            needed = tokens * bytes_per_token
            what = f"{len(waiting)} of {counted(len(files), 'video')}"
            self.say(f"Encoding {what}: {tokens:,} tokens, {size(needed)} in {self.index.folder}.")
            require_space(self.index.folder, needed, f"the features of {what}")
        return waiting

    def _is_stored(self, name: str, entry: Entry) -> bool:
        """Whether its features are there, and as they were written; a damaged file goes."""
        file = self.index.file(entry)
        if entry["features"] is None or not file.exists():
            return False
        if file.is_dir():
            raise ValueError(f"{file} is a folder; expected what was stored of {printable(name)}: remove it.")
        try:
            load_video(file, self.index.settings["made_by"], self.model, entry["features"])
        except ValueError as error:
            if isinstance(error.__cause__, OSError):
                raise
            self.say(f"What was stored of {printable(name)} is damaged, and is made again.")
            file.unlink()
            return False
        return True

    def encode_all(self, waiting: dict[str, Path]) -> None:
        console = Console(stderr=True)
        made_by = self.index.settings["made_by"]
        entries = self.index.entries
        copies = {}
        for name, entry in entries.items():
            if name not in waiting:
                copies[entry["content"]] = entry["features"]
        hidden = not console.is_terminal
        for name, path in track(waiting.items(), "Encoding", console=console, disable=hidden):
            entry = entries[name]
            content = entry["content"]
            if copies.get(content):
                self.index.add(name, {**entry, "error": None, "features": copies[content]})
                continue
            try:
                encoded = encode(self.model, self.processor, path, device="cpu", **self.sampling.options())
                if not file_state(path).items() <= entry.items():
                    raise ValueError("It was changed while it was read; run the same command again.")
                if not encoded.features.isfinite().all():
                    raise ValueError("Its features hold NaN or infinity.")
            except FAILURES as error:
                self._refuse(name, error)
                continue
            with saved_video(encoded, self.index.file(entry), made_by) as features:
                # Noted before it is there: a file that is there and was not noted would belong to nobody.
                self.index.add(name, {**entry, "error": None, "features": features})
            copies[content] = features

    @cached_property
    def selector(self) -> str | None:
        return keys_fingerprint(self.model)

    @property
    def _scoring_layer(self) -> Any:
        return self.model.model.qtsplus.scoring_layers[-1]

    def store_keys(self) -> None:
        """Makes the keys that this model's selector has not made yet."""
        seen = set()
        for name, file in self.index.files.items():
            entry = self.index.entries[name]
            path = self.index.keys_file(entry)
            if path not in seen and not self._has_keys(name, entry):  # copies share the file
                self._make_keys(file, path, entry)
            seen.add(path)

    def _has_keys(self, name: str, entry: Entry) -> bool:
        try:
            return self.index.load_keys(entry, self.model, self.selector) is not None
        except ValueError as error:
            if isinstance(error.__cause__, OSError):
                raise
            self.say(f"The keys of {printable(name)} are damaged, and are made again.")
            return False

    @torch.no_grad()
    def _make_keys(self, file: Path, path: Path, entry: Entry) -> None:
        if self.selector is None or entry["features"] is None:
            return
        video = load_video(file, self.index.settings["made_by"], self.model, entry["features"])
        keys = token_keys(self._scoring_layer, video.features)
        save_keys(path, video, keys, {"made_by": self.selector, "features": entry["features"]["digest"]})

    def _refuse(self, name: str, error: BaseException) -> None:
        self.index.add(name, {**self.index.done[name], "error": first_line(error), "features": None})
