"""Arguments of any kind: what the public functions cannot use is a `ValueError` that says so, and breaks nothing."""

import datetime
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clips import make_world, render_world, write_mp4
from qtsplus import Library, Stream, VideoSession, ask, encode, load
from qtsplus.library.indexing import index

QUESTION = "What is in the red circle?"
FRAMES = render_world(make_world(3, 8))
ODD = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            -1,
            1,
            2.5,
            math.nan,
            math.inf,
            -math.inf,
            "",
            "5",
            "\ud800",
            b"x",
            object(),
            [],
            [None],
            ["5", 5],
            (),
            {},
            {"a": 1},
            {1},
            Fraction(1, 3),
            Decimal("0.5"),
            1j,
            datetime.date(2026, 1, 1),
            np.float32(0.5),
            np.zeros(2),
            np.array([None]),
        ]
    ),
    st.integers(-3, 3),
    st.floats(-2, 2),
)
ENCODE = ("fps", "max_frames", "frames_per_chunk", "device")
ASK = ("question", "turns", "retention", "max_visual_tokens", "selection", "max_new_tokens", "subtitles", "streamer")
ARGUMENTS_OF = {
    "load": ("model", "device", "dtype", "revision"),
    "encode": ("video", *ENCODE),
    "frames": ("video", *ENCODE),
    "ask": ("video", "fps", *ASK),
    "session": ("videos", "batch_size", "questions", "name", "remove", "video_of"),
    "stream": ("memory_tokens", "question", "fps"),
    "append": ("frames", "times", "name"),
    "library": ("folder", "top", "pieces", "window", "names", "pattern", *ASK),
}


ARGUMENTS = [(call, name) for call, names in ARGUMENTS_OF.items() for name in names]


@pytest.fixture(scope="module")
def calls(tiny_published, tmp_path_factory):
    """By name, a call with one argument of any kind among good ones."""
    folder = tmp_path_factory.mktemp("videos")
    loaded = load(tiny_published, "cpu")
    write_mp4(folder / "video.mp4", FRAMES, 2)
    index(folder, folder / "library", *loaded, name=str(tiny_published), say=lambda _: None)
    video = encode(*loaded, FRAMES, fps=2)
    library = Library(folder / "library", *loaded)

    def session(**odd):
        made = VideoSession(*loaded)
        made.add(video, "video")
        if "name" in odd:
            made.add(video, odd["name"])
        elif "remove" in odd:
            made.remove(odd["remove"])
        elif "video_of" in odd:
            made.video(odd["video_of"])
        elif "videos" in odd:
            made.ask(QUESTION, max_new_tokens=1, **odd)
        else:
            made.ask_many(**{"questions": [QUESTION], "max_new_tokens": 1, **odd})

    def in_library(**odd):
        if "folder" in odd:
            Library(odd["folder"], *loaded)
        elif "pattern" in odd:
            library.select(odd["pattern"])
        elif "top" in odd:
            library.find(QUESTION, **odd)
        else:
            library.ask(**{"question": QUESTION, "max_new_tokens": 1, **odd})

    return {
        "load": lambda **odd: load(**{"model": tiny_published, "device": "cpu", **odd}),
        "encode": lambda **odd: encode(*loaded, **{"video": folder / "video.mp4", **odd}),
        "frames": lambda **odd: encode(*loaded, **{"video": FRAMES[:4], "fps": 2, **odd}),
        "ask": lambda **odd: ask(*loaded, **{"video": video, "question": QUESTION, "max_new_tokens": 1, **odd}),
        "session": session,
        "stream": lambda **odd: Stream(*loaded, **odd).append(FRAMES[:4]),
        "append": lambda **odd: Stream(*loaded).append(**{"frames": FRAMES[:2], **odd}),
        "library": in_library,
    }


@settings(max_examples=300)
@given(argument=st.sampled_from(ARGUMENTS), value=ODD)
def test_odd_arguments_are_one_error(calls, argument, value):
    call, name = argument
    try:
        calls[call](**{name: value})
    except (ValueError, OSError) as error:
        assert str(error).strip()


def test_what_is_no_count_is_never_taken_for_one(calls):
    no_counts = [0, "5", True, -1, 2.5, math.nan, math.inf, [1]]
    for value in no_counts:
        with pytest.raises(ValueError, match="max_new_tokens=.* expected a "):
            calls["ask"](max_new_tokens=value)
    for value in no_counts:
        with pytest.raises(ValueError, match=r"max_frames=.* expected a (whole|finite) number"):
            calls["encode"](max_frames=value)


@pytest.mark.parametrize(
    ("call", "misspelt", "right"),
    [
        ("encode", "max_frame", "max_frames"),
        ("encode", "options", "progress"),
        ("ask", "retenton", "retention"),
        ("ask", "max_tokens", "max_new_tokens"),
        ("ask", "questions", "question"),
        ("session", "video", "videos"),
        ("library", "tops", "top_p"),
    ],
)
def test_a_misspelt_keyword_is_named_with_the_nearest(calls, call, misspelt, right):
    with pytest.raises(ValueError, match=f"no keyword '{misspelt}'( here)?; the nearest is '{right}'"):
        calls[call](**{misspelt: 1})


@pytest.mark.parametrize("frames", [FRAMES[..., 0], np.repeat(FRAMES, 2, axis=-1)[..., :4]], ids=["grey", "rgba"])
def test_frames_without_three_channels_are_refused(calls, frames):
    with pytest.raises(ValueError, match=r"of the shape .*; expected \[T, H, W, C\] or \[T, C, H, W\] with 1 or 3"):
        calls["frames"](video=frames)
