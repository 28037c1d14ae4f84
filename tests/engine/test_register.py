"""The plugin is found by vLLM, and says so where it does not know the version."""

from importlib.metadata import entry_points

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from qtsplus.vllm import BACKBONES, register  # noqa: E402


def test_vllm_finds_the_plugin():
    places = {}
    for plugin in entry_points(group="vllm.general_plugins"):
        places[plugin.name] = plugin.value
    assert places["qtsplus"] == "qtsplus.vllm:register"


@pytest.mark.parametrize("version", [(0, 28, 1), (0, 34, 0), (1, 0, 0)])
def test_an_unknown_version_is_refused_in_one_line(version, monkeypatch, caplog):
    registered = []
    name = ".".join(map(str, version))
    monkeypatch.setattr(vllm, "__version_tuple__", version)
    monkeypatch.setattr(vllm, "__version__", name)
    monkeypatch.setattr(vllm.ModelRegistry, "register_model", lambda *names: registered.append(names))
    register()
    records = [record for record in caplog.records if record.name == "qtsplus.vllm"]
    assert len(records) == 1
    message = records[0].getMessage()
    assert message.endswith(f"0.29 to 0.33, and this is {name}: its models are not registered.")
    assert not registered


def test_every_backbone_is_registered_as_often_as_vllm_asks():
    register()
    register()
    names = {f"{backbone}ForConditionalGeneration" for backbone in BACKBONES}
    assert names <= set(vllm.ModelRegistry.get_supported_archs())
