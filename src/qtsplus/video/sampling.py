"""How the frames of a video are sampled: named once, and passed whole from where a user says it to where it is read."""

from dataclasses import dataclass, fields

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
    """

    fps: float | None = None
    start: float | None = None
    end: float | None = None
    max_frames: int | None = None
    max_pixels: int | None = None

    def stated(self) -> dict[str, float]:
        """What was said, by the name of the field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def video_keys(self) -> dict[str, float | None]:
        """The same as [`~QTSplusProcessorMixin.video_chunks`] takes it."""
        return {
            "fps": self.fps,
            "video_start": self.start,
            "video_end": self.end,
            "max_frames": self.max_frames,
            "max_pixels": self.max_pixels,
        }
