"""The bundled tiny model as a Hub folder, and `qtsplus demo` around it."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from . import loading, session
from .hub.files import hub_configs
from .hub.folder import whole_folder
from .hub.publish import assemble_folder, code_files

TINY = "qtsplus-tiny"
CLIP = Path(__file__).with_name("demo.mp4")  # 8 s of shapes, which training never saw


class Question(NamedTuple):
    """What the demo asks about [`CLIP`], and what is true."""

    question: str
    answer: str


QUESTIONS = (
    Question("What is in the yellow ring?", "ball"),
    Question("Which colours does the cross take?", "yellow blue orange"),
)


def cached_tiny() -> Path:
    """
    The tiny variant as a Hub folder in the user's cache, built when it is not there yet.

    The folder's name carries a hash of the code and the configuration that made it, so a changed package never loads an
    earlier one's folder. Of several processes, one builds it and the others wait.

    Raises:
        ValueError: the cache cannot be written.
    """
    made_from = [*code_files(), *sorted(path for path in (hub_configs() / TINY).iterdir() if path.is_file())]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in made_from)).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "qtsplus"
    folder = cache / f"{TINY}-{digest}"
    try:
        if not (folder / "config.json").exists():
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{folder.name}.lock"):
                if not (folder / "config.json").exists():
                    assemble_folder(TINY, folder)
    except OSError as error:
        raise ValueError(
            f"The bundled model cannot be kept at {cache} ({error}): set XDG_CACHE_HOME to a folder that can be "
            "written, or name a model with --model."
        ) from error
    return folder


def run_demo(out: Path, say: Callable[[str], None]) -> list[tuple[Question, session.Answer]]:
    """
    Publishes the tiny model, loads it back as remote code, asks two questions about a clip, and draws what it kept.

    Args:
        out: folder for `clip.mp4`, `qtsplus-tiny/` and `kept_tokens.png`, as [`whole_folder`] writes it.

    Returns:
        both questions, with the true answers, and what the model answered.
    """
    # Matplotlib wants a folder in the user's home; who only asks the tiny model does without.
    from .picture import draw_kept_tokens

    with whole_folder(out) as staging:
        shutil.copyfile(CLIP, staging / "clip.mp4")
        say(f"Copied {out / 'clip.mp4'}, an 8 s H.264 clip that the model has never seen.")
        folder = assemble_folder(TINY, staging / TINY)
        say(f"Published {TINY} to {out / TINY}.")

        model, processor = loading.load(folder)
        say(f"Loaded it back as remote code: {type(model).__name__} from {type(model).__module__.split('.')[0]}.")
        encoded = session.encode(model, processor, CLIP)
        answers = [session.ask(model, processor, encoded, one.question, max_new_tokens=16) for one in QUESTIONS]

        chunks = processor.video_chunks(CLIP)
        # Two frames make one step in time.
        frames = np.stack([chunks.resize(frame) for frame in chunks.decode()])[::2]
        kept = []
        for question, one in zip(QUESTIONS, answers, strict=True):
            title = f"“{question.question}” {one.answer}: {one.kept_tokens} of {one.visual_tokens} visual tokens"
            kept.append((title, one.keep_map))
        draw_kept_tokens(frames, kept, chunks.second_per_grid_ts[0], staging / "kept_tokens.png")
        say(f"Drew the kept tokens to {out / 'kept_tokens.png'}.")
    return list(zip(QUESTIONS, answers, strict=True))
