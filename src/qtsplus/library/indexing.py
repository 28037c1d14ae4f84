"""Encodes the videos of a folder into a library, and keeps the library as the folder is."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, ProcessorMixin
from typing_extensions import Unpack

from ..asking.ranking import keys_fingerprint, scoring_layer, token_keys
from ..common.files import check_folder, counted, first_line, listed, printable, require_space, size, working_in
from ..common.journals import file_state
from ..data.media import VIDEO_SUFFIXES
from ..video.encoded import FAILURES, EncodedVideo, encode, open_chunks
from ..video.sampling import Sampling, SamplingOptions
from ..video.storage import SAMPLING, Stored, fingerprint, load_video, measure, save_keys, saved_video
from .library import INDEX, MADE, Entry, Index, known_model

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
    is known again. Damaged features are made again.

    Args:
        videos: the folder; a video is called by its path in it.
        folder: the library, which need not be there yet.
        name, revision: of the model, for [`Library.open`]; without a name the bundled model's.
        prune: remove videos whose files are gone, which is an error otherwise.
        say: takes a line: what is to be done, and its size on disk.
        options: as for [`encode`], the fields of [`Sampling`], such as `fps`.

    Raises:
        OSError: a folder that cannot be read; a disk that is full.
        ValueError: no video; a library of another vision tower or settings, or one that another process is writing; a
            folder of other files; videos of the library are gone; a disk without room for the features; a selector with
            several scoring layers.
    """
    videos = Path(videos)
    folder = Path(folder)
    files = _find_videos(videos)
    _check_library_folder(folder)
    made_by = fingerprint(model, processor)
    sampling = Sampling(**options)
    if name and Path(name).is_dir():
        name = str(Path(name).resolve())
    with working_in(folder):
        for path in folder.iterdir():
            if _PARTS.fullmatch(path.name):
                path.unlink()
        journal = folder / INDEX
        if journal.exists() and journal.stat().st_size:
            Index(folder).require(made_by)
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
        waiting = indexing.find_waiting(files)
        indexing.encode_all(waiting)
        indexing.store_keys()
    return library


def _find_videos(root: Path) -> dict[str, Path]:
    """
    The videos of a folder and of the folders in it, also behind links to folders, by their paths in it. A `ValueError`
    if there are none.
    """
    if not root.is_dir():
        raise ValueError(f"There is no folder {str(root)!r}; expected one with videos.")

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
    if not videos:
        suffixes = ", ".join(VIDEO_SUFFIXES)
        raise ValueError(f"There is no video in {root}; expected files such as {suffixes}.")
    return dict(sorted(videos.items()))


def _check_library_folder(folder: Path) -> None:
    """Makes the folder. A `ValueError` for one with other files."""
    check_folder(folder).mkdir(parents=True, exist_ok=True)
    others = {path.name for path in folder.iterdir()}
    others.discard(".lock")
    if others and INDEX not in others:
        example = min(others)
        raise ValueError(f"{folder} holds other files, such as {example}: choose another folder for the library.")


def _sampling(processor, stated: Sampling) -> dict:
    """How frames are sampled: as the processor does, unless [`index`] was told otherwise."""
    sampling = {name: getattr(processor.video_processor, name, None) for name in SAMPLING}
    for name, value in vars(stated).items():
        if value is not None or name not in sampling:
            sampling[name] = value
    return sampling


def _note_model(known: Path, say: Callable[[str], None]) -> None:
    """Remembers that this user has indexed with this model, so that questions to the library can load it."""
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
    except OSError as error:
        consequence = "questions to the library will have to name the model with --model"
        say(f"{error.filename} cannot be written: {consequence}.")


