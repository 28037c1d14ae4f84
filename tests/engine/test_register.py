"""The plugin is found by vLLM, and says so where it does not know the version."""

from importlib.metadata import entry_points

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from qtsplus.vllm import BACKBONES, register  # noqa: E402


def test_vllm_finds_the_plugin():
    plugins = entry_points(group="vllm.general_plugins")
    assert next(plugin.value for plugin in plugins if plugin.name == "qtsplus") == "qtsplus.vllm:register"


@pytest.mark.parametrize("version", [(0, 28, 1), (0, 34, 0), (1, 0, 0)])
def test_an_unknown_version_is_refused_in_one_line(version, monkeypatch, caplog):
    registered = []
    monkeypatch.setattr(vllm, "__version_tuple__", version)
    monkeypatch.setattr(vllm, "__version__", ".".join(map(str, version)))
    monkeypatch.setattr(vllm.ModelRegistry, "register_model", lambda *names: registered.append(names))
    register()
    (record,) = (record for record in caplog.records if record.name == "qtsplus.vllm")
    assert record.getMessage().endswith(f"0.29 to 0.33, and this is {vllm.__version__}: its models are not registered.")
    assert not registered


def test_every_backbone_is_registered_as_often_as_vllm_asks():
    for _ in range(2):
        register()
    assert {f"{name}ForConditionalGeneration" for name in BACKBONES} <= set(vllm.ModelRegistry.get_supported_archs())
