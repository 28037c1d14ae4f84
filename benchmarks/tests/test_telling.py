"""What a summary tells of known events."""

import numpy as np
import pytest

from benchmarks.real.telling import score

# What comes and the steps that show it, of a video of eight steps of a second.
SEEN = [("ant", [0, 1]), ("bus", [1, 2, 3]), ("owl", [2]), ("pig", [4, 5]), ("bus", [6, 7])]
EVENTS = [(name, np.array(steps)) for name, steps in SEEN]


def told(*texts, joined=""):
    chapters = [{"start": 4.0 * n, "end": 4.0 * n + 4, "text": text} for n, text in enumerate(texts)]
    return score({"chapters": chapters, "overview": joined}, EVENTS)


def test_what_happens_is_told_in_the_chapter_in_which_it_happens():
    whole = told("The ant, the bus and the owl.", "The pig and the bus.", joined="An ANT, then a pig")
    assert whole == {
        "told": 1,
        "omission": 0,
        "order": 1,
        "order within chapters": 1,
        "hallucination": 0,
        "at another time": 0,
        "names in the overview": 0.5,
    }
    swapped = told("The pig and the bus.", "The ant, the bus and the owl.")
    assert swapped["told"] == 2 / 5 and swapped["hallucination"] == 3 / 5, "each bus is told, whichever is meant"
    assert swapped["at another time"] == 3 / 5, "all of them are shown, but then"
    assert told("Nothing.", "")["order"] is None


def test_order_is_that_of_what_is_told():
    assert told("The owl, the bus and the ant.", "")["order"] == 0
    assert told("The ant, the owl and the bus.", "")["order"] == 2 / 3
    trumpet = told("A trumpet, a trumpet and the ant", "The antelope")
    assert trumpet["hallucination"] == 1 / 2, "a name counts once"
    assert trumpet["at another time"] == 0, "no trumpet is ever shown"


def test_a_film_that_stops_short_tells_less():
    assert told("The ant, the bus and the owl.")["told"] == pytest.approx(3 / 5)