class _Indexing:
    """One run of [`index`]."""

    def __init__(
        self,
        index: Index,
        model: PreTrainedModel,
        processor: ProcessorMixin,
        sampling: Sampling,
        say: Callable[[str], None],
    ):
        self.index = index
        self.entries = index.entries
        self.made_by = index.settings["made_by"]
        self.model = model
        self.processor = processor
        self.sampling = sampling
        self.say = say
        self.layer = scoring_layer(model)
        self.selector = keys_fingerprint(model)

    def recognise(self, files: dict[str, Path], folder: str, prune: bool) -> None:
        """Notes the content of each file that is new or was changed, and forgets files that are gone."""
        known = dict(self.entries)
        encoded: dict[str | None, Stored] = {}
        for entry in known.values():
            if entry["features"]:
                encoded[entry["content"]] = entry["features"]
        after = {name: self._look(path, known.get(name), encoded) for name, path in files.items()}
        contents = {entry["content"] for entry in after.values()}
        self._check_lost(after, contents, folder, prune)
        for name, entry in known.items():
            if name not in files:
                self._note(name, None)
            if entry["content"] not in contents:
                self.index.file(entry).unlink(missing_ok=True)
                self.index.keys_file(entry).unlink(missing_ok=True)
        for name, entry in after.items():
            if entry != known.get(name):
                self._note(name, entry)

    def _look(self, path: Path, earlier: Entry | None, encoded: dict[str | None, Stored]) -> Entry:
        """The entry of a file as it is now; the earlier one where the file is unchanged."""
        try:
            state = file_state(path)
            if earlier and state.items() <= earlier.items():
                return earlier
            content = measure(path)["digest"]
        except OSError as error:
            reason = str(error.strerror)
            return Entry(size=0, modified=0, inode=0, changed=0, content=None, error=reason, features=None)
        return Entry(**state, content=content, error=None, features=encoded.get(content))

    def _check_lost(self, after: dict[str, Entry], contents: set[str | None], folder: str, prune: bool) -> None:
        """A `ValueError` for videos that would leave the library: another folder may be meant, or is to be mounted."""
        is_same_folder = MADE in self.index.done and folder == str(self.index.videos)
        lost = []
        for name, entry in self.entries.items():
            is_there = name in after and after[name]["content"] is not None
            # In another folder, a file of the same name is another video.
            stays = entry["content"] in contents or (is_there and is_same_folder)
            if entry["error"] is None and not stays:
                lost.append(name)
        if not lost:
            return
        count = f"{len(lost)} of {counted(len(self.entries), 'video')}"
        if not prune:
            raise ValueError(
                f"{count} of {self.index.folder} are not in {folder}, or cannot be read: {listed(lost)}. Nothing was "
                "changed. Is another folder to be mounted there? To let them go, run the same command with --prune."
            )
        self.say(f"The library loses {count}: {listed(lost)}")

    def find_waiting(self, files: dict[str, Path]) -> dict[str, Path]:
        """The files that are to be encoded, once it is said how large that is."""
        waiting = {}
        tokens: dict[str, int] = {}  # by content: copies share what is stored
        patches_per_token = self.processor.video_processor.merge_size**2
        for name, path in files.items():
            entry = self.entries[name]
            content = entry["content"]
            if content is None or self._is_stored(name, entry):
                continue
            try:
                grid = open_chunks(self.processor, path, self.sampling).video_grid_thw
            except FAILURES as error:
                self._refuse(name, error)
                continue
            waiting[name] = path
            tokens[content] = int(grid.prod()) // patches_per_token
        if waiting:
            count = sum(tokens.values())
            bytes_per_token = self.model.model.token_width * self.model.dtype.itemsize
            needed = count * (bytes_per_token + self.layer.k_proj.out_features)
            what = f"{len(waiting)} of {counted(len(files), 'video')}"
            self.say(f"Encoding {what}: {count:,} tokens, {size(needed)} in {self.index.folder}.")
            require_space(self.index.folder, needed, f"the features of {what}")
        return waiting

    def _is_stored(self, name: str, entry: Entry) -> bool:
        """Whether its features are there, and as they were written; a damaged file goes."""
        file = self.index.file(entry)
        if entry["features"] is None or not file.exists():
            return False
        try:
            load_video(file, self.made_by, self.model, entry["features"])
        except ValueError:
            self.say(f"What was stored of {printable(name)} is damaged, and is made again.")
            file.unlink()
            return False
        return True

    def encode_all(self, waiting: dict[str, Path]) -> None:
        stored = {}
        for name, entry in self.entries.items():
            if name not in waiting:
                stored[entry["content"]] = entry["features"]
        console = Console(stderr=True)
        hidden = not console.is_terminal
        for name, path in track(waiting.items(), "Encoding", console=console, disable=hidden):
            entry = self.entries[name]
            content = entry["content"]
            if stored.get(content):
                self._note_features(name, stored[content])
                continue
            try:
                encoded = self._encode(path, entry)
            except FAILURES as error:
                self._refuse(name, error)
                continue
            with saved_video(encoded, self.index.file(entry), self.made_by) as features:
                # Noted before it is there: a file that is there and was not noted would belong to nobody.
                self._note_features(name, features)
            stored[content] = features

    def _encode(self, path: Path, entry: Entry) -> EncodedVideo:
        encoded = encode(self.model, self.processor, path, device="cpu", **self.sampling.options())
        if not file_state(path).items() <= entry.items():
            raise ValueError("It was changed while it was read; run the same command again.")
        if not encoded.features.isfinite().all():
            raise ValueError("Its features hold NaN or infinity.")
        return encoded

    def _note(self, name: str, entry: Entry | None) -> None:
        self.index.add(name, entry)
        if entry is None:
            del self.entries[name]
        else:
            self.entries[name] = entry

    def _note_features(self, name: str, features: Stored | None) -> None:
        entry = self.entries[name] | {"error": None, "features": features}
        self._note(name, entry)

    def _refuse(self, name: str, error: BaseException) -> None:
        entry = self.entries[name] | {"error": first_line(error), "features": None}
        self._note(name, entry)

    def store_keys(self) -> None:
        """Makes the keys that this model's selector has not made yet."""
        for name, entry in self.entries.items():
            features = entry["features"]
            if features is None or self._has_keys(name, entry):
                continue
            video = load_video(self.index.file(entry), self.made_by, self.model, features)
            keys = token_keys(self.layer, video.features)
            made_from = {"made_by": self.selector, "features": features["digest"]}
            save_keys(self.index.keys_file(entry), video, keys, made_from)

    def _has_keys(self, name: str, entry: Entry) -> bool:
        try:
            return self.index.load_keys(entry, self.model, self.selector) is not None
        except ValueError:
            self.say(f"The keys of {printable(name)} are damaged, and are made again.")
            return False
