"""The selector's configuration: its fields with their allowed values, and the fields of a model that has a selector."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args

from transformers import PreTrainedConfig

QUERY_STATES = ("embeddings", "layer")
REDUCTIONS = ("max", "mean", "sum")
POSITION_IDS = ("original", "sequential")
# The names of methods_qtsplus.METHODS. `selection` also takes `module:function` and `file.py:function`.
SELECTIONS = (
    "qtsplus",
    "uniform",
    "random",
    "all",
    "diversity",
    "coverage",
    "temporal_redundancy",
    "lm_attention",
)
CHOICES: dict[str, tuple[str, ...]] = {
    "budget": ("rho", "loss"),
    "query_states": QUERY_STATES,
    "reduction": REDUCTIONS,
    "gate": ("gumbel", "detached", "soft"),
    "position_ids": POSITION_IDS,
    "selection": SELECTIONS,
}
VERSION = "0.1.0"  # the version of this code, which config.json states as `qtsplus_version`
Ids = list[int] | tuple[int, ...]  # token ids or indices; from JSON they are lists
Tags = list[list[int]] | tuple[tuple[int, ...], ...]  # the token ids of a tool response's two tags
SEEN_AREA = 0.8  # with a smaller `seen_area`, `seen` hardly tells whether a video shows the answer
_ABOVE_0 = 1e-12
_LARGEST = 2**31 - 1
# The numeric fields by their range. The annotation of a field says whether only whole numbers are allowed.
_RANGES: dict[tuple[float, float], tuple[str, ...]] = {
    (_ABOVE_0, 1): ("rho_min", "rho_max", "attention_mass", "evidence_share", "seen_threshold", "seen_area"),
    (_ABOVE_0, _LARGEST): ("token_price", "tau_s", "trained_seconds", "target_n"),
    (1, _LARGEST): ("n_max", "budget_hidden_size", "attention_group", "scoring_layers"),
    (0, _LARGEST): ("attention_layer", "reencode_layers", "lambda_t", "lambda_m", "lambda_s"),
    (0, 1): ("rho_prior",),
    (0, 0.999): ("dropout",),
}


class QTSplusConfig(PreTrainedConfig):
    r"""
    Hyperparameters of the selector (arXiv "Seeing the Forest and the Trees", Algorithm 1). Nested as
    `qtsplus_config` in a model's configuration.

    > The budget, `n = min(ceil(rho * M), n_max)`

    Args:
        rho_min, rho_max (`float`, default to 0.05 and 0.5): bounds of the fraction of the visual tokens that is kept.
        n_max (`int`, defaults to 25600): hard cap on the kept tokens of one sample, in training as in inference.
        budget (`str`, defaults to `"loss"`): how the budget is predicted. With `"loss"` a head reads the question and
            its relevance, and predicts how much higher the answer's loss would be if only 1, 2, 4, ... tokens were
            kept. The budget is the count for which this loss plus the price of the tokens is lowest. Only
            `QTSplusTrainer` trains that head; untrained it keeps `rho_min`. With the paper's `"rho"` a head predicts
            rho.
        token_price (`float`, defaults to 0.02): for `budget="loss"`, by how many nats one more token must raise the
            answer's log-probability to be kept; the lambdas add to it. Training sets it if there is a `target_n`.
        budget_hidden_size (`int`, defaults to 256): width of the budget head's hidden layer.

    > The gate and the method

        tau_s (`float`, defaults to 0.5): temperature of the training gate.
        gate (`str`, defaults to `"soft"`): which tokens training keeps (docs/training.md). `"soft"` keeps three times
            as many as the budget, each mixed with the mean of all tokens, so that the answers teach the scores.
            `"detached"` keeps the tokens that inference keeps, for scores that attention teaches. `"gumbel"` is the
            paper's sampled gate.
        selection (`str`, defaults to `"qtsplus"`): how tokens are chosen, one of `methods_qtsplus.METHODS`.
            `"qtsplus"` keeps the tokens that the selector finds most relevant, `"lm_attention"` those that the language
            model itself attends to in a first, shallow pass, `"all"` every token. The others ignore the question:
            `"uniform"` (the paper's UNIF), `"random"`, `"temporal_redundancy"` (as EVS), `"diversity"` (as DivPrune)
            and `"coverage"`, for summaries.

    > The relevance

        query_states (`str`, defaults to `"layer"`): how the words of the question are represented. `"embeddings"` is
            the paper's, every word by itself; `"layer"` adds one self-attention layer of the selector over them.
        scoring_layers (`int`, defaults to 1): cross-attention layers; the last one's attention is the relevance.
        null_token (`bool`, defaults to `True`): one learned token competes with the visual ones for the relevance and
            stands for "none of them". The visual tokens' relevance and its own sum to 1.
        reduction (`str`, defaults to `"mean"`): how a token's scores over heads and words of the question become its
            relevance: `"max"` (the paper), `"mean"`, or, for questions without options, `"sum"`; see
            relevance_qtsplus.py.
        evidence_share (`float`, defaults to 0.5): a token with at least this fraction of the highest relevance is
            evidence.
        seen_threshold (`float`, *optional*): an answer with at least this `seen` says that its video shows what was
            asked for. A calibration finds it from questions whose video shows the answer and questions whose video does
            not. Only a model with a null token and a calibration has a `seen`, see [`says_seen`]. Training the scores
            removes the calibration.
        seen_area (`float`, *optional*): the area under the ROC curve of that calibration: how often `seen` is larger
            for a question whose video shows the answer than for another; 0.5 by chance.

        trained_seconds (`float`, *optional*): the length of the longest video that the selector was trained on, set by
            training. An answer about a longer video says so.

    > The language model's own attention, for `selection="lm_attention"`

        attention_layer (`int`, *optional*): the layer whose attention is read, counted from 0. It must have full
            attention. The default is the layer at 0.65 of the depth, as in published work; `qtsplus calibrate` finds
            a model's best layer.
        attention_heads (`list[int]`, *optional*): the heads of that layer that count; all if absent.
        attention_group (`int`, defaults to 8192): how many visual tokens at most are read together. Time and memory of
            a group grow with its size; in larger groups more frames see each other.
        attention_mass (`float`, defaults to 0.6): this selection keeps the fewest tokens that hold this share of the
            attention to all visual tokens, within `rho_min` and `rho_max`.

    > The kept tokens

        reencode_layers (`int`, defaults to 2): self-attention layers over the kept tokens; 0 is the paper's nREENC.
        reencode_rope (`bool`, defaults to `True`): give the re-encoder each token's absolute (time, height, width) as
            rotary positions. `False` for the checkpoints of the reference implementation, which never had them.
        dropout (`float`, defaults to 0.0): dropout after attention and feed-forward.
        position_ids (`str`, defaults to `"original"`): `"original"` lets each kept token keep the position it had in
            the full prompt; `"sequential"` numbers the shortened prompt from 0, as the reference checkpoints do.

    > The compute-aware loss

        lambda_t, lambda_m, lambda_s (`float`): weights of attention time, of key/value memory and of the prior on rho.
        rho_prior (`float`, *optional*): the prior's mean; `None` takes the running mean of rho over training.
        target_n (`float`, *optional*): dataset-level mean of kept tokens to aim at.

    Raises:
        ValueError: a value is out of its range. The message names both.
    """

    model_type = "qtsplus"
    base_config_key = "qtsplus_config"

    rho_min: float = 0.05
    rho_max: float = 0.5
    n_max: int = 25600
    budget: str = "loss"
    token_price: float = 0.02
    budget_hidden_size: int = 256
    tau_s: float = 0.5
    gate: str = "soft"
    selection: str = "qtsplus"
    query_states: str = "layer"
    attention_layer: int | None = None
    attention_heads: Ids | None = None
    attention_group: int = 8192
    attention_mass: float = 0.6
    scoring_layers: int = 1
    null_token: bool = True
    reduction: str = "mean"
    reencode_layers: int = 2
    reencode_rope: bool = True
    dropout: float = 0.0
    evidence_share: float = 0.5
    seen_threshold: float | None = None
    seen_area: float | None = None
    trained_seconds: float | None = None
    position_ids: str = "original"
    lambda_t: float = 0.1
    lambda_m: float = 0.17
    lambda_s: float = 0.05
    rho_prior: float | None = None
    target_n: float | None = None

    def __post_init__(self, **kwargs):
        check_names(kwargs, QTSplusConfig.__annotations__)
        super().__post_init__(**kwargs)
        check_fields(self, QTSplusConfig.__annotations__)
        require(self, self.model_type == QTSplusConfig.model_type, ["model_type"], "'qtsplus'")
        require(self, self.rho_min <= self.rho_max, ["rho_min", "rho_max"], "rho_min <= rho_max")
        require(
            self,
            (self.seen_threshold is None) == (self.seen_area is None),
            ["seen_threshold", "seen_area"],
            "both or neither",
        )

    @property
    def says_seen(self) -> bool:
        """Whether `seen` can be used: with a null token, without `max`, and after a good calibration."""
        return self.null_token and self.reduction != "max" and (self.seen_area or 0) >= SEEN_AREA


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class QTSplusConfigMixin:
    """
    The fields that a backbone's configuration gets with a selector: a [`QTSplusConfig`] as `qtsplus_config`, and the
    token ids by which the question is found in a prompt. The defaults are the ids of Qwen2.5's tokenizer.
    """

    keys_to_ignore_at_inference = ["cache", "past_key_values", "image_outputs", "video_outputs", "qtsplus"]

    qtsplus_config: dict | PreTrainedConfig | None = None  # `None` is replaced by the defaults
    user_turn_token_ids: Ids = (151644, 872)  # <|im_start|>user, without the line break
    turn_end_token_id: int = 151645  # <|im_end|>
    special_token_ids: Ids = tuple(range(151643, 151657))  # never part of a question
    # The ids that begin and end a tool's response in a turn of the user: `<tool_response` and `</tool_response>`. The
    # first has no `>`, because the tokenizer joins it with the line break that follows.
    tool_response_token_ids: Tags = ((27, 14172, 9655), (522, 14172, 9655, 29))

    def __init_subclass__(cls, **options):
        """
        Adds `qtsplus_config` to the nested configurations of the stock class. Transformers below 5.20 reads
        `sub_configs`, later versions `sub_configs_defaults`.
        """
        cls.sub_configs = cls.sub_configs | {"qtsplus_config": QTSplusConfig}  # type: ignore[attr-defined]
        specifications = getattr(cls, "sub_configs_defaults", {})
        if specifications:
            stock = next(iter(specifications.values()))
            specification = type(stock)(config_class=QTSplusConfig)
            cls.sub_configs_defaults = specifications | {"qtsplus_config": specification}  # type: ignore[attr-defined]
        super().__init_subclass__(**options)

    def to_dict(self):
        """The stock dict, with the version of this code."""
        return super().to_dict() | {"qtsplus_version": VERSION}  # type: ignore[misc]

    def __post_init__(self, **kwargs):
        selector = {} if self.qtsplus_config is None else self.qtsplus_config
        if isinstance(selector, dict):
            selector = QTSplusConfig(**selector)
        if not isinstance(selector, PreTrainedConfig):
            raise ValueError(
                f"qtsplus_config={selector!r}: expected the selector's fields, as a dict or a QTSplusConfig."
            )
        check_token_ids(self)
        self.qtsplus_config = selector
        kwargs.pop("model_type", None)  # in a base checkpoint's config.json it is that of the stock model
        super().__post_init__(**kwargs)  # type: ignore[misc]


def check_fields(config: PreTrainedConfig, kinds: Mapping) -> None:
    """
    Raises `ValueError` for a value that is not of its field's kind, or out of its range.

    Args:
        kinds: the annotations of the fields, by their names.
    """
    for name in ("null_token", "reencode_rope"):
        require(config, isinstance(getattr(config, name), bool), [name], "true or false")
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        is_own_method = name == "selection" and isinstance(value, str) and ":" in value
        require(config, is_own_method or value in choices, [name], f"one of {choices}")
    for (least, most), names in _RANGES.items():
        for name in names:
            value = getattr(config, name)
            kind = kinds[name]
            if value is None and type(None) in get_args(kind):
                continue
            is_whole = kind in (int, int | None)
            types = int if is_whole else (int, float)
            is_number = isinstance(value, types) and not isinstance(value, bool)
            holds = is_number and least <= value <= most
            noun = "a whole number" if is_whole else "a number"
            require(config, holds, [name], f"{noun} from {least:,} to {most:,}")
    heads = config.attention_heads
    if heads is not None:
        are_different = are_ids(heads) and len(heads) > 0 and len(set(heads)) == len(heads)
        require(config, are_different, ["attention_heads"], "different whole numbers from 0 on, at least one")


def require(
    config: PreTrainedConfig,
    holds: bool,
    names: Iterable[str],
    expected: str,
) -> None:
    """Raises `ValueError` with the values of the fields `names` and what was `expected`, unless `holds`."""
    if not holds:
        given = ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
        raise ValueError(f"QTSplusConfig got {given}; expected {expected}.")


def are_ids(value) -> bool:
    """Whether a value is a list of whole numbers from 0 on, such as token ids or the indices of heads."""
    if not isinstance(value, (list, tuple)):
        return False
    return all(type(number) is int and number >= 0 for number in value)


def check_token_ids(config) -> None:
    """Raises `ValueError` for token ids with which no question could be found."""
    for name in ("user_turn_token_ids", "special_token_ids", "frame_text_token_ids"):
        ids = getattr(config, name, ())
        if not are_ids(ids):
            raise ValueError(f"{name}={ids!r}: expected a list of token ids, whole numbers from 0 on.")
    tags = config.tool_response_token_ids
    if tags and (len(tags) != 2 or not all(tags)):
        raise ValueError(f"tool_response_token_ids={tags!r}: expected the ids that begin a response and that end it.")


def check_names(names: Iterable[str], kinds: Mapping) -> None:
    """Raises `ValueError` for a field that is not in `kinds` and not one that every configuration has."""
    for name in sorted(names):
        is_inherited = hasattr(PreTrainedConfig, name) or hasattr(PreTrainedConfig, f"_{name}")
        is_internal = name.startswith("_") or name == "auto_map"
        if name not in kinds and not is_inherited and not is_internal:
            nearest = get_close_matches(name, kinds, n=2, cutoff=0)
            raise ValueError(
                f"QTSplusConfig has no field {name!r}; the nearest are {' and '.join(nearest)}. If another version of "
                "qtsplus wrote it (`qtsplus_version` in config.json), install that version."
            )
