"""The model that lmms-eval asks, the frames that it sees, and how it selects among their tokens."""

from dataclasses import dataclass, replace
from typing import Any

from qtsplus.hub import loading
from qtsplus.model.methods_qtsplus import add_method, check_budget
from qtsplus.model.numbers_qtsplus import require_positive
from qtsplus.training.models import load_either


@dataclass(frozen=True)
class Options:
    """
    How tokens are selected, as for `generate`, and which frames are looked at and how large they are, as the processor
    has it where it is left out. `max_pixels` is for a backbone that reads frames in their own resolution.
    """

    selection: str | None = None
    retention: float | None = None
    max_visual_tokens: int | None = None
    reencode: bool = True
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        add_method(self.selection)
        check_budget(self.selection or "qtsplus", [self.retention], self.max_visual_tokens)
        for name in ("fps", "num_frames", "max_frames", "max_pixels"):
            if (value := getattr(self, name)) is not None:
                require_positive(name, value)
        if self.num_frames is not None and (self.fps is not None or self.max_frames is not None):
            raise ValueError("Got num_frames with fps or max_frames; expected the number or the others.")

    def apply(self, processor: Any) -> None:
        """Sets a processor up to read every video like this."""
        video_processor = processor.video_processor
        if self.fps is not None:
            video_processor.fps, video_processor.num_frames = self.fps, None
        for name in ("num_frames", "max_frames"):
            if getattr(self, name) is not None:
                setattr(video_processor, name, getattr(self, name))
        if self.max_pixels is not None:
            if not processor.native_resolution:
                raise ValueError(f"{type(processor).__name__} has frames of one size; leave out max_pixels.")
            video_processor.size = {**dict(video_processor.size), "longest_edge": self.max_pixels}


def load_evaluated(
    pretrained: str, revision: str | None, device: str, dtype: str, options: Options
) -> tuple[Any, Any, Options]:
    """
    A model, its processor and how it selects: a QTSplus model as everybody loads it, a stock model in our class, with
    all tokens unless another selection is asked for; a `ValueError` for the selector, which it does not have.
    """
    config = loading.stored_config(pretrained, revision)
    if "qtsplus_config" in config:
        return *loading.load(pretrained, device, dtype, revision=revision), options
    own_budget = options.selection is None and (options.retention or options.max_visual_tokens)
    if options.selection == "qtsplus" or own_budget:
        raise ValueError(f"{pretrained!r} has no selector: say how it is to choose, such as selection=uniform.")
    if revision is not None:
        raise ValueError(f"{pretrained!r} is a stock model: download the revision, and name its folder.")
    loaded = load_either(pretrained, device, dtype)
    return *loaded, replace(options, selection=options.selection or "all")
