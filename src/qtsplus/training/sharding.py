"""Which weights a sharded run shares out among its processes: those of the language model's layers.

Every pass over a batch calls each of these layers once, whatever the batch holds. How often it calls the embeddings, the
vision tower and the selector depends on its videos and questions. A process that gathers a weight waits for all others
to gather it too, so what lies outside of the layers is gathered for a whole pass, or a whole step.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def layer_class(model: Any) -> type[nn.Module]:
    """Of the language model's layers. What FSDP has wrapped derives from it."""
    return type(model.model.language_model.layers[0])


def choose_layers(state: Any, model: Any) -> None:
    """
    Prepares accelerate's state: FSDP wraps the language model's layers, unless its configuration names others, and
    ZeRO-3 gathers a layer when it is called. What would be called next it knows from the batch before.
    """
    fsdp, deepspeed = getattr(state, "fsdp_plugin", None), getattr(state, "deepspeed_plugin", None)
    if fsdp is not None and fsdp.transformer_cls_names_to_wrap is None:
        fsdp.transformer_cls_names_to_wrap = [layer_class(model).__name__]
    if deepspeed is not None:
        deepspeed.deepspeed_config["zero_optimization"].setdefault("stage3_prefetch_bucket_size", 0)


def keep_gathered(model: nn.Module, layer: type[nn.Module], optimizer: Any) -> None:
    """
    Has FSDP2 hold what it has gathered outside of the layers until the way back is over, and ZeRO-3 until the step is.

    Args:
        model: as it was prepared.
        layer: see [`layer_class`].
        optimizer: DeepSpeed's own, where there is one.
    """
    layers = [module for module in model.modules() if isinstance(module, layer)]
    for module in model.modules():
        if isinstance(module, FSDPModule) and module not in layers:
            module.set_reshard_after_forward(False, recurse=False)
    shared_out = {id(weight) for module in layers for weight in module.parameters()}
    kept: list[Any] = [weight for weight in model.parameters() if hasattr(weight, "ds_id")]
    kept = [weight for weight in kept if weight.ds_persist or id(weight) not in shared_out]
    for weight in kept:
        weight.ds_persist = weight.is_external_param = True  # the end of a module does not let go of either
    if kept:
        optimizer.persistent_parameters[:] = kept  # which are gathered again behind every step
        kept[0].all_gather(kept)


__all__ = ["choose_layers", "keep_gathered", "layer_class"]
