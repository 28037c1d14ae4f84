"""The models that this user has indexed with: a library from elsewhere can have none but these loaded."""

import hashlib
import json
import os
from pathlib import Path


def known_model(made_by: str, name: str, revision: str | None) -> Path:
    """The empty file that is there once this user has indexed with a model of this [`fingerprint`] and name."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    digest = hashlib.sha256(json.dumps([made_by, name, revision]).encode()).hexdigest()
    return Path(cache, "qtsplus", "models", digest)
