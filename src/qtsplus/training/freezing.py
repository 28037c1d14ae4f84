"""Which parameters are trained, and how many they are."""

from peft import PeftModel
from torch import nn

from .arguments import QTSplusTrainingArguments
from .lora import active_selector, add_lora, lora_config

# The vision tower and all between it and the selector, by its names in Transformers' models.
_VISION = (".visual.", ".vision_tower.", ".multi_modal_projector.", ".image_newline")


def part_of(parameter_name: str) -> str:
    """The part of a model that a parameter of this name belongs to: "selector", "vision" or "language_model"."""
    if ".qtsplus." in parameter_name:
        return "selector"
    for part in _VISION:
        if part in parameter_name:
            return "vision"
    return "language_model"


def vision_modules(model) -> dict[str, nn.Module]:
    """The modules between the pixels and the selector, by their names in `model.model`."""
    return {name: module for name, module in model.model.named_children() if f".{name}." in _VISION}


def prepare_parts(model, args: QTSplusTrainingArguments):
    """The model with adapters, or with what the arguments freeze; a `PeftModel` is left as it is."""
    if args.lora_rank:
        return add_lora(model, lora_config(args.lora_rank, args.lora_alpha))
    if not isinstance(model, PeftModel):
        freeze(model, args)
    return model


def freeze(model: nn.Module, args: QTSplusTrainingArguments) -> None:
    """
    Leaves trainable what the arguments name. Parameters of the selector that cannot receive a gradient stay frozen: the
    last scoring layer is used only for its attention weights.
    """
    frozen = {
        "selector": args.freeze_selector,
        "language_model": args.freeze_language_model,
        "vision": args.freeze_vision_model,
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen[part_of(name)])
    selector = active_selector(model)
    untrained = list(selector.unused_parameters())
    if args.freeze_scores:
        untrained += score_parameters(selector)
    for parameter in untrained:
        parameter.requires_grad_(False)


def score_parameters(selector) -> list[nn.Parameter]:
    """What decides the relevance of a token."""
    return list(nn.ModuleList([selector.scoring_layers, selector.question_layers, selector.null_tokens]).parameters())


def trained_and_all(model: nn.Module) -> tuple[int, int]:
    """How many parameters are trained, and how many there are; works on the meta device."""
    trained = 0
    total = 0
    for name, weight in model.named_parameters():
        if ".original_module." not in name:  # the untrained copy that PEFT keeps of the selector
            total += weight.numel()
            trained += weight.numel() * weight.requires_grad
    return trained, total
