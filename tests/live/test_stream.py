"""A stream remembers so many tokens; appended in pieces it is the whole, and a standing question drifts nowhere."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from clips import make_world, render_world
from qtsplus.asking import session
from qtsplus.asking.ranking import Scorer, StandingQuestion
from qtsplus.live.stream import Stream
from qtsplus.model.fields_qtsplus import REDUCTIONS
from qtsplus.model.methods_qtsplus import METHODS
from tiny import compress

WORLD = make_world(3)
FRAMES = render_world(WORLD)  # 16, two a second
TIMES = np.arange(16) / 2
TOKENS = 36  # of a step in time, which is two frames
STEPS = list(range(8))
QUESTION = WORLD.objects[0].question
ANSWER = WORLD.objects[0].mark


def encoded(loaded, frames):
    return session.encode(*loaded, frames, fps=2)


@pytest.fixture(scope="module")
def whole(loaded):
    return encoded(loaded, FRAMES)


def filled(loaded, frames_at_a_time, policy=None, **options):
    """A stream of all frames."""
    stream = Stream(*loaded, **options)
    if policy is not None:
        stream.policy = policy
    for first in range(0, 16, frames_at_a_time):
        stream.append(FRAMES[first : first + frames_at_a_time])
    return stream


def newest(candidates, n):
    """A policy."""
    by_time = candidates.positions[0].sort(stable=True).indices
    return by_time[-n:].sort().values


def of_odd_steps(candidates, n):
    """A policy: the newest of them."""
    is_odd = candidates.positions[0] % 2
    return is_odd.sort(stable=True).indices[-n:].sort().values


def tokens_of(stream, name="video"):
    return stream.cameras[name].tokens


def steps_of(stream):
    return tokens_of(stream).steps.unique().tolist()


def places_of(stream):
    tokens = tokens_of(stream)
    return tokens.steps * TOKENS + tokens.cells


def check_features(stream, expected):
    assert_close(tokens_of(stream).features, expected, atol=1e-5, rtol=1e-5)


def check_answer(answer, expected):
    assert answer.answer == expected.answer
    assert answer.kept_tokens == expected.kept_tokens
    assert torch.equal(answer.keep_map, expected.keep_map)
    assert places(answer) == places(expected)


def places(answer):
    """The evidence without weights and names."""
    return [replace(interval, weight=0.0, name="") for interval in answer.evidence]


# --- Frames and times ---


@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, 15), max_size=6))
def test_pieces_are_the_whole(loaded, whole, cuts):
    """Odd frames wait for the next piece."""
    stream = Stream(*loaded)
    for piece in np.split(FRAMES, sorted(cuts)):
        stream.append(piece)
    assert stream.num_tokens == 8 * TOKENS
    check_features(stream, whole.features)
    check_answer(stream.ask(QUESTION), session.ask(*loaded, whole, QUESTION))


def test_the_last_odd_frame_is_a_step_when_the_stream_is_finished(loaded):
    stream = Stream(*loaded)
    stream.append(FRAMES[:7])
    assert stream.num_tokens == 3 * TOKENS
    stream.finish()
    check_features(stream, encoded(loaded, FRAMES[:7]).features)
    stream.finish()
    assert stream.num_tokens == 4 * TOKENS, "nothing waits any more"
    expected = session.ask(*loaded, FRAMES[:7], QUESTION, fps=2, retention=1.0)
    check_answer(stream.ask(QUESTION, retention=1.0), expected)


def test_frames_that_come_a_little_early_stay(loaded):
    stream = Stream(*loaded)
    times = TIMES + np.random.default_rng(0).uniform(-0.04, 0.04, 16)
    stream.append(FRAMES, times.clip(min=0))
    assert steps_of(stream) == STEPS


def test_a_frame_before_a_gap_is_a_step_of_its_own(loaded):
    stream = Stream(*loaded)
    stream.append(FRAMES[:5], [0, 0.5, 1, 1.5, 2])
    stream.append(FRAMES[5:8], [99.5, 100.5, 101])
    assert steps_of(stream) == [0, 1, 2, 99, 100]
    check_features(stream, encoded(loaded, FRAMES[[0, 1, 2, 3, 4, 4, 5, 5, 6, 6]]).features)


def test_finishing_again_and_again_does_not_hurry_the_clock(loaded):
    stream = Stream(*loaded)
    for frame, time in zip(FRAMES, TIMES, strict=True):
        stream.append([frame], [time])
        stream.finish()
    assert steps_of(stream) == STEPS


# --- Threads ---


def test_a_question_while_frames_come(loaded):
    """Asked in another thread, of what was in memory at one moment."""
    stream = Stream(*loaded, memory_tokens=60)
    stream.append(FRAMES[:4])
    is_over = threading.Event()

    def look():
        while not is_over.is_set():
            for video in stream.videos().values():
                assert len(video.features) == len(video.places)

    with ThreadPoolExecutor(1) as other:
        looking = other.submit(look)
        try:
            for frame in FRAMES[:12]:
                stream.append([frame])
        finally:
            is_over.set()
        looking.result()


# --- Memory ---


def noting_calls(monkeypatch, owner, name):
    """The arguments of every call of a method."""
    calls = []
    method = getattr(owner, name)

    def noted(*arguments, **options):
        calls.append(arguments)
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, noted)
    return calls


def test_frames_are_encoded_and_scored_once(loaded, monkeypatch):
    """What is new, and never what is remembered."""
    model, _ = loaded
    stream = Stream(*loaded, memory_tokens=100, question=QUESTION)
    encodings = noting_calls(monkeypatch, model.model, "encode_pixels")
    scorings = noting_calls(monkeypatch, stream.question, "add")
    for first in range(0, 16, 4):
        stream.append(FRAMES[first : first + 4])
    stream.ask(QUESTION, max_new_tokens=1)
    steps = [grid[0, 0].item() for _, grid in encodings]
    assert steps == [2, 2, 2, 2]
    tokens = [len(features) for (features,) in scorings]
    assert tokens == [2 * TOKENS] * 4


@pytest.mark.parametrize("question", [QUESTION, None])
@pytest.mark.parametrize("policy", [None, METHODS["uniform"]])
def test_the_memory_has_a_bound(loaded, question, policy, whole):
    stream = Stream(*loaded, memory_tokens=100.0, question=question)
    if policy is not None:
        stream.policy = policy
    for first in range(0, 16, 2):
        stream.append(FRAMES[first : first + 2])
        steps_so_far = first // 2 + 1
        assert stream.num_tokens == min(100, steps_so_far * TOKENS)
    kept = places_of(stream)
    assert (kept.diff() > 0).all(), "in the order of time"
    check_features(stream, whole.features[kept])
    answer = stream.ask(QUESTION)
    assert answer.visual_tokens == 100
    assert 1 <= answer.kept_tokens <= 100
    remembered = set(steps_of(stream))
    for interval in answer.evidence:
        assert remembered.issuperset(range(int(interval.start), int(interval.end)))


@pytest.mark.parametrize("frames_at_a_time", [2, 6, 16])
def test_what_stays_is_what_the_policy_would_keep_of_the_whole(loaded, whole, frames_at_a_time):
    relevant = filled(loaded, frames_at_a_time, memory_tokens=100, question=QUESTION)
    assert torch.equal(places_of(relevant), kept_of_the_whole(loaded, whole, 100))
    new = filled(loaded, frames_at_a_time, newest, memory_tokens=100)
    assert torch.equal(places_of(new), torch.arange(188, 288))


def test_the_times_of_what_stays_are_kept_and_no_others(loaded):
    """The times at which each step begins and ends: a step ends where the next one begins."""
    stream = Stream(*loaded, memory_tokens=2 * TOKENS)
    stream.policy = of_odd_steps
    stream.append(FRAMES[:15])
    stream.append(FRAMES[15:])  # the last step begins with the frame before, which waited
    assert steps_of(stream) == [5, 7]
    assert stream.videos()["video"].begins == {5: 5.0, 6: 6.0, 7: 7.0}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda candidates, n: torch.arange(n + 1), "expected a tensor of n ascending int64 indices"),
        (lambda candidates, n: None, "expected a tensor of n ascending int64 indices"),
        ("newest", "selection='newest'; expected one of"),
    ],
)
def test_a_policy_that_is_no_choice_of_tokens_is_refused(loaded, policy, message):
    stream = Stream(*loaded, memory_tokens=TOKENS)
    stream.policy = policy
    with pytest.raises(ValueError, match=message):
        stream.append(FRAMES[:4])


def kept_of_the_whole(loaded, whole, n):
    model, processor = loaded
    content = [{"type": "video"}, {"type": "text", "text": QUESTION}]
    asked = [{"role": "user", "content": content}]
    inputs = processor.conversation_inputs(
        [asked], video_grid_thw=whole.video_grid_thw, video_metadata=[whole.about.metadata]
    )
    inputs["video_features"] = [whole.features]
    inputs["second_per_grid_ts"] = [1.0]
    with torch.no_grad():
        output = compress(model.model, **inputs, retention=1.0, max_visual_tokens=n)
    return output.qtsplus.kept_indices[0]


@pytest.fixture(params=REDUCTIONS)
def reduction(request, loaded, monkeypatch):
    monkeypatch.setattr(loaded[0].config.qtsplus_config, "reduction", request.param)
    return request.param


@pytest.fixture(params=[0, 1])
def null_tokens(request, loaded, monkeypatch):
    model, _ = loaded
    null = torch.nn.Embedding(1, model.config.text_config.hidden_size)
    torch.nn.init.normal_(null.weight, std=0.1)
    nulls = torch.nn.ModuleList([null] * request.param)
    monkeypatch.setitem(model.model.qtsplus._modules, "null_tokens", nulls)
    return request.param


def test_merged_relevance_does_not_drift(loaded, whole, reduction, null_tokens):
    """Relevance merged from pieces is the selector's own for all tokens at once; so is that of a ranking."""
    model, processor = loaded
    longer = [whole.features + 0.05 * index for index in range(40)]
    features = torch.cat(longer)
    pieces = features.split(72)
    words = torch.tensor(processor.text_ids(QUESTION))
    embed = model.get_input_embeddings()
    with torch.no_grad():
        query = embed(words)
        positions = torch.zeros(3, len(features))
        _, chosen = model.model.qtsplus([features], [query], [positions], retention=0.01)
    (expected,) = chosen.log_relevance

    question = StandingQuestion(model, processor, QUESTION)
    scores = [question.add(piece) for piece in pieces]
    merged = question.log_relevance(torch.cat(scores))
    assert_close(merged, expected, atol=1e-4, rtol=0)

    scorer = Scorer(model, processor, QUESTION, pieces)
    ranked = [scorer.relevance(piece) for piece in pieces]
    assert_close(torch.cat(ranked), expected, atol=1e-4, rtol=0)

    has_threshold = null_tokens > 0 and reduction != "max"  # whose relevance is no part of 1
    assert (chosen.seen is not None) == has_threshold


