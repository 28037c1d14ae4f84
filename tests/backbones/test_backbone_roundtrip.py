"""Published folders of every backbone behave, where there is no `qtsplus`, exactly as the models they were made of."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtsplus.hub.publish import assemble_folder
from tiny_backbones import BACKBONES

FRESH_PROCESS = """
import sys

sys.modules["qtsplus"] = None  # any import of the package fails from here on
folder, video, *names = sys.argv[1:]

import torch
import transformers
from safetensors.torch import load_file, save_file

for name in names:
    inputs = load_file(f"{folder}/{name}.safetensors")
    model = transformers.AutoModelForImageTextToText.from_pretrained(f"{folder}/{name}", trust_remote_code=True)
    processor = transformers.AutoProcessor.from_pretrained(f"{folder}/{name}", trust_remote_code=True)
    with torch.no_grad():
        outputs = {"logits": model(**inputs).logits}
    outputs["ids"] = model.generate(**inputs, max_new_tokens=4)
    content = [{"type": "video", "video": video}, {"type": "text", "text": "What moves?"}]
    made = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )
    outputs.update({"inputs." + key: torch.as_tensor(value) for key, value in made.items()})
    save_file(outputs, f"{folder}/{name}.out.safetensors")
# A backbone brings its own classes, and not those of another one.
loaded = [name for name in sys.modules if ".modeling_qtsplus" in name]
assert not any(name.endswith(".modeling_qtsplus") for name in loaded) or "qwen2_5_vl" in names, loaded
"""


@pytest.fixture(scope="session")
def published(tmp_path_factory, clips):
    """Per backbone its model, its inputs, and what a fresh process made of both."""
    folder, made = tmp_path_factory.mktemp("published"), {}
    content = [{"type": "video", "video": str(clips / "short.mp4")}, {"type": "text", "text": "What moves?"}]
    for backbone in BACKBONES:
        processor = backbone.processor()
        model = backbone.build(processor)
        for part in (model, processor):
            part.save_pretrained(folder / "saved" / backbone.name)
        assemble_folder(folder / "saved" / backbone.name, folder / backbone.name)
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        inputs = {name: torch.as_tensor(value) for name, value in inputs.items()}
        save_file(inputs, folder / f"{backbone.name}.safetensors")
        made[backbone.name] = model, inputs
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(folder / "modules")
    result = subprocess.run(
        [sys.executable, "-I", "-c", FRESH_PROCESS, str(folder), str(clips / "short.mp4"), *made],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return folder, {name: (*one, load_file(folder / f"{name}.out.safetensors")) for name, one in made.items()}


def test_round_trip(backbone, published):
    model, inputs, outputs = published[1][backbone.name]
    with torch.no_grad():
        assert torch.equal(outputs["logits"], model(**inputs).logits)
    assert torch.equal(outputs["ids"], model.generate(**inputs, max_new_tokens=4))
    made = {name.removeprefix("inputs."): value for name, value in outputs.items() if name.startswith("inputs.")}
    assert made.keys() == inputs.keys()
    for name, value in inputs.items():
        assert torch.equal(made[name], value), name


def test_a_folder_holds_no_other_backbone(backbone, published):
    files = {path.name for path in (published[0] / backbone.name).glob("*.py")}
    assert "mixin_qtsplus.py" in files and "processing_qtsplus.py" in files
    assert len([name for name in files if name.startswith("modeling_qtsplus")]) == 1
