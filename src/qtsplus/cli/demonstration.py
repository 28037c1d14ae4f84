"""`qtsplus demo`: the bundled tiny model as a Hub folder, and what it sees in a clip."""

import shutil
from pathlib import Path
from typing import NamedTuple

from ..asking import session
from ..common.folders import whole_folder
from ..hub import loading
from ..hub.files import TINY
from ..hub.publish import assemble_folder

CLIP = Path(__file__).with_name("demo.mp4")  # 8 s of shapes, which training never saw


class Example(NamedTuple):
    """What the demo asks about [`CLIP`], and what is true."""

    question: str
    answer: str


QUESTIONS = (
    Example("What is in the yellow ring?", "ball"),
    Example("Which colours does the cross take?", "yellow blue orange"),
)


def run_demo(out: Path) -> list[tuple[Example, session.Answer]]:
    """
    Publishes the tiny model, loads it back, asks two questions about a clip, and draws what it kept.

    Args:
        out: folder for `clip.mp4`, `qtsplus-tiny/` and a picture for each question, as [`whole_folder`] writes it.

    Returns:
        both questions, with the true answers, and what the model answered.
    """
    # Matplotlib wants a folder in the user's home; who only asks the tiny model does without.
    from ..asking.picture import draw_spans

    with whole_folder(out) as staging:
        shutil.copyfile(CLIP, staging / "clip.mp4")
        folder = assemble_folder(TINY, staging / TINY)

        model, processor = loading.load(folder)
        encoded = session.encode(model, processor, CLIP)
        answered = []
        for number, example in enumerate(QUESTIONS, 1):
            answer = session.ask(model, processor, encoded, example.question, max_new_tokens=16)
            draw_spans(encoded, answer.keep_map, answer.evidence, staging / f"evidence-{number}.png")
            answered.append((example, answer))
    return answered
