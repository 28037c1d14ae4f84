"""What is compared: every way to spend visual tokens, and what tables call it."""

from dataclasses import dataclass
from typing import Any

from qtsplus.model.configuration_qtsplus import POSITION_IDS, REDUCTIONS

RETENTIONS = (0.025, 0.05, 0.1, 0.25)
# At which the other variants are asked by wrong questions too.
CONTROLLED = (0.05, 0.1)
# A trained model that reads all tokens; that with a random selector; that trained by the recipe as it is.
BASE, FRESH, DEFAULT = "base", "fresh", "qtsplus"
# What is trained, and how each differs from the recipe; one that does not differ is not trained twice.
VARIANTS: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    # Without a teacher's attention, so that the gate's own gradient has to teach.
    "gumbel": ("training.relevance_weight=0", "model.selector.gate=gumbel"),  # the paper's gate
    "soft": (
        "training.relevance_weight=0",
        "model.selector.gate=soft",
        "training.learning_rate=5.0e-4",  # at the recipe's 2e-3 its scores collapsed
    ),
    "no_teacher": ("training.relevance_weight=0",),
    "taught_gumbel": ("model.selector.gate=gumbel",),
    "taught_detached": ("model.selector.gate=detached",),
    "max": ("model.selector.reduction=max",),  # the paper's
    "mean": ("model.selector.reduction=mean",),
    "sum": ("model.selector.reduction=sum",),
    "one_layer": ("model.selector.scoring_layers=1",),  # the paper's
    "two_layers": ("model.selector.scoring_layers=2",),
    "embeddings": ("model.selector.query_states=embeddings",),  # the paper's
    "layer": ("model.selector.query_states=layer",),
    "no_reencoder": ("model.selector.reencode_layers=0",),  # the paper's nREENC, but trained without
    "no_time": ("model.selector.reencode_rope=false",),
    "sequential": ("model.selector.position_ids=sequential",),
    "original": ("model.selector.position_ids=original",),
}
# What needs no training: (selection, layout), as in [`Policy`].
BASELINES = {
    "uniform": ("uniform", "full"),
    "random": ("random", "full"),
    "temporal_redundancy": ("temporal_redundancy", "full"),
    "diversity": ("diversity", "full"),
    "fewer_frames": ("all", "fewer_frames"),
    "lower_resolution": ("all", "lower_resolution"),
}
# A video that is read small, and in part again, see twice.py; and the retentions at which it is asked.
TWO_PASSES, TWICE = "two_passes", (0.1, 0.25)
# What is left out or changed of a trained model while it is asked: fields of [`Policy`].
ASKED: dict[str, dict[str, Any]] = {
    "no_reencoding": {"reencode": False},  # the paper's nREENC, to the letter
    "uniform": {"selection": "uniform"},  # the paper's UNIF
    "uniform_no_reencoding": {"selection": "uniform", "reencode": False},
    **{f"asked_{reduction}": {"settings": (("reduction", reduction),)} for reduction in REDUCTIONS},
    "asked_no_time": {"settings": (("reencode_rope", False),)},
    "asked_time": {"settings": (("reencode_rope", True),)},
    **{f"asked_{mode}": {"settings": (("position_ids", mode),)} for mode in POSITION_IDS},
    "with_options": {"with_options": True},
}
# What an ablation looks at, in the order of its table: names of [`ASKED`] and of [`VARIANTS`], which are trained.
AXES: dict[str, tuple[str, ...]] = {
    "the paper's": ("uniform", "uniform_no_reencoding", "no_reencoding", "no_reencoder"),
    "gate": ("taught_gumbel", "taught_detached"),
    "distillation": ("no_teacher", "gumbel", "soft"),
    "query states": ("embeddings", "layer"),
    "query": ("with_options",),
    "reduction": (*REDUCTIONS, *(f"asked_{reduction}" for reduction in REDUCTIONS)),
    "scoring depth": ("one_layer", "two_layers"),
    "absolute time": ("no_time", "asked_no_time", "asked_time"),
    "positions": (*POSITION_IDS, *(f"asked_{mode}" for mode in POSITION_IDS)),
}
# What needs no training and looks at the question: the base's own attention.
ATTENTION = "lm_attention"
# Whose question a control selects by; the prompt keeps its own.
OTHER_VIDEO, SAME_VIDEO = "shuffled_question", "same_video_question"
WRONG_QUESTIONS = (OTHER_VIDEO, SAME_VIDEO)
# What keeps tokens by what they show, which no model knows.
SALIENCE, NEEDLES = "salience_oracle", "needle_oracle"
ORACLES = (SALIENCE, NEEDLES)
# In the order of the table.
TITLES = {
    DEFAULT: "QTSplus, by the recipe",
    "soft": "soft gate, no teacher",
    "gumbel": "the paper's gate, no teacher",
    "max": "maximum over heads and words (the paper)",
    "mean": "mean over heads and words",
    "sum": "sum over the words",
    "one_layer": "one scoring layer (the paper)",
    "two_layers": "two scoring layers",
    "embeddings": "query: embeddings (the paper)",
    "layer": "query: a layer of the selector",
    "no_reencoder": "no re-encoder (nREENC)",
    "no_teacher": "no teacher",
    "taught_gumbel": "the paper's gate",
    "taught_detached": "detached gate",
    "no_time": "re-encoder without absolute time",
    "sequential": "positions: sequential",
    "original": "positions: of the full prompt",
    "no_reencoding": "without re-encoding (nREENC)",
    "uniform_no_reencoding": "uniform, without re-encoding",
    **{f"asked_{reduction}": f"asked with the reduction {reduction}" for reduction in REDUCTIONS},
    "asked_no_time": "asked without absolute time",
    "asked_time": "asked with absolute time",
    **{f"asked_{mode}": f"asked with {mode} positions" for mode in POSITION_IDS},
    "with_options": "selects by the question with its options",
    ATTENTION: "the language model's attention, nothing trained",
    "all": "all tokens",
    "uniform": "uniform (UNIF)",
    "random": "random",
    "temporal_redundancy": "temporal redundancy (as in EVS)",
    "diversity": "diversity (as in DivPrune)",
    "fewer_frames": "fewer frames",
    "lower_resolution": "lower resolution",
    TWO_PASSES: "two passes",
    OTHER_VIDEO: "control: another video's question",
    SAME_VIDEO: "control: another question of the same video",
    "untrained_selector": "control: untrained selector",
    SALIENCE: "oracle: any object",
    NEEDLES: "oracle: the needles",
}
MODELS = {BASE: "base model", **{name: TITLES[name] for name in VARIANTS}}


