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
        assert value == pytest.approx(float(log_probabilities[int(token)]), abs=tolerance)
    if engine.exact:
        assert answer["tokens"] == tokens
    else:  # which of two that are nearly the same comes first is left to the rounding
        assert float(log_probabilities[answer["tokens"][0]]) >= float(log_probabilities.max()) - tolerance


@pytest.fixture
def all_times(monkeypatch):
    """Has our models keep the times of frames of which nothing stays, as vLLM has to."""
    monkeypatch.setattr(layout_qtsplus, "find_separators", lambda spans, length: torch.zeros(3, 0, dtype=torch.long))


def test_the_same_tokens_stay(engine):
    for name, asked in engine.requests.items():
        if not asked["videos"] or asked["settings"].get("selection") == "random":
            continue
        *_, qtsplus = engine.here(asked)
        here, there = qtsplus.kept_indices[0].tolist(), engine.alone[name]["kept"]
        if engine.exact:
            assert here == there, name
        else:
            assert len(here) == pytest.approx(len(there), abs=name.startswith("learned")), name
            assert len({*here} & {*there}) >= 0.75 * len(here), name


def test_an_answer_rests_on_the_same(engine):
    for name, asked in engine.requests.items():
        if not asked["videos"] or asked["settings"].get("selection") == "random":
            continue
        told = engine.alone[name]["basis"]
        if not engine.exact:
            assert told["kept_tokens"] == len(engine.alone[name]["kept"]) and told["evidence"], name
            continue
        videos = {}
        for number, count in enumerate(asked["videos"], start=1):
            videos[str(number)] = encode(engine.model, engine.processor, frames_of(count), metadata=described(count))
        *_, chosen = engine.here(asked)
        merge_size = engine.processor.video_processor.merge_size
        here = shown_by(videos, Kept.of(chosen, 0), merge_size, engine.model.config.qtsplus_config).as_dict()
        same_basis(told, here)
        assert {one["video"] for one in told["evidence"]} == {one["video"] for one in here["evidence"]}, name


def test_the_same_answers(engine, all_times):
    for name, asked in engine.requests.items():
        overrides: dict[str, Any] = {}
        # What is drawn is another each time; what attention reads depends on the times, of which here all stay.
        given = asked["settings"].get("selection") in ("random", "lm_attention")
        if asked["videos"] and (given or (not engine.exact and asked["settings"].get("selection") != "all")):
            kept = torch.tensor(engine.alone[name]["kept"])
            overrides = {"retention": 1.0, "max_visual_tokens": len(kept)}
            overrides["selection"] = lambda candidates, n, kept=kept: kept
        tokens, log_probabilities, _ = engine.here(asked, **overrides)
        check_answer(engine, engine.alone[name], tokens, log_probabilities)


def test_a_request_in_a_batch_is_answered_as_alone(engine):
    for name, asked in engine.requests.items():
        if asked["settings"].get("selection") == "random":
            continue
        alone, together = engine.alone[name], engine.together[name]
        assert alone["length"] == together["length"], name
        if engine.exact:
            assert alone["tokens"] == together["tokens"], name
            assert alone["logprobs"] == pytest.approx(together["logprobs"], abs=TOLERANCE["float32"]), name


def test_the_question_decides_and_the_tower_runs_once(engine):
    first, second = engine.alone["trained"], engine.alone["other question again"]
    assert first["kept"] != second["kept"]
    assert (first["tower_calls"], second["tower_calls"]) == (1, 0)
    assert engine.alone["two videos"]["tower_calls"] == 1  # of the second video


def test_the_models_own_budget_is_that_of_transformers(engine):
    names = [name for name in engine.requests if name.startswith("learned")]
    if engine.defaults is not None:
        pytest.skip("the engine has a budget for every request")
    counts = {name: len(engine.alone[name]["kept"]) for name in names}
    for name, count in counts.items():
        assert count == pytest.approx(int(engine.here(engine.requests[name])[2].n[0]), abs=not engine.exact), name
    calls = {name: engine.alone[name]["tower_calls"] for name in names}
    assert calls == {name: int(name == "learned") for name in names}
