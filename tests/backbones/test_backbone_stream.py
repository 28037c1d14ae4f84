"""A stream on every backbone: while all is remembered it is the video, and later it has its true times."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from qtsplus.asking import session
from qtsplus.asking.question import Batch, prompt_inputs
from qtsplus.live.stream import Stream
from tiny import assert_same, compress

QUESTION = "What moves?"


def frames_of(processor, path, fps):
    video = processor.video_chunks(path, fps=fps)
    return np.stack(list(video.decode()))


@pytest.fixture(scope="module")
def frames(clips, processor):
    """6 frames, three seconds."""
    return frames_of(processor, clips / "long.mp4", 2)


@pytest.fixture
def prompts(model, monkeypatch):
    """The shortened prompts from which the model generates; it forgets their features."""
    noted = []
    generate_from = model.generate_from

    def note(prompt, *arguments, **options):
        noted.append(replace(prompt))
        return generate_from(prompt, *arguments, **options)

    monkeypatch.setattr(model, "generate_from", note)
    return noted


def shortened(model, processor, video, **call):
    """The prompt of the question about a whole video."""
    inputs = prompt_inputs(processor, Batch({"video": video}, [QUESTION]))
    return compress(model.model, **inputs, **call)


@pytest.mark.parametrize("count", [6, 5])
def test_all_is_remembered(model, processor, frames, count, prompts):
    """The same tokens are kept and the same is said, at the same positions; also where the last step is not full."""
    first_frames = frames[:count]
    stream = Stream(model, processor)
    stream.sized_as = count
    for piece in np.split(first_frames, [1, 4]):
        stream.append(piece)
    stream.finish()
    whole = session.encode(model, processor, first_frames, fps=2)
    selection = {"selection": "uniform", "retention": 0.5}
    answer = stream.ask(QUESTION, **selection, max_new_tokens=6)
    (prompt,) = prompts
    expected = session.ask(
        model,
        processor,
        whole,
        QUESTION,
        **selection,
        max_new_tokens=6,
    )
    assert_same(answer.keep_map, expected.keep_map)
    assert answer.answer == expected.answer
    assert answer.frames == count
    moments = [replace(moment, name="video") for moment in expected.evidence]
    assert answer.evidence == moments
    shown = shortened(model, processor, whole, **selection)
    assert_same(prompt.input_ids, shown.input_ids)
    assert_same(prompt.position_ids, shown.position_ids)


@pytest.mark.parametrize("question", [QUESTION, None])
def test_some_is_remembered(model, processor, frames, question):
    stream = Stream(
        model,
        processor,
        memory_tokens=20,
        question=question,
    )
    stream.sized_as = 6
    times = np.arange(len(frames)) / 2
    for start in (0, 1000, 2000):
        stream.append(frames, start + times)
    stream.finish()
    answer = stream.ask(QUESTION, retention=0.5, max_new_tokens=2)
    assert answer.visual_tokens == 20
    assert answer.kept_tokens == 10
    remembered = stream.cameras["video"].tokens.steps.unique().tolist()
    starts = [step * stream.seconds_per_step for step in remembered]
    for moment in answer.evidence:
        last_start = moment.end - stream.seconds_per_step
        assert moment.start in starts
        assert last_start in starts


def test_positions_are_those_of_the_whole_video(model, processor, clips, prompts):
    """Of a part of the first step and a part of the last."""

    def ends(candidates, n):
        everything = torch.arange(candidates.num_tokens)
        half = n // 2
        return torch.cat([everything[:half], everything[-half:]])

    path = clips / "long.mp4"
    frames = frames_of(processor, path, 4)
    stream = Stream(model, processor, memory_tokens=6, fps=4)
    stream.policy = ends
    stream.sized_as = len(frames)
    stream.append(frames)
    stream.ask(QUESTION, selection="all", max_new_tokens=1)
    (prompt,) = prompts
    expected = shortened(
        model,
        processor,
        session.encode(model, processor, path, fps=4),
        selection=ends,
        retention=1.0,
        max_visual_tokens=6,
    )
    assert_close(prompt.features["video"], expected.features["video"], atol=1e-4, rtol=1e-5)
    if model.model.rope_axes == 3 and not model.model.frames_apart:
        assert_same(prompt.position_ids[1:], expected.position_ids[1:])
    else:  # what is missing takes no positions
        assert prompt.position_ids.max() <= expected.position_ids.max()
