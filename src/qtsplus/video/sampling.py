"""How the frames of a video are sampled: named once, and passed whole from where a user says it to where it is read."""

from dataclasses import dataclass
from typing import cast

from typing_extensions import TypedDict


class SamplingOptions(TypedDict, total=False):
    """The fields of [`Sampling`], as keyword arguments of functions that encode a video."""

    fps: float | None
    start: float | None
    end: float | None
    max_frames: int | None
    max_pixels: int | None


@dataclass(frozen=True)
class Sampling:
    """
    How the frames of a video are sampled. What is `None` is as the processor has it.

    Args:
        fps: of a file, how many frames to look at per second; of a folder or of given frames, the rate at which they
            were taken.
        start, end: of a file, the seconds on a player's clock between which it is looked at.
        max_frames: of a file, the most that are looked at.
        max_pixels: the most pixels of a frame; a larger one is looked at smaller.

    Raises:
        ValueError: a rate, a time or a count that no video has, by the name that it has here.
    """

    fps: float | None = None
    start: float | None = None
    end: float | None = None
    max_frames: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        from ..model.sampling_qtsplus import check_key  # it needs PyTorch, which the commands' help does not

        for name, value in vars(self).items():
            if value is not None:
                check_key(name, value)

    def options(self) -> SamplingOptions:
        """The same as keyword arguments."""
        return cast(SamplingOptions, dict(vars(self)))

    def video_keys(self) -> dict[str, float | None]:
        """The same as [`~QTSplusProcessorMixin.video_chunks`] takes it."""
        return {
            "fps": self.fps,
            "video_start": self.start,
            "video_end": self.end,
            "max_frames": self.max_frames,
            "max_pixels": self.max_pixels,
        }
