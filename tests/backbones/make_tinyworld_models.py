"""Random models of other backbones, large enough to learn TinyWorld: `make_tinyworld_models.py FOLDER`.

Writes FOLDER/internvl and FOLDER/llava_onevision, each with its processor, one frame of 36 visual tokens per second and
the widths of qtsplus-tiny. What a layer of the vision tower adds starts out small in both: InternVL has a scale for it,
0.1 at the start; SigLIP has none. `recipes/tinyworld-internvl*.yaml` and `recipes/tinyworld-llava*.yaml` train them.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from tiny_backbones import INTERNVL, LLAVA_ONEVISION, Backbone

TEXT = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "initializer_range": 0.06}
VISION = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 168, "patch_size": 14, "initializer_range": 0.08},
}


def make(backbone: Backbone, **tokens: int) -> tuple[Any, Any]:
    """A model and its processor; `tokens` is what the processor has to know of a frame."""
    processor = backbone.processor()
    for part in (processor.image_processor, processor.video_processor):
        part.size = {"height": 168, "width": 168}
    processor.video_processor.fps = 1
    for name, value in tokens.items():
        setattr(processor, name, value)
    settings = backbone.config(processor, {"rho_min": 0.05, "rho_max": 0.2}).to_dict()
    settings["text_config"].pop("layer_types", None)  # of another number of layers
    settings["text_config"].update(TEXT)
    settings["vision_config"].update(VISION)
    settings.update({name: value for name, value in tokens.items() if name in settings})
    torch.manual_seed(0)
    return backbone.model(backbone.model.config_class(**settings)), processor


def start_small(siglip: Any) -> None:
    """Scales what every layer adds by 0.1, as InternVL does: the model learns sooner, and directions at all."""
    with torch.no_grad():
        for layer in siglip.encoder.layers:
            layer.self_attn.out_proj.weight.mul_(0.1)
            layer.mlp.fc2.weight.mul_(0.1)


if __name__ == "__main__":
    internvl, llava = make(INTERNVL, image_seq_length=36), make(LLAVA_ONEVISION, num_image_tokens=144)
    start_small(llava[0].model.vision_tower)
    for name, parts in (("internvl", internvl), ("llava_onevision", llava)):
        for part in parts:
            part.save_pretrained(Path(sys.argv[1]) / name)