@dataclass(frozen=True)
class Policy:
    """
    One way to spend visual tokens, at one retention.

    Args:
        name: of the row; no two policies of a retention share one.
        model: a variant, [`BASE`] or [`FRESH`].
        retention: fraction of the tokens; `None` is the model's own budget.
        selection: as in `QTSplusConfig`, or one of [`ORACLES`].
        layout: which pixels of a video are encoded: "full", "fewer_frames", "lower_resolution" or [`TWO_PASSES`].
        wrong_question: one of [`WRONG_QUESTIONS`] to select by; `None` selects by the question itself.
        max_visual_tokens: a cap on the tokens.
        reencode: whether kept tokens are re-encoded.
        with_options: select by the question with its options.
        settings: fields of the selector's configuration, and what they are while it is asked.
    """

    name: str
    model: str
    retention: float | None
    selection: str = "qtsplus"
    layout: str = "full"
    wrong_question: str | None = None
    max_visual_tokens: int | None = None
    reencode: bool = True
    with_options: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def chooser(self) -> str:
        """The policy that chooses as this one does, by the question itself."""
        return self.model if self.selection == DEFAULT else name_of(self.selection, self.model)

    @property
    def label(self) -> str:
        budget = "own" if self.retention is None else format(self.retention, "g")
        cap = "" if self.max_visual_tokens is None else f"-max{self.max_visual_tokens}"
        return f"{self.name}-{budget}{cap}"


def policies_of(model: str, own_budget: bool, adapted: bool) -> list[Policy]:
    """
    All that a model is asked with.

    Args:
        own_budget: whether the recipe teaches a model how many tokens to ask for.
        adapted: whether it changes how kept tokens are read. Else a baseline says the same of the base.
    """
    if model == FRESH:
        return [Policy("untrained_selector", FRESH, retention) for retention in RETENTIONS]
    chosen = []
    if model != BASE:
        chosen = [Policy(model, model, retention) for retention in RETENTIONS]
        chosen += [Policy(model, model, None)] if own_budget else []
        controlled = [share for share in RETENTIONS if model == DEFAULT or share in CONTROLLED]
        for wrong in WRONG_QUESTIONS:
            name = name_of(wrong, model)
            chosen += [Policy(name, model, retention, wrong_question=wrong) for retention in controlled]
    if model == BASE:
        chosen += attention_policies(model)
    if model == BASE or (model == DEFAULT and adapted):
        chosen.append(Policy(name_of("all", model), model, 1.0, "all"))
    if model == DEFAULT or (model == BASE and adapted):
        for name, how in BASELINES.items():
            chosen += [Policy(name_of(name, model), model, retention, *how) for retention in RETENTIONS]
    if model == DEFAULT:
        chosen += [Policy(TWO_PASSES, model, share, layout=TWO_PASSES) for share in RETENTIONS if share in TWICE]
        chosen += [Policy(name, model, retention, name) for name in ORACLES for retention in RETENTIONS]
    return chosen


def attention_policies(model: str) -> list[Policy]:
    """Selection by a model's own attention, with its controls."""
    name = name_of(ATTENTION, model)
    chosen = [Policy(name, model, retention, ATTENTION) for retention in (*RETENTIONS, None)]
    for wrong in WRONG_QUESTIONS:
        for retention in (share for share in RETENTIONS if share in CONTROLLED):
            chosen.append(Policy(name_of(wrong, model), model, retention, ATTENTION, wrong_question=wrong))
    return chosen


def name_of(policy: str, model: str) -> str:
    """What a policy is called when a model is asked with it."""
    return policy if model == DEFAULT else f"{model}_{policy}"


def parts_of(name: str) -> tuple[str, str]:
    """A policy without its model, and the model: the reverse of [`name_of`]."""
    if name in TITLES:
        return name, name if name in VARIANTS else DEFAULT
    model = next(model for model in MODELS if name.removeprefix(f"{model}_") in TITLES)
    return name.removeprefix(f"{model}_"), model


def title_of(name: str) -> str:
    """A policy in words."""
    policy, model = parts_of(name)
    return TITLES[policy] if policy == name else f"{TITLES[policy]}; {MODELS[model]}"


def changes_something(changes: dict[str, Any], selector: Any) -> bool:
    """Whether the fields of a name in [`ASKED`] are not what a selector's configuration has already."""
    settings = dict(changes.get("settings", ()))
    reencodes = "reencode_rope" in settings or (not changes.get("reencode", True) and "selection" not in changes)
    if reencodes and selector.reencode_layers == 0:
        return False
    return not settings or any(getattr(selector, name) != value for name, value in settings.items())
