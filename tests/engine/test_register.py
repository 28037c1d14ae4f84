"""The plugin says so where it does not know the version."""

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from qtsplus.vllm import register  # noqa: E402


@pytest.mark.parametrize("version", [(0, 28, 1), (0, 34, 0)])
def test_an_unknown_version_is_refused_in_one_line(version, monkeypatch, caplog):
    name = ".".join(map(str, version))
    monkeypatch.setattr(vllm, "__version_tuple__", version)
    monkeypatch.setattr(vllm, "__version__", name)
    monkeypatch.setattr(vllm.ModelRegistry, "register_model", None)  # which nobody can call
    register()
    (message,) = caplog.messages
    assert message.endswith(f"0.29 to 0.33, and this is {name}: its models are not registered.")
