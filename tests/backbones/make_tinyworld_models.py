"""Random models of other backbones, large enough to learn TinyWorld: `make_tinyworld_models.py FOLDER`.

Writes FOLDER/internvl and FOLDER/llava_onevision, each with its processor, one frame of 36 visual tokens per second and
the widths of qtsplus-tiny. `recipes/tinyworld-internvl*.yaml` and `recipes/tinyworld-llava*.yaml` train them.
"""

import sys
from pathlib import Path

import torch

from tiny_backbones import INTERNVL, LLAVA_ONEVISION, Backbone

TEXT = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "initializer_range": 0.06}
VISION = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 168, "patch_size": 14, "initializer_range": 0.08},
}


def make(backbone: Backbone, folder: Path, **tokens: int) -> None:
    """Writes a model with its processor; `tokens` is what the processor has to know of a frame."""
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
    backbone.model(backbone.model.config_class(**settings)).save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    make(INTERNVL, out / "internvl", image_seq_length=36)
    make(LLAVA_ONEVISION, out / "llava_onevision", num_image_tokens=144)
