"""A stream remembers so many tokens; appended in pieces it is the whole, and a standing question drifts nowhere."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clips import make_world, render_world
from qtsplus.asking import session
from qtsplus.asking.ranking import Scorer, StandingQuestion
from qtsplus.asking.recall import within
from qtsplus.live.stream import Stream
from qtsplus.model.methods_qtsplus import METHODS
from tiny import compress

WORLD = make_world(3)
FRAMES = render_world(WORLD)  # 16, of 36 tokens for two
QUESTION, ANSWER = WORLD.objects[0].question, WORLD.objects[0].mark


@pytest.fixture(scope="module")
def whole(loaded):
    return session.encode(*loaded, FRAMES, fps=2)


def stream(loaded, policy, memory_tokens=100, **more):
    how = {"question": QUESTION} if policy == "question" else {"policy": policy}
    return Stream(*loaded, memory_tokens=memory_tokens, **how, **more)


def newest(candidates, n):
    return candidates.positions[0].sort(stable=True).indices[-n:].sort().values


def tokens_of(one, name="video"):
    return one.cameras[name].tokens


def compare(answer, expected):
    assert (answer.answer, answer.kept_tokens) == (expected.answer, expected.kept_tokens)
    assert torch.equal(answer.keep_map, expected.keep_map)
    where = [(one.start, one.end, one.box, one.pixels) for one in answer.evidence]
    assert where == [(one.start, one.end, one.box, one.pixels) for one in expected.evidence]


@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, 15), max_size=6))
def test_pieces_are_the_whole(loaded, whole, cuts):
    """Odd frames wait for the next piece."""
    one = Stream(*loaded)
    for piece in np.split(FRAMES, sorted(cuts)):
        one.append(piece)
    assert one.num_tokens == 288 and torch.allclose(tokens_of(one).features, whole.features, atol=1e-5)
    compare(one.ask(QUESTION), session.ask(*loaded, whole, QUESTION))


def test_the_last_odd_frame_is_a_step_when_the_stream_is_finished(loaded):
    one = Stream(*loaded)
    one.append(FRAMES[:7])
    assert one.num_tokens == 3 * 36
    one.finish()
    expected = session.encode(*loaded, FRAMES[:7], fps=2)
    assert torch.allclose(tokens_of(one).features, expected.features, atol=1e-5)
    one.finish()
    assert one.num_tokens == 4 * 36, "nothing waits any more"


def test_the_end_of_an_odd_frame_is_that_of_the_video(loaded):
    one, shown = Stream(*loaded), FRAMES[:7]
    one.append(shown)
    one.finish()
    compare(one.ask(QUESTION, retention=1.0), session.ask(*loaded, shown, QUESTION, fps=2, retention=1.0))


@settings(max_examples=10)
@given(rate=st.floats(1, 60), cuts=st.lists(st.integers(0, 400), max_size=6), late=st.integers(0, 10**5))
def test_the_clock_is_that_of_the_frames(loaded, whole, rate, cuts, late):
    """However many come in a second, one or more, and in whatever pieces."""
    one, times = Stream(*loaded), late + np.arange(8 * rate) / rate
    frames = FRAMES[((times - late) * 2).astype(int)]
    for piece, when in zip(np.split(frames, sorted(cuts)), np.split(times, sorted(cuts)), strict=True):
        one.append(piece, when)
    one.finish()
    assert (tokens_of(one).steps.unique() - late).tolist() in (list(range(8)), list(range(9)))  # the last may be early
    answer, expected = one.ask(QUESTION), session.ask(*loaded, whole, QUESTION)
    assert answer.answer == expected.answer == ANSWER
    span, true = answer.evidence[0], expected.evidence[0]
    assert abs(span.start - late - true.start) <= 1 and abs(span.end - late - true.end) <= 1


def test_frames_that_come_a_little_early_stay(loaded):
    one = Stream(*loaded)
    one.append(FRAMES, np.maximum(np.arange(16) / 2 + np.random.default_rng(0).uniform(-0.04, 0.04, 16), 0))
    assert tokens_of(one).steps.unique().tolist() == list(range(8))


def test_a_frame_before_a_gap_is_a_step_of_its_own(loaded):
    one = Stream(*loaded)
    one.append(FRAMES[:5], [0, 0.5, 1, 1.5, 2])
    one.append(FRAMES[5:8], [99.5, 100.5, 101])
    assert tokens_of(one).steps.unique().tolist() == [0, 1, 2, 99, 100]
    expected = session.encode(*loaded, FRAMES[[0, 1, 2, 3, 4, 4, 5, 5, 6, 6]], fps=2)
    assert torch.allclose(tokens_of(one).features, expected.features, atol=1e-5)


def test_finishing_again_and_again_does_not_hurry_the_clock(loaded):
    one = Stream(*loaded)
    for number in range(16):
        one.append(FRAMES[number : number + 1], [number / 2])
        one.finish()
    assert tokens_of(one).steps.unique().tolist() == list(range(8))


@pytest.mark.parametrize("fails_at", [0, 1])
def test_what_fails_can_be_appended_again(loaded, whole, monkeypatch, fails_at):
    """Also the frame that waited is there still; and what was encoded before is not encoded twice."""
    one, model, calls = Stream(*loaded), loaded[0].model, []
    encode_pixels, times = model.encode_pixels, np.arange(16) / 2
    monkeypatch.setattr("qtsplus.live.stream.STEPS_AT_A_TIME", 4)
    one.append(FRAMES[:1], times[:1])

    def fail(*inputs):
        calls.append(inputs)
        if len(calls) == fails_at + 1:
            raise torch.OutOfMemoryError
        return encode_pixels(*inputs)

    monkeypatch.setattr(model, "encode_pixels", fail)
    with pytest.raises(torch.OutOfMemoryError):
        one.append(FRAMES[1:], times[1:])
    one.append(FRAMES[1:], times[1:])
    assert torch.allclose(tokens_of(one).features, whole.features, atol=1e-5) and len(calls) == 3


def test_a_step_that_failed_is_not_taken_for_the_one_before(loaded, monkeypatch):
    one, model = Stream(*loaded), loaded[0].model
    one.append(FRAMES[:2], [0, 0.5])
    encode_pixels = model.encode_pixels
    monkeypatch.setattr(model, "encode_pixels", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.append(FRAMES[8:10], [1, 1.5])
    monkeypatch.setattr(model, "encode_pixels", encode_pixels)
    one.append(FRAMES[8:10], [1, 1.5])
    expected = session.encode(*loaded, FRAMES[[0, 1, 8, 9]], fps=2)
    assert torch.allclose(tokens_of(one).features, expected.features, atol=1e-5)


def test_a_question_while_frames_come(loaded):
    """Asked in another thread, of what was in memory at one moment."""
    one, going, switching = Stream(*loaded, memory_tokens=60), threading.Event(), sys.getswitchinterval()
    one.append(FRAMES[:4])

    def look():
        while not going.is_set():
            for video in one.videos().values():
                assert len(video.features) == len(video.places)

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(1) as other:
            looking = other.submit(look)
            for number in range(12):
                one.append(FRAMES[number % 16 : number % 16 + 1])
            going.set()
            looking.result()
    finally:
        sys.setswitchinterval(switching)


def test_frames_are_encoded_once(loaded, monkeypatch):
    one, model, counts = stream(loaded, "question"), loaded[0].model, []
    encode_pixels = model.encode_pixels
    monkeypatch.setattr(
        model,
        "encode_pixels",
        lambda kind, pixels, grid: counts.append(int(grid[0, 0])) or encode_pixels(kind, pixels, grid),
    )
    scored = []
    add = one.question.add
    monkeypatch.setattr(one.question, "add", lambda features: scored.append(len(features)) or add(features))
    for first in range(0, 16, 4):
        one.append(FRAMES[first : first + 4])
    one.ask(QUESTION, max_new_tokens=1)
    assert counts == [2] * 4 and scored == [72] * 4, "what is new, and never what is remembered"


@pytest.mark.parametrize("policy", ["question", None, METHODS["uniform"]], ids=["question", "none", "a function"])
def test_the_memory_has_a_bound(loaded, policy, whole):
    one = stream(loaded, policy)
    for first in range(0, 16, 2):
        one.append(FRAMES[first : first + 2])
        assert one.num_tokens == min(100, 18 * (first + 2))
    tokens = tokens_of(one)
    places = tokens.steps * 36 + tokens.cells
    assert bool((places.diff() > 0).all()), "in the order of time"
    assert torch.allclose(tokens.features, whole.features[places], atol=1e-5), "each at its place"
    answer = one.ask(QUESTION)
    assert answer.visual_tokens == 100 and 1 <= answer.kept_tokens <= 100
    for interval in answer.evidence:
        assert set(range(int(interval.start), int(interval.end))) <= set(tokens.steps.tolist())


@pytest.mark.parametrize("policy", ["question", newest])
def test_what_stays_is_what_the_policy_would_keep_of_the_whole(loaded, policy):
    """However it came."""
    steps = []
    for size in (2, 6, 16):
        one = stream(loaded, policy)
        for first in range(0, 16, size):
            one.append(FRAMES[first : first + size])
        steps.append(tokens_of(one).steps * 36 + tokens_of(one).cells)
    assert torch.equal(steps[0], steps[1]) and torch.equal(steps[0], steps[2])
    expected = kept_of(loaded, 100) if policy == "question" else torch.arange(188, 288)
    assert torch.equal(steps[0], expected)


def kept_of(loaded, n):
    model, processor = loaded
    whole = session.encode(*loaded, FRAMES, fps=2)
    asked = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}]
    times = {"video_grid_thw": whole.video_grid_thw, "video_metadata": [whole.about.metadata]}
    inputs = processor.conversation_inputs([asked], **times)
    call = {"video_features": [whole.features], "second_per_grid_ts": [1.0]}
    with torch.no_grad():
        return compress(model.model, **inputs, **call, retention=1.0, max_visual_tokens=n).qtsplus.kept_indices[0]


@pytest.mark.parametrize("null_token", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "max", "mean"])
def test_merged_relevance_does_not_drift(loaded, whole, reduction, null_token, monkeypatch):
    """Relevance merged from pieces is the selector's own for all tokens at once; so is that of a ranking."""
    model, processor = loaded
    monkeypatch.setattr(model.config.qtsplus_config, "reduction", reduction)
    token = torch.nn.Embedding(1, model.config.text_config.hidden_size)
    torch.nn.init.normal_(token.weight, std=0.1)
    monkeypatch.setitem(model.model.qtsplus._modules, "null_tokens", torch.nn.ModuleList([token][: int(null_token)]))
    question = StandingQuestion(model, processor, QUESTION)
    many = torch.cat([whole.features + 0.05 * index for index in range(40)])
    scores = torch.cat([question.add(piece) for piece in many.split(72)])
    ids = torch.tensor(processor.text_ids(QUESTION))
    with torch.no_grad():
        words = model.get_input_embeddings()(ids)
        chosen = model.model.qtsplus([many], [words], [torch.zeros(3, len(many))], retention=0.01)[1]
    assert torch.allclose(question.log_relevance(scores), chosen.log_relevance[0], atol=1e-4)
    assert (chosen.seen is not None) == (null_token and reduction != "max"), "which is no part of 1"
    scorer = Scorer(model, processor, QUESTION, lambda: many.split(72))
    ranked = torch.cat([scorer.relevance(piece) for piece in many.split(72)])
    total = torch.logaddexp(ranked.logsumexp(0), scorer.null) if reduction == "sum" else 0
    assert torch.allclose(ranked - total, chosen.log_relevance[0], atol=1e-4)


