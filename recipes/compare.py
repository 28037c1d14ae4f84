"""
Compares one evaluation with others of the same questions, such as those of `controls.py`:

    python recipes/compare.py own.json other-question.json other-video.json untrained.json

Each file is what `qtsplus eval ... --json` printed. For the first file, its share of right answers is printed; for each
other file its own share, by how many points the first file's share is higher, and in brackets the 95% interval of this
difference. If the whole interval is above 0, the first file is better.

The difference is taken question by question, which is more exact than to compare two separate intervals. Questions
about one video depend on each other, so the interval is found by drawing whole videos, with replacement, 10,000 times.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from typing_extensions import TypedDict

from qtsplus.common.validation import validated

DRAWS = 10_000


class Answered(TypedDict):
    """A question in the output of an evaluation, and whether the model's answer is right."""

    video: str
    question: str
    correct: bool


class Unreadable(TypedDict):
    """A video about which questions could not be asked or judged, why, and how many."""

    video: str
    reason: str
    questions: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="what `qtsplus eval --json` printed for the selector itself")
    parser.add_argument("others", type=Path, nargs="+", help="what it printed for each control")
    arguments = parser.parse_args()
    try:
        first = read_answers(arguments.first)
        videos = [answer["video"] for answer in first]
        if len(set(videos)) < 2:
            raise ValueError(f"{arguments.first} is about one video; expected two at least")
        right = right_answers(first)
        print(f"{arguments.first}: {right.mean():.1%} of {len(right)} questions about {len(set(videos))} videos")
        for path in arguments.others:
            other = read_answers(path)
            if questions_of(other) != questions_of(first):
                raise ValueError(f"{path} has other questions than {arguments.first}, or another order")
            other_right = right_answers(other)
            differences = right - other_right
            low, high = interval(differences, videos)
            print(f"{path}: {other_right.mean():.1%}, {differences.mean():+.1%} [{low:+.1%}, {high:+.1%}]")
    except (OSError, ValueError) as error:
        parser.error(str(error))


def read_answers(path: Path) -> list[Answered]:
    """
    The answers of an evaluation. A `ValueError` for a file that `qtsplus eval --json` did not print, and for questions
    that could not be asked or judged: they count as wrong, which says nothing about a selector.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON that can be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not what `qtsplus eval --json` prints")
    answers = validated(list[Answered], content.get("answers"), f"{path}: answers: ")
    unreadable = validated(list[Unreadable], content.get("unreadable"), f"{path}: unreadable: ")
    if unreadable:
        count = sum(video["questions"] for video in unreadable)
        raise ValueError(
            f"{count} of {len(answers)} questions of {path} could not be asked or judged, such as those about "
            f"{unreadable[0]['video']}: {unreadable[0]['reason']}"
        )
    return answers


def questions_of(answers: list[Answered]) -> list[tuple[str, str]]:
    return [(answer["video"], answer["question"]) for answer in answers]


def right_answers(answers: list[Answered]) -> np.ndarray:
    """`[questions]` float64: 1 where the answer is right, else 0."""
    return np.array([float(answer["correct"]) for answer in answers])


def interval(differences: np.ndarray, videos: list[str]) -> tuple[float, float]:
    """
    The 95% interval of the mean of the `[questions]` differences, by drawing videos with all of their questions.
    `videos` has the video of each question.
    """
    _, video_indices = np.unique(videos, return_inverse=True)
    sums = np.bincount(video_indices, differences)
    counts = np.bincount(video_indices)
    rng = np.random.default_rng(0)
    means = []
    for _ in range(DRAWS):
        drawn = rng.integers(len(sums), size=len(sums))
        means.append(sums[drawn].sum() / counts[drawn].sum())
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


if __name__ == "__main__":
    main()
