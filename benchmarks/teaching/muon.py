"""Muon for the matrices of a model, beside another optimizer for the rest."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def matrix_names(model: nn.Module) -> set[str]:
    """
    Names of the weights that Muon is made for: those of the layers' linear maps. Not the embeddings, the output head
    and the budget head, whose small gradients ask for small steps.
    """
    output_embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = output_embeddings()
    linear = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    return {f"{name}.weight" for name, module in linear if module is not head}


def split_matrices(
    groups: Sequence[Mapping[str, Any]], matrices: Iterable[nn.Parameter], scale: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """
    The groups of Muon and those of the other optimizer.

    Args:
        groups: of all parameters, with their `lr`.
        matrices: those that Muon trains, at `scale` times the rate.
    """
    chosen = {id(matrix) for matrix in matrices}
    by_muon, others = [], []
    for group in groups:
        own = [parameter for parameter in group["params"] if id(parameter) in chosen]
        rest = [parameter for parameter in group["params"] if id(parameter) not in chosen]
        by_muon += [{**group, "params": own, "lr": scale * group["lr"]}] if own else []
        others += [{**group, "params": rest}] if rest else []
    return by_muon, others


class MuonBeside(Optimizer):
    """
    `torch.optim.Muon` over some groups and another optimizer over the others, as one optimizer.

    Muon (Jordan et al., 2024) takes the momentum of a matrix to the nearest orthogonal one; its step is scaled to the
    size of an AdamW step, so that learning rates carry over.

    Args:
        matrices: groups of 2-D parameters with their `lr` and `weight_decay`, or what optimizes them.
        other: the optimizer of everything else.

    Raises:
        ValueError: a PyTorch without Muon, which came with 2.9.
    """

    def __init__(self, matrices: list[dict[str, Any]] | Optimizer, other: Optimizer):
        if not isinstance(matrices, Optimizer) and not hasattr(torch.optim, "Muon"):
            raise ValueError(f"PyTorch {torch.__version__} has no Muon: leave muon_scale out, or install 2.9 or newer.")
        if not isinstance(matrices, Optimizer):
            matrices = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
        self.parts: list[Optimizer] = [matrices, other]
        # The same dictionaries, so that a scheduler that writes to our groups writes to theirs.
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class MuonSingle(Optimizer):
    """
    Muon in single precision, as `torch.optim.Muon` with `match_rms_adamw`. That one works in bfloat16, which takes 40
    times as long on a processor that has no instructions for it (0.22 and 9.2 s for one of 768 x 768).

    Args:
        matrices: 2-D parameters, or groups of them.
        lr, weight_decay, momentum: as there.
    """

    def __init__(self, matrices: Any, lr: float, weight_decay: float = 0.1, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                mean = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1 - group["momentum"])
                update = _orthogonal(matrix.grad.lerp(mean, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Close to the nearest orthogonal matrix, by five steps of Newton and Schulz."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (2.0315 * square @ square - 4.775 * square) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
