"""The models of other backbones that learn TinyWorld."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.world.clip import write_mp4
from benchmarks.world.tinyworld import FPS, render, split_world
from benchmarks.world.tinyworld_models import write_tinyworld_models
from qtsplus.hub.files import hub_configs
from qtsplus.training.models import make_model, make_processor


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, "-m", "benchmarks.world.tinyworld_models", str(folder)], check=True)
    return folder


@pytest.mark.parametrize("name", ["internvl", "llava_onevision"])
def test_a_second_has_36_tokens(name, written, tmp_path):
    model = make_model(None, str(written / name))
    processor = make_processor(None, str(written / name), model.config)
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


@pytest.mark.parametrize("name", ["internvl", "llava_onevision"])
def test_the_language_model_may_come_from_qtsplus_tiny(name, written, tmp_path):
    source = hub_configs() / "qtsplus-tiny"
    write_tinyworld_models(tmp_path, source)
    given = load_file(source / "model.safetensors")
    random, made = (load_file(folder / name / "model.safetensors") for folder in (written, tmp_path))
    assert made.keys() == random.keys()
    for key, weight in made.items():
        lent = given.get(key) if ".language_model." in key else None
        if lent is None:
            assert key == "lm_head.weight" or torch.equal(weight, random[key])
        else:  # the backbone's own special tokens stay as they were
            assert torch.equal(weight[: len(lent)], lent) and torch.equal(weight[len(lent) :], random[key][len(lent) :])
    if "lm_head.weight" in made:
        assert torch.equal(made["lm_head.weight"], made["model.language_model.embed_tokens.weight"])
