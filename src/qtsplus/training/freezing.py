"""Which parameters are trained, at which learning rate, and how many they are."""

from typing import Any, NamedTuple

from torch import nn

from .arguments import QTSplusTrainingArguments
from .lora import active_selector

# The vision tower and all between it and the selector, by its names in Transformers' models.
_VISION = (".visual.", ".vision_tower.", ".multi_modal_projector.", ".image_newline")


def part_of(parameter_name: str) -> str:
    """The part of a model that a parameter of this name belongs to: "selector", "vision" or "language_model"."""
    if ".qtsplus." in parameter_name:
        return "selector"
    return "vision" if any(part in parameter_name for part in _VISION) else "language_model"


def vision_modules(model: Any) -> dict[str, nn.Module]:
    """The modules between the pixels and the selector, by their names in `model.model`."""
    return {name: module for name, module in model.model.named_children() if f".{name}." in _VISION}


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
    selector = active_selector(model)
    unused = {id(parameter) for parameter in selector.unused_parameters()}
    if args.freeze_scores:
        unused |= {id(parameter) for parameter in score_parameters(selector)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen[part_of(name)] and id(parameter) not in unused)


def score_parameters(selector: Any) -> list[nn.Parameter]:
    """What decides the relevance of a token."""
    scoring = (selector.scoring_layers, selector.question_layers, selector.null_tokens)
    return [parameter for layers in scoring for parameter in layers.parameters()]


class ParameterCounts(NamedTuple):
    """How many parameters a model has; tied ones count once."""

    total: int
    named_trainable: int  # of the parts that are not frozen, as the paper counts them
    trainable: int  # those among them that a gradient reaches

    def describe(self) -> str:
        share, actual = self.named_trainable / self.total, self.trainable / self.total
        return (
            f"{self.named_trainable:,} trainable parameters ({share:.2%} of {self.total:,}), as the paper counts; a "
            f"gradient reaches {self.trainable:,} ({actual:.2%}), for the last scoring layer only gives its attention."
        )


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Counts a model whose freezing is set; works on the meta device."""
    # The untrained copy that PEFT keeps of the selector is not a part of the model.
    named = [(name, weight) for name, weight in model.named_parameters() if ".original_module." not in name]
    trainable = sum(weight.numel() for _, weight in named if weight.requires_grad)
    scoring = (".qtsplus.scoring_layers.", ".qtsplus.modules_to_save.")
    trains_scores = any(weight.requires_grad and any(part in name for part in scoring) for name, weight in named)
    unused = sum(weight.numel() for weight in active_selector(model).unused_parameters()) if trains_scores else 0
    return ParameterCounts(sum(weight.numel() for _, weight in named), trainable + unused, trainable)


def parameter_groups(model: nn.Module, args: QTSplusTrainingArguments, decayed: list[str]) -> list[dict[str, Any]]:
    """The optimizer's groups: each part with its own learning rate, with decay those whose names are `decayed`."""
    own = {"language_model": args.language_model_learning_rate, "vision": args.vision_learning_rate}
    with_decay = set(decayed)
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            part, decay = part_of(name), name in with_decay
            rate = args.learning_rate if own.get(part) is None else own[part]
            group: dict[str, Any] = {"params": [], "lr": rate, "weight_decay": args.weight_decay if decay else 0.0}
            groups.setdefault((part, decay), group)["params"].append(parameter)
    return list(groups.values())
