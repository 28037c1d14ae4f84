"""Which weights a sharded run shares out among its processes: those of the language model's layers.

Every pass over a batch calls each of these layers once, whatever the batch holds. How often it calls the embeddings,
the vision tower and the selector depends on its videos and questions. A process that gathers a weight waits for all
others to gather it too, so what lies outside of the layers is gathered for a whole pass, or a whole step.
"""

from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule


def layer_class(model) -> type[nn.Module]:
    """Of the language model's layers. What FSDP has wrapped derives from it."""
    return type(model.model.language_model.layers[0])


def choose_layers(state, model) -> None:
    """
    Prepares accelerate's state: FSDP wraps the language model's layers, unless its configuration names others, and does
    not round what the model gives. A `ValueError` for a configuration that would end without a model's folder, or could
    not begin.
    """
    fsdp = getattr(state, "fsdp_plugin", None)
    deepspeed = getattr(state, "deepspeed_plugin", None)
    if deepspeed is not None and deepspeed.zero_stage == 3:
        raise ValueError("ZeRO-3 shares out the model, as here only FSDP can: use recipes/accelerate/fsdp2.yaml.")
    if fsdp is None:
        return
    if model.config.qtsplus_config.selection == "lm_attention":
        raise ValueError(
            "lm_attention reads the first layers by themselves, which FSDP shares out: train with "
            "recipes/accelerate/zero2.yaml or ddp.yaml."
        )
    if fsdp.fsdp_version != 2 or fsdp.state_dict_type.name != "FULL_STATE_DICT" or fsdp.cpu_ram_efficient_loading:
        raise ValueError(
            "accelerate's configuration of FSDP: expected fsdp_version 2, fsdp_state_dict_type FULL_STATE_DICT and "
            "fsdp_cpu_ram_efficient_loading false, as in recipes/accelerate/fsdp2.yaml."
        )
    if fsdp.transformer_cls_names_to_wrap is None:
        fsdp.transformer_cls_names_to_wrap = [layer_class(model).__name__]
    if fsdp.mixed_precision_policy is not None:
        fsdp.mixed_precision_policy = replace(fsdp.mixed_precision_policy, output_dtype=None)


def keep_gathered(model: nn.Module, layer: type[nn.Module]) -> None:
    """Has FSDP2 hold what it has gathered outside of the layers until the way back is over."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, layer):
            inside.update(module.modules())
    for module in model.modules():
        if module not in inside and isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)
