"""A folder from a stranger that holds what no model can be: one line says so, in every command that loads it."""

import json
import os
import shutil
from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.common.folders import reading
from qtsplus.hub.loading import check_values, load, load_processor
from qtsplus.model.methods_qtsplus import is_finite

TEMPLATES = {
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}": "RecursionError",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ raise_exception('no system') }}": "TemplateError: no system",
    "{% for": "TemplateSyntaxError",
    "{{ messages[0].nothing.more }}": "UndefinedError",
    "{{ messages + 1 }}": "TypeError",
    "{{ 'x' * 10000000000 }}": "it takes more than 1.1 GB of memory",
}


@pytest.fixture
def folder(tiny_published, tmp_path):
    return shutil.copytree(tiny_published, tmp_path / "model")


def change(path, *places, **values):
    content = json.loads(path.read_text())
    section = content
    for place in places:
        section = section[place]
    section.update(values)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_cannot_be_used_is_refused(template, folder):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=f"The processor of .* cannot be used: .*{TEMPLATES[template]}"):
        load_processor(folder)


def test_a_package_that_a_folder_needs_is_named():
    reason = "No module named 'absent_package', which it needs; install it, such as by pip install absent_package"
    with pytest.raises(ValueError, match=f"The model cannot be used: {reason}"), reading("The model"):
        import_module("absent_package")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.qtsplus.budget.mlp.0.bias", float("inf")),
        ("model.language_model.embed_tokens.weight", float("-inf")),
        ("model.visual.patch_embed.proj.weight", float("nan")),
    ],
)
def test_weights_that_are_not_finite_are_refused(name, value, folder):
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[5] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for read in (lambda: load(folder, "cpu"), lambda: AutoModel.from_pretrained(folder)):
        with pytest.raises(ValueError, match=f"hold NaN or infinity, such as {name}"):
            read()


def test_many_large_weights_of_few_bits_are_finite():
    assert is_finite(torch.full((1000,), 60_000.0, dtype=torch.float16))
    assert not is_finite(torch.tensor([1.0, torch.inf], dtype=torch.float16))


@pytest.mark.parametrize(
    ("file", "section", "name", "value"),
    [
        *(("config.json", ["text_config"], "rms_norm_eps", value) for value in (float("nan"), float("inf"), "x", [])),
        *(("config.json", [], "eos_token_id", value) for value in ("x", 1.5, True, [1, "x"], {})),
        *(
            ("generation_config.json", [], "eos_token_id", value)
            for value in ("x", 1.5, [1, "x"], {}, [[1]], [None], [])
        ),
        *(("generation_config.json", [], "temperature", value) for value in (float("nan"), float("inf"))),
        ("config.json", ["text_config"], "rope_theta", float("nan")),
        ("config.json", ["text_config", "rope_parameters"], "mrope_section", [16, 24, 24]),
        ("config.json", [], "initial", 10**400),
        ("config.json", [], "model_type", ["qwen2_5_vl"]),
        ("tokenizer.json", ["model"], "merges", [["zzzz", "qqqq"]]),
        ("tokenizer.json", ["model"], "vocab", {"a": -1}),
        ("processor_config.json", ["video_processor"], "patch_size", 0),
        ("processor_config.json", ["video_processor"], "patch_size", 1),
        ("processor_config.json", ["video_processor"], "max_frames", 0),
        ("processor_config.json", ["video_processor"], "rescale_factor", "x"),
        ("processor_config.json", ["video_processor", "size"], "shortest_edge", 10**12),
    ],
)
def test_values_that_no_model_has_end_each_command_in_one_line(file, section, name, value, folder, tiny_mp4, tmp_path):
    change(folder / file, *section, **{name: value})
    with pytest.raises(ValueError) as refused:
        load(folder, "cpu")
    assert "\n" not in str(refused.value)
    result = CliRunner().invoke(app, ["ask", str(tiny_mp4), "What?", "--model", str(folder)])
    assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_a_named_pipe_in_a_folder_is_not_waited_for(name, folder):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"expected .*{name}|There is no {name}|The processor of .* cannot be used"):
        load(folder, "cpu")


def test_good_values_are_no_problem():
    check_values("It", {"eps": 3, "layer_norm_eps": 1e-6, "pad_token_id": -1, "eos_token_id": [1, 2], "a": {"b": None}})
