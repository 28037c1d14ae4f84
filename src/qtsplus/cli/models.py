"""Loads the model that a question goes to."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .console import note, notes

if TYPE_CHECKING:
    from ..library.library import Library
    from ..model.methods_qtsplus import MethodOrName


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def split_revision(model: str) -> tuple[str, str | None]:
    """A folder or Hub id, and what stands behind the @ of an id: a commit, branch or tag."""
    match = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)@(.+)", model)
    if match is None or os.path.exists(model):
        return model, None
    return match[1], match[2]


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and how it is loaded; the bundled one without a name."""

    model: str | None = None
    device: str | None = None
    dtype: Dtype = "auto"

    def name(self) -> tuple[str, str | None]:
        """Its folder or Hub id, and a revision of the latter; the bundled model's, which is announced."""
        if self.model is not None:
            return split_revision(self.model)
        from ..hub.files import TINY, hub_configs

        note("No --model given: using the bundled tiny model, which knows only rendered shapes.")
        return str(hub_configs() / TINY), None

    def load(self, selection: "MethodOrName | None" = None) -> tuple[Any, Any]:
        """The model and its processor, once the method that will choose tokens is known. Raises as `loading.load`."""
        from ..hub import loading
        from ..model.methods_qtsplus import add_method

        add_method(selection)
        name, revision = self.name()
        with notes.status("Loading the model"):
            return loading.load(name, self.device, self.dtype, revision=revision)


def open_library(folder: Path, source: Source, selection: str | None = None) -> "Library":
    """A library, with the model that answers questions about it."""
    from ..library.library import Index, Library

    Index(folder)  # raises for a folder that is no library before the model is loaded
    library = Library(folder, *source.load(selection))
    for warning in library.warnings:
        note(warning)
    return library
