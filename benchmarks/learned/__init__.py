"""What a selection costs in right answers: trained variants, training-free baselines and controls, on held-out videos.

`policies` says what is compared, `questions` on what; `work` trains and asks, `statistics` sums up, `report` shows.
"""

from .run import run_learned

__all__ = ["run_learned"]
