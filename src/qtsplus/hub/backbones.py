"""The classes of every backbone, by the `model_type` of its configuration."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

_QWEN = ("model.configuration_qtsplus", "model.modeling_qtsplus", "model.processing_qtsplus")
_QWEN3 = ("model.configuration_qtsplus", "model.modeling_qtsplus_qwen3", "model.processing_qtsplus")
_FRAMES = ("model.modeling_qtsplus_frames",) * 3
# The prefix of the names of our classes, and the modules of configuration, models and processor, by the stock
# `model_type`.
_BACKBONES = {
    "qwen2_5_vl": ("Qwen2_5_VLQTSplus", _QWEN),
    "qwen2_vl": ("Qwen2VLQTSplus", _QWEN),
    "qwen3_vl": ("Qwen3VLQTSplus", _QWEN3),
    "qwen3_5": ("Qwen3_5QTSplus", _QWEN3),
    "internvl": ("InternVLQTSplus", _FRAMES),
    "llava_onevision": ("LlavaOnevisionQTSplus", _FRAMES),
}
STOCK_TYPES = sorted(_BACKBONES)
OURS = "_qtsplus"  # the suffix of our types beside those of the stock models


@dataclass(frozen=True)
class Backbone:
    """Our classes, and those of Transformers that they derive from."""

    config: Any
    model: Any  # with a head
    processor: Any

    @property
    def stock_model(self):
        return self.model.stock_class


def class_modules() -> dict[str, str]:
    """The module of each of our classes, by its name."""
    modules = {}
    for prefix, (config, model, processor) in _BACKBONES.values():
        modules.update(
            {
                f"{prefix}Config": config,
                f"{prefix}Model": model,
                f"{prefix}ForConditionalGeneration": model,
                f"{prefix}Processor": processor,
            }
        )
    return modules


def backbone_of(model_type: str | None) -> Backbone:
    """The classes of our model type (`"internvl_qtsplus"`) or the stock one (`"internvl"`); `ValueError` for others."""
    name = model_type.removesuffix(OURS) if isinstance(model_type, str) else ""
    if name not in _BACKBONES:
        raise ValueError(
            f"There is no backbone of type {model_type!r}; expected one of {', '.join(STOCK_TYPES)}, or ours of "
            f"these, with {OURS!r} behind."
        )
    prefix, (config, model, processor) = _BACKBONES[name]
    return Backbone(
        config=_class(config, f"{prefix}Config"),
        model=_class(model, f"{prefix}ForConditionalGeneration"),
        processor=_class(processor, f"{prefix}Processor"),
    )


def _class(module: str, name: str):
    return getattr(import_module(f"qtsplus.{module}"), name)


@cache
def register_backbones() -> None:
    """Makes Transformers' Auto classes take these classes for our models, in the place of a folder's own code."""
    import transformers

    from ..model.generation_qtsplus import MODEL_AUTO_CLASSES

    for stock_type in STOCK_TYPES:
        model_type = stock_type + OURS
        backbone = backbone_of(model_type)
        transformers.AutoConfig.register(model_type, backbone.config, exist_ok=True)
        transformers.AutoProcessor.register(backbone.config, backbone.processor, exist_ok=True)
        for name in MODEL_AUTO_CLASSES:
            getattr(transformers, name).register(backbone.config, backbone.model, exist_ok=True)
