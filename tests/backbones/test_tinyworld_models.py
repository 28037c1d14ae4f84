"""The random models that `recipes/tinyworld-*.yaml` start from."""

import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from qtsplus.data.clip import write_mp4
from qtsplus.data.tinyworld import FPS, render, split_world
from qtsplus.hub.tinyworld_models import write_tinyworld_models
from qtsplus.training.models import load_model, load_processor


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, "-m", "qtsplus.hub.tinyworld_models", str(folder)], check=True)
    return folder


@pytest.mark.parametrize("name", ["internvl", "llava_onevision"])
def test_a_recipe_starts_from_36_tokens_a_second(name, written, tmp_path, pytestconfig):
    recipe = pytestconfig.rootpath / "recipes" / f"tinyworld-{name.split('_')[0]}-base.yaml"
    assert yaml.safe_load(recipe.read_text())["model"]["weights"] == f"runs/tinyworld/{name}"
    model = load_model(None, str(written / name))
    processor = load_processor(None, str(written / name), model.config)
    write_mp4(tmp_path / "clip.mp4", render(split_world("test", 0, (4,))), FPS)
    content = [{"type": "video", "path": str(tmp_path / "clip.mp4")}, {"type": "text", "text": "What moves?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )
    with torch.no_grad():
        (encoded,) = model.encode_videos(**{key: inputs[key] for key in inputs if "video" in key})
    assert len(encoded) == 4 * 36


def test_the_weights_are_the_same_every_time(written, tmp_path):
    state = torch.random.get_rng_state()
    for folder in write_tinyworld_models(tmp_path):
        first, again = (load_file(parent / folder.name / "model.safetensors") for parent in (written, tmp_path))
        assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)
    assert torch.equal(state, torch.random.get_rng_state())
