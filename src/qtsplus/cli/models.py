"""Loads the model that a question goes to."""

import os
from pathlib import Path
from typing import Any

from .console import fail, note, notes


def check_model_options(model: str | None, revision: str | None) -> None:
    """Ends the command for a revision of no repository, before anything heavy is imported."""
    if revision is not None and (model is None or os.path.isdir(model)):
        fail("--revision is about a repository on the Hub; name one with --model ORG/NAME")


def load_named(model: str | None, revision: str | None, device: str | None, dtype: str = "auto") -> tuple[Any, Any]:
    """The model and its processor; the bundled ones without a name. Raises as `loading.load`."""
    from .. import loading

    name = name_model(model)
    with notes.status("Loading the model"):
        return loading.load(name, device, dtype, revision=revision)


def open_library(folder: Path, model: str | None, revision: str | None, device: str | None, dtype: str = "auto") -> Any:
    """A library with the model that made it, or with the one that is named."""
    from ..library import Index, Library

    if model is None:
        model, revision = Index(folder).model
    library = Library(folder, *load_named(model, revision, device, dtype))
    if library.missing:
        note(f"{len(library.missing)} videos of the library are not encoded yet: run `qtsplus index` again.")
    return library


def name_model(model: str | None) -> str:
    """The folder or Hub id that a command is to load; the bundled model's, which it announces, without a name."""
    if model is not None:
        return model
    from ..hub.files import bundled_model

    note("No --model given: using the bundled tiny model, which knows only rendered shapes.")
    return str(bundled_model())
