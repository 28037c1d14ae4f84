"""Encodes the videos of a folder into a library, and keeps the library as the folder is."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, ProcessorMixin
from typing_extensions import Unpack

from ..asking.ranking import keys_fingerprint, scoring_layer, token_keys
from ..common.files import check_folder, counted, first_line, listed, require_space, size, working_in
from ..common.journals import file_state
from ..data.media import VIDEO_SUFFIXES
from ..hub.files import TINY
from ..model.sampling_qtsplus import Sampling, SamplingOptions, read_options
from ..video.encoded import FAILURES, encode, open_chunks, with_bar
from ..video.storage import SAMPLING, Stored, fingerprint, load_video, measure, save_keys, saved_video
from .library import INDEX, MADE, Entry, Index

Files = dict[str, Path]  # videos by their names, which are their paths in the folder


def index(
    videos: str | Path,
    folder: str | Path,
    model,
    processor,
    *,
    name: str = TINY,
    prune: bool = False,
    say: Callable[[str], None] = print,
    **options: Unpack[SamplingOptions],
) -> Index:
    """
    Encodes the videos of a folder, and of the folders in it, that the library does not hold yet; hidden files and
    folders are passed over. Each is on disk when the next begins. The content of a file decides: a file that was moved
    is known again.

    Args:
        videos: the folder; a video is called by its path in it.
        folder: the library, which need not be there yet.
        name: what the model is called, such as its folder, for messages about another one.
        prune: remove videos whose files are gone or can no longer be read, which is an error otherwise, and also if the
            folder holds no video at all.
        say: takes a line: what is to be done, and its size on disk.
        options: as for [`encode`], the fields of [`Sampling`], such as `fps`.

    Raises:
        OSError: a folder that cannot be read; a disk that is full; other files where the library is to be.
        ValueError: no video; a library of another vision tower or settings, or one that another process is writing;
            videos of the library are gone; a disk without room for the features; a selector with several scoring
            layers.
    """
    videos = Path(videos)
    folder = Path(folder)
    files = find_videos(videos, folder)
    made_by = fingerprint(model, processor)
    sampling = read_options(index, options)
    names = sorted(path.name for path in check_folder(folder).glob("[!.]*"))
    if names and INDEX not in names:
        raise FileExistsError(
            f"{folder} is no library and holds files ({listed(names)}); choose another folder, or move them away."
        )
    with working_in(folder):
        journal = folder / INDEX
        if journal.exists() and journal.stat().st_size:
            Index(folder).require(made_by)
        library = Index(folder, _sampling(processor, sampling) | {"made_by": made_by})
        indexing = _Indexing(library, model, processor, sampling, say)
        place = str(videos.resolve())
        indexing.recognise(files, place, prune)
        library.add(MADE, {"model": name, "videos": place})
        indexing.encode_all(indexing.find_waiting(files))
        indexing.store_keys()
    return library


def find_videos(root: Path, library: Path) -> Files:
    """
    The videos of a folder and of the folders in it, also behind links to folders, by their paths in it. A `ValueError`
    if there are none and the library is not there yet.
    """
    if not root.is_dir():
        raise ValueError(f"There is no folder {str(root)!r}; expected one with videos.")

    def fail(error: OSError) -> None:
        raise error  # else what cannot be read would pass for what is gone

    videos = {}
    seen = set()
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
    if not videos and not (library / INDEX).is_file():
        raise ValueError(f"There is no video in {root}; expected files such as .mp4.")
    return dict(sorted(videos.items()))


def _sampling(processor, stated: Sampling) -> dict:
    """How frames are sampled: as the processor does, unless [`index`] was told otherwise."""
    sampling = {name: getattr(processor.video_processor, name, None) for name in SAMPLING}
    for name, value in vars(stated).items():
        if value is not None or name not in sampling:
            sampling[name] = value
    return sampling


@dataclass
class _Indexing:
    """One run of [`index`]."""

    index: Index
    model: PreTrainedModel
    processor: ProcessorMixin
    sampling: Sampling
    say: Callable[[str], None]

    def __post_init__(self):
        self.made_by = self.index.settings["made_by"]
        self.layer = scoring_layer(self.model)
        self.selector = keys_fingerprint(self.model)

    def recognise(
        self,
        files: Files,
        folder: str,
        prune: bool,
    ) -> None:
        """Notes the content of each file that is new or was changed, and forgets files that are gone."""
        known = self.known = self.index.entries
        encoded = {entry["content"]: entry["features"] for entry in known.values()}
        after = {name: self._look(path, known.get(name), encoded) for name, path in files.items()}
        self.earlier = {} if prune else known  # what stays where new files cannot be encoded
        contents = {entry["content"] for name, entry in after.items() if entry != known.get(name)}
        lost = self._lost(after, contents, folder)
        readable = sum(entry["error"] is None for entry in known.values())
        what = f"{len(lost)} of {counted(readable, 'video')}"
        if lost and not (prune and files):  # a disk that is not mounted looks like an empty folder
            raise ValueError(
                f"{what} of {self.index.folder} are not in {folder}, or cannot be read: {listed(lost)}. Nothing was "
                "changed. Is another folder to be mounted there? To let them go, run the same command with --prune; to "
                "let all go, remove the library."
            )
        if lost:
            self.say(f"The library loses {what}: {listed(lost)}")
        for name in known.keys() - files.keys():
            self.index.add(name, None)
        for name, entry in after.items():
            if entry != known.get(name):
                self.index.add(name, entry)

    def _look(
        self,
        path: Path,
        earlier: Entry | None,
        encoded: dict[str | None, Stored | None],
    ) -> Entry:
        """The entry of a file as it is now; the earlier one where the file is unchanged."""
        try:
            state = file_state(path)
            if earlier and state.items() <= earlier.items():
                return earlier
            content = measure(path)["digest"]
            if earlier and earlier["features"] and content not in encoded:
                open_chunks(self.processor, path, self.sampling)
        except FAILURES as error:
            return Entry(
                size=0,
                modified=0,
                inode=0,
                changed=0,
                content=None,
                error=first_line(getattr(error, "strerror", error)),
                features=None,
            )
        return Entry(
            **state,
            content=content,
            error=None,
            features=encoded.get(content),
        )

    def _lost(
        self,
        after: dict[str, Entry],
        contents: set[str | None],
        folder: str,
    ) -> list[str]:
        """
        The videos that would leave the library; another folder may be meant, or is to be mounted.

        Args:
            contents: of files that are new or were changed. A video that is one of them was moved.
        """
        is_same_folder = MADE in self.index.done and folder == self.index.made["videos"]
        lost = []
        for name, entry in self.known.items():
            stays = entry["content"] in contents
            # In another folder, the same name is another video's.
            if name in after and (is_same_folder or after[name] == entry):
                stays = after[name]["content"] is not None
            if entry["error"] is None and not stays:
                lost.append(name)
        return lost

    def find_waiting(self, files: Files) -> Files:
        """
        The files that are to be encoded, once it is said how large their features and keys are; a `ValueError` for a
        disk without room.
        """
        waiting = {}
        tokens = {}  # by content: copies share what is stored
        for name, path in files.items():
            entry = self.index.done[name]
            content = entry["content"]
            if content is None or self._is_stored(entry):
                continue
            try:
                chunks = open_chunks(self.processor, path, self.sampling)
            except FAILURES as error:
                self._refuse(name, error)
                continue
            waiting[name] = path
            tokens[content] = int(chunks.video_grid_thw.prod()) // self.processor.video_processor.merge_size**2
        if waiting:
            folder = self.index.folder
            what = f"{len(waiting)} of {counted(len(files), 'video')}"
            count = sum(tokens.values())
            bytes_of_features = self.model.model.token_width * self.model.dtype.itemsize
            needed = count * (bytes_of_features + self.layer.k_proj.out_features)
            self.say(f"Encoding {what}: {count:,} tokens, {size(needed)} in {folder}.")
            require_space(folder, needed, f"the features of {what}")
        return waiting

    def _is_stored(self, entry: Entry) -> bool:
        """
        Whether the file of its features is there, and is the one that was noted. It is read only if no keys were made
        from it: the last lines of the journal may be lost, and then the file is newer than what is noted.
        """
        file = self.index.file(entry)
        features = entry["features"]
        if features is None or not file.exists() or file.stat().st_size != features["size"]:
            return False
        return self.index.load_keys(entry, self.model, self.selector) is not None or measure(file) == features

    def encode_all(self, waiting: Files) -> None:
        for name, path in with_bar(waiting.items(), "Encoding"):
            entry = self.index.done[name]
            if self._is_stored(entry):  # as of a copy
                continue
            try:
                encoded = encode(self.model, self.processor, path, device="cpu", **vars(self.sampling))
                if not file_state(path).items() <= entry.items():
                    raise ValueError("It was changed while it was read; run the same command again.")
            except FAILURES as error:
                self._refuse(name, error)
                continue
            self.index.keys_file(entry).unlink(missing_ok=True)  # or `_is_stored` would take them for its proof
            with saved_video(encoded, self.index.file(entry), self.made_by) as features:
                # Noted before it is there: a file that is there and was not noted would belong to nobody.
                for copy, known in self.index.entries.items():
                    if known["content"] == entry["content"]:
                        self.index.add(copy, known | {"error": None, "features": features})
        # Features and keys go once no video of the library has their content.
        contents = {entry["content"] for entry in self.index.entries.values()}
        for entry in self.known.values():
            if entry["content"] not in contents:
                self.index.file(entry).unlink(missing_ok=True)
                self.index.keys_file(entry).unlink(missing_ok=True)

    def _refuse(self, name: str, error: BaseException) -> None:
        earlier = self.earlier.get(name)
        if earlier and self.index.file(earlier).exists():
            self.say(f"{name} keeps its earlier features: {first_line(error)}")
            self.index.add(name, earlier)
            return
        self.index.add(name, self.index.done[name] | {"error": first_line(error), "features": None})

    def store_keys(self) -> None:
        """Makes the keys that this model's selector has not made yet."""
        for entry in self.index.entries.values():
            features = entry["features"]
            if features is None or self.index.load_keys(entry, self.model, self.selector) is not None:
                continue
            video = load_video(self.index.file(entry), self.made_by, self.model, features)
            keys = token_keys(self.layer, video.features)
            made_from = {"made_by": self.selector, "features": features["digest"]}
            save_keys(self.index.keys_file(entry), video, keys, made_from)
