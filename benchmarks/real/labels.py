"""
Teaches a selector from labels: which tokens show what is asked for, and whether anything does.

    python -m benchmarks.real.labels WORK SEED ... [--steps STEPS]

In the recipe's first stage the null token learns how much of the language model's attention the video gets, and a
pretrained model looks at a video as much when it does not show what is asked for. So labels teach it here. The language
model takes no part: its weights stay as they are, and the whole takes minutes.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from qtsplus.hub.convert import fresh_selector
from qtsplus.hub.loading import adopt_tokenizer
from qtsplus.training.freezing import score_parameters
from qtsplus.training.models import make_config, make_model, make_processor
from qtsplus.training.recipe import load_stages

from ..open.measures import area_under_curve
from .clips import CROWD_SECONDS, clip_scene
from .fetch import ELSEWHERE
from .questions import YES_OR_NO, Question, ask_scene
from .settings import RECIPE, SETTINGS
from .tower import see
from .words import FOOTAGE
from .work import log
from .world import Pictures, Scene

FIRST_CLIP = 2_000_000  # neither base nor other records have these clips
CLIPS = 160
PLAIN_EVERY = 4  # every fourth clip is a background alone
VALIDATION_CLIPS = 24
CLIPS_ELSEWHERE = 40  # of each video
KINDS = (*YES_OR_NO, "present", "absent", "kind", "which", "first", "list")
QUESTIONS = 9
STEPS = 900
CLIPS_PER_STEP = 2
RATE = 3e-4


@dataclass(frozen=True)
class Lesson:
    """
    A clip, and questions about it.

    Attributes:
        tokens: `[M, d]`, the visual tokens.
        queries: per question `[L, d]`, the embeddings of its words.
        needles: per question `[M]` bool, the tokens that show what is asked for.
        kinds: per question, as in [`ask_scene`].
    """

    tokens: torch.Tensor
    queries: list[torch.Tensor]
    needles: list[torch.Tensor]
    kinds: list[str]


def make_lessons(pictures: Pictures, model: Any, tokenizer: Any, split: str, clips: int) -> list[Lesson]:
    """Crowds, and backgrounds alone, which are also asked what the crowd before them was asked."""
    embed = model.get_input_embeddings()
    lessons = []
    before: list[Question] = []
    for number in range(clips):
        seed = FIRST_CLIP + number
        is_plain = number % PLAIN_EVERY == PLAIN_EVERY - 1
        scene, frames, shown = clip_scene(pictures, seed, split, CROWD_SECONDS, crowd=True, plain=is_plain)
        asked = ask_scene(scene, QUESTIONS, seed, kinds=KINDS, further=True)
        asked = [question for question in asked if not question.doubtful]
        if is_plain:
            asked += [question for question in before if not _may_show(scene, question)]
        before = asked
        with torch.no_grad():
            tokens = see(model.model.visual, torch.from_numpy(frames)[None])
        lesson = Lesson(tokens, [], [], [])
        for question in asked:
            ids = tokenizer(question.question, add_special_tokens=False)["input_ids"]
            answering = [place for place, thing in enumerate(scene.things) if thing.name in question.about]
            lesson.queries.append(embed(torch.tensor(ids)).detach().float())
            lesson.needles.append(torch.from_numpy(np.isin(shown.ravel(), answering)))
            lesson.kinds.append(question.kind)
        if asked:
            lessons.append(lesson)
    return lessons


def _may_show(scene: Scene, question: Question) -> bool:
    """Whether a background itself may answer."""
    text = question.question.lower()
    return question.kind == "list" or any(word in text for word in FOOTAGE.get(scene.film, ()))


def score(selector: Any, lesson: Lesson) -> list[torch.Tensor]:
    """Per question `[M]` log-relevance, beside the null token."""
    count = len(lesson.queries)
    no_positions = torch.zeros(3, len(lesson.tokens), dtype=torch.long)
    _, chosen = selector(
        [lesson.tokens] * count,
        lesson.queries,
        [no_positions] * count,
        max_visual_tokens=1,
        retention=1.0,
        reencode=False,
        sample_gate=False,
    )
    return list(chosen.log_relevance)


def teach(selector: Any, lessons: Sequence[Lesson], seed: int, steps: int) -> float:
    """
    The choice among the tokens learns the needles, and the sum of the relevance whether there are any.

    Returns:
        the last step's loss.
    """
    for parameter in selector.parameters():
        parameter.requires_grad_(False)
    weights = score_parameters(selector)
    for weight in weights:
        weight.requires_grad_(True)
    selector.freeze_unused()
    optimizer = torch.optim.AdamW([weight for weight in weights if weight.requires_grad], lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        terms = []
        for place in rng.integers(len(lessons), size=CLIPS_PER_STEP).tolist():
            for scores, needles in zip(score(selector, lessons[place]), lessons[place].needles, strict=True):
                terms.append(_loss(scores, needles))
        loss = torch.stack(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def _loss(scores: torch.Tensor, needles: torch.Tensor) -> torch.Tensor:
    seen = scores.exp().sum().clamp(1e-6, 1 - 1e-6)
    loss = F.binary_cross_entropy(seen, needles.any().float())
    if needles.any():
        loss = loss - scores.log_softmax(0)[needles].mean()
    return loss


SeenByClip = list[dict[str, list[float]]]


@torch.no_grad()
def seen_by_clip(selector: Any, lessons: Sequence[Lesson]) -> SeenByClip:
    """`seen` by answer, of the questions that are asked alike about what is there and about what is not."""
    clips: SeenByClip = []
    for lesson in lessons:
        found: dict[str, list[float]] = {"there": [], "missing": [], "missing, plain": []}
        is_plain = not torch.stack(lesson.needles).any()
        for scores, needles, kind in zip(score(selector, lesson), lesson.needles, lesson.kinds, strict=True):
            if kind not in YES_OR_NO:
                continue
            answer = "missing"
            if needles.any():
                answer = "there"
            elif is_plain:
                answer = "missing, plain"
            found[answer].append(float(scores.exp().sum()))
        clips.append(found)
    return clips


def of_all(clips: SeenByClip, answer: str) -> np.ndarray:
    return np.array([seen for clip in clips for seen in clip[answer]])


def calibrate_seen(selector: Any, lessons: Sequence[Lesson]) -> tuple[float, float]:
    """
    The `seen` that tells best what is there from what is not, and the area under the curve in crowds, where that is
    harder than on a background alone.
    """
    clips = seen_by_clip(selector, lessons)
    there = of_all(clips, "there")
    missing = np.concatenate([of_all(clips, "missing"), of_all(clips, "missing, plain")])
    thresholds = np.concatenate([there, missing])
    hits = [np.mean(there >= least) + np.mean(missing < least) for least in thresholds]
    return float(thresholds[np.argmax(hits)]), area(clips, "missing")


def area(clips: SeenByClip, missing: str) -> float:
    return area_under_curve(of_all(clips, "there"), of_all(clips, missing))


def area_interval(clips: SeenByClip, missing: str, draws: int = 1000) -> list[float]:
    """Of 95%, over clips."""
    rng = np.random.default_rng(0)
    areas = [area([clips[place] for place in rng.integers(len(clips), size=len(clips))], missing) for _ in range(draws)]
    return np.percentile(areas, [2.5, 97.5]).round(3).tolist()


def measure_seen(selector: Any, lessons: Mapping[str, Sequence[Lesson]], threshold: float) -> dict[str, Any]:
    """
    How often `seen` is larger for what a video shows than for what it does not, and how often a threshold is right.

    Args:
        lessons: by video.
    """
    by_video = {name: seen_by_clip(selector, own) for name, own in lessons.items()}
    everything = sum(by_video.values(), [])
    result: dict[str, dict[str, Any]] = {}
    for name, clips in (by_video | {"all": everything}).items():
        there = of_all(clips, "there")
        row: dict[str, Any] = {answer: len(of_all(clips, answer)) for answer in clips[0]}
        row["area in crowds"] = area(clips, "missing")
        row["area on plain videos"] = area(clips, "missing, plain")
        row["there, above the threshold"] = np.mean(there >= threshold)
        row["missing, below it"] = np.mean(of_all(clips, "missing") < threshold)
        row["missing, plain, below it"] = np.mean(of_all(clips, "missing, plain") < threshold)
        result[name] = {key: round(float(value), 3) for key, value in row.items()}
    result["all"]["interval in crowds"] = area_interval(everything, "missing")
    result["all"]["interval on plain videos"] = area_interval(everything, "missing, plain")
    return result


def teach_from_labels(work: Path, seeds: Sequence[int], steps: int) -> None:
    """Writes `WORK/labels-SEED`: the base, with a selector such as the recipe's first stage makes, and calibrated."""
    base = str(work / "base")
    (stage, *_) = load_stages(RECIPE, [*SETTINGS, f"model.weights={base}", f"training.output_dir={work / 'unused'}"])
    model: Any = make_model(None, base, stage.model.selector).eval()
    processor = make_processor(None, base, make_config(None, base, stage.model.selector))
    adopt_tokenizer(model.config, processor)
    selector = model.model.qtsplus
    pictures = Pictures(work)
    lessons = make_lessons(pictures, model, processor.tokenizer, "varied", CLIPS)
    validation = make_lessons(pictures, model, processor.tokenizer, "validation", VALIDATION_CLIPS)
    elsewhere = {}
    for name in ELSEWHERE:
        elsewhere[name] = make_lessons(pictures, model, processor.tokenizer, f"video-{name}", CLIPS_ELSEWHERE)
    for seed in seeds:
        model.load_state_dict(fresh_selector(model.config, model.dtype, seed), strict=False)
        _, untrained_area = calibrate_seen(selector, validation)
        loss = teach(selector, lessons, seed, steps)
        threshold, area = calibrate_seen(selector, validation)
        config = model.config.qtsplus_config
        config.seen_threshold = round(threshold, 3)
        config.seen_area = round(area, 3)
        folder = work / f"labels-{seed}"
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        line = {"seed": seed, "loss": loss, "area before": untrained_area, "area": area, "threshold": threshold}
        log(work / "labels.jsonl", line | {"elsewhere": measure_seen(selector, elsewhere, threshold)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("seed", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    teach_from_labels(given.work, given.seed, given.steps)


if __name__ == "__main__":
    main()
