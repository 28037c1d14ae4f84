"""What the commands print, and how they end."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import exists
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.segment import Segment
from typer.core import TyperGroup

from ..common.files import printable


class _Console(Console):
    """
    A terminal obeys none of what is printed: names of videos, answers and errors are texts of others. Nor does Rich,
    which would take [brackets] and :words: for styles and pictures.
    """

    def render(self, *renderable: Any, **options: Any) -> Iterator[Segment]:
        for text, style, control in super().render(*renderable, **options):
            yield Segment(text if control else "\n".join(map(printable, text.split("\n"))), style, control)


# Standard output carries results only; everything said on the way goes to standard error.
console = _Console(markup=False, emoji=False)
notes = _Console(stderr=True, highlight=False, markup=False, emoji=False)


def note(line: str) -> None:
    """Says something on the way."""
    notes.print(printable(line), soft_wrap=True)


def wrote(target: object) -> None:
    """Names what a command has made."""
    console.print(f"Wrote {printable(str(target))}", soft_wrap=True, highlight=False)


def complain(message: object) -> None:
    """Says in one line on standard error what is wrong: a text, or an error."""
    text = re.sub(r"^\[Errno -?\d+\] ", "", str(message))
    # A name in it may hold line breaks, and some libraries write whole paragraphs.
    line = printable(" ".join(text.split()))
    typer.echo(f"qtsplus: {line or 'failed without a message'}", err=True)


def fail(message: object, code: int = 2) -> NoReturn:
    """Ends the command with one line on standard error; with exit code 1 if what was typed is not the reason."""
    complain(message)
    raise typer.Exit(code)


def print_json(content: object) -> None:
    """Prints one line on standard output, at once."""
    print(json.dumps(content), flush=True)


class FilledArguments(TyperGroup):
    """A command without empty arguments: those are a script's unset variables, and none means the current folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before = ""
        for argument in args:
            value = argument
            if argument.startswith("--"):
                value = argument.split("=", 1)[-1]
            if not value.strip():
                fail("an argument, or an option's value, is empty; fill it in, or leave it out")
            if argument.startswith("-") and not before.startswith("-") and "--" not in args and exists(argument):
                fail(f"{argument!r} would be taken for an option; write ./{argument} for the file")
            before = argument
        return super().parse_args(ctx, args)


def require_fraction(retention: float | None) -> float | None:
    """The fraction; ends the command for one out of (0, 1]."""
    if retention is not None and not 0 < retention <= 1:
        fail(f"--retention is {retention:g}; expected a fraction in (0, 1]")
    return retention


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad input ends in one line on standard error and exit code 2; anything else is a bug and keeps its traceback."""
    from huggingface_hub.errors import StrictDataclassError
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads on
    except (ValueError, OSError, StrictDataclassError) as error:  # the last is about a field of a config.json
        fail(error)


@contextmanager
def resumable(message: str = "interrupted; the same command goes on with what is missing") -> Iterator[None]:
    """An interruption is no failure: what has been done stays on disk."""
    try:
        yield
    except KeyboardInterrupt:
        fail(message, 130)
