"""Loads the model that a question goes to."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from .console import fail, note, notes

Name = TypeVar("Name", str, str | None)


def split_revision(model: Name) -> tuple[Name, str | None]:
    """A folder or Hub id, and what stands behind the @ of an id: a commit, branch or tag."""
    if model is None or os.path.exists(model):
        return model, None
    match = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)@(.+)", model)
    if match is None:
        return model, None
    if os.path.isdir(match[1]):
        fail(f"{model}: {match[1]} is a folder, and @{match[2]} is about a repository on the Hub; leave it out")
    return match[1], match[2]


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and how it is loaded; the bundled one without a name."""

    model: str | None
    revision: str | None
    device: str | None
    dtype: str = "auto"

    def load(self) -> tuple[Any, Any]:
        """The model and its processor. Raises as `loading.load`."""
        from ..hub import loading

        name = name_model(self.model)
        with notes.status("Loading the model"):
            return loading.load(name, self.device, self.dtype, revision=self.revision)


def open_library(folder: Path, source: Source) -> Any:
    """A library with the model that made it, or with the one that is named."""
    from ..library.library import Index, Library

    if source.model is None:
        name, revision = Index(folder).model
        source = replace(source, model=name, revision=revision)
    library = Library(folder, *source.load())
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
