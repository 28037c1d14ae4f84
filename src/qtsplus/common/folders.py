"""Output folders that appear whole or not at all, and never eat a user's files."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError

from .files import check_folder, listed, naming_full_disk, size
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
        FileExistsError: the folder holds other files, or some that were changed since; another process writes it.
        ValueError: an empty name; the folder is a file or cannot be written.
    """
    folder = check_own(folder)
    staging = folder.with_name(f".{folder.name}.partial")
    earlier = folder.with_name(f".{folder.name}.earlier")
    try:
        staging.mkdir(parents=True)
    except FileExistsError as error:
        raise FileExistsError(
            f"Another process is writing {folder}, or was stopped while it did: wait for it, or remove {staging}."
        ) from error
    try:
        with naming_full_disk(folder):
            yield staging
        write_json(staging / WRITTEN, _states(staging))
        if folder.exists():
            folder.rename(earlier)
        staging.rename(folder)
        shutil.rmtree(earlier, ignore_errors=True)  # it holds only what an earlier run wrote
    finally:
        if earlier.exists() and not folder.exists():
            earlier.rename(folder)
        shutil.rmtree(staging, ignore_errors=True)


def check_own(folder: str | Path, *sources: str | Path) -> Path:
    """
    The folder of [`whole_folder`], before anything is computed for it; raises as that does, and `ValueError` for a
    folder in one of the sources that are read.
    """
    folder = check_folder(folder)
    for source in sources:
        place = Path(source).resolve()
        if place.is_dir() and folder.is_relative_to(place):
            raise ValueError(f"{folder} is in the source {source}; choose another folder to write to.")
    written = {}
    if (folder / WRITTEN).is_file():
        written = read_json(folder / WRITTEN)
    others = [name for name, state in _states(folder).items() if written.get(name) != state]
    if others:
        raise FileExistsError(
            f"{folder} holds files that an earlier run did not write, or that were changed since ({listed(others)}); "
            "choose another folder, or move them away."
        )
    return folder


def _states(folder: Path) -> dict[str, State]:
    """The state of every file below a folder, by its name in there."""
    states = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_file = path.is_symlink() or path.is_file()
        if is_file and "__pycache__" not in path.parts and name != WRITTEN:
            states[name] = file_state(path, follow_symlinks=False)
    return states


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


@contextmanager
def within_memory(most: int) -> Iterator[None]:
    """On Linux, raises `ValueError` where the process allocates more bytes."""
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm").read_text().split()[0]
    limit = int(pages) * resource.getpagesize() + most
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except MemoryError as error:
        raise ValueError(f"it takes more than {size(most)} of memory.") from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def read_json(path: Path) -> Document:
    """A JSON object; a `ValueError` for no such file, one that cannot be read, or other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return content
