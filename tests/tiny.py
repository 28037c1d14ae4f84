"""A tiny random model and random prompts for it, made without a processor."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.model.fields_qtsplus import CHOICES
from qtsplus.model.methods_qtsplus import top_n
from qtsplus.model.prompt_qtsplus import take_inputs
from qtsplus.model.selector_qtsplus import GATES, Gated, find_threshold

PAD = 0
BOS = 1
EOS = 2
IM_START = 490
USER = 491
IM_END = 492
NEWLINE = 10
ASSISTANT = 493
VISION_START = 497
VISION_END = 498
IMAGE_PAD = 499
VIDEO_PAD = 500
SPECIAL = [PAD, BOS, EOS, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]
WORDS = (20, 480)  # ordinary tokens
PATCH_VALUES = 3 * 2 * 4 * 4


def assert_same(actual, expected) -> None:
    """Equal to the bit: tensors, or lists and dictionaries of tensors."""
    assert_close(actual, expected, rtol=0, atol=0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def without(inputs, name: str) -> dict:
    """The inputs but one."""
    return {key: value for key, value in inputs.items() if key != name}


@torch.no_grad()
def run(model, inputs, **call):
    """A model's output, without gradients."""
    return model(**inputs, **call)


@torch.no_grad()
def compress(model, input_ids, attention_mask=None, position_ids=None, pad_left=None, **inputs):
    """The shortened prompts, of a model without a head."""
    return model.shorten(input_ids, attention_mask, position_ids, *take_inputs(inputs), pad_left=pad_left)


def noiseless_gate(log_relevance, target, tau_s, n, n_max):
    """What inference keeps, with the gradient of `sigmoid((log r - t) / tau_s)`: to compare runs to the digit."""
    kept = top_n(log_relevance.detach(), n)
    threshold = find_threshold(log_relevance, target, tau_s)
    soft = torch.sigmoid((log_relevance[kept] - threshold) / tau_s)
    return Gated(kept, 1 + (soft - soft.detach()), threshold)