# --- Questions ---


def test_the_standing_question_is_answered_as_of_the_whole(loaded, whole):
    """With a quarter of the tokens in memory."""
    stream = filled(loaded, 2, memory_tokens=2 * TOKENS, question=QUESTION)
    budget = {"retention": 1.0, "max_visual_tokens": 16}
    answer = stream.ask(QUESTION, **budget)
    expected = session.ask(*loaded, whole, QUESTION, **budget)
    assert answer.answer == expected.answer == ANSWER
    assert places(answer) == places(expected)


@pytest.mark.parametrize("begin", [0.0, 1e6], ids=["from the beginning", "after eleven days"])
def test_positions_count_from_the_oldest_token(loaded, whole, begin, monkeypatch):
    model, _ = loaded
    stream = Stream(*loaded)
    prompts = noting_calls(monkeypatch, model, "generate_from")
    stream.append(FRAMES, begin + TIMES)
    answer = stream.ask(QUESTION)
    expected = session.ask(*loaded, whole, QUESTION)
    (prompt,) = prompts[0]
    assert prompt.position_ids.max() < 100
    assert answer.answer == expected.answer
    assert torch.equal(answer.keep_map, expected.keep_map)
    starts = [interval.start for interval in answer.evidence]
    starts_in_whole = [begin + interval.start for interval in expected.evidence]
    assert starts == starts_in_whole


