"""What a library of videos is worth: whether the right file, moment and answer are found among crowds."""

from .evidence import run_evidence
from .run import run_library

__all__ = ["run_evidence", "run_library"]
