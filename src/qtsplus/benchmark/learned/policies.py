"""What is compared: every way to spend visual tokens, and what tables call it."""

from dataclasses import dataclass

RETENTIONS = (0.025, 0.05, 0.1, 0.25)
# At which the other variants are asked by wrong questions too.
CONTROLLED = (0.05, 0.1)
# A trained model that reads all tokens; that with a random selector; that trained by the recipe as it is.
BASE, FRESH, DEFAULT = "base", "fresh", "qtsplus"
# What is trained, and how each differs from the recipe; one that does not differ is not trained twice.
VARIANTS: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    # Without a teacher's attention, so that the gate's own gradient has to teach.
    "straight_through": ("training.relevance_weight=0", "model.selector.gate=straight_through"),
    "gumbel": ("training.relevance_weight=0", "model.selector.gate=gumbel"),  # the paper's gate
    "max": ("model.selector.reduction=max",),  # the paper's
    "mean": ("model.selector.reduction=mean",),
    "logsumexp": ("model.selector.reduction=logsumexp",),
    "one_layer": ("model.selector.scoring_layers=1",),  # the paper's
    "two_layers": ("model.selector.scoring_layers=2",),
    "embeddings": ("model.selector.query_states=embeddings",),  # the paper's
    "language_model": ("model.selector.query_states=language_model",),
    "layer": ("model.selector.query_states=layer",),
    "no_reencoder": ("model.selector.reencode_layers=0",),  # the paper's nREENC
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
    "straight_through": "straight-through gate, no teacher",
    "gumbel": "the paper's gate, no teacher",
    "max": "maximum over heads and words (the paper)",
    "mean": "mean over heads and words",
    "logsumexp": "one softmax over the log-sum-exp",
    "one_layer": "one scoring layer (the paper)",
    "two_layers": "two scoring layers",
    "embeddings": "query: embeddings (the paper)",
    "language_model": "query: the language model's states",
    "layer": "query: a layer of the selector",
    "no_reencoder": "no re-encoder (nREENC)",
    ATTENTION: "the language model's attention, nothing trained",
    "all": "all tokens",
    "uniform": "uniform (UNIF)",
    "random": "random",
    "temporal_redundancy": "temporal redundancy (as in EVS)",
    "diversity": "diversity (as in DivPrune)",
    "fewer_frames": "fewer frames",
    "lower_resolution": "lower resolution",
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
        layout: which pixels of a video are encoded: "full", "fewer_frames" or "lower_resolution".
        wrong_question: one of [`WRONG_QUESTIONS`] to select by; `None` selects by the question itself.
    """

    name: str
    model: str
    retention: float | None
    selection: str = "qtsplus"
    layout: str = "full"
    wrong_question: str | None = None

    @property
    def chooser(self) -> str:
        """The policy that chooses as this one does, by the question itself."""
        return self.model if self.selection == DEFAULT else name_of(self.selection, self.model)

    @property
    def label(self) -> str:
        return f"{self.name}-{'own' if self.retention is None else format(self.retention, 'g')}"


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
