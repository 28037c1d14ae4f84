"""What a budget follows: measured from what its head sees, over videos, and never encoded twice."""

import json

import numpy as np
import pytest
import torch

from benchmarks.prompts import compress, model_inputs
from benchmarks.studies import analysis
from benchmarks.studies.analysis import measure, run_analysis, summarise_choices
from benchmarks.world.open_sets import build_open
from qtsplus.data.formats import read_records
from qtsplus.data.records import VideoRecord
from qtsplus.training.models import make_model
from qtsplus.video.encoded import encode


@pytest.fixture(scope="module")
def model():
    return make_model("qtsplus-tiny", None, seed=0).eval()


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analysis")
    paths = [build_open(folder / f"{seconds}s", "test", 2, seconds, variant="plain") for seconds in (3, 4)]
    return [record for path in paths for record in read_records(path)]


def test_a_question_is_measured_from_what_the_budget_head_sees(model, tiny_processor, records):
    record = records[0]
    encoded = encode(model, tiny_processor, record.video)
    video = {
        "video_features": encoded.features,
        "video_grid_thw": encoded.video_grid_thw,
        "second_per_grid_ts": torch.tensor([encoded.seconds_per_step]),
    }
    found = measure(model, tiny_processor, record, video)
    inputs = model_inputs(tiny_processor, [record], {str(record.video): video})
    with torch.no_grad():
        chosen = compress(model.model, **inputs).qtsplus
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


def test_a_run_leaves_out_what_cannot_be_read_and_encodes_nothing_twice(
    model, tiny_processor, records, tmp_path, monkeypatch
):
    record = VideoRecord(str(tmp_path / "missing.mp4"), "What?", "!", kind="attribute")
    asked = [*records, record, VideoRecord(None, "Without a video?", "Yes.")]
    call = {"work": tmp_path / "work", "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(analysis, "measure", None)
        with pytest.raises(TypeError):
            run_analysis(model, tiny_processor, asked, tmp_path, **call)
    monkeypatch.setattr(model, "encode_videos", None)  # nothing is encoded again
    document = json.loads(run_analysis(model, tiny_processor, asked, tmp_path, **call).read_text())
    assert (document["questions"], document["videos"], document["unreadable"]) == (len(records), 4, 1)
    assert set(document["correlations"]) == set(analysis.QUANTITIES)
    assert len(document["pairs"]) == len(records) and document["published"]["entropy"] == -0.4911
    with pytest.raises(ValueError, match="is there already"):
        run_analysis(model, tiny_processor, asked, tmp_path, **call)
    assert json.loads((tmp_path / "analysis.json").read_text()) == document


def test_longer_videos_with_smaller_shares_correlate():
    lengths = (100, 200, 400, 800)
    records = [VideoRecord(f"{m}.mp4", "?", "!", kind=kind) for m in lengths for kind in ("when", "count")]
    constant = dict.fromkeys(analysis.QUANTITIES, 1.0)
    measured = [
        {**constant, "log_m": np.log(m), "rho": 10 / m, "m": m, "n": 8} for m in lengths for _ in ("when", "count")
    ]
    document = summarise_choices(records, measured)
    assert document["correlations"]["log_m"]["r"] < -0.9 and document["correlations"]["r_max"] == {}
    assert document["rho"]["low"] < document["rho"]["mean"] < document["rho"]["high"]
    with pytest.raises(ValueError, match="expected at least two"):
        summarise_choices(records[:3], [measured[0], measured[1], None])
