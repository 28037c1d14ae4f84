"""A published folder behaves, in a process that has no `qtsplus`, exactly as the model it was made from."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import chat_inputs, load_bundled

AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")

FRESH_PROCESS = """
import sys

sys.modules["qtsplus"] = None  # any import of the package fails from here on
folder, inputs_file, outputs_file, video, *auto_classes = sys.argv[1:]

import torch
import transformers
from safetensors.torch import load_file, save_file

inputs, outputs = load_file(inputs_file), {}
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
assert type(config).__name__ == "Qwen2_5_VLQTSplusConfig", type(config)
for name in auto_classes:
    model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == "Qwen2_5_VLQTSplusForConditionalGeneration", (name, type(model))
    with torch.no_grad():
        outputs[name + ".logits"] = model(**inputs).logits
    outputs[name + ".ids"] = model.generate(**inputs, max_new_tokens=8)

content = [{"type": "video", "video": video}, {"type": "text", "text": "What moves?"}]
for task in ("image-text-to-text", "video-text-to-text", "any-to-any"):
    if task in transformers.pipelines.SUPPORTED_TASKS:
        answer = transformers.pipeline(task, model=folder, trust_remote_code=True)(
            text=[{"role": "user", "content": content}], max_new_tokens=8, do_sample=False, return_full_text=False
        )
        outputs[task] = torch.tensor(list(answer[0]["generated_text"].encode()))
assert not [name for name in sys.modules if name.startswith("qtsplus.")]
save_file(outputs, outputs_file)
"""


@pytest.fixture(scope="module")
def inputs(tiny_processor, tiny_mp4):
    made = chat_inputs(tiny_processor, tiny_mp4, "What moves?")
    return {name: torch.as_tensor(value) for name, value in made.items()}


@pytest.fixture(scope="module")
def fresh_outputs(tiny_published, inputs, tiny_mp4, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    save_file(inputs, folder / "inputs.safetensors")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(folder / "modules")
    arguments = [tiny_published, folder / "inputs.safetensors", folder / "outputs.safetensors", tiny_mp4, *AUTO_CLASSES]
    result = subprocess.run(
        [sys.executable, "-I", "-c", FRESH_PROCESS, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    return load_file(folder / "outputs.safetensors")


@pytest.fixture(scope="module")
def model():
    return load_bundled()[0]


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
def test_every_auto_class_gives_bit_equal_logits(auto_class, fresh_outputs, model, inputs):
    with torch.no_grad():
        assert torch.equal(fresh_outputs[f"{auto_class}.logits"], model(**inputs).logits)


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
def test_every_auto_class_generates_the_same_ids(auto_class, fresh_outputs, model, inputs):
    assert torch.equal(fresh_outputs[f"{auto_class}.ids"], model.generate(**inputs, max_new_tokens=8))


def test_pipelines_answer_on_a_video(fresh_outputs, model, inputs, tiny_processor):
    ids = model.generate(**inputs, max_new_tokens=8)[:, inputs["input_ids"].shape[1] :]
    expected = tiny_processor.batch_decode(ids, skip_special_tokens=True)[0]
    answers = {name: bytes(fresh_outputs[name].tolist()).decode() for name in fresh_outputs if "-to-" in name}
    assert "image-text-to-text" in answers and set(answers.values()) == {expected}
