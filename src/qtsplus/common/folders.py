"""Output folders that appear whole or not at all, and never eat a user's files."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError

from .files import check_folder, listed, locked, naming_full_disk, whole_file
from .journals import Document, State, file_state, write_json

# In every folder that is written here: what was written, so that a later run replaces that and nothing else.
WRITTEN = ".qtsplus-files.json"
# What Transformers and its parsers raise for a file whose content is not what its name says: with a message for users,
# or without.
_SPEAKING = (OSError, ValueError, ImportError, StrictDataclassError)
_SILENT = (
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    UnpicklingError,
    SafetensorError,
    TemplateError,
)


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """
    A folder beside the target to write to; it takes the target's place when the block ends without an error. What an
    earlier run wrote there is replaced.

    Raises:
        FileExistsError: the folder holds other files, or some that were changed since.
        ValueError: an empty name; the folder is a file or cannot be written, or another process writes it.
    """
    folder = check_own(folder)
    with _sole_writer(folder):
        staging = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed
        staging.mkdir()
        try:
            with naming_full_disk(folder):
                yield staging
            _move(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def check_own(folder: str | Path) -> Path:
    """The folder of [`whole_folder`], before anything is computed for it; raises as that does."""
    folder = check_folder(folder).resolve()
    others = set()
    if (folder / WRITTEN).is_file():
        others = _files(folder).keys() - _unchanged(folder)
    elif folder.exists():
        others = {path.name for path in folder.iterdir()}
    if others:
        raise FileExistsError(
            f"{folder} holds files that an earlier run did not write, or that were changed since "
            f"({listed(sorted(others))}); choose another folder, or move them away."
        )
    return folder


@contextmanager
def _sole_writer(folder: Path) -> Iterator[None]:
    """Holds a lock beside the folder."""
    path = folder.with_name(f".{folder.name}.lock")
    try:
        lock = locked(path, f"is writing {folder}")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error}); choose another folder.") from error
    with lock:
        try:
            yield
        finally:
            # Removed while it is held: who waits for it sees that its file is gone. Windows keeps it until then.
            with suppress(PermissionError):
                path.unlink()


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Raises one `ValueError` that names the file, whatever reading it raises."""
    try:
        yield
    except Exception as error:
        # All kinds have to be caught because the tokenizers library raises `Exception` itself, for example for merges
        # outside of the vocabulary; every kind that is not expected is raised again.
        is_expected = isinstance(error, _SPEAKING + _SILENT) or type(error) is Exception
        if not is_expected:
            raise
        reason = " ".join(str(error).split())
        if isinstance(error, ModuleNotFoundError):
            reason += f", which it needs; install it, such as by pip install {error.name}."
        if not isinstance(error, _SPEAKING):
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{what} cannot be used: {reason}") from error


def read_json(path: Path) -> Document:
    """A JSON object; a `ValueError` for no such file, one that cannot be read, or other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"There is no {path}.") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return content


def update_json(path: Path, drop: tuple[str, ...] = (), **values: object) -> None:
    """Sets and removes keys of a JSON file."""
    content = read_json(path) | values
    for name in drop:
        content.pop(name, None)
    with whole_file(path) as file:
        file.write(json.dumps(content, indent=2) + "\n")


def _move(staging: Path, folder: Path) -> None:
    if not folder.exists():
        write_json(staging / WRITTEN, _files(staging))
        staging.rename(folder)
        return
    # The configuration goes first and comes last: without it nothing loads.
    (folder / "config.json").unlink(missing_ok=True)
    for name in _unchanged(folder):
        (folder / name).unlink(missing_ok=True)
    names = sorted(_files(staging), key=lambda name: name == "config.json")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(folder / name)
    # Written last, since a move can change the state of a file.
    states = {name: file_state(folder / name, follow_symlinks=False) for name in names}
    write_json(folder / WRITTEN, states)


def _files(folder: Path) -> dict[str, State]:
    """The state of every file below a folder, by its name in there."""
    states = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if "__pycache__" in path.parts or name == WRITTEN:
            continue
        if path.is_symlink() or path.is_file():
            states[name] = file_state(path, follow_symlinks=False)
    return states


def _unchanged(folder: Path) -> set[str]:
    """The files of a folder that are as an earlier run left them."""
    if not (folder / WRITTEN).is_file():
        return set()
    written = read_json(folder / WRITTEN)
    return {name for name, state in _files(folder).items() if written.get(name) == state}
