"""Makes the base with real words, teaches it a selector, and asks it about filmed footage."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from qtsplus import ask, encode, load
from qtsplus.asking.answers import Answer
from qtsplus.evaluation.calibration import calibrate, write_attention
from qtsplus.evaluation.labelled import labelled_questions
from qtsplus.training.models import load_either
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import last_checkpoint, run_stages

from ..bases import REAL
from .base import save_base, save_parts
from .clips import SECONDS
from .fetch import ATTRIBUTION, ELSEWHERE, fetch
from .labels import STEPS, teach_from_labels
from .reading import train_reading
from .records import write_records
from .settings import RECIPE, SETTINGS
from .tower import train_tower

RECORDS = {"train": 120, "validation": 12, "test": 160}  # clips
CLIPS_ELSEWHERE = 10  # of each video
ASKED = (
    "What can be seen?",
    "Is there an elephant?",  # there is
    "Is there a cat?",  # there is none
    "Is there anything to eat?",
    "Which animal can you see?",
)


def make_real(work: Path, minutes: float, say: Callable[[str], None] = print) -> Path:
    """
    Goes on where the last call stopped.

    Args:
        minutes: of training a base anew; 0 takes what this repository has of one.

    Returns:
        `work/qtsplus`, the base with a selector; beside it `work/base`, a stock Qwen2.5-VL, and `work/records`, what
        they are trained and asked with.
    """
    start, parts = time.monotonic(), REAL / "parts.safetensors"
    say(ATTRIBUTION)
    fetch(work)
    if minutes:
        parts = work / "parts.safetensors"
        train_tower(work, minutes)
        train_reading(work, minutes - (time.monotonic() - start) / 60)
        save_parts(work, parts)
    save_base(work, parts, work / "base")
    for split, clips in RECORDS.items():
        say(f"Clips with questions: {write_records(work, work / 'records', split, clips, max(SECONDS))}")
    write_records(work, work / "records", "test", RECORDS["test"], max(SECONDS), held_out=True)
    write_elsewhere(work)
    return teach_selector(work)


def write_elsewhere(work: Path) -> None:
    """Records about videos that taught nothing: in trained wordings, in free ones, and of the videos alone."""
    for name in ELSEWHERE:
        write = partial(write_records, work, work / "records", f"video-{name}", CLIPS_ELSEWHERE)
        write()
        write(held_out=True)
        write(plain=True)


def teach_selector(work: Path) -> Path:
    """
    Labels teach the scores and calibrate `seen`; the second stage of the shipped recipe, with [`SETTINGS`], teaches the
    budget; and `calibrate` decides by answers which layer `selection="lm_attention"` reads.
    """
    labels, folder = work / "labels-0", work / "qtsplus"
    if not (labels / "processor_config.json").is_file():
        teach_from_labels(work, [0], STEPS)
    own = [
        f"model.weights={labels}",
        f"data.train_files=[{work / 'records/train.jsonl'}]",
        f"data.features={work / 'features'}",
        f"training.output_dir={folder}",
    ]
    stage = load_stages(RECIPE, [*SETTINGS, *own])[-1]
    if not (folder / "trainer_state.json").exists():
        stage = replace(stage, model=replace(stage.model, weights=str(labels)))
        run_stages([stage], resume=last_checkpoint(folder) is not None)
    model, processor = load_either(str(folder))
    if model.config.qtsplus_config.attention_layer is None:
        questions = labelled_questions(work / "records/validation.jsonl")
        write_attention(folder, calibrate(model, processor, questions))
    return folder


def ask_real(work: Path) -> tuple[Path, list[Answer]]:
    """A clip whose footage no training saw, and answers to [`ASKED`]."""
    clip = sorted((work / "records/test").glob("*.mp4"))[1]
    model, processor = load(work / "qtsplus")
    video = encode(model, processor, clip)
    return clip, [ask(model, processor, video, question, max_new_tokens=32) for question in ASKED]