def test_the_standing_question_is_answered_as_of_the_whole(loaded, whole):
    """With a quarter of the tokens in memory."""
    one = stream(loaded, "question", 72)
    for first in range(0, 16, 2):
        one.append(FRAMES[first : first + 2])
    budget = {"retention": 1.0, "max_visual_tokens": 16}
    answer, expected = one.ask(QUESTION, **budget), session.ask(*loaded, whole, QUESTION, **budget)
    assert answer.answer == expected.answer == ANSWER
    where = [(one.start, one.end, one.box) for one in answer.evidence]
    assert where == [(one.start, one.end, one.box) for one in expected.evidence]


def prompts_of(model, monkeypatch):
    """The shortened prompts that go to the language model."""
    prompts, generate_from = [], model.generate_from
    monkeypatch.setattr(
        model,
        "generate_from",
        lambda prompt, *more, **others: prompts.append(prompt) or generate_from(prompt, *more, **others),
    )
    return prompts


@pytest.mark.parametrize("begin", [0.0, 1e6], ids=["from the beginning", "after eleven days"])
def test_positions_count_from_the_oldest_token(loaded, whole, begin, monkeypatch):
    one, prompts = Stream(*loaded), prompts_of(loaded[0], monkeypatch)
    one.append(FRAMES, begin + np.arange(16) / 2)
    compared, expected = one.ask(QUESTION), session.ask(*loaded, whole, QUESTION)
    assert prompts[0].position_ids.max() < 100
    assert compared.answer == expected.answer and torch.equal(compared.keep_map, expected.keep_map)
    assert [one.start for one in compared.evidence] == [begin + one.start for one in expected.evidence]


