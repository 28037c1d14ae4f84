"""Assembles complete Hub repositories: weights, configuration, processor, the code that runs them, a model card."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.dynamic_module_utils import get_relative_import_files

from ..configuration_qtsplus import Qwen2_5_VLQTSplusConfig
from ..modeling_qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from ..processing_qtsplus import Qwen2_5_VLQTSplusProcessor
from .card import model_card
from .files import hub_configs, hub_root, variants

_MODEL_CLASS = "modeling_qtsplus.Qwen2_5_VLQTSplusForConditionalGeneration"
# AutoModel too gives the class with the head, as published video models do.
AUTO_MAP = {
    "AutoConfig": "configuration_qtsplus.Qwen2_5_VLQTSplusConfig",
    "AutoModel": _MODEL_CLASS,
    "AutoModelForCausalLM": _MODEL_CLASS,
    "AutoModelForImageTextToText": _MODEL_CLASS,
    "AutoModelForMultimodalLM": _MODEL_CLASS,
}
PROCESSOR_AUTO_MAP = {"AutoProcessor": "processing_qtsplus.Qwen2_5_VLQTSplusProcessor"}

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# What an assembly may hold from an earlier run. Anything else in a folder is the user's.
_OWN_FILES = (
    *("config.json", "generation_config.json", "processor_config.json", "chat_template.jinja", "README.md"),
    *("model*.safetensors", "model.safetensors.index.json", "*_qtsplus*.py", "__pycache__"),
    *("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
)


@dataclass(frozen=True)
class Publishable:
    """A model with its processor, and what its card has to say.

    Args:
        variant: name of a folder of `hub_configs`, or `None`.
        random_seed: the seed of random weights; `None` for weights that were loaded.
    """

    model: Qwen2_5_VLQTSplusForConditionalGeneration
    processor: Qwen2_5_VLQTSplusProcessor
    variant: str | None = None
    random_seed: int | None = None


def build_variant(name: str, seed: int = 0, dtype: torch.dtype | None = None) -> Publishable:
    """
    Builds a variant of `hub_configs` with seeded random weights.

    Args:
        name: such as `"qtsplus-tiny"`.
        seed: of the weights. The global random state is left as it was.
        dtype: of the weights; the configuration's when absent.

    Raises:
        ValueError: no such variant, or one without tokenizer files of its own.
    """
    if name not in variants():
        raise ValueError(f"There is no variant {name!r}; expected one of {', '.join(variants())}.")
    folder = hub_configs() / name
    if not (folder / "tokenizer_config.json").exists():
        raise ValueError(
            f"The variant {name!r} comes without tokenizer and weights; give a folder that was saved with "
            "save_pretrained instead."
        )
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen2_5_VLQTSplusForConditionalGeneration(config)  # its `to` is typed wrongly upstream
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.to(dtype or config.dtype).eval()
    return Publishable(model, load_processor(folder, config), name, seed)


def load_variant(name: str) -> Publishable:
    """
    A variant of `hub_configs` with the weights that are bundled with it, or built by [`build_variant`] without.

    Raises:
        ValueError: no such variant, or one that comes with neither weights nor tokenizer files.
    """
    folder = hub_configs() / name
    if name not in variants() or not any((folder / weights).exists() for weights in _WEIGHTS):
        return build_variant(name)
    loaded = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(folder).eval()
    return Publishable(loaded, load_processor(folder, loaded.config), name)


def load_processor(folder: str | Path, config: Qwen2_5_VLQTSplusConfig) -> Qwen2_5_VLQTSplusProcessor:
    """
    Loads a processor with this package's class.

    The configuration goes along because the tokenizer's loader would otherwise look for one itself, meet the `auto_map`
    in the folder's config.json, and ask on the terminal whether to trust it.
    """
    return Qwen2_5_VLQTSplusProcessor.from_pretrained(folder, config=config)


def load_for_publish(model: str | Path) -> Publishable:
    """
    Loads what `qtsplus publish MODEL` names: a folder with weights, or a variant of `hub_configs`.

    Args:
        model: a folder written by `save_pretrained` (model and processor), a Trainer checkpoint, an assembled
            repository; or a variant's name, which is built with random weights if none are bundled.

    Raises:
        ValueError: neither of the two, another kind of model, or a folder without weights or processor files.
    """
    folder = Path(model)
    if not folder.is_dir():
        if str(model) in variants():
            return load_variant(str(model))
        raise ValueError(f"{model} is neither a folder nor a variant; the variants are {', '.join(variants())}.")
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds a PEFT adapter; merge it (merge_and_unload) and save the whole model first.")
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json; expected a folder written by save_pretrained.")
    model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    if model_type != Qwen2_5_VLQTSplusConfig.model_type:
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}; expected {Qwen2_5_VLQTSplusConfig.model_type!r}."
        )
    if not any((folder / name).exists() for name in _WEIGHTS):
        raise ValueError(f"{folder} has no weights; expected {' or '.join(_WEIGHTS)}.")
    if not (folder / "processor_config.json").exists():
        raise ValueError(f"{folder} has no processor_config.json; save the processor there with save_pretrained.")
    loaded = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(folder, dtype="auto").eval()
    return Publishable(loaded, load_processor(folder, loaded.config))


def assemble(
    model: Qwen2_5_VLQTSplusForConditionalGeneration,
    processor: Qwen2_5_VLQTSplusProcessor,
    folder: str | Path,
    *,
    variant: str | None = None,
    random_seed: int | None = None,
    overwrite: bool = False,
) -> Path:
    """
    Writes a complete Hub repository, which loads with `trust_remote_code=True` where this package is not installed.

    The repository is built in a folder beside the target and then moved, so that an interrupted run leaves nothing
    that loads half.

    Args:
        folder: the target. An earlier assembly is replaced.
        variant: name of a folder of `hub_configs`, for the card's licence and base model.
        random_seed: the seed of random weights, for the card to say so.
        overwrite: write also into a folder that holds other files; those stay as they are.

    Returns:
        the folder.

    Raises:
        FileExistsError: the folder holds other files, or is a file.
    """
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; expected a folder to write to.")
    foreign = _foreign_files(folder)
    if foreign and not overwrite:
        raise FileExistsError(
            f"{folder} holds files that are not from an earlier run ({', '.join(foreign[:3])}); "
            "choose another folder or allow overwriting."
        )
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    staging.mkdir(parents=True)
    try:
        _write(model, processor, staging, folder.name, variant, random_seed)
        _move(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def code_files() -> list[Path]:
    """The Python files that a repository needs: those that the auto maps name, and what they import."""
    entries = {
        hub_root() / f"{target.split('.')[0]}.py" for target in [*AUTO_MAP.values(), *PROCESSOR_AUTO_MAP.values()]
    }
    imported = {Path(path) for entry in entries for path in get_relative_import_files(entry)}
    return sorted(entries | imported)


def _write(
    model: Qwen2_5_VLQTSplusForConditionalGeneration,
    processor: Qwen2_5_VLQTSplusProcessor,
    folder: Path,
    name: str,
    variant: str | None,
    random_seed: int | None,
) -> None:
    # Without save_original_format=False a model that was loaded from a base checkpoint goes back to that one's names.
    model.save_pretrained(folder, max_shard_size="5GB", save_original_format=False)
    processor.save_pretrained(folder)
    for path in code_files():
        shutil.copyfile(path, folder / path.name)
    _update_json(folder / "config.json", architectures=[_MODEL_CLASS.split(".")[1]], auto_map=AUTO_MAP)
    _update_json(folder / "processor_config.json", auto_map=PROCESSOR_AUTO_MAP)
    (folder / "README.md").write_text(model_card(model, name, variant, random_seed), encoding="utf-8")


def _move(staging: Path, folder: Path) -> None:
    if not folder.exists():
        staging.rename(folder)
        return
    # The configuration goes first and comes last: without it nothing loads.
    (folder / "config.json").unlink(missing_ok=True)
    for pattern in _OWN_FILES:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in sorted(staging.iterdir(), key=lambda path: path.name == "config.json"):
        path.replace(folder / path.name)


def _foreign_files(folder: Path) -> list[str]:
    """Names in the folder that are not an earlier assembly's, sorted."""
    if not folder.exists():
        return []
    names = sorted(path.name for path in folder.iterdir())
    if "modeling_qtsplus.py" not in names:
        return names
    return [name for name in names if not any(Path(name).match(pattern) for pattern in _OWN_FILES)]


def _update_json(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}, indent=2) + "\n", encoding="utf-8")


__all__ = [
    "AUTO_MAP",
    "PROCESSOR_AUTO_MAP",
    "Publishable",
    "assemble",
    "build_variant",
    "code_files",
    "load_for_publish",
    "load_processor",
    "load_variant",
]
