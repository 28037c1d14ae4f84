"""Checkpoints on disk, and their weights under the names of our model: exactly what its configuration needs.

Tensors that were read are memory-mapped: a model is copied from file to file without being in memory.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..common.files import rewritten
from ..common.folders import read_json, reading
from .backbones import backbone_of

_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SELECTOR = "model.qtsplus."
RHO_HISTORY = "model.qtsplus.rho_history"
HEAD = "lm_head.weight"
EMBEDDINGS = "model.language_model.embed_tokens.weight"
_PLAIN_NAME = re.compile(r"(?!\.{1,2}$)[^/\\:\0]+", re.DOTALL)  # of a file, without folders

# From a checkpoint's names to ours, which are those of Transformers since 4.52: regular expressions with their
# replacements, applied in turn. Older checkpoints and saved backbones, which have no head, name weights otherwise.
STOCK = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.language_model.",
    r"^(?!model\.|lm_head\.)": "model.",
    r"^model\.(embed_tokens|layers|norm)\.": r"model.language_model.\1.",
}
REFERENCE = {
    r"^model\.qts_plus\.selector\.": "model.qtsplus.",
    r"^(model\.qtsplus\.reencode_layers\.\d+)\.core\.": r"\1.",
    r"^(model\.qtsplus\..+)\.ffn\.net\.": r"\1.ffn.",
    r"^model\.vision_tower\.": "model.visual.",
} | STOCK

Weights = dict[str, torch.Tensor]  # by name


def weight_files(folder: Path) -> list[Path]:
    """The one file of a folder's weights, or their index and its shards; a `ValueError` for missing ones."""
    if (folder / _FILE).is_file():
        return [folder / _FILE]
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} has no weights; expected {_FILE} or {INDEX}. Save others with Transformers.")
    shards = sorted({folder / name for name in weight_map(folder / INDEX).values()})
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise ValueError(f"{folder} lacks {', '.join(absent)}, which its {INDEX} names.")
    return [folder / INDEX] + shards


def weight_map(index: Path) -> dict[str, str]:
    """By the name of a tensor the shard that holds it; a `ValueError` for an index that leads out of its folder."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index} has no weight_map: it is no index of a checkpoint.")
    for name in shards.values():  # an index from elsewhere must not reach files outside its folder
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise ValueError(f"{index} names {str(name)!r}; expected names of files beside it.")
    return shards


def read_checkpoint(folder: Path) -> Weights:
    """The tensors of a folder's weights; a `ValueError` for a missing, cut or unreadable file."""
    tensors = {}
    for path in weight_files(folder):
        try:
            if path.suffix != ".json":
                tensors.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    return tensors


def on_meta(config):
    """The model of a configuration without weights: names, shapes and sizes."""
    with torch.device("meta"):
        return backbone_of(config.model_type).model(config)


def check_weights(
    stored: Mapping[str, torch.Tensor],
    config,
    folder: Path,
    rules: Mapping[str, str] = STOCK,
    without: str | None = None,
) -> Weights:
    """
    The stored tensors under our names, if they are exactly what the model needs; a `ValueError` that lists those that
    are missing, unexpected or of another shape. A head beside tied embeddings is dropped where the two are equal.
    Weights whose names begin as `without` says are not expected.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{folder} is quantized; take the checkpoint that it was made from, and quantize the result.")
    with reading(Path(folder, "config.json")):
        model = on_meta(config)
    ignored = model._keys_to_ignore_on_load_unexpected or ()  # as Qwen3.5's heads for several tokens at a time
    tensors = {
        rewritten(key, rules): tensor
        for key, tensor in stored.items()
        if not any(re.search(pattern, key) for pattern in ignored)
    }
    if config.tie_word_embeddings and EMBEDDINGS in tensors:
        embeddings = tensors[EMBEDDINGS]
        head = tensors.setdefault(HEAD, embeddings)
        if head is not embeddings and not torch.equal(head, embeddings):
            raise ValueError(
                f"{folder} has a {HEAD} that differs from its embeddings, but its configuration ties the two: set "
                "tie_word_embeddings to false in its config.json, or remove the head."
            )
    with reading(f"The weights in {folder}"):
        difference = model.load_state_dict(tensors, strict=False, assign=True)
    missing = [name for name in difference.missing_keys if without is None or not name.startswith(without)]
    wrong = [("missing", missing), ("unexpected", sorted(difference.unexpected_keys))]
    problems = [f"{len(names)} {problem}: {', '.join(names)}" for problem, names in wrong if names]
    if problems:
        raise ValueError(f"The weights in {folder} do not fit their configuration. {'; '.join(problems)}.")
    if config.tie_word_embeddings:
        del tensors[HEAD]
    return tensors
