"""Encodes the videos of a folder into a library, and keeps the library as the folder is."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, ProcessorMixin
from typing_extensions import Unpack

from ..asking.ranking import keys_fingerprint, token_keys
from ..common.files import check_folder, counted, first_line, listed, printable, require_space, size, working_in
from ..common.journals import file_state
from ..data.media import VIDEO_SUFFIXES
from ..video.encoded import FAILURES, EncodedVideo, encode, open_chunks
from ..video.sampling import Sampling, SamplingOptions
from ..video.storage import SAMPLING, Stored, fingerprint, load_video, measure, save_keys, saved_video
from .library import INDEX, MADE, Entry, Index, known_model, refuse_links

_PARTS = re.compile(r"\.(library\.jsonl|[0-9a-f]{32}\.(safetensors|keys))(\.[\w-]+)+\.part")  # of a killed process


def index(
    videos: str | Path,
    folder: str | Path,
    model,
    processor,
    *,
    name: str | None = None,
    revision: str | None = None,
    prune: bool = False,
    say: Callable[[str], None] = print,
    **options: Unpack[SamplingOptions],
) -> Index:
    """
    Encodes the videos of a folder, and of the folders in it, that the library does not hold yet; hidden files and
    folders are passed over. Each is on disk when the next begins. The content of a file decides: a file that was moved
    is known again. Videos whose files are gone leave the library, and damaged features are made again.

    Args:
        videos: the folder; a video is called by its path in it.
        folder: the library, which need not be there yet.
        name, revision: of the model, for [`Library.open`]; without a name the bundled model's.
        prune: remove videos whose files are gone, even if these are most.
        say: takes a line: what is to be done, and its size on disk.
        options: as for [`encode`], the fields of [`Sampling`], such as `fps`.

    Raises:
        OSError: a folder that cannot be read; a disk that is full.
        ValueError: no video; a library of another vision tower, settings or videos, or one that another process is
            writing; a folder of other files; most videos are gone; a disk without room for the features.
    """
    videos = Path(videos)
    folder = Path(folder)
    files = _check_videos(videos)
    is_new = _check_library_folder(folder)
    made_by = fingerprint(model, processor)
    sampling = Sampling(**options)
    if name and Path(name).is_dir():
        name = str(Path(name).resolve())
    with working_in(folder):
        _remove_parts(folder)
        if not is_new and (folder / INDEX).stat().st_size:
            _check_earlier(folder, made_by, say)
        settings = _sampling(processor, sampling)
        settings["made_by"] = made_by
        settings["dtype"] = "auto"  # the model's
        library = Index(folder, settings)
        indexing = _Indexing(library, model, processor, sampling, say)
        place = str(videos.resolve())
        indexing.recognise(files, place, prune)
        library.add(MADE, {"model": name, "revision": revision, "videos": place})
        if name:
            _note_model(known_model(made_by, name, revision), say)
        waiting = indexing.measure(files)
        indexing.encode_all(waiting)
        indexing.store_keys()
    return library


def _check_videos(folder: Path) -> dict[str, Path]:
    """The videos of a folder, by their paths in it; a `ValueError` if there are none."""
    if not folder.is_dir():
        raise ValueError(f"There is no folder {str(folder)!r}; expected one with videos.")
    videos = _find_videos(folder)
    if not videos:
        suffixes = ", ".join(VIDEO_SUFFIXES)
        raise ValueError(f"There is no video in {folder}; expected files such as {suffixes}.")
    return dict(sorted(videos.items()))


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


def _sampling(processor, stated: Sampling) -> dict:
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
        say(f"Left out of {INDEX} {lines} that cannot be used.")


def _note_model(known: Path, say: Callable[[str], None]) -> None:
    """Remembers that this user has indexed with this model, so that questions to the library can load it."""
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
    except OSError as error:
        consequence = "questions to the library will have to name the model with --model"
        say(f"{error.filename} cannot be written: {consequence}.")


def _find_videos(root: Path) -> dict[str, Path]:
    """The videos of a folder and of the folders in it, also behind links to folders, by their paths in it."""

    def fail(error: OSError) -> None:
        raise error  # else what cannot be read would pass for what is gone

    videos = {}
    seen: set[str] = set()
    for place, folders, names in os.walk(root, onerror=fail, followlinks=True):
        real_place = os.path.realpath(place)
        if real_place in seen:
            folders.clear()
            continue
        seen.add(real_place)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            is_video = path.suffix.lower() in VIDEO_SUFFIXES
            if is_video and not name.startswith(".") and path.is_file():
                videos[path.relative_to(root).as_posix()] = path
    return videos


@dataclass(frozen=True)
class _Indexing:
    """One run of [`index`]."""

    index: Index
    model: PreTrainedModel
    processor: ProcessorMixin
    sampling: Sampling
    say: Callable[[str], None]

    def recognise(self, files: dict[str, Path], folder: str, prune: bool) -> None:
        """Notes the content of each file that is new or was changed, and forgets files that are gone."""
        known = self.index.entries
        encoded: dict[str | None, Stored] = {}
        for entry in known.values():
            if entry["features"]:
                encoded[entry["content"]] = entry["features"]
        after = {name: self._look(name, path, encoded) for name, path in files.items()}
        contents = {entry["content"] for entry in after.values()}
        gone = [name for name in known if name not in files]
        self._check_gone(gone, contents, folder, prune)
        for name in gone:
            self._leave(known[name], contents)
            self.index.add(name, None)
        for name, entry in after.items():
            earlier = known.get(name)
            if entry == earlier:
                continue
            if earlier:
                self._leave(earlier, contents)
            self.index.add(name, entry)

    def _look(
        self,
        name: str,
        path: Path,
        encoded: dict[str | None, Stored],
    ) -> Entry:
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
            return Entry(size=0, modified=0, inode=0, changed=0, content=None, error=reason, features=None)
        return Entry(**state, content=content, error=None, features=encoded.get(content))

    def _check_gone(
        self,
        gone: list[str],
        contents: set[str | None],
        folder: str,
        prune: bool,
    ) -> None:
        """A `ValueError` if too many videos are gone, so that another folder is meant, or is to be mounted."""
        known = self.index.entries
        place = self.index.folder
        readable = [name for name, entry in known.items() if entry["error"] is None]
        is_same_folder = MADE in self.index.done and folder == str(self.index.videos)
        lost = []
        for name in readable:
            # In another folder, a file of the same name is another video.
            is_gone = name in gone or not is_same_folder
            if is_gone and known[name]["content"] not in contents:
                lost.append(name)
        if not lost:
            return
        are_most = len(lost) > max(1, len(readable) / 2) or len(gone) == len(known)
        if not prune and (are_most or not is_same_folder):
            raise ValueError(
                f"{len(lost)} of {len(readable)} videos of {place} are not in {folder}: {listed(lost)}. Nothing was "
                "changed. Is another folder to be mounted there? To let them go, run the same command with --prune."
            )
        held = counted(len(readable), "video")
        self.say(f"The library loses {len(lost)} of {held}, not here any more: {listed(lost)}")

    def _leave(self, entry: Entry, contents: set[str | None]) -> None:
        """Removes the features and keys of an entry, if no other video has its content."""
        if entry["features"] and entry["content"] not in contents:
            self.index.file(entry).unlink(missing_ok=True)
            self.index.keys_file(entry).unlink(missing_ok=True)

    def measure(self, files: dict[str, Path]) -> dict[str, Path]:
        """The files that are to be encoded, once it is said how large that is."""
        waiting = {}
        tokens: dict[str, int] = {}  # by content: copies share what is stored
        patches_per_token = self.processor.video_processor.merge_size**2
        for name, entry in self.index.entries.items():
            content = entry["content"]
            if not content or self._is_stored(name, entry):
                continue
            try:
                grid = open_chunks(self.processor, files[name], self.sampling).video_grid_thw
            except FAILURES as error:
                self._refuse(name, error)
                continue
            waiting[name] = files[name]
            tokens[content] = int(grid.prod()) // patches_per_token
        if waiting:
            count = sum(tokens.values())
            bytes_per_token = self.model.model.token_width * self.model.dtype.itemsize
            if self.selector is not None:
                bytes_per_token += self._scoring_layer.k_proj.out_features
            needed = count * bytes_per_token
            what = f"{len(waiting)} of {counted(len(files), 'video')}"
            self.say(f"Encoding {what}: {count:,} tokens, {size(needed)} in {self.index.folder}.")
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
        entries = self.index.entries
        stored = {entry["content"]: entry["features"] for name, entry in entries.items() if name not in waiting}
        console = Console(stderr=True)
        hidden = not console.is_terminal
        for name, path in track(waiting.items(), "Encoding", console=console, disable=hidden):
            entry = entries[name]
            content = entry["content"]
            if stored.get(content):
                self._note(name, entry, stored[content])
                continue
            try:
                encoded = self._encode(path, entry)
            except FAILURES as error:
                self._refuse(name, error)
                continue
            with saved_video(encoded, self.index.file(entry), self.index.settings["made_by"]) as features:
                # Noted before it is there: a file that is there and was not noted would belong to nobody.
                self._note(name, entry, features)
            stored[content] = features

    def _encode(self, path: Path, entry: Entry) -> EncodedVideo:
        encoded = encode(self.model, self.processor, path, device="cpu", **self.sampling.options())
        if not file_state(path).items() <= entry.items():
            raise ValueError("It was changed while it was read; run the same command again.")
        if not encoded.features.isfinite().all():
            raise ValueError("Its features hold NaN or infinity.")
        return encoded

    def _note(self, name: str, entry: Entry, features: Stored | None, error: str | None = None) -> None:
        self.index.add(name, entry | {"error": error, "features": features})

    def _refuse(self, name: str, error: BaseException) -> None:
        self._note(name, self.index.done[name], None, first_line(error))

    @cached_property
    def selector(self) -> str | None:
        return keys_fingerprint(self.model)

    @property
    def _scoring_layer(self):
        return self.model.model.qtsplus.scoring_layers[-1]

    @torch.no_grad()
    def store_keys(self) -> None:
        """Makes the keys that this model's selector has not made yet."""
        if self.selector is None:
            return
        for name, file in self.index.files.items():
            entry = self.index.entries[name]
            features = entry["features"]
            if features is None or self._has_keys(name, entry):
                continue
            video = load_video(file, self.index.settings["made_by"], self.model, features)
            keys = token_keys(self._scoring_layer, video.features)
            made_from = {"made_by": self.selector, "features": features["digest"]}
            save_keys(self.index.keys_file(entry), video, keys, made_from)

    def _has_keys(self, name: str, entry: Entry) -> bool:
        try:
            return self.index.load_keys(entry, self.model, self.selector) is not None
        except ValueError as error:
            if isinstance(error.__cause__, OSError):
                raise
            self.say(f"The keys of {printable(name)} are damaged, and are made again.")
            return False
