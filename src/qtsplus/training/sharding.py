"""Which weights a sharded run shares out among its processes: those of the language model's layers.

Every pass over a batch calls each of these layers once, whatever the batch holds. How often it calls the embeddings,
the vision tower and the selector depends on its videos and questions. A process that gathers a weight waits for all
others to gather it too, so what lies outside of the layers is gathered for a whole pass, or a whole step.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

NEITHER = "neither FSDP nor DeepSpeed"


def layer_class(model: Any) -> type[nn.Module]:
    """Of the language model's layers. What FSDP has wrapped derives from it."""
    return type(model.model.language_model.layers[0])


def shares_layers(state: Any) -> bool:
    """Whether a process holds a part of a layer, by accelerate's state: with FSDP and with ZeRO-3."""
    deepspeed = getattr(state, "deepspeed_plugin", None)
    return getattr(state, "fsdp_plugin", None) is not None or (deepspeed is not None and deepspeed.zero_stage == 3)


def check_checkpoint(checkpoint: Path, state: Any) -> None:
    """Raises `ValueError` for a checkpoint of another engine: FSDP and DeepSpeed alone read what they wrote."""
    shares = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))
    written, running = NEITHER, NEITHER
    if shares:
        stage = 2 if any(checkpoint.glob("global_step*/mp_rank_00_model_states.pt")) else 3
        written = f"ZeRO-{stage} in {shares} processes"
    elif any(checkpoint.glob("pytorch_model_fsdp*")):
        written = "FSDP"
    if getattr(state, "deepspeed_plugin", None) is not None:
        running = f"ZeRO-{state.deepspeed_plugin.zero_stage} in {state.num_processes} processes"
    elif getattr(state, "fsdp_plugin", None) is not None:
        running = "FSDP"
    if written != running:
        raise ValueError(f"{checkpoint} was written by {written}, and this run is by {running}: go on as it began.")


def choose_layers(state: Any, model: Any) -> None:
    """
    Prepares accelerate's state: FSDP wraps the language model's layers, unless its configuration names others, and does
    not round what the model gives; ZeRO-3 gathers a layer when it is called, for the batch before tells nothing.
    A `ValueError` for a configuration that would end without a model's folder, or could not begin.
    """
    fsdp, deepspeed = getattr(state, "fsdp_plugin", None), getattr(state, "deepspeed_plugin", None)
    if fsdp is not None and (
        fsdp.fsdp_version != 2 or fsdp.state_dict_type.name != "FULL_STATE_DICT" or fsdp.cpu_ram_efficient_loading
    ):
        raise ValueError(
            "accelerate's configuration of FSDP: expected fsdp_version 2, fsdp_state_dict_type FULL_STATE_DICT and "
            "fsdp_cpu_ram_efficient_loading false, as in recipes/accelerate/fsdp2.yaml."
        )
    if deepspeed is not None and deepspeed.zero_stage == 3 and not deepspeed.zero3_save_16bit_model:
        raise ValueError(
            "accelerate's configuration of ZeRO-3: expected zero3_save_16bit_model true, as in "
            "recipes/accelerate/zero3.yaml."
        )
    if fsdp is not None and fsdp.transformer_cls_names_to_wrap is None:
        fsdp.transformer_cls_names_to_wrap = [layer_class(model).__name__]
    if fsdp is not None and fsdp.mixed_precision_policy is not None:
        fsdp.mixed_precision_policy = replace(fsdp.mixed_precision_policy, output_dtype=None)
    if deepspeed is not None:
        deepspeed.deepspeed_config["zero_optimization"].setdefault("stage3_prefetch_bucket_size", 0)


def keep_gathered(model: nn.Module, layer: type[nn.Module], optimizer: Any) -> None:
    """
    Has FSDP2 hold what it has gathered outside of the layers until the way back is over, and ZeRO-3, with an optimizer
    of its own, until the step is.
    """
    inside = {part for module in model.modules() if isinstance(module, layer) for part in module.modules()}
    outside = [module for module in model.modules() if module not in inside]
    for module in outside:
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)
    weights: list[Any] = [weight for module in outside for weight in module.parameters(recurse=False)]
    if not weights or not hasattr(weights[0], "ds_id"):
        return
    # ZeRO-3 does not watch the calls of these modules either, but for where a pass begins.
    beginning = optimizer.parameter_offload.fwd_pre_hook.id
    for module in outside:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook.__module__.startswith("deepspeed.")]:
                if key != beginning:
                    del hooks[key]
    more = [weight for weight in weights if not weight.ds_persist]  # than the small ones, which it keeps by itself
    for weight in more:
        weight.ds_persist = True
    optimizer.persistent_parameters.extend(more)  # which are gathered again behind every step
    optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
