"""The models that this user has indexed with: a library from elsewhere can have none but these loaded."""

import os
from pathlib import Path

from pydantic import with_config
from typing_extensions import TypedDict

from .output import locked
from .results import STORED, Journal, Line, Schema
from .storage import Digest


@with_config(STORED)
class KnownModel(TypedDict):
    """A folder or a Hub id."""

    name: str
    revision: str | None


_SCHEMA = Schema(line=Line[Digest, list[KnownModel]])


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache, "qtsplus", "models.jsonl")


def known_models(made_by: str) -> list[KnownModel]:
    """Those with this [`fingerprint`], the one that was used last in front."""
    return Journal(_file(), schema=_SCHEMA).done.get(made_by, []) if _file().exists() else []


def remember_model(made_by: str, model: KnownModel) -> None:
    """Puts a model in front of those with its [`fingerprint`]; `OSError` if the cache cannot be written."""
    with locked(_file().with_suffix(".lock")):
        earlier = known_models(made_by)
        if earlier[:1] != [model]:
            others = [one for one in earlier if one != model]
            Journal(_file(), {}, _SCHEMA).add(made_by, [model, *others])
