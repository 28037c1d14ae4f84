"""Videos, processors and prompts for every backbone."""

import pytest
import torch
from PIL import Image

from clips import render_clip
from tiny_backbones import BACKBONES


@pytest.fixture(scope="session", params=BACKBONES, ids=lambda backbone: backbone.name)
def backbone(request):
    return request.param


@pytest.fixture(scope="session")
def processor(backbone):
    return backbone.processor()


@pytest.fixture(scope="session")
def model(backbone, processor):
    """For tests that change nothing."""
    return backbone.build(processor)


@pytest.fixture(scope="session")
def all_tokens(backbone, processor):
    """Keeps everything and changes nothing."""
    return backbone.build(processor, selection="all", reencode_layers=0)


@pytest.fixture(scope="session")
def stock(backbone, all_tokens):
    return backbone.stock_twin(all_tokens)


@pytest.fixture(scope="session")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for seed, (name, seconds, size) in enumerate(
        (("long", 3, (112, 112)), ("short", 2, (128, 96)), ("other", 2, (128, 96)))
    ):
        render_clip(folder / f"{name}.mp4", seconds=seconds, fps=4, size=size, seed=seed)
    return folder


@pytest.fixture(scope="session")
def rows(clips, backbone):
    """Conversations with an image, with videos of different lengths, and with neither."""
    image: object = {"type": "image", "image": Image.new("RGB", (60, 40), (200, 20, 20))}
    image = None if backbone.without_images else image
    long, short, other = ({"type": "video", "video": str(clips / f"{name}.mp4")} for name in ("long", "short", "other"))

    def row(*content):
        parts = [part for part in content if part is not None]
        return [{"role": "user", "content": [part if isinstance(part, dict) else text(part) for part in parts]}]

    def text(words):
        return {"type": "text", "text": words}

    return {
        "video": row(long, "What moves to the left of the red ball?"),
        "image and video": row(image, short, "Why?"),
        "text": row("Where is the red ball, and when does the green one appear in the middle?"),
        "short text": row("And why?"),
        "two videos": row(short, other, "Which shape appears first?"),
        "image": row(image, "What colour is it?"),
        "earlier turns": [
            *row(long, "Which shape is red?"),
            {"role": "assistant", "content": [text("The ball.")]},
            *row("And blue?"),
        ],
    }


@pytest.fixture(scope="session")
def prepare(processor, rows):
    """Model inputs for the named conversations."""

    def make(*names, **options):
        options = {"add_generation_prompt": True, **options}
        inputs = processor.apply_chat_template(
            [rows[name] for name in names],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left", "fps": 2, **options.pop("processor_kwargs", {})},
            **options,
        )
        # The model takes these too, and does not need them.
        return {name: torch.as_tensor(value) for name, value in inputs.items() if name != "mm_token_type_ids"}

    return make
