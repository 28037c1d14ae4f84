"""
Compares evaluations of the same questions, such as those of `controls.py`:

    python recipes/compare.py own.json other-question.json other-video.json untrained.json

Each file is what `qtsplus eval ... --json` printed. Its share of right answers is printed, and by how much the first
file's share is higher, with the 95% interval of that difference. If the whole interval is above 0, the first is better.

The files have the same questions. So the difference is taken question by question, which is more exact than two
separate intervals. Questions about one video depend on each other, so the interval is found by drawing whole videos,
with replacement, 10,000 times.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from typing_extensions import TypedDict

from qtsplus.common.validation import validated

DRAWS = 10_000


class Answered(TypedDict):
    """What an evaluation says of a question."""

    video: str
    question: str
    correct: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="what `qtsplus eval --json` printed for the selector itself")
    parser.add_argument("others", type=Path, nargs="+", help="what it printed for each control")
    given = parser.parse_args()
    try:
        first = read_answers(given.first)
        videos = [answer["video"] for answer in first]
        if len(set(videos)) < 2:
            raise ValueError(f"{given.first} is about one video; expected two at least")
        right = rights(first)
        print(f"{given.first}: {right.mean():.1%} of {len(right)} questions about {len(set(videos))} videos")
        for path in given.others:
            other = read_answers(path)
            if names(other) != names(first):
                raise ValueError(f"{path} has other questions than {given.first}, or another order")
            differences = right - rights(other)
            low, high = interval(differences, videos)
            print(f"{path}: {rights(other).mean():.1%}, {differences.mean():+.1%} [{low:+.1%}, {high:+.1%}]")
    except (OSError, ValueError) as error:
        parser.error(str(error))


def read_answers(path: Path) -> list[Answered]:
    """The answers of an evaluation; a `ValueError` for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON that can be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not what `qtsplus eval --json` prints")
    return validated(list[Answered], content.get("answers"), f"{path}: answers: ")


def names(answers: list[Answered]) -> list[tuple[str, str]]:
    return [(answer["video"], answer["question"]) for answer in answers]


def rights(answers: list[Answered]) -> np.ndarray:
    """`[questions]`, 1 where the answer is right, else 0."""
    return np.array([float(answer["correct"]) for answer in answers])


def interval(differences: np.ndarray, videos: list[str]) -> tuple[float, float]:
    """The 95% interval of the mean, by drawing videos with all of their questions."""
    _, places = np.unique(videos, return_inverse=True)
    sums = np.bincount(places, differences)
    counts = np.bincount(places)
    rng = np.random.default_rng(0)
    means = []
    for _ in range(DRAWS):
        drawn = rng.integers(len(sums), size=len(sums))
        means.append(sums[drawn].sum() / counts[drawn].sum())
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


if __name__ == "__main__":
    main()
