"""Which parameters are trained, at which learning rate, and how many they are."""

from dataclasses import dataclass

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
    modules = {}
    for name, module in model.model.named_children():
        if f".{name}." in _VISION:
            modules[name] = module
    return modules


def prepare_parts(model, args: QTSplusTrainingArguments):
    """The model with adapters, or with what the arguments freeze; a `PeftModel` is left as it is."""
    if args.lora_rank:
        return add_lora(model, lora_config(args.lora_rank, args.lora_alpha, args.lora_dropout))
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
    parts = nn.ModuleList([selector.scoring_layers, selector.question_layers, selector.null_tokens])
    return list(parts.parameters())


@dataclass(frozen=True)
class ParameterCounts:
    """How many parameters a model has; tied ones count once."""

    total: int
    named_trainable: int  # of the parts that are not frozen, as the paper counts them
    trainable: int  # those among them that a gradient reaches

    def describe(self) -> str:
        share = self.named_trainable / self.total
        actual = self.trainable / self.total
        return (
            f"{self.named_trainable:,} trainable parameters ({share:.2%} of {self.total:,}), as the paper counts; a "
            f"gradient reaches {self.trainable:,} ({actual:.2%}), for the last scoring layer only gives its attention."
        )


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Counts a model whose freezing is set; works on the meta device."""
    total = 0
    trainable = 0
    for name, weight in model.named_parameters():
        if ".original_module." not in name:  # the untrained copy that PEFT keeps of the selector
            total += weight.numel()
            trainable += weight.numel() * weight.requires_grad
    selector = active_selector(model)
    unused = 0
    if any(weight.requires_grad for weight in selector.scoring_layers.parameters()):
        unused = sum(weight.numel() for weight in selector.unused_parameters())
    return ParameterCounts(total, trainable + unused, trainable)


def parameter_groups(
    model: nn.Module,
    args: QTSplusTrainingArguments,
    decayed: list[str],
) -> list[dict]:
    """The optimizer's groups: each part with its own learning rate, with decay those whose names are `decayed`."""
    rates = {
        "selector": None,
        "language_model": args.language_model_learning_rate,
        "vision": args.vision_learning_rate,
    }
    with_decay = set(decayed)
    groups: dict[tuple[str, bool], dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part = part_of(name)
        decay = args.weight_decay if name in with_decay else 0.0
        group = groups.setdefault((part, name in with_decay), {"params": [], "weight_decay": decay})
        rate = rates[part]
        group["lr"] = args.learning_rate if rate is None else rate
        group["params"].append(parameter)
    return list(groups.values())
