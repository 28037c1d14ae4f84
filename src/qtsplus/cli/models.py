"""Loads the model that a question goes to, and says first whose code that runs."""

import os
from pathlib import Path
from typing import Any

from .console import fail, note, notes


def check_model_options(model: str | None, revision: str | None) -> None:
    """Ends the command for a revision of no repository, before anything heavy is imported."""
    if revision is not None and (model is None or os.path.isdir(model)):
        fail("--revision is about a repository on the Hub; name one with --model ORG/NAME")


def check_selection(selection: str | None) -> None:
    """Ends the command for a name that is no selection method."""
    from ..methods_qtsplus import METHODS

    if selection is not None and selection not in METHODS:
        fail(f"--selection is {selection!r}; expected one of {', '.join(METHODS)}")


def load_model(model: str | None, revision: str | None, device: str | None, dtype: str = "auto") -> tuple[Any, Any]:
    """The model and its processor; the bundled ones without a name. Raises as `loading.load`."""
    from .. import loading

    name = name_model(model, revision)
    with notes.status("Loading the model"):
        return loading.load(name, device, dtype, revision=revision)


def open_library(folder: Path, model: str | None, revision: str | None, device: str | None, dtype: str = "auto") -> Any:
    """A library with the model that made it, or with the one that is named."""
    from ..library import Index, Library

    if model is None:
        model, revision = Index(folder).model
    library = Library(folder, *load_model(model, revision, device, dtype))
    if library.missing:
        note(f"{len(library.missing)} videos of the library are not encoded yet: run `qtsplus index` again.")
    return library


def name_model(model: str | None, revision: str | None) -> str:
    """The folder or Hub id that a command is to load, whose code it announces; the bundled one's without a name."""
    from transformers.utils import HF_MODULES_CACHE

    try:
        os.makedirs(HF_MODULES_CACHE, exist_ok=True)
    except OSError as error:
        raise OSError(f"A model's code goes to {HF_MODULES_CACHE}, which cannot be written: set HF_HOME.") from error
    if model is not None:
        _announce_code(model, revision)
        return model
    from ..demo import cached_tiny

    folder = cached_tiny()
    note(f"No --model given: using the bundled tiny model at {folder}, which knows only rendered shapes.")
    return str(folder)


def _announce_code(model: str, revision: str | None) -> None:
    """Models with a selector bring their own code; who names one has to know that it runs."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from ..hub.folder import read_json

    if Path(model).is_dir():
        if "auto_map" in read_json(Path(model) / "config.json"):
            note(f"The Python code in the folder {model} will run (trust_remote_code).")
        return
    try:
        validate_repo_id(model)
    except HFValidationError:
        return  # neither a folder nor a repository: loading will say so
    pinned = f" at {revision}" if revision else ""
    hint = "" if revision else " Pin it to a commit that you have read with --revision."
    note(f"The Python code of the Hub repository {model}{pinned} will run (trust_remote_code).{hint}")