def test_positions_stay_in_the_models_range(loaded, monkeypatch):
    """A day, of which the first and the last seconds are remembered; the positions are enough for four hours."""
    one, prompts, day = Stream(*loaded), prompts_of(loaded[0], monkeypatch), 86_400
    one.append(FRAMES[:8], np.arange(8) / 2)
    one.append(FRAMES[8:], day + np.arange(8) / 2)
    answer = one.ask(QUESTION, selection="uniform", retention=1.0)
    most = loaded[0].config.text_config.max_position_embeddings
    times = prompts[0].position_ids[1, 0]
    assert most - 200 < times.max() < most, "all that there is"
    newest = times[times > most // 2].unique()
    assert newest.diff().tolist() == [2, 2, 2], "two positions a second, as ever"
    assert answer.answer == ANSWER
    assert {(one.start, one.end) for one in answer.evidence} <= {(0, 4), (day, day + 4)}


@settings(max_examples=50)
@given(st.lists(st.integers(0, 10**7), min_size=1, unique=True).map(sorted), st.integers(2, 10**6))
def test_numbers_within_a_range(steps, most):
    (numbers,) = within([steps], most)
    assert numbers[0] >= 0 and most >= numbers[-1] and numbers == sorted(numbers)
    for step, number in zip(steps, numbers, strict=True):
        if steps[-1] - step <= most // 2 or steps[-1] - steps[0] <= most:
            assert numbers[-1] - number == steps[-1] - step, "what is new has its true distance"


def test_cameras_share_a_memory_and_a_clock(loaded):
    empty = np.full_like(FRAMES, 128)
    one = Stream(*loaded, memory_tokens=100, question=QUESTION)
    for first in range(0, 16, 4):
        times = 100 + np.arange(first, first + 4) / 2
        one.append(empty[first : first + 4], times, "yard")
        one.append(FRAMES[first : first + 4], times, "door")
    assert one.num_tokens == 100
    answer = one.ask(QUESTION)
    assert answer.answer == ANSWER and answer.evidence[0].name == "door"
    assert all(100 <= interval.start < interval.end <= 108 for interval in answer.evidence)


def test_a_camera_that_was_forgotten_is_not_in_the_prompt(loaded):
    one = Stream(*loaded, memory_tokens=72, policy=newest)
    one.append(FRAMES[:4], [0, 0.5, 1, 1.5], "gone")
    one.append(FRAMES[4:8], [2, 2.5, 3, 3.5], "there")
    assert len(tokens_of(one, "gone")) == 0
    assert set(one.ask(QUESTION, max_new_tokens=1).keep_maps) == {"there"}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"policy": "best"}, "expected a function"),
        ({"question": " "}, "empty"),
        ({"memory_tokens": 0}, "memory_tokens=0"),
        ({"memory_tokens": 1.5}, "memory_tokens=1.5"),
        ({"fps": 0}, "from 0.001 to 1000"),
        ({"fps": float("nan")}, "from 0.001 to 1000"),
    ],
    ids=str,
)
def test_what_is_no_stream(loaded, options, words):
    with pytest.raises(ValueError, match=words):
        Stream(*loaded, **options).append(FRAMES)


