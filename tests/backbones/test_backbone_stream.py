"""A stream on every backbone: while all is remembered it is the video, and later it has its true times."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qtsplus.asking import session
from qtsplus.asking.question import Batch, prompt_inputs
from qtsplus.live.stream import Stream
from tiny import assert_same, compress

QUESTION = "What moves?"


@pytest.fixture(scope="module")
def frames(clips, processor):
    """6 frames, three seconds."""
    video = processor.video_chunks(clips / "long.mp4", fps=2)
    return np.stack(list(video.decode()))


@pytest.mark.parametrize("count", [6, 5])
def test_all_is_remembered(model, processor, frames, count, monkeypatch):
    """The same tokens are kept and the same is said, at the same positions; also where the last step is not full."""
    stream = Stream(model, processor)
    prompts = []
    generate_from = model.generate_from
    stream.sized_as = count
    for piece in np.split(frames[:count], [1, 4]):
        stream.append(piece)
    stream.finish()
    whole = session.encode(model, processor, frames[:count], fps=2)
    monkeypatch.setattr(
        model,
        "generate_from",
        lambda prompt, *a, **more: prompts.append(replace(prompt)) or generate_from(prompt, *a, **more),
    )
    call = {"selection": "uniform", "retention": 0.5, "max_new_tokens": 6}
    answer = stream.ask(QUESTION, **call)
    expected = session.ask(model, processor, whole, QUESTION, **call)
    assert_same(answer.keep_map, expected.keep_map)
    assert answer.answer == expected.answer
    assert (answer.frames, expected.frames) == (count, count)
    assert answer.evidence == [replace(one, name="video") for one in expected.evidence]
    inputs = prompt_inputs(processor, Batch({"video": whole}, [QUESTION]))
    shown = compress(model.model, **inputs, selection="uniform", retention=0.5)
    assert_same(prompts[0].input_ids, shown.input_ids)
    assert_same(prompts[0].position_ids, shown.position_ids)


@pytest.mark.parametrize("question", [QUESTION, None])
def test_some_is_remembered(model, processor, frames, question):
    stream = Stream(model, processor, memory_tokens=20, question=question)
    stream.sized_as = 6
    for turn in range(3):
        stream.append(frames, 1000 * turn + np.arange(len(frames)) / 2)
    stream.finish()
    answer = stream.ask(QUESTION, retention=0.5, max_new_tokens=2)
    assert (answer.visual_tokens, answer.kept_tokens) == (20, 10)
    steps = [step * stream.seconds_per_step for step in stream.cameras["video"].tokens.steps.unique().tolist()]
    for one in answer.evidence:
        assert one.start in steps
        assert one.end - stream.seconds_per_step in steps


def test_positions_are_those_of_the_whole_video(model, processor, clips, monkeypatch):
    """Of a part of the first step and a part of the last."""
    prompts = []
    generate_from = model.generate_from

    def note(prompt, *some, **more):
        prompts.append(replace(prompt))  # whose features `generate` forgets
        return generate_from(prompt, *some, **more)

    monkeypatch.setattr(model, "generate_from", note)

    def ends(candidates, n):
        return torch.cat([torch.arange(n // 2), torch.arange(candidates.num_tokens - n // 2, candidates.num_tokens)])

    frames = np.stack(list(processor.video_chunks(clips / "long.mp4", fps=4).decode()))
    stream = Stream(model, processor, memory_tokens=6, fps=4)
    stream.policy = ends
    stream.sized_as = len(frames)
    stream.append(frames)
    stream.ask(QUESTION, selection="all", max_new_tokens=1)
    whole = session.encode(model, processor, clips / "long.mp4", fps=4)
    inputs = prompt_inputs(processor, Batch({"video": whole}, [QUESTION]))
    kept = torch.cat([torch.arange(3), torch.arange(len(whole.features) - 3, len(whole.features))])
    call = {"retention": 1.0, "max_visual_tokens": 6, "selection": lambda candidates, n: kept}
    expected = compress(model.model, **inputs, **call)
    (features,), (whole_features,) = (one.features["video"] for one in (prompts[0], expected))
    assert torch.allclose(features, whole_features, atol=1e-4), "encoded again at the same times"
    if model.model.rope_axes == 3 and not model.model.frames_apart:
        assert_same(prompts[0].position_ids[1:], expected.position_ids[1:])
    else:  # what is missing takes no positions
        assert prompts[0].position_ids.max() <= expected.position_ids.max()
