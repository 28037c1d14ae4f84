"""What each method takes of the prefill that it saves, at toy size."""

from benchmarks.files import read_result
from benchmarks.speed import method_shares
from benchmarks.speed.method_shares import method_costs, run_methods
from benchmarks.speed.shapes import find_shape, make_config
from qtsplus.model.methods_qtsplus import METHODS


def test_every_method_has_a_share_measured_and_by_the_cost_model(tmp_path, monkeypatch):
    monkeypatch.setattr(method_shares, "in_own_process", lambda function, **arguments: function(**arguments))
    target = run_methods(tmp_path, tokens=400, shape_name="tiny", whole="tiny")
    document = read_result(target)
    assert document["shares"].keys() == METHODS.keys() - {"all"}
    for share in document["shares"].values():
        assert share.keys() == {"measured", "A100 80 GB SXM", "H100 SXM"}
    assert document["measured"]["saved"] < document["measured"]["prefill"]


def test_a_selector_costs_less_than_what_it_saves_and_the_models_own_attention_much_of_it():
    costs = method_costs(make_config(find_shape("3b")), 180_000)
    saved = costs["stock prefill"].flops - costs["prefill"].flops
    assert costs["qtsplus"].flops < 0.03 * saved
    assert 0.1 * saved < costs["lm_attention"].flops < saved