@pytest.mark.parametrize(
    "call, words",
    [
        ({"frames": FRAMES[:2, :, :, 0]}, r"expected \(height, width, 3\)"),
        ({"frames": [FRAMES[0], FRAMES[1, :, :, 0]]}, r"expected \(height, width, 3\)"),
        ({"frames": FRAMES[:2], "times": [1.0]}, "do not ascend"),
        ({"frames": FRAMES[:2], "times": [1.0, 1.0]}, "do not ascend"),
        ({"frames": FRAMES[:2], "times": [1.0, float("nan")]}, "do not ascend"),
        ({"frames": FRAMES[:2], "times": [1.0, float("inf")]}, "do not ascend"),
        ({"frames": FRAMES[:2], "times": [-1.0, 0.0]}, "from the beginning"),
        ({"frames": FRAMES[:2], "times": 1.0}, "not one for each"),
        ({"frames": FRAMES[:2] / 255}, "float64 of shape"),
        ({"frames": FRAMES[:2, :0]}, r"expected \(height, width, 3\)"),
        ({"frames": FRAMES[:2], "name": ""}, "name is empty"),
        ({"frames": FRAMES[:2], "name": 3}, "name is 3; expected a text"),
    ],
)
def test_what_is_no_piece(loaded, call, words):
    one = Stream(*loaded)
    with pytest.raises(ValueError, match=words):
        one.append(**call)
    assert not one.cameras


