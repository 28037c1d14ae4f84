"""In vLLM a published folder keeps the same tokens and gives the same answers as in Transformers."""

from typing import Any

import pytest
import torch

from qtsplus import encode
from qtsplus.asking.answers import Kept, shown_by
from qtsplus.model import layout_qtsplus

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from engine_runs import described, frames_of, same_basis

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.4}  # of log-probabilities


def check_answer(engine, answer, tokens, log_probabilities):
    tolerance = TOLERANCE[engine.dtype]
    for token, value in answer["logprobs"].items():
        expected = float(log_probabilities[int(token)])
        assert value == pytest.approx(expected, abs=tolerance)
    if engine.exact:
        assert answer["tokens"] == tokens
    else:  # which of two that are nearly the same comes first is left to the rounding
        first = answer["tokens"][0]
        lowest = log_probabilities.max() - tolerance
        assert log_probabilities[first] >= lowest


@pytest.fixture
def all_times(monkeypatch):
    """Has our models keep the times of frames of which nothing stays, as vLLM has to."""
    none = torch.zeros(3, 0, dtype=torch.long)
    monkeypatch.setattr(layout_qtsplus, "find_separators", lambda spans, length: none)


def repeatable_requests(engine):
    """The requests about videos by their names, without those to the random method."""
    for name, asked in engine.requests.items():
        selection = asked["settings"].get("selection")
        if asked["videos"] and selection != "random":
            yield name, asked


def test_the_same_tokens_stay(engine):
    for name, asked in repeatable_requests(engine):
        *_, qtsplus = engine.here(asked)
        here = qtsplus.kept_indices[0].tolist()
        there = engine.alone[name]["kept"]
        if engine.exact:
            assert here == there, name
        else:
            tolerance = 1 if name.startswith("learned") else 0
            assert len(here) == pytest.approx(len(there), abs=tolerance), name
            shared = set(here).intersection(there)
            assert len(shared) >= 0.75 * len(here), name


def test_an_answer_rests_on_the_same(engine):
    processor = engine.processor
    config = engine.model.config.qtsplus_config
    for name, asked in repeatable_requests(engine):
        there = engine.alone[name]
        basis = there["basis"]
        if not engine.exact:
            assert basis["kept_tokens"] == len(there["kept"]), name
            assert basis["evidence"], name
            continue
        videos = {}
        for number, count in enumerate(asked["videos"], start=1):
            frames = frames_of(count)
            videos[str(number)] = encode(engine.model, processor, frames, metadata=described(count))
        *_, chosen = engine.here(asked)
        kept = Kept.of(chosen, 0)
        merge_size = processor.video_processor.merge_size
        here = shown_by(videos, kept, merge_size, config).as_dict()
        if engine.defaults is not None:
            here["rho"] = basis["rho"]  # only a server tells it
        same_basis(basis, here)
        assert videos_of(basis) == videos_of(here), name


def videos_of(basis):
    return {span["video"] for span in basis["evidence"]}


def test_the_same_answers(engine, all_times):
    for name, asked in engine.requests.items():
        overrides: dict[str, Any] = {}
        selection = asked["settings"].get("selection")
        # A random method draws other tokens each time. Attention depends on the times, all of which stay here.
        may_differ = selection in ("random", "lm_attention")
        if not engine.exact and selection != "all":
            may_differ = True
        if asked["videos"] and may_differ:
            kept = torch.tensor(engine.alone[name]["kept"])
            overrides["retention"] = 1.0
            overrides["max_visual_tokens"] = len(kept)
            overrides["selection"] = lambda candidates, n, kept=kept: kept
        tokens, log_probabilities, _ = engine.here(asked, **overrides)
        check_answer(engine, engine.alone[name], tokens, log_probabilities)


def test_a_request_in_a_batch_is_answered_as_alone(engine):
    for name, asked in engine.requests.items():
        if asked["settings"].get("selection") == "random":
            continue
        alone = engine.alone[name]
        together = engine.together[name]
        assert alone["length"] == together["length"], name
        if engine.exact:
            assert alone["tokens"] == together["tokens"], name
            assert alone["logprobs"] == pytest.approx(together["logprobs"], abs=TOLERANCE["float32"]), name


def test_the_question_decides_and_the_tower_runs_once(engine):
    first = engine.alone["trained"]
    second = engine.alone["other question again"]
    assert first["kept"] != second["kept"]
    assert first["tower_calls"] > 1  # one for each chunk
    assert second["tower_calls"] == 0
    assert engine.alone["two videos"]["tower_calls"] == 4  # chunks of the second video


def test_a_further_question_passes_only_its_words_through_the_first_layers(engine):
    if engine.defaults is not None or "attention" not in engine.requests:
        pytest.skip("attention is not read in pieces")
    names = ("up to a cap", "of two videos", "behind a text")
    further, first, elsewhere = (engine.alone[f"attention {name}"]["passed"][0] for name in names)
    assert further < 30 < first < elsewhere
