"""In vLLM a published folder keeps the same tokens and gives the same answers as in Transformers."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

TOLERANCE = 1e-3  # of log-probabilities, float32


def check_answer(answer, tokens, log_probabilities):
    assert answer["tokens"] == tokens
    for token, value in answer["logprobs"].items():
        assert value == pytest.approx(float(log_probabilities[int(token)]), abs=TOLERANCE)


def names_kept(engine, asked):
    """Whether Transformers drops the times of frames of which nothing stays, which vLLM cannot."""
    return engine.model.model.frames_apart and asked["videos"] and asked["settings"].get("selection") != "all"


def test_the_same_tokens_stay(engine):
    for name, asked in engine.requests.items():
        if not asked["videos"] or asked["settings"].get("selection") == "random":
            continue
        *_, qtsplus = engine.here(asked)
        assert engine.alone[name]["kept"] == qtsplus.kept_indices[0].tolist(), name


def test_the_same_answers(engine):
    for name, asked in engine.requests.items():
        if names_kept(engine, asked):
            continue
        overrides = {}
        if asked["settings"].get("selection") == "random":
            kept = torch.tensor(engine.alone[name]["kept"])
            overrides["selection"] = lambda candidates, n, kept=kept: kept
        tokens, log_probabilities, _ = engine.here(asked, **overrides)
        check_answer(engine.alone[name], tokens, log_probabilities)


def test_a_request_in_a_batch_is_answered_as_alone(engine):
    for name, asked in engine.requests.items():
        if asked["settings"].get("selection") == "random":
            continue
        alone, together = engine.alone[name], engine.together[name]
        assert (alone["tokens"], alone["length"]) == (together["tokens"], together["length"]), name
        assert alone["logprobs"] == pytest.approx(together["logprobs"], abs=TOLERANCE), name


def test_the_question_decides_and_the_tower_runs_once(engine):
    first, second = engine.alone["trained"], engine.alone["other question again"]
    assert first["kept"] != second["kept"]
    assert (first["tower_calls"], second["tower_calls"]) == (1, 0)
    assert engine.alone["two videos"]["tower_calls"] == 1  # of the second video
