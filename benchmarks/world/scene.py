"""What rendered worlds have in common: their rate, the side of a visual token, directions and shapes."""

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import ImageDraw

SHAPES = ("circle", "square", "triangle", "cross", "ring")
# Cells moved per second, along x and along y.
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

FPS = 2
CELL = 28  # pixels of a visual token's side: 2 x 2 patches of 14


@dataclass(frozen=True)
class Rendered:
    """
    A video that is rendered.

    Attributes:
        seed, seconds: what it was made from.
        size: (width, height) of a frame in pixels.
    """

    seed: int
    seconds: int
    size: tuple[int, int]

    @property
    def frames(self) -> int:
        return self.seconds * FPS

    @property
    def grid(self) -> tuple[int, int, int]:
        """(time, height, width) of its visual tokens, one step a second."""
        return self.seconds, self.size[1] // CELL, self.size[0] // CELL


def with_article(name: str) -> str:
    """A name with its article, such as "an orange ring"."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def draw_shape(canvas: ImageDraw.ImageDraw, shape: str, box: Sequence[float], colour: tuple[int, int, int]) -> None:
    """Draws one of [`SHAPES`] into a box (left, top, right, bottom), all inclusive."""
    left, top, right, bottom = box
    width = right - left
    middle_x = (left + right) / 2
    middle_y = (top + bottom) / 2
    if shape == "circle":
        canvas.ellipse(box, fill=colour)
    elif shape == "square":
        canvas.rectangle(box, fill=colour)
    elif shape == "triangle":
        canvas.polygon([(left, bottom), (middle_x, top), (right, bottom)], fill=colour)
    elif shape == "ring":
        canvas.ellipse(box, outline=colour, width=max(2, round(width / 5)))
    elif shape == "cross":
        arm = width / 6
        canvas.rectangle([middle_x - arm, top, middle_x + arm, bottom], fill=colour)
        canvas.rectangle([left, middle_y - arm, right, middle_y + arm], fill=colour)
    else:
        raise ValueError(f"shape {shape!r}: expected one of {SHAPES}.")
