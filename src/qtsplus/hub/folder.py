"""Output folders that appear whole or not at all, and never eat a user's files."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

# What an earlier run may have left. Anything else in a folder is the user's.
OWN_FILES = (
    *("config.json", "generation_config.json", "processor_config.json", "chat_template.jinja", "README.md"),
    *("model*.safetensors", "model.safetensors.index.json", "*_qtsplus*.py", "__pycache__"),
    *("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json"),
)


@contextmanager
def whole_folder(folder: str | Path, overwrite: bool = False, own: tuple[str, ...] = OWN_FILES) -> Iterator[Path]:
    """
    A folder beside the target to write to; it takes the target's place when the block ends without an error.

    Args:
        folder: the target. An earlier run's is replaced.
        overwrite: write also into a folder that holds other files; those stay as they are.
        own: patterns of the names that an earlier run may have written.

    Raises:
        FileExistsError: the folder holds other files, or is a file.
        ValueError: it cannot be written, or another process writes it.
    """
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; expected a folder to write to.")
    foreign = _foreign_files(folder, own)
    if foreign and not overwrite:
        raise FileExistsError(
            f"{folder} holds files that are not from an earlier run ({', '.join(foreign[:3])}); "
            "choose another folder or allow overwriting."
        )
    with _sole_writer(folder):
        staging = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed
        staging.mkdir()
        try:
            yield staging
            _move(staging, folder, own)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _sole_writer(folder: Path) -> Iterator[None]:
    """Holds a lock beside the folder, which the system takes from a process that dies."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"Another process is writing {folder}; wait until it is done or choose another.") from error
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error}); choose another folder.") from error
    try:
        yield
    finally:
        # Removed while it is held: who waits for it sees that its file is gone. Windows keeps it until it is released.
        with suppress(PermissionError):
            Path(lock.lock_file).unlink()
        lock.release()


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: no such file, one that cannot be read, or not a JSON object.
    """
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


def update_json(path: Path, **values: Any) -> None:
    """Sets keys of a JSON file."""
    path.write_text(json.dumps({**read_json(path), **values}, indent=2) + "\n", encoding="utf-8")


def remove_from_json(path: Path, *names: str) -> None:
    """Removes keys of a JSON file."""
    content = {name: value for name, value in read_json(path).items() if name not in names}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _move(staging: Path, folder: Path, own: tuple[str, ...]) -> None:
    if not folder.exists():
        staging.rename(folder)
        return
    # The configuration goes first and comes last: without it nothing loads.
    (folder / "config.json").unlink(missing_ok=True)
    for pattern in own:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in sorted(staging.iterdir(), key=lambda path: path.name == "config.json"):
        path.replace(folder / path.name)


def _foreign_files(folder: Path, own: tuple[str, ...]) -> list[str]:
    """Names in the folder that are not an earlier run's, sorted."""
    if not folder.exists():
        return []
    names = sorted(path.name for path in folder.iterdir())
    if not {"modeling_qtsplus.py", "vision_head"} & set(names):
        return names
    return [name for name in names if not any(Path(name).match(pattern) for pattern in own)]


__all__ = ["OWN_FILES", "read_json", "remove_from_json", "update_json", "whole_folder"]