def test_positions_stay_in_the_models_range(loaded, monkeypatch):
    """A day, of which the first and the last seconds are remembered; the positions are enough for four hours."""
    model, _ = loaded
    day = 86_400
    stream = Stream(*loaded)
    prompts = noting_calls(monkeypatch, model, "generate_from")
    stream.append(FRAMES[:8], TIMES[:8])
    stream.append(FRAMES[8:], day + TIMES[:8])
    answer = stream.ask(QUESTION, selection="uniform", retention=1.0)
    (prompt,) = prompts[0]
    times = prompt.position_ids[1, 0]
    last = times.max()
    longest = model.config.text_config.max_position_embeddings
    assert longest - 200 < last < longest, "all that there is"
    of_the_end = times[times > longest // 2]
    distances = of_the_end.unique().diff()
    assert distances.tolist() == [2, 2, 2], "two positions a second, as ever"
    assert answer.answer == ANSWER
    shown = {(interval.start, interval.end) for interval in answer.evidence}
    assert shown <= {(0, 4), (day, day + 4)}


def test_cameras_share_a_memory_and_a_clock(loaded):
    stream = Stream(*loaded, memory_tokens=100, question=QUESTION, fps=np.float16(2))
    empty = np.full_like(FRAMES, 128)
    times = 5000 + TIMES
    for first in range(0, 16, 4):
        piece = slice(first, first + 4)
        stream.append(empty[piece], times[piece], "yard")
        stream.append(FRAMES[piece], times[piece], "door")
    assert stream.num_tokens == 100
    answer = stream.ask(QUESTION)
    assert answer.answer == ANSWER
    assert answer.evidence[0].name == "door"
    for interval in answer.evidence:
        assert 5000 <= interval.start < interval.end <= 5008


def test_a_camera_that_was_forgotten_is_not_in_the_prompt(loaded):
    stream = Stream(*loaded, memory_tokens=2 * TOKENS)
    stream.policy = newest
    stream.append(FRAMES[:4], [0, 0.5, 1, 1.5], "gone")
    stream.append(FRAMES[4:8], [2, 2.5, 3, 3.5], "there")
    assert len(tokens_of(stream, "gone")) == 0
    assert list(stream.ask(QUESTION, max_new_tokens=1).keep_maps) == ["there"]


def test_a_camera_whose_size_changes_goes_on(loaded):
    """As if its frames had been brought to the first size before."""
    stream = Stream(*loaded)
    large = FRAMES.repeat(2, axis=1).repeat(2, axis=2)
    stream.append(FRAMES[:4])
    stream.append(large[4:12])
    stream.append(FRAMES[12:])
    assert stream.cameras["video"].size == FRAMES.shape[1:3]
    assert stream.ask(QUESTION).answer == ANSWER


# --- What is refused ---


@pytest.mark.parametrize(
    "options, words",
    [
        ({"question": " "}, "empty"),
        ({"memory_tokens": 1.5}, "memory_tokens=1.5"),
        ({"fps": float("nan")}, "from 0.001 to 1000"),
    ],
    ids=str,
)
def test_options_that_no_stream_has_are_refused(loaded, options, words):
    with pytest.raises(ValueError, match=words):
        Stream(*loaded, **options)


GREY = FRAMES[:2, :, :, 0]
NO_FRAMES = [GREY, [FRAMES[0], GREY[0]], FRAMES[:2, :0], FRAMES[:2] / 255]
NAN = float("nan")
INFINITE = float("inf")
NO_TIMES = [[1.0], [1.0, 1.0], [1.0, NAN], [1.0, INFINITE], [-1.0, 0.0], 1.0]


def append_refused(loaded, words, frames=FRAMES[:2], **options):
    stream = Stream(*loaded)
    with pytest.raises(ValueError, match=words):
        stream.append(frames, **options)
    assert not stream.cameras


@pytest.mark.parametrize("frames", NO_FRAMES, ids=range(4))
def test_frames_that_no_camera_sends_are_refused(loaded, frames):
    append_refused(loaded, r"expected \(height, width, 3\) of uint8", frames)


@pytest.mark.parametrize("times", NO_TIMES, ids=str)
def test_times_that_do_not_ascend_are_refused(loaded, times):
    append_refused(loaded, "times=.* for 2 frames of .video.; expected a number for each frame", times=times)


@pytest.mark.parametrize("name, words", [("", "name is empty"), (3, "name is 3; expected a text")])
def test_a_camera_without_a_name_is_refused(loaded, name, words):
    append_refused(loaded, words, name=name)


def test_nothing_to_ask_about(loaded):
    stream = Stream(*loaded)
    stream.append(FRAMES[:1])
    with pytest.raises(ValueError, match="no step in time yet"):
        stream.ask(QUESTION)
    stream.append([])
    stream.append(FRAMES[1:2])
    with pytest.raises(ValueError, match="question is empty"):
        stream.ask(" ")


def test_several_scoring_layers_have_no_standing_question(loaded, monkeypatch):
    modules = loaded[0].model.qtsplus._modules
    layers = list(modules["scoring_layers"])
    monkeypatch.setitem(modules, "scoring_layers", torch.nn.ModuleList(layers * 2))  # setattr would not be undone
    with pytest.raises(ValueError, match="2 scoring layers"):
        Stream(*loaded, question=QUESTION)