def test_a_camera_whose_size_changes_goes_on(loaded, whole, caplog):
    """As if its frames had been brought to the first size before; that is said once."""
    one, large = Stream(*loaded), FRAMES.repeat(2, axis=1).repeat(2, axis=2)
    with caplog.at_level("WARNING"):
        for first in range(0, 16, 4):
            one.append((FRAMES, large)[first in (4, 12)][first : first + 4])
    assert one.ask(QUESTION).answer == ANSWER and one.cameras["video"].size == FRAMES.shape[1:3]
    assert torch.allclose(tokens_of(one).features[:72], whole.features[:72], atol=1e-5)
    assert caplog.text.count("are brought to the first one") == 1


def test_nothing_to_ask_about(loaded):
    one = Stream(*loaded)
    one.append(FRAMES[:1])
    with pytest.raises(ValueError, match="no step in time yet"):
        one.ask(QUESTION)
    one.append([])
    one.append(FRAMES[1:2])
    with pytest.raises(ValueError, match="question is empty"):
        one.ask(" ")
    with pytest.raises(ValueError, match="retenton"):
        one.ask(QUESTION, retenton=0.5)


def test_several_scoring_layers_have_no_standing_question(loaded, monkeypatch):
    selector = loaded[0].model.qtsplus
    two = torch.nn.ModuleList([*selector.scoring_layers] * 2)
    monkeypatch.setitem(selector._modules, "scoring_layers", two)  # setattr would take it away at the end
    with pytest.raises(ValueError, match="2 scoring layers"):
        Stream(*loaded, question=QUESTION)
