"""Published folders of every backbone behave, where there is no `qtsplus`, exactly as the models they were made of."""

import os
import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file

from qtsplus.hub.publish import assemble_folder
from tiny import assert_same, chat_inputs, run
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


def test_round_trip(tmp_path, clips):
    """All in one fresh process: bit-equal logits, ids and inputs, from folders that hold no other backbone."""
    video = clips / "short.mp4"
    models = {}
    inputs_of = {}
    for backbone in BACKBONES:
        name = backbone.name
        processor = backbone.processor()
        models[name] = backbone.build(processor)
        inputs_of[name] = inputs_about(processor, video)
        save_file(inputs_of[name], tmp_path / f"{name}.safetensors")
        saved = tmp_path / "saved" / name
        models[name].save_pretrained(saved)
        processor.save_pretrained(saved)
        check_code(assemble_folder(saved, tmp_path / name))
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    environment["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    arguments = [str(tmp_path), str(video), *models]
    result = subprocess.run(
        [sys.executable, "-I", "-c", FRESH_PROCESS, *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    for name, model in models.items():
        outputs = load_file(tmp_path / f"{name}.out.safetensors")
        inputs = inputs_of[name]
        logits = run(model, inputs).logits
        assert torch.equal(outputs.pop("logits"), logits), name
        ids = model.generate(**inputs, max_new_tokens=4)
        assert torch.equal(outputs.pop("ids"), ids), name
        assert_same(outputs, {f"inputs.{key}": value for key, value in inputs.items()})


def inputs_about(processor, video):
    inputs = chat_inputs(processor, video, "What moves?")
    return {name: torch.as_tensor(value) for name, value in inputs.items()}


def check_code(folder):
    """It holds the code of one backbone."""
    files = {path.name for path in folder.glob("*.py")}
    assert files >= {"mixin_qtsplus.py", "processor_mixin_qtsplus.py", "lm_attention_qtsplus.py"}
    models = [name for name in files if name.startswith("modeling_qtsplus")]
    assert len(models) == 1
