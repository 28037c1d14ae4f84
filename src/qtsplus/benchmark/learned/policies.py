"""What is compared: every way to spend visual tokens, and what tables call it."""

from dataclasses import dataclass

RETENTIONS = (0.05, 0.1, 0.25)
BASE, FRESH, DEFAULT = "base", "fresh", "straight_through"
# What is trained, and how each differs from the recipe.
VARIANTS: dict[str, tuple[str, ...]] = {
    DEFAULT: ("model.selector.gate=straight_through",),
    "gumbel": ("model.selector.gate=gumbel",),  # the paper's gate
    "no_reencoder": ("model.selector.reencode_layers=0",),  # the paper's nREENC
    "no_rope": ("model.selector.reencode_rope=false",),
    "sequential": ("model.selector.position_ids=sequential",),
    # How the reference implementation places tokens: nowhere in its re-encoder, and by their rank in the prompt.
    "reference_positions": ("model.selector.reencode_rope=false", "model.selector.position_ids=sequential"),
}
# What needs no training, asked of the base and of the default: (selection, layout), as in [`Policy`].
BASELINES = {
    "uniform": ("uniform", "full"),
    "random": ("random", "full"),
    "temporal_redundancy": ("temporal_redundancy", "full"),
    "diversity": ("diversity", "full"),
    "fewer_frames": ("all", "fewer_frames"),
    "lower_resolution": ("all", "lower_resolution"),
}
# In the order of the table.
TITLES = {
    "straight_through": "straight-through gate (default)",
    "gumbel": "the paper's gate",
    "no_reencoder": "no re-encoder (nREENC)",
    "no_rope": "re-encoder without mRoPE, original positions",
    "sequential": "re-encoder with mRoPE, sequential positions",
    "reference_positions": "no mRoPE, sequential (the reference)",
    "all": "all tokens",
    "uniform": "uniform (UNIF)",
    "random": "random",
    "temporal_redundancy": "temporal redundancy (as in EVS)",
    "diversity": "diversity (as in DivPrune)",
    "fewer_frames": "fewer frames",
    "lower_resolution": "lower resolution",
    "shuffled_question": "control: another video's question",
    "untrained_selector": "control: untrained selector",
}
OF_BASE = "base_"  # before the name of what the base model is asked with


@dataclass(frozen=True)
class Policy:
    """
    One way to spend visual tokens, at one retention.

    Args:
        name: of the row.
        model: a variant, [`BASE`] (all tokens, as the recipe starts from) or [`FRESH`] (that with a random selector).
        retention: fraction of the tokens; `None` is the model's own budget.
        selection: as in `QTSplusConfig`.
        layout: which pixels of a video are encoded: "full", "fewer_frames" or "lower_resolution".
        shuffled: select by the question of another video.
    """

    name: str
    model: str
    retention: float | None
    selection: str = "qtsplus"
    layout: str = "full"
    shuffled: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}-{'own' if self.retention is None else format(self.retention, 'g')}"


def policies_of(model: str) -> list[Policy]:
    """All that a model is asked with."""
    if model == FRESH:
        return [Policy("untrained_selector", FRESH, retention) for retention in RETENTIONS]
    chosen = []
    if model != BASE:
        chosen = [Policy(model, model, retention) for retention in (*RETENTIONS, None)]
    if model in (BASE, DEFAULT):
        prefix = OF_BASE if model == BASE else ""
        chosen.append(Policy(f"{prefix}all", model, 1.0, "all"))
        for retention in RETENTIONS:
            chosen += [Policy(prefix + name, model, retention, *how) for name, how in BASELINES.items()]
    if model == DEFAULT:
        chosen += [Policy("shuffled_question", model, retention, shuffled=True) for retention in RETENTIONS]
    return chosen


def title_of(name: str) -> str:
    """A policy in words."""
    own = name.removeprefix(OF_BASE)
    return TITLES[own] + (", base model" if own != name else "")
