"""What a library of videos is worth: whether the right file, moment and answer are found among crowds."""

from .run import run_library

__all__ = ["run_library"]
