"""`qtsplus chat`: a conversation about videos, line by line, in a terminal or through a pipe."""

import sys
from typing import Annotated, Any

import typer

from ..asking.choice import Choice
from ..model.sampling_qtsplus import Sampling
from . import options
from .asking import Talk, check_videos, print_answer
from .console import complain, note
from .models import Source


@options.command
def chat(
    videos: Annotated[
        list[str], typer.Argument(help="Video files, http(s) addresses, folders of frames; or a library.")
    ],
    *,
    source: Source,
    choice: Choice,
    sampling: Sampling,
    subtitles: options.Subtitles = None,
    max_new_tokens: options.MaxNewTokens = None,
    as_json: options.AsJson = False,
) -> None:
    """
    Ask about videos again and again. They are encoded once, and a question knows those before.

    Every question to a library searches all of it, and may be answered from another video than the one before. So it
    stands alone, as for `qtsplus ask`: name in each what it is about.

    A question stands on a line of its own; /quit ends. From a pipe, a line that fails makes the exit code 1.
    """
    check_videos(videos, dict(vars(sampling), subtitles=subtitles))
    asking = dict(vars(choice), max_new_tokens=max_new_tokens, subtitles=subtitles)
    try:
        talk = Talk(videos[0], source, choice.selection)
        if not talk.is_library:
            for video in videos:
                encoded = talk.add(video, sampling, subtitles)
                note(f"{encoded.video}: {len(encoded.features)} visual tokens")
        note("/quit ends. Anything else is a question.")
        failed = _listen(talk, asking, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def _listen(talk: Talk, asking: dict[str, Any], as_json: bool) -> int:
    """Answers line by line until they end; the number of lines that failed."""
    failed = 0
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt).strip()
            if text == "/quit":
                return failed
            if text:
                print_answer(talk.ask(text, asking), talk.is_library, as_json)
        except EOFError:
            return failed
        except BrokenPipeError:
            raise  # nobody reads on
        except (ValueError, OSError) as error:
            failed += 1
            complain(error)
