"""Makes the base with real words, teaches it a selector by the shipped recipe, and asks it about filmed footage."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from qtsplus import ask, encode, load
from qtsplus.asking.answers import Answer
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import is_finished, last_checkpoint, run_stages

from ..bases import REAL
from .base import save_base, save_parts
from .clips import SECONDS
from .fetch import ATTRIBUTION, ELSEWHERE, fetch
from .reading import train_reading
from .records import write_records
from .tower import train_tower
from .work import HALVES

RECIPE = Path(__file__).resolve().parents[2] / "recipes/qtsplus-3b.yaml"
RECORDS = {"train": 120, "validation": 24, "test": 160}  # clips
CLIPS_ELSEWHERE = 10  # of each video
# Eight of the heads that `qtsplus calibrate` prints; they find as much as all of these (benchmarks/notebook.md).
HEADS = [[2, 4], [5, 6], [8, 0], [8, 1], [9, 2], [14, 3], [15, 6], [15, 7]]
SETTINGS = (  # all in which the recipe's run differs from that of a 3B
    *("model.variant=null", "model.selector.reencode_layers=0"),
    *("data.processor_kwargs={fps: 2}", "training.gradient_checkpointing=false"),
    *(
        "training.gradient_accumulation_steps=4",
        "training.max_steps=100",
        f"training.bf16={HALVES}",
        f"model.dtype={'bfloat16' if HALVES else 'float32'}",
    ),
    f"training.relevance_heads={HEADS}",
    *("training.dataloader_num_workers=0", "training.use_cpu=true", "training.save_steps=40"),
)
# Of the second stage, in which the budget's head is all that learns.
SECOND = (
    *("model.selector.target_n=12", "model.selector.rho_max=0.2", "training.retention_share=0"),
    *("training.learning_rate=1.0e-3", "training.max_steps=150"),
)
ASKED = (
    "What can be seen?",
    "Is there anything to eat?",
    "is there an animal in this video",
    "Which animal can you see?",
    "What appears first?",
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
    """Runs `recipes/qtsplus-3b.yaml` with overrides alone, an hour and a quarter on one core."""
    own = [f"model.weights={work / 'base'}", f"data.train_files=[{work / 'records/train.jsonl'}]"]
    settings = [*SETTINGS, *own, f"training.output_dir={work / 'qtsplus'}"]
    stages = [*load_stages(RECIPE, settings)[:1], *load_stages(RECIPE, [*settings, *SECOND])[1:]]
    if not is_finished(stages[-1].output_dir):
        begun = any(is_finished(stage.output_dir) or last_checkpoint(stage.output_dir) for stage in stages)
        run_stages(stages, resume=begun)
    return stages[-1].output_dir


def ask_real(work: Path) -> tuple[Path, list[tuple[str, Answer, Answer]]]:
    """A clip whose footage no training saw, and what [`ASKED`] is answered from a tenth of its tokens and from all."""
    clip = sorted((work / "records/test").glob("*.mp4"))[1]
    model, processor = load(work / "qtsplus")
    video = encode(model, processor, clip)
    answers = []
    for question in ASKED:
        few = ask(model, processor, video, question, max_new_tokens=32, retention=0.1)
        every = ask(model, processor, video, question, max_new_tokens=32, selection="all")
        answers.append((question, few, every))
    return clip, answers
