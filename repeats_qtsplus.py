"""Steps of a video that repeat the one before are encoded once: slides, screen recordings, fixed cameras."""

import torch


class Repeats:
    """
    What was encoded last, for the steps that come behind it.

    A step is what the vision tower sees by itself: a temporal patch (two frames) in Qwen-VL, a frame in the others. It
    learns of the place of a patch in its frame, and nothing of the time. So steps of the same pixels have the same
    features, up to the rounding that also comes with chunks of another size.

    Args:
        tolerance: the most by which a pixel value of a step may differ from the one that was encoded last, for its
            features to be taken: in normalised values, where one of the 255 levels of a colour is about 0.015 (0.008
            with Qwen3-VL). 0 takes those of equal steps alone; `None` encodes every step.

    Raises:
        ValueError: a tolerance below 0.
    """

    def __init__(self, tolerance: float | None = 0.0):
        if tolerance is not None and not tolerance >= 0:
            raise ValueError(f"tolerance={tolerance!r}: expected 0 or more, or None to encode every step.")
        self.tolerance = tolerance
        self._size: list[int] = []
        self._pixels: torch.Tensor | None = None
        self._features = torch.empty(0)

    def sources(self, steps: torch.Tensor, size: list[int]) -> list[int]:
        """
        Which step has to be encoded for each step of a video: itself, one before it, or -1 for what was encoded last.

        Args:
            steps: `[T, ...]`, the pixel values.
            size: (height, width) of the video's grid.
        """
        tolerance = self.tolerance
        if tolerance is None:
            return list(range(len(steps)))
        if size != self._size:
            self._size, self._pixels = size, None
        sources: list[int] = []
        for index, step in enumerate(steps):
            if self._pixels is not None and _same(step, self._pixels, tolerance):
                sources.append(sources[-1] if sources else -1)
            else:
                sources.append(index)
                self._pixels = step
        return sources

    def fill(self, features: torch.Tensor | None, sources: list[int]) -> torch.Tensor:
        """
        `[T * k, d]`: every step of a video with the features of its source.

        Args:
            features: `[T * k, d]`, right for the steps that are their own source, and written to; `None` where none is.
        """
        count = len(sources)
        if features is None:  # all repeat what was encoded last
            return self._features.repeat(count, 1)
        if self.tolerance is None:
            return features
        steps = features.unflatten(0, (count, -1))
        carried = sources.count(-1)  # they stand in front
        if carried:
            steps[:carried] = self._features
        for index, source in enumerate(sources):  # one by one: all at once would hold them twice
            if source not in (index, -1):
                steps[index] = steps[source]
        self._features = steps[-1]
        return features

    def let_go(self) -> None:
        """Holds no more than one step of what it was given."""
        if self._pixels is not None:
            self._pixels, self._features = self._pixels.clone(), self._features.clone()


def _same(step: torch.Tensor, encoded: torch.Tensor, tolerance: float) -> bool:
    if tolerance == 0:
        return torch.equal(step, encoded)
    return bool((step - encoded).abs().max() <= tolerance)


__all__ = ["Repeats"]
