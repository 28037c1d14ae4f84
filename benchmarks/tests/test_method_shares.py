"""What each method takes of the prefill that it saves, at toy size."""

from benchmarks.files import read_result
from benchmarks.speed import method_shares
from benchmarks.speed.cost import DATA_SHEETS
from benchmarks.speed.method_shares import method_costs, run_methods
from benchmarks.speed.shapes import find_shape, make_config
from qtsplus.model.methods_qtsplus import METHODS


def test_every_method_has_a_share_measured_and_by_the_cost_model(tmp_path, monkeypatch):
    monkeypatch.setattr(method_shares, "in_own_process", lambda function, **arguments: function(**arguments))
    document = read_result(run_methods(tmp_path, tokens=400, shape_name="tiny", whole="tiny"))
    assert document["shares"].keys() == METHODS.keys() - {"all"}
    for share in document["shares"].values():
        assert share.keys() == {"measured", "A100 80 GB SXM", "H100 SXM"}
    assert document["measured"]["saved"] < document["measured"]["prefill"]


def test_at_the_papers_size_every_method_takes_less_than_3_percent_but_attention_behind_layer_4():
    config = make_config(find_shape("3b"))
    for layer, expected in [(4, set()), (5, {"lm_attention"}), (None, {"lm_attention"})]:
        config.qtsplus_config.attention_layer = layer
        costs = method_costs(config, 180_000)
        stock = costs.pop("stock prefill")
        ours = costs.pop("prefill")
        for device in DATA_SHEETS:
            saved = device.floor(stock) - device.floor(ours)
            slow = {name for name, cost in costs.items() if device.floor(cost) > 0.03 * saved}
            assert slow == expected