GATES["noiseless"] = noiseless_gate
CHOICES["gate"] += ("noiseless",)
# What the paper's selector has.
PAPER = {"query_states": "embeddings", "reduction": "max", "budget": "rho", "null_token": False}

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "max_position_embeddings": 4096,
}
VISION = {
    "hidden_size": 32,
    "depth": 4,
    "intermediate_size": 48,
    "num_heads": 2,
    "fullatt_block_indexes": [1, 3],
    "patch_size": 4,
    "window_size": 16,
    "out_hidden_size": 64,
}
TOKEN_IDS = {
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def tiny_config(tie_word_embeddings: bool = True, **selector) -> Qwen2_5_VLQTSplusConfig:
    return Qwen2_5_VLQTSplusConfig(
        text_config=dict(TEXT),
        vision_config=dict(VISION),
        qtsplus_config={**PAPER, **selector},
        tie_word_embeddings=tie_word_embeddings,
        user_turn_token_ids=[IM_START, USER],
        turn_end_token_id=IM_END,
        special_token_ids=SPECIAL,
        **TOKEN_IDS,
    )


def tiny_model(
    seed: int = 0, tie_word_embeddings: bool = True, **selector
) -> Qwen2_5_VLQTSplusForConditionalGeneration:
    """Every parameter random and of a size that matters, the zero-initialised ones too."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLQTSplusForConditionalGeneration(tiny_config(tie_word_embeddings, **selector))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.ndim == 1 and "norm" in name else 0.0
            parameter.normal_(centre, 0.12)
    return model.eval()


def stock_twin(model) -> Qwen2_5_VLForConditionalGeneration:
    """Stock Qwen2.5-VL with the same weights."""
    config = Qwen2_5_VLConfig(
        text_config=dict(TEXT),
        vision_config=dict(VISION),
        tie_word_embeddings=model.config.tie_word_embeddings,
        **TOKEN_IDS,
    )
    stock = Qwen2_5_VLForConditionalGeneration(config)
    weights = {name: value for name, value in model.state_dict().items() if ".qtsplus." not in name}
    stock.load_state_dict(weights)
    return stock.eval()


def write_stock(source, out) -> None:
    """The bundled model and its processor as Transformers' own, in `out`."""
    names = ("text_config", "vision_config", "tie_word_embeddings", *TOKEN_IDS)
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(source).to_dict()
    stock = Qwen2_5_VLConfig(**{name: config[name] for name in names})
    Qwen2_5_VLForConditionalGeneration.from_pretrained(source, config=stock).save_pretrained(out)
    Qwen2_5_VLProcessor.from_pretrained(source, trust_remote_code=False).save_pretrained(out)


def published_name(name: str) -> str:
    """What the checkpoints that Qwen published call a weight of ours."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


@dataclass
class Prompt:
    """One row: its ids and the pixels of its images and videos."""

    ids: list[int] = field(default_factory=list)
    images: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[tuple[int, int, int]] = field(default_factory=list)
    image_pixels: list[Tensor] = field(default_factory=list)
    video_pixels: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def prompt(
    images=(),
    videos=(),
    question: int = 5,
    seed: int = 0,
    seconds: float = 1.0,
    turns: int = 0,
    generation: bool = True,
) -> Prompt:
    """
    A chat prompt with random words and pixels.

    Args:
        images, videos: (t, h, w) in patches; h and w even.
        question: words in the last user turn.
        turns: earlier question-and-answer turns (the first one holds the images and videos).
    """
    generator = seeded(seed)
    row = Prompt(images=list(images), videos=list(videos), seconds=[seconds] * len(videos))
    vision: list[int] = []

    def words(count):
        return torch.randint(*WORDS, (count,), generator=generator).tolist()

    def show(grid, pad):
        t, h, w = grid
        patches = t * h * w
        placeholders = [pad] * (patches // 4)
        vision.extend([VISION_START, *placeholders, VISION_END])
        return torch.randn(patches, PATCH_VALUES, generator=generator)

    row.image_pixels = [show(grid, IMAGE_PAD) for grid in images]
    row.video_pixels = [show(grid, VIDEO_PAD) for grid in videos]
    row.ids = [IM_START, 30, NEWLINE, *words(3), IM_END, NEWLINE]
    for turn in range(turns + 1):
        row.ids += [IM_START, USER, NEWLINE]
        if turn == 0:
            row.ids += vision
        row.ids += [*words(question), IM_END, NEWLINE]
        if turn < turns or not generation:
            row.ids += [IM_START, ASSISTANT, NEWLINE, *words(4), IM_END, NEWLINE]
    if generation:
        row.ids += [IM_START, ASSISTANT, NEWLINE]
    return row


def batch(*rows: Prompt, pad_left: bool = True, width: int | None = None) -> dict[str, Tensor]:
    """Model inputs for several rows."""
    if width is None:
        width = max(len(row.ids) for row in rows)
    ids = []
    mask = []
    for row in rows:
        length = len(row.ids)
        padding = width - length
        if pad_left:
            ids.append([PAD] * padding + row.ids)
            mask.append([0] * padding + [1] * length)
        else:
            ids.append(row.ids + [PAD] * padding)
            mask.append([1] * length + [0] * padding)
    together = Prompt()
    for row in rows:
        together.images += row.images
        together.videos += row.videos
        together.image_pixels += row.image_pixels
        together.video_pixels += row.video_pixels
        together.seconds += row.seconds
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    if together.images:
        inputs["pixel_values"] = torch.cat(together.image_pixels)
        inputs["image_grid_thw"] = torch.tensor(together.images)
    if together.videos:
        inputs["pixel_values_videos"] = torch.cat(together.video_pixels)
        inputs["video_grid_thw"] = torch.tensor(together.videos)
        inputs["second_per_grid_ts"] = torch.tensor(together.seconds)
    return inputs


def token_types(input_ids: Tensor) -> Tensor:
    return (input_ids == IMAGE_PAD) * 1 + (input_ids == VIDEO_PAD) * 2


def chat_inputs(processor, *content, **processor_kwargs):
    """Inputs of one turn of the user: a text, a video's path, or a part as it stands in a message."""
    parts = []
    for item in content:
        if isinstance(item, dict):
            parts.append(item)
        elif isinstance(item, str):
            parts.append({"type": "text", "text": item})
        else:
            parts.append({"type": "video", "video": str(item)})
    return processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=processor_kwargs,
    )


def load_bundled(folder=None):
    """The model and the processor of qtsplus-tiny, or of another folder, with trained weights."""
    from qtsplus.hub.files import hub_configs
    from qtsplus.hub.loading import processor_of

    folder = folder or hub_configs() / "qtsplus-tiny"
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(folder).eval()
    return model, processor_of(folder, model.config)
