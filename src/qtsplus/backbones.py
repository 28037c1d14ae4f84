"""The classes of every backbone, by the `model_type` of its configuration."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

_MODULES = {
    "qwen2_5_vl": ("configuration_qtsplus", "modeling_qtsplus", "processing_qtsplus", "Qwen2_5_VLQTSplus"),
    "internvl": (*["modeling_qtsplus_internvl"] * 3, "InternVLQTSplus"),
    "llava_onevision": (*["modeling_qtsplus_llava_onevision"] * 3, "LlavaOnevisionQTSplus"),
    "qwen2_vl": (*["modeling_qtsplus_qwen2_vl"] * 3, "Qwen2VLQTSplus"),
    "qwen3_5": (*["modeling_qtsplus_qwen3_5"] * 3, "Qwen3_5QTSplus"),
    "qwen3_vl": (*["modeling_qtsplus_qwen3_vl"] * 3, "Qwen3VLQTSplus"),
}
OURS = "_qtsplus"  # what our types have behind those of the stock models


@dataclass(frozen=True)
class Backbone:
    """
    Args:
        config, model, processor: our classes; the model with a head.
        stock_config, stock_model, stock_processor: those of Transformers that they derive from.
    """

    config: Any
    model: Any
    processor: Any
    stock_config: Any
    stock_model: Any
    stock_processor: Any


def model_types() -> list[str]:
    """The types of our models, sorted."""
    return sorted(name + OURS for name in _MODULES)


def backbone_of(model_type: str | None) -> Backbone:
    """
    The classes of a backbone.

    Args:
        model_type: ours (`"internvl_qtsplus"`) or the stock model's (`"internvl"`).

    Raises:
        ValueError: another type.
    """
    stock = (model_type or "").removesuffix(OURS)
    if stock not in _MODULES:
        raise ValueError(
            f"There is no backbone of type {model_type!r}; expected one of {', '.join(sorted(_MODULES))}, or ours of "
            f"these, with {OURS!r} behind."
        )
    *modules, prefix = _MODULES[stock]
    kinds = ("Config", "ForConditionalGeneration", "Processor")
    ours = [
        getattr(import_module(f"qtsplus.{module}"), prefix + kind) for module, kind in zip(modules, kinds, strict=True)
    ]
    return Backbone(*ours, *map(_stock, ours))


def _stock(cls: type) -> type:
    """The class of Transformers that one of ours derives from."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("transformers.models."))
