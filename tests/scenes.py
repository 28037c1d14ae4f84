"""Features of videos, for the methods that choose among them."""

import math
from dataclasses import dataclass

import torch

from qtsplus.model.methods_qtsplus import Candidates
from tiny import seeded

WIDTH = 6


@dataclass
class Scene:
    """Random features of some videos."""

    visual: list[torch.Tensor]  # [t * h * w, width] of each
    grids: list[tuple[int, int, int]]

    @classmethod
    def random(cls, grids, seed):
        generator = seeded(seed)
        visual = [torch.randn(math.prod(grid), WIDTH, generator=generator) for grid in grids]
        return cls(visual, grids)

    @classmethod
    def changing(cls, drift, seed):
        """40 steps of a video that stands still (0), changes slowly (0.2), or shows something else in each (1)."""
        generator = seeded(seed)
        first = torch.randn(1, 40, 32, generator=generator)
        noise = torch.randn(40, 40, 32, generator=generator)
        changes = torch.randn(40, 40, 32, generator=generator)
        steps = first + drift * changes.cumsum(0) + 0.02 * noise
        return cls([steps.flatten(0, 1)], [(40, 5, 8)])

    @property
    def features(self):
        return torch.cat(self.visual)

    def candidates(self, score=None):
        """A method that does not look at the question needs no `score`."""
        features = self.features
        return Candidates(
            visual=self.visual,
            query=features[:0],
            positions=torch.zeros(3, len(features), dtype=torch.long, device=features.device),
            grids=self.grids,
            score=score,
        )

    def count(self, share):
        return max(1, int(share * len(self.features)))

    def steps(self):
        """`[M]`, the step in time of each token; those of the next video follow."""
        sizes = []
        for time, height, width in self.grids:
            sizes += [height * width] * time
        return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
