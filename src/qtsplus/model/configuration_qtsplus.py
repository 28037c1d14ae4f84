"""Configuration of QTSplus, the query-aware visual-token selector, and of the Qwen-VL models with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from packaging.version import parse
from transformers import PreTrainedConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.utils import logging

VERSION = "0.1.0"  # of the code; stands as `qtsplus_version` in every config.json that it writes
# Read and encoded at a time without gradients: enough rows to fill a GPU, a few hundred MB of activations in bfloat16.
PATCHES_PER_CHUNK = 16384
QUERY_STATES = ("embeddings", "layer")
REDUCTIONS = ("max", "mean", "sum")
POSITION_IDS = ("original", "sequential")
SEEN_AREA = 0.8  # A calibration with less does not tell what a video shows from what it does not show.
# A `selection` is looked up where the methods are, when a selector is made.
CHOICES: dict[str, tuple[str, ...]] = {
    "budget": ("rho", "mass", "loss"),
    "query_states": QUERY_STATES,
    "reduction": REDUCTIONS,
    "gate": ("gumbel", "detached", "soft"),
    "position_ids": POSITION_IDS,
}
_BEFORE = {"query_states": "embeddings", "reduction": "max", "budget": "rho", "null_token": False}


class QTSplusConfig(PreTrainedConfig):
    r"""
    Hyperparameters of the selector (arXiv "Seeing the Forest and the Trees", Algorithm 1). Nested as
    `qtsplus_config` in a model's configuration.

    A saved configuration without `query_states`, `reduction`, `budget` or `null_token` is older than these, and means
    the paper's: `"embeddings"`, `"max"`, `"rho"` and none.

    > The budget, `n = min(ceil(rho * M), n_max)`

    Args:
        rho_min, rho_max (`float`, default to 0.05 and 0.5): bounds of the fraction of the visual tokens that is kept.
        n_max (`int`, defaults to 25600): hard cap on the kept tokens of one sample, in training as in inference.
        budget (`str`, defaults to `"loss"`): where rho comes from. With `"loss"` a head over the question and its
            relevance predicts what the answer would lose with 1, 2, 4, ... tokens; kept are so many that this, and the
            price of the tokens, is least. `QTSplusTrainer` alone teaches that head; untaught it keeps `rho_min`. The
            paper's `"rho"` has the head predict rho. `"mass"` needs no head: the fewest tokens whose relevance sums to
            `relevance_mass`, what went to the null token included.
        token_price (`float`, defaults to 0.02): for `budget="loss"`, what one more token has to be worth, in nats of
            the answer's log-probability; the lambdas' part comes on top. Training sets it where there is a `target_n`.
        relevance_mass (`float`, defaults to 0.8): for `budget="mass"`.
        budget_hidden_size (`int`, defaults to 256): width of the budget head's hidden layer.

    > The gate and the method

        tau_s (`float`, defaults to 0.5): temperature of the training gate.
        gate (`str`, defaults to `"soft"`): what training lets through (docs/training.md). `"soft"` lets three times as
            many tokens through as are asked for, each in part, so that the answers teach the scores. `"detached"` keeps
            what inference keeps, for scores that are taught by attention. `"gumbel"` is the paper's sampled gate.
        selection (`str`, defaults to `"qtsplus"`): how tokens are chosen, one of `methods_qtsplus.METHODS`: the most
            relevant ones; `"lm_attention"`, those that the language model itself attends to in a first, shallow pass;
            `"all"`; or, without a look at the question, `"uniform"` (the paper's UNIF), `"random"`,
            `"temporal_redundancy"` (as EVS), `"diversity"` (as DivPrune) or `"coverage"`, for summaries.

    > The relevance

        query_states (`str`, defaults to `"layer"`): what stands for the words of the question. `"embeddings"` is the
            paper's, every word by itself; `"layer"` has one self-attention layer of the selector over the question.
        scoring_layers (`int`, defaults to 1): cross-attention layers; the last one's attention is the relevance.
        null_token (`bool`, defaults to `True`): one learned token competes with the visual ones for the relevance and
            stands for "none of them". The visual tokens' relevance sums to 1 less its share.
        reduction (`str`, defaults to `"mean"`): how the relevance of a token is made of its scores over heads and words
            of the question: `"max"` (the paper), `"mean"`, or, for questions without options, `"sum"`; see
            relevance_qtsplus.py.
        evidence_share (`float`, defaults to 0.5): of the highest relevance, what a token needs to count as evidence.
        seen_threshold (`float`, *optional*): an answer's `seen` from which on the video shows what was asked for, as a
            calibration found on questions whose answer their video shows and on others. Only a model with a null token
            and a calibration has a `seen`, see [`says_seen`]. Training the scores removes the calibration.
        seen_area (`float`, *optional*): how often that calibration found a larger `seen` for a question of the first
            kind than for one of the second: the area under the curve, 0.5 by chance.

    > The language model's own attention, for `selection="lm_attention"`

        attention_layer (`int`, *optional*): the layer whose attention is read, counted from 0; one with full attention.
            By default that at 0.65 of the depth, as published work has it; `qtsplus calibrate` finds a model's own.
        attention_heads (`list[int]`, *optional*): the heads of that layer that count; all if absent.
        attention_group (`int`, defaults to 8192): the most visual tokens that are read together. Time and memory of a
            group grow with its size; larger ones let more frames see each other.
        attention_mass (`float`, defaults to 0.6): the own budget: as many tokens as hold this share of the attention to
            all visual tokens, within `rho_min` and `rho_max`.

    > What goes on

        reencode_layers (`int`, defaults to 2): self-attention layers over the kept tokens; 0 is the paper's nREENC.
        reencode_rope (`bool`, defaults to `True`): give the re-encoder each token's absolute (time, height, width) as
            rotary positions. `False` for the checkpoints of the reference implementation, which never had them.
        dropout (`float`, defaults to 0.0): dropout after attention and feed-forward.
        position_ids (`str`, defaults to `"original"`): `"original"` lets each kept token keep the position it had in
            the full prompt; `"sequential"` numbers the shortened prompt from 0, as the reference checkpoints do.

    > The compute-aware loss

        lambda_t, lambda_m, lambda_s (`float`): weights of attention time, of key/value memory and of the prior on rho.
        rho_prior (`float`, *optional*): the prior's mean; `None` takes the running mean of rho over training.
        target_n (`float`, *optional*): dataset-level mean of kept tokens to aim at; not with `budget="mass"`.

    Raises:
        ValueError: a value out of its range, named with the range.
    """

    model_type = "qtsplus"
    base_config_key = "qtsplus_config"

    rho_min: float = 0.05
    rho_max: float = 0.5
    n_max: int = 25600
    budget: str = "loss"
    token_price: float = 0.02
    relevance_mass: float = 0.8
    budget_hidden_size: int = 256
    tau_s: float = 0.5
    gate: str = "soft"
    selection: str = "qtsplus"
    query_states: str = "layer"
    attention_layer: int | None = None
    attention_heads: list[int] | tuple[int, ...] | None = None
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
    position_ids: str = "original"
    lambda_t: float = 0.1
    lambda_m: float = 0.17
    lambda_s: float = 0.05
    rho_prior: float | None = None
    target_n: float | None = None

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """A saved configuration keeps its meaning, whatever the defaults have become since."""
        return super().from_dict({**_BEFORE, **config_dict}, **kwargs)

    def __post_init__(self, **kwargs):
        _check_names(kwargs)
        super().__post_init__(**kwargs)
        _require(0 < self.rho_min <= self.rho_max <= 1, self, "rho_min, rho_max", "0 < rho_min <= rho_max <= 1")
        _require(self.n_max >= 1, self, "n_max", "n_max >= 1")
        _require(self.null_token in (False, True), self, "null_token", "true or false")
        weights = (self.lambda_t, self.lambda_m, self.lambda_s, self.rho_prior or 0)
        held = all(0 <= weight < 1e9 for weight in weights)
        _require(held, self, "lambda_t, lambda_m, lambda_s, rho_prior", "numbers from 0 to 1e9")
        _require(self.token_price > 0, self, "token_price", "token_price > 0")
        steered = self.target_n is None or self.budget != "mass"
        _require(steered, self, "target_n, budget", "a target_n with another budget, which training moves")
        _require(self.tau_s > 0, self, "tau_s", "tau_s > 0")
        _require(0 <= self.dropout < 1, self, "dropout", "0 <= dropout < 1")
        heads = self.attention_heads
        distinct = heads is None or 0 < len(set(heads)) == len(heads)
        _require(distinct, self, "attention_heads", "different heads, at least one")
        _require(self.attention_group >= 1, self, "attention_group", "attention_group >= 1")
        _require(self.scoring_layers >= 1, self, "scoring_layers", "scoring_layers >= 1")
        _require(self.reencode_layers >= 0, self, "reencode_layers", "reencode_layers >= 0 (0 switches it off)")
        for share in ("evidence_share", "relevance_mass", "attention_mass"):
            _require(0 < getattr(self, share) <= 1, self, share, f"0 < {share} <= 1")
        calibration = (self.seen_threshold, self.seen_area)
        calibrated = calibration == (None, None) or all(value is not None and 0 < value <= 1 for value in calibration)
        _require(calibrated, self, "seen_threshold, seen_area", "both above 0 and at most 1, or neither")
        for name, choices in CHOICES.items():
            _require(getattr(self, name) in choices, self, name, f"one of {choices}")

    @property
    def says_seen(self) -> bool:
        """Whether a calibration found that the null token tells what a video shows from what it does not show."""
        has_null_token = self.null_token and self.reduction != "max"
        return has_null_token and self.seen_area is not None and self.seen_area >= SEEN_AREA


def with_selector(config_class: type[PreTrainedConfig]) -> tuple[dict, dict]:
    """
    `sub_configs` and `sub_configs_defaults` of a configuration with a `qtsplus_config` beside those of `config_class`:
    Transformers below 5.20 reads the first, later ones the second.
    """
    classes = {**config_class.sub_configs, "qtsplus_config": QTSplusConfig}
    specifications = getattr(config_class, "sub_configs_defaults", {})
    if specifications:
        specification = type(next(iter(specifications.values())))
        specifications = {**specifications, "qtsplus_config": specification(config_class=QTSplusConfig)}
    return classes, specifications


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class QTSplusConfigMixin:
    """
    What every configuration with a selector has, in front of the backbone's own: a [`QTSplusConfig`] as
    `qtsplus_config`, and the token ids by which the question is found in a prompt, here those of Qwen2.5's tokenizer.
    """

    keys_to_ignore_at_inference = ["cache", "past_key_values", "image_outputs", "video_outputs", "qtsplus"]

    qtsplus_config: dict | PreTrainedConfig | None = None  # the selector; its defaults where absent
    user_turn_token_ids: list[int] | tuple[int, ...] = (151644, 872)  # <|im_start|>user, without the line break
    turn_end_token_id: int = 151645  # <|im_end|>
    special_token_ids: list[int] | tuple[int, ...] = tuple(range(151643, 151657))  # never part of a question
    # What begins and what ends a tool's response in a turn of the user: `<tool_response` and `</tool_response>`. The
    # first has no `>`, which is one token with the line break behind it.
    tool_response_token_ids: list[list[int]] | tuple[tuple[int, ...], ...] = ((27, 14172, 9655), (522, 14172, 9655, 29))

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """
        As [`QTSplusConfig.from_dict`]; a stock configuration has no selector yet and gets a new one. A `ValueError` for
        one that a later version wrote, with fields that this one does not know; without those it is only noted.
        """
        selector = config_dict.get("qtsplus_config")
        if isinstance(selector, dict):
            _check_version(config_dict.get("qtsplus_version"), selector)
            config_dict = {**config_dict, "qtsplus_config": {**_BEFORE, **selector}}
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def to_dict(self):
        """As stock, with the version of the code that writes it."""
        return {**super().to_dict(), "qtsplus_version": VERSION}  # type: ignore[misc]

    def __post_init__(self, **kwargs):
        given = self.qtsplus_config
        if given is not None and not isinstance(given, (dict, PreTrainedConfig)):
            raise ValueError(f"qtsplus_config={given!r}: expected the selector's fields, as a dict or a QTSplusConfig.")
        tags = self.tool_response_token_ids
        if tags and (len(tags) != 2 or not all(tags)):
            raise ValueError(
                f"tool_response_token_ids={tags!r}: expected the ids that begin a response and that end it."
            )
        self.qtsplus_config = given if isinstance(given, PreTrainedConfig) else QTSplusConfig(**(given or {}))
        kwargs.pop("model_type", None)  # a base checkpoint's config.json has the stock model's
        super().__post_init__(**kwargs)  # type: ignore[misc]


class Qwen2_5_VLQTSplusConfig(QTSplusConfigMixin, Qwen2_5_VLConfig):
    """Configuration of [`Qwen2_5_VLQTSplusForConditionalGeneration`]; see [`QTSplusConfigMixin`]."""

    model_type = "qwen2_5_vl_qtsplus"
    sub_configs, sub_configs_defaults = with_selector(Qwen2_5_VLConfig)


class Qwen2VLQTSplusConfig(QTSplusConfigMixin, Qwen2VLConfig):
    """Configuration of [`Qwen2VLQTSplusForConditionalGeneration`]; see [`QTSplusConfigMixin`]."""

    model_type = "qwen2_vl_qtsplus"
    sub_configs, sub_configs_defaults = with_selector(Qwen2VLConfig)


class Qwen3VLQTSplusConfig(QTSplusConfigMixin, Qwen3VLConfig):
    """
    Configuration of [`Qwen3VLQTSplusForConditionalGeneration`]; see [`QTSplusConfigMixin`]. `frame_text_token_ids` open
    the time in front of a frame (`<`).
    """

    model_type = "qwen3_vl_qtsplus"
    sub_configs, sub_configs_defaults = with_selector(Qwen3VLConfig)

    tool_response_token_ids: list[list[int]] | tuple[tuple[int, ...], ...] = ((151665,), (151666,))
    frame_text_token_ids: list[int] | tuple[int, ...] = (27,)


class Qwen3_5QTSplusConfig(QTSplusConfigMixin, Qwen3_5Config):
    """Configuration of [`Qwen3_5QTSplusForConditionalGeneration`]; see [`Qwen3VLQTSplusConfig`]."""

    model_type = "qwen3_5_qtsplus"
    sub_configs, sub_configs_defaults = with_selector(Qwen3_5Config)

    user_turn_token_ids: list[int] | tuple[int, ...] = (248045, 846)
    turn_end_token_id: int = 248046
    special_token_ids: list[int] | tuple[int, ...] = tuple(range(248044, 248058))
    tool_response_token_ids: list[list[int]] | tuple[tuple[int, ...], ...] = ((248066,), (248067,))
    frame_text_token_ids: list[int] | tuple[int, ...] = (27,)


def _check_version(written, selector):
    if written is None or parse(str(written)) <= parse(VERSION):
        return
    unknown = sorted(selector.keys() - QTSplusConfig().to_dict().keys())
    found = f"The model was written by qtsplus {written}, and this is {VERSION}"
    if unknown:
        raise ValueError(
            f"{found}, which does not know {', '.join(unknown)}: install {written}, or load the model where no qtsplus "
            "is installed, with trust_remote_code=True."
        )
    logging.get_logger(__name__).warning_once(f"{found}: it loads, but install {written} if something is odd.")


def _check_names(unknown: Iterable[str]) -> None:
    """
    Raises `ValueError` for unknown fields whose names are like those of [`QTSplusConfig`]. Others are left to
    Transformers, whose versions write different fields of their own into every saved configuration.
    """
    fields = list(vars(QTSplusConfig)["__annotations__"])
    for name in unknown:
        similar = get_close_matches(name, fields, cutoff=0.8)
        if similar:
            raise ValueError(f"QTSplusConfig has no field {name!r}. Did you mean {' or '.join(similar)}?")


def _require(holds, config, names, expected):
    if not holds:
        given = ", ".join(f"{name}={getattr(config, name)!r}" for name in names.split(", "))
        raise ValueError(f"QTSplusConfig got {given}; expected {expected}.")


__all__ = [
    "QTSplusConfig",
    "QTSplusConfigMixin",
    "Qwen2VLQTSplusConfig",
    "Qwen2_5_VLQTSplusConfig",
    "Qwen3VLQTSplusConfig",
    "Qwen3_5QTSplusConfig",
    "with_selector",
]
