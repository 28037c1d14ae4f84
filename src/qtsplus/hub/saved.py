"""What `save_pretrained` left in a folder, loaded with this package's classes; a broken file is one `ValueError`."""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..backbones import backbone_of
from .folder import read_json, reading


def refuse_adapter(folder: Path) -> None:
    """Raises `ValueError` for the folder of a PEFT adapter, which has the weights of no whole model."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds a PEFT adapter; merge it (merge_and_unload) and save the whole model first.")


def load_config(folder: Path) -> Any:
    """The configuration of one of our models."""
    path = folder / "config.json"
    with reading(path):
        return backbone_of(read_json(path).get("model_type")).config.from_pretrained(folder)


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """The generation configuration, where there is one."""
    path = folder / "generation_config.json"
    if not path.exists():
        return None
    with reading(path):
        return GenerationConfig.from_pretrained(folder)


def load_processor(folder: str | Path, config: Any) -> Any:
    """
    Loads a processor with this package's class for a model's configuration, without which the tokenizer's loader would
    ask whether to trust the folder's code. A `ValueError` where a file is broken or the tokenizer has no words.
    """
    for path in [*Path(folder).glob("*processor_config.json"), *Path(folder).glob("tokenizer*.json")]:
        if path.exists():
            read_json(path)
    backbone = backbone_of(config.model_type)
    with reading(f"The processor of {folder}"):
        processor = backbone.processor.from_pretrained(folder, config=config)
    # Transformers makes a tokenizer of only the special tokens where the file is missing.
    if len(processor.tokenizer) <= len(processor.tokenizer.added_tokens_decoder):
        raise ValueError(f"{folder} has a tokenizer without words; expected a tokenizer.json, or vocab and merges.")
    if isinstance(config, backbone.config):  # and not a stock one, which does not say
        processor.follow(config)
    return processor
