"""Initialising, loading and saving: a checkpoint that lacks weights is refused, and what is saved brings its code."""

import shutil
import sys
from pathlib import Path
from typing import Any

from transformers import initialization as init
from transformers.dynamic_module_utils import get_relative_import_files

from .selector_qtsplus import QTSplusSelector

# AutoModel too gives the class with the head, as published video models do.
MODEL_AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_OF_A_PUSH = ("commit_message", "private", "create_pr", "revision", "token")


def auto_map(model_class: Any) -> dict[str, str]:
    """The whole `auto_map` of a config.json, for a class with a head."""
    config_class = model_class.config_class
    target = f"{model_class.__module__.rpartition('.')[2]}.{model_class.__name__}"
    config_target = f"{config_class.__module__.rpartition('.')[2]}.{config_class.__name__}"
    return {"AutoConfig": config_target, **dict.fromkeys(MODEL_AUTO_CLASSES, target)}


def code_of(module_name: str) -> list[Path]:
    """The Python file of a module and of all that it imports from beside it, sorted."""
    entry = Path(str(sys.modules[module_name].__file__))
    return sorted({entry, *map(Path, get_relative_import_files(entry))})


class QTSplusPreTrainedMixin:
    """
    Initialises the selector, refuses checkpoints that would leave a part of the model random, and saves a model with a
    head as a Hub repository: with the whole `auto_map`, its code, and the names it loads by.
    """

    config: Any
    can_generate: Any
    push_to_hub: Any

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, QTSplusSelector):
            # A fresh re-encoder and a fresh layer over the question change nothing, so that they do not wreck a
            # trained language model.
            layers: Any = [*module.reencode_layers, *module.question_layers]
            for layer in layers:
                for weight in (layer.o_proj.weight, layer.ffn[-1].weight, layer.ffn[-1].bias):
                    init.zeros_(weight)
            init.zeros_(module.rho_history)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs):
        """As stock, but a `ValueError` where weights are missing, as in a checkpoint of the base model."""
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} of the weights of {cls.__name__} ({missing[0]}, "
                "...), which would stay random. If it is a base checkpoint without a selector, make a QTSplus model of "
                "it first: qtsplus convert."
            )
        for module in model.modules():
            if isinstance(module, QTSplusSelector):
                module.freeze_unused()
        return (model, info) if output_loading_info else model

    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        """As stock; the selector, whose attention is its own, is left out."""
        if isinstance(attn_implementation, str):
            parts = [name for name in self.config.sub_configs if name != "qtsplus_config"]
            attn_implementation = {"": attn_implementation, **dict.fromkeys(parts, attn_implementation)}
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs):
        """As stock, with the code that runs the model beside its weights."""
        # The default goes back to the names of a stock checkpoint where one was loaded, and that does not load again.
        kwargs["save_original_format"] = False
        if self.can_generate() and kwargs.get("is_main_process", True):
            # A class that somebody derived elsewhere is saved as the one of ours that it derives from.
            ours = next(parent for parent in type(self).__mro__ if "stock_class" in vars(parent))
            self.config.auto_map = auto_map(ours)
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            for path in code_of(ours.__module__):
                shutil.copyfile(path, Path(save_directory, path.name))
        super().save_pretrained(save_directory, *args, **kwargs)
        if push_to_hub:  # stock uploads only what it has written itself
            repo_id = kwargs.pop("repo_id", Path(save_directory).name)
            self.push_to_hub(repo_id, **{name: kwargs[name] for name in _OF_A_PUSH if name in kwargs})
