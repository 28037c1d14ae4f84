"""Selector settings that change over training: curriculum and budget schedules."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from ..settings import STRICT

SHAPES = ("linear", "cosine", "step")
SCHEDULED = ("tau_s", "n_max", "rho_min", "rho_max", "lambda_t", "lambda_m", "lambda_s")


@dataclass(frozen=True)
class Schedule:
    """
    A value that moves from `start` to `end` as training goes on.

    Args:
        start, end: the value until `begin`, and from `finish` on.
        shape: `"linear"`, `"cosine"` (half a period), or `"step"` (`start` until `finish`, then `end`).
        begin, finish: a whole number counts optimizer steps, a float is a fraction of all of them.

    Raises:
        ValueError: an unknown shape, or a negative or too large point in time.
    """

    __pydantic_config__ = STRICT

    start: float
    end: float
    shape: str = "linear"
    begin: int | float = 0.0
    finish: int | float = 1.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r}: expected one of {SHAPES}.")
        for name in ("begin", "finish"):
            point = getattr(self, name)
            if point < 0 or (isinstance(point, float) and point > 1):
                raise ValueError(f"{name}={point!r}: expected optimizer steps (whole), or a fraction in [0.0, 1.0].")

    def value(self, step: int, max_steps: int) -> float:
        """The value after `step` of `max_steps` optimizer steps; a function of nothing else, so resuming is exact."""
        begin, finish = self.steps(max_steps)
        if step >= finish:
            return self.end
        if step <= begin or self.shape == "step":
            return self.start
        progress = (step - begin) / (finish - begin)
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress

    def steps(self, max_steps: int) -> tuple[float, float]:
        """`begin` and `finish` in optimizer steps."""
        begin, finish = (
            point * max_steps if isinstance(point, float) else float(point) for point in (self.begin, self.finish)
        )
        return begin, finish


class ScheduleCallback(TrainerCallback):
    """
    Writes the scheduled values into a selector's configuration, where the next step and the next checkpoint read them.

    Args:
        config: the `QTSplusConfig` that the selector reads.
        schedules: by field name, one of [`SCHEDULED`].

    Raises:
        ValueError: a field that cannot be scheduled; when training begins, values that the configuration refuses.
    """

    def __init__(self, config: Any, schedules: Mapping[str, Schedule]):
        unknown = sorted(set(schedules) - set(SCHEDULED))
        if unknown:
            raise ValueError(f"There is no schedule for {', '.join(unknown)}; expected fields among {SCHEDULED}.")
        self.config, self.schedules = config, schedules

    def values(self, step: int, max_steps: int) -> dict[str, float]:
        values = {name: schedule.value(step, max_steps) for name, schedule in self.schedules.items()}
        return {name: round(value) if name == "n_max" else value for name, value in values.items()}

    def apply(self, step: int, max_steps: int) -> None:
        for name, value in self.values(step, max_steps).items():
            setattr(self.config, name, value)

    def on_train_begin(self, args, state, control, **kwargs):
        fixed = {name: getattr(self.config, name) for name in SCHEDULED}
        corners = {int(point) for schedule in self.schedules.values() for point in schedule.steps(state.max_steps)}
        for step in sorted(corners | {0, state.max_steps}):
            type(self.config)(**{**fixed, **self.values(step, state.max_steps)})  # raises what is out of range
        self.apply(state.global_step, state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self.apply(state.global_step, state.max_steps)


__all__ = ["SCHEDULED", "SHAPES", "Schedule", "ScheduleCallback"]
