"""Scores a summary by the events that its record names, one a line: how many it tells, in which order, what else."""

import re
from collections.abc import Sequence
from itertools import combinations

EVENTS = "events"  # the kind of such records
_ENOUGH = 0.5  # the share of an event's words that one sentence must hold
_STEM = 4  # letters that make two words the same: cross, crosses, crossing
_SENTENCE_END = re.compile(r"[.!?;。！？\n]+")
_FUNCTION_WORDS = (
    "a an and are as at be by for from has have he her his in into is it its of on or she that the their them then "
    "there they this to was were while with"
)


def score_events(events: str, said: str) -> dict[str, float | None]:
    """
    Scores what a summary `said` by the `events` that happen, in order, one a line: a sentence, or words. A sentence
    tells an event if it holds half of its words, without function words and to their first four letters. No judge is
    asked, so other words for the same thing, a negation, and who did what to whom are not seen.

    Returns:
        `recall`, the share of the events that a sentence tells; `order`, the share of the pairs of events told by two
        sentences that are in the right order, `None` without such a pair; `invented`, the share of the sentences that
        tell no event, `None` if there is no sentence. If several sentences tell an event, the first that does best
        counts.
    """
    wanted = _word_sets(events.splitlines())
    sentences = _word_sets(_SENTENCE_END.split(said))
    shares = [_shares(words, sentences) for words in wanted]
    told = []
    places = []
    for row in shares:
        best = max(row, default=0.0)
        told.append(best >= _ENOUGH)
        if best >= _ENOUGH:
            places.append(row.index(best))
    in_order = []
    for earlier, later in combinations(places, 2):
        if earlier != later:
            in_order.append(earlier < later)
    invented = []
    for place in range(len(sentences)):
        most = max((row[place] for row in shares), default=0.0)
        invented.append(most < _ENOUGH)
    return {
        "recall": _mean(told),
        "order": _mean(in_order),
        "invented": _mean(invented),
    }


def mean_scores(scores: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The mean of each score over the summaries that have it."""
    means: dict[str, float | None] = {}
    for name in ("recall", "order", "invented"):
        values = [score[name] for score in scores]
        means[name] = _mean([value for value in values if value is not None])
    return means


def _word_sets(texts: Sequence[str]) -> list[frozenset[str]]:
    """The words of each text that has any."""
    word_sets = [_words(text) for text in texts]
    return [words for words in word_sets if words]


def _words(text: str) -> frozenset[str]:
    function_words = _FUNCTION_WORDS.split()
    words = re.findall(r"\w+", text.casefold())
    return frozenset(word[:_STEM] for word in words if word not in function_words)


def _shares(words: frozenset[str], sentences: Sequence[frozenset[str]]) -> list[float]:
    """The share of an event's words that each sentence holds."""
    return [len(words & sentence) / len(words) for sentence in sentences]


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return sum(values) / len(values)
