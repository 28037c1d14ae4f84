"""What a selector does: measured from what its budget head sees, over videos, and never twice."""

import json

import numpy as np
import pytest
import torch

from benchmarks.learned.baselines import full_video
from benchmarks.world.tinyworld import build_dataset
from qtsplus.data.records import VideoRecord
from qtsplus.evaluation import analysis
from qtsplus.evaluation.analysis import measure, run_analysis, summarise_choices
from qtsplus.evaluation.exact_match import model_inputs
from qtsplus.evaluation.labelled import read_questions
from qtsplus.training.models import load_model


@pytest.fixture(scope="module")
def model():
    return load_model("qtsplus-tiny", None, seed=0).eval()


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analysis")
    return read_questions(
        folder / build_dataset(folder, "test", 3, seconds=(2, 3), max_objects=20, progress=False, crowd=True)
    )


def test_a_question_is_measured_from_what_the_budget_head_sees(model, tiny_processor, questions):
    question = next(one for one in questions if one.needles)
    pixels = full_video(tiny_processor, str(question.record.video))
    (features,) = model.encode_videos(pixels.pop("pixel_values_videos"), pixels["video_grid_thw"])
    video = {"video_features": features, **pixels}
    found = measure(model, tiny_processor, question, video)
    inputs = model_inputs(tiny_processor, [question.record], {str(question.record.video): video})
    with torch.no_grad():
        chosen = model.model.compress(**inputs).qtsplus
    relevance = chosen.relevance[0].double()
    p = relevance / relevance.sum()
    assert found["rho"] == float(chosen.rho[0]) and found["n"] == len(chosen.kept_indices[0])
    assert found["m"] == len(relevance) and found["log_m"] == pytest.approx(np.log(len(relevance)))
    assert found["r_max"] == pytest.approx(float(relevance.max()))
    assert found["entropy"] == pytest.approx(float(-(p * p.log()).sum()), rel=1e-4)
    ids, mask = inputs["query_input_ids"][0], inputs["query_attention_mask"][0].bool()
    words = model.get_input_embeddings()(ids[mask]).detach()
    assert found["sq_mean"] == pytest.approx(float(words.mean()), abs=1e-6)
    tau = model.config.qtsplus_config.tau_s
    for name, scores in (("threshold", relevance), ("log_threshold", relevance.log())):
        soft = torch.sigmoid((scores - found[name]) / tau).sum()
        assert float(soft) == pytest.approx(found["rho"] * found["m"], rel=1e-3)
    assert sum(found["needles"]) == len(question.tokens((len(relevance) // 36, 6, 6), 1.0)) > 0
    assert sum(found["needles"]) + sum(found["others"]) == found["m"] == pytest.approx(sum(found["all_over_time"]))
    assert sum(found["kept_over_time"]) == pytest.approx(found["n"])


def test_a_run_leaves_out_what_cannot_be_read_and_goes_on_where_it_stopped(
    model, tiny_processor, questions, tmp_path, monkeypatch
):
    record = VideoRecord(str(tmp_path / "missing.mp4"), "What?", "!", kind="attribute")
    asked = [*questions, type(questions[0])(record, [])]
    measured, told = [], analysis.measure

    def count(*arguments):
        measured.append(arguments)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return told(*arguments)

    monkeypatch.setattr(analysis, "measure", count)
    call = {"name": "test", "work": tmp_path / "work", "progress": False}
    with pytest.raises(KeyboardInterrupt):
        run_analysis(model, tiny_processor, asked, tmp_path, **call)
    document = json.loads(run_analysis(model, tiny_processor, asked, tmp_path, **call).read_text())
    assert len(measured) == len(questions) + 1
    assert (document["questions"], document["videos"], document["unreadable"]) == (len(questions), 3, 1)
    assert set(document["correlations"]) == set(analysis.QUANTITIES)
    assert sum(row["questions"] for row in document["budgets"].values()) == len(document["pairs"]) == len(questions)
    page = (tmp_path / "analysis-test.md").read_text()
    assert "-0.4911" in page and "1 questions had no video" in page
    for figure in ("budget", "tokens"):
        assert (tmp_path / f"analysis-test-{figure}.png").stat().st_size > 1000


def found(rho, m, kept):
    """A question with so many of the tokens kept in the first and in the second half."""
    halves = [kept[0] / 10] * 10 + [kept[1] / 10] * 10
    empty = {"needles": [0] * 200, "others": [0] * 200, "kept_over_time": halves, "all_over_time": [m / 20] * 20}
    quantities = dict.fromkeys(analysis.QUANTITIES, 1.0)
    return {**quantities, "log_m": np.log(m), "rho": rho, "m": m, "n": sum(kept), **empty}


def test_longer_videos_with_smaller_shares_correlate_and_kept_tokens_have_their_time():
    lengths = (100, 200, 400, 800)
    records = [VideoRecord(f"{m}.mp4", "?", "!", kind=kind) for m in lengths for kind in ("when", "count")]
    measured = [found(10 / m, m, (6, 2) if kind == "when" else (2, 6)) for m in lengths for kind in ("when", "count")]
    document = summarise_choices(records, measured)
    assert document["correlations"]["log_m"]["r"] < -0.9 and document["correlations"]["r_max"] == {}
    assert document["budgets"]["when"]["rho"]["mean"] == pytest.approx(np.mean([10 / m for m in lengths]))
    assert document["time"]["when"] == pytest.approx([1.5] * 10 + [0.5] * 10)
    assert document["time"]["all"] == pytest.approx([1.0] * 20)
    with pytest.raises(ValueError, match="expected at least two"):
        summarise_choices(records[:3], [measured[0], measured[1], None])
