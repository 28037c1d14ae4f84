"""What the commands print, and how they end."""

import os
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
    if "tqdm" in sys.modules:
        for bar in list(sys.modules["tqdm"].tqdm._instances):
            bar.close()  # a Trainer's bar does not end its line by itself
    complain(message)
    raise typer.Exit(2)


class FilledArguments(TyperGroup):
    """A command without empty arguments: those are a script's unset variables, and none means the current folder."""

    def main(self, *args: Any, **options: Any) -> Any:
        """As Typer's; where standard output takes no more, one line, or none if nobody reads it."""
        code: Any = 0
        try:
            try:
                super().main(*args, **options)
            except SystemExit as end:
                code = end.code
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError as error:
            if error.filename is not None or sys.stdout is not sys.__stdout__:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains when it ends
            if not code and not isinstance(error, BrokenPipeError):
                complain(f"standard output: {error.strerror}")
            code = code or 1
        sys.exit(code)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before = ""
        for argument in args:
            name = before
            value = argument
            if argument.startswith("--"):
                name, _, value = argument.rpartition("=")
            if not value.strip():
                option = name if name.startswith("--") and "=" not in name else "an argument"
                fail(f"{option} is empty; give a value, or leave it out")
            before = argument
        return super().parse_args(ctx, args)


def require_fraction(retention: float | None) -> float | None:
    """The fraction; ends the command for one out of (0, 1]."""
    if retention is not None and not 0 < retention <= 1:
        fail(f"--retention is {retention:g}; expected a fraction in (0, 1]")
    return retention


def read_pairs(option: str, given: list[str] | None) -> dict[str, str]:
    """`["n_max=512"]` as `{"n_max": "512"}`; ends the command for what is no such thing."""
    pairs: dict[str, str] = {}
    has_twice = False
    for text in given or ():
        name, _, value = text.partition("=")
        if not name or not value:
            fail(f"{option} is {text!r}; expected a name and a value, such as n_max=512")
        has_twice = has_twice or name in pairs
        pairs[name] = value
    if has_twice:
        fail(f"{option} has a name twice; expected one value of each")
    return pairs


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
    text = str(error).strip()
    if text.startswith("Caught ") and "DataLoader worker" in text:
        text = text.splitlines()[-1]  # PyTorch puts the worker's traceback in front of what happened
    return text or type(error).__name__
