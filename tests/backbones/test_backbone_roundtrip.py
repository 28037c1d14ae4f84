"""Published folders of every backbone behave, where there is no `qtsplus`, exactly as the models they were made of."""

import os
import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file

from qtsplus.hub.publish import assemble_folder
from tiny import chat_inputs
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
    made = {}
    for backbone in BACKBONES:
        processor = backbone.processor()
        model = backbone.build(processor)
        for part in (model, processor):
            part.save_pretrained(tmp_path / "saved" / backbone.name)
        assemble_folder(tmp_path / "saved" / backbone.name, tmp_path / backbone.name)
        files = {path.name for path in (tmp_path / backbone.name).glob("*.py")}
        assert {"mixin_qtsplus.py", "processing_qtsplus.py", "lm_attention_qtsplus.py"} <= files
        assert len([name for name in files if name.startswith("modeling_qtsplus")]) == 1
        inputs = chat_inputs(processor, clips / "short.mp4", "What moves?")
        inputs = {name: torch.as_tensor(value) for name, value in inputs.items()}
        save_file(inputs, tmp_path / f"{backbone.name}.safetensors")
        made[backbone.name] = model, inputs
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    result = subprocess.run(
        [sys.executable, "-I", "-c", FRESH_PROCESS, str(tmp_path), str(clips / "short.mp4"), *made],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    for name, (model, inputs) in made.items():
        outputs = load_file(tmp_path / f"{name}.out.safetensors")
        with torch.no_grad():
            assert torch.equal(outputs["logits"], model(**inputs).logits), name
        assert torch.equal(outputs["ids"], model.generate(**inputs, max_new_tokens=4)), name
        prepared = {key.removeprefix("inputs."): value for key, value in outputs.items() if key.startswith("inputs.")}
        assert prepared.keys() == inputs.keys()
        assert all(torch.equal(prepared[key], value) for key, value in inputs.items()), name
