"""What the commands print, and how they end."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


def complain(message: str) -> None:
    """Says in one line on standard error what is wrong."""
    # A name in it may hold line breaks, and some libraries write whole paragraphs.
    line = printable(" ".join(message.split()))
    typer.echo(f"qtsplus: {line or 'failed without a message'}", err=True)


def fail(message: str) -> NoReturn:
    """Ends the command with one line on standard error and exit code 2."""
    complain(message)
    raise typer.Exit(2)


def print_json(content: object) -> None:
    """Prints one line on standard output, at once."""
    print(json.dumps(content), flush=True)


class FilledArguments(TyperGroup):
    """A command without empty arguments: those are a script's unset variables, and none means the current folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for argument in args:
            value = argument
            if argument.startswith("--"):
                value = argument.split("=", 1)[-1]
            if not value.strip():
                fail("an argument, or an option's value, is empty; fill it in, or leave it out")
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
    except (ValueError, OSError) as error:
        fail(describe(error))
    except StrictDataclassError as error:
        fail(f"a config.json cannot be used: {' '.join(str(error).split())}")


@contextmanager
def resumable() -> Iterator[None]:
    """An interruption is no failure: what has been done stays on disk."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("qtsplus: interrupted; the same command goes on with what is missing", err=True)
        raise typer.Exit(130) from None


def describe(error: Exception) -> str:
    """What went wrong, for people."""
    if isinstance(error, OSError) and error.strerror:  # without "[Errno 21]"
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error).strip() or type(error).__name__
