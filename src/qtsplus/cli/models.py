"""Loads the model that a question goes to."""

import os
import re
from pathlib import Path
from typing import Any, TypeVar

from .console import fail, note, notes

Name = TypeVar("Name", str, str | None)


def split_revision(model: Name) -> tuple[Name, str | None]:
    """A folder or Hub id, and what stands behind the @ of an id: a commit, branch or tag."""
    match = None if model is None or os.path.exists(model) else re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)@(.+)", model)
    if match is None:
        return model, None
    if os.path.isdir(match[1]):
        fail(f"{model}: {match[1]} is a folder, and @{match[2]} is about a repository on the Hub; leave it out")
    return match[1], match[2]


def load_named(model: str | None, revision: str | None, device: str | None, dtype: str = "auto") -> tuple[Any, Any]:
    """The model and its processor; the bundled ones without a name. Raises as `loading.load`."""
    from ..hub import loading

    name = name_model(model)
    with notes.status("Loading the model"):
        return loading.load(name, device, dtype, revision=revision)


def open_library(folder: Path, model: str | None, revision: str | None, device: str | None, dtype: str = "auto") -> Any:
    """A library with the model that made it, or with the one that is named."""
    from ..library.library import Index, Library

    if model is None:
        model, revision = Index(folder).model
    library = Library(folder, *load_named(model, revision, device, dtype))
    for warning in library.warnings:
        note(warning)
    return library


def name_model(model: str | None) -> str:
    """The folder or Hub id that a command is to load; the bundled model's, which it announces, without a name."""
    if model is not None:
        return model
    from ..hub.files import bundled_model

    note("No --model given: using the bundled tiny model, which knows only rendered shapes.")
    return str(bundled_model())
