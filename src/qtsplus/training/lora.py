"""LoRA on the language model beside a selector that is trained whole."""

from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from ..common.folders import read_json
from .models import load_either

# Beside an adapter. Transformers would take a folder with a config.json for a whole model.
CONFIG_FILE = "qtsplus_config.json"


def lora_config(rank: int, alpha: float = 32.0) -> LoraConfig:
    """Adapters for [`add_lora`], and the selector as a module that is saved whole."""
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # any number scales
        modules_to_save=["qtsplus"],
        task_type="CAUSAL_LM",
    )


def add_lora(model, config: LoraConfig) -> PeftModel:
    """
    Puts adapters on the language model, on every projection where the `config` names none. PEFT trains a copy of the
    selector: here it reads the model's configuration, so that a change of it counts, and keeps frozen what the selector
    itself keeps frozen.
    """
    # The vision tower and the selector have projections of the same names.
    config.target_modules = config.target_modules or rf".*language_model\.layers\.\d+\.({model.projections})"
    weights = model.model.qtsplus.named_parameters()
    frozen = [name for name, weight in weights if not weight.requires_grad]
    adapted = get_peft_model(model, config)
    selector = active_selector(adapted)
    selector.config = base_model(adapted).config.qtsplus_config
    for name in frozen:
        selector.get_parameter(name).requires_grad_(False)
    return adapted


def save_selector_config(model, folder: str | Path) -> None:
    """Writes the `qtsplus_config` of a model into the folder of its adapter, where [`load_lora`] reads it."""
    base_model(model).config.qtsplus_config.to_json_file(Path(folder, CONFIG_FILE), use_diff=False)


def load_lora(
    base: str,
    adapter: str | Path,
    device: str | None = None,
) -> PeftModel:
    """
    A model with an adapter that was trained on it. The `qtsplus_config` is the adapter's, since recipes and training
    change it.

    Args:
        base: a folder or a Hub id, see [`load_either`].
        adapter: a folder that `QTSplusTrainer` or [`save_selector_config`] has written to; `ValueError` for another.
        device: as for `qtsplus.load`.
    """
    model, _ = load_either(base, device, selector=read_json(Path(adapter, CONFIG_FILE)))
    return PeftModel.from_pretrained(model, adapter)


def merge_lora(model: PeftModel) -> nn.Module:
    """The model with its adapters merged into the weights and the trained selector in its place, free of PEFT."""
    merged = model.merge_and_unload()
    merged.model.qtsplus.config = merged.config.qtsplus_config
    return merged


def base_model(model):
    """The QTSplus model inside a `PeftModel`, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def active_selector(model):
    """The [`QTSplusSelector`] that runs: under PEFT the trained copy."""
    selector = base_model(model).model.qtsplus
    if hasattr(selector, "modules_to_save"):
        return selector.modules_to_save[selector.active_adapters[0]]
    return selector
