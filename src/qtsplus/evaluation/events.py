"""Scores a summary by the events that its record names, a line each: how many it tells, in which order, what else."""

import re
from collections.abc import Sequence
from itertools import combinations

EVENTS = "events"  # the kind of such records
_ENOUGH = 0.5  # of an event's words, in one sentence
_STEM = 4  # letters that make two words the same: cross, crosses, crossing
_FUNCTION = (
    "a an and are as at be by for from has have he her his in into is it its of on or she that the their them then "
    "there they this to was were while with"
)


def score_events(events: str, said: str) -> dict[str, float | None]:
    """
    Scores what a summary `said` by the `events` that happen, in order, a line each: a sentence, or words. A sentence
    tells an event if it holds half of its words, function words aside, to their first four letters. No judge is asked,
    so other words for the same, a negation, and who did what to whom are not seen.

    Returns:
        `recall`, the part of the events that a sentence tells; `order`, of the pairs of events that two sentences tell
        the part that comes in the right order, `None` without such a pair; `invented`, the part of the sentences that
        tell no event, `None` of no sentence. Of several sentences that tell an event, the first that does best counts.
    """
    wanted = [words for line in events.splitlines() if (words := _words(line))]
    sentences = [words for part in re.split(r"[.!?;。！？\n]+", said) if (words := _words(part))]
    shares = [[len(words & sentence) / len(words) for sentence in sentences] for words in wanted]
    told = [max(row) >= _ENOUGH for row in shares] if sentences else [False] * len(wanted)
    places = [row.index(max(row)) for row, known in zip(shares, told, strict=True) if known]
    pairs = [one < other for one, other in combinations(places, 2) if one != other]
    idle = [all(row[place] < _ENOUGH for row in shares) for place in range(len(sentences))]
    return {"recall": _mean(told), "order": _mean(pairs), "invented": _mean(idle)}


def mean_scores(scores: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The mean of each over the summaries that have it."""
    names = ("recall", "order", "invented")
    return {name: _mean([value for one in scores if (value := one[name]) is not None]) for name in names}


def _words(text: str) -> frozenset[str]:
    return frozenset(word[:_STEM] for word in re.findall(r"\w+", text.casefold()) if word not in _FUNCTION.split())


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
