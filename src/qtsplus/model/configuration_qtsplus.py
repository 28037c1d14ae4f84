"""Configuration of QTSplus, the query-aware visual-token selector, and of the Qwen-VL models with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from packaging.version import parse
from transformers import PreTrainedConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.utils import logging

VERSION = "0.1.0"  # of the code; every config.json that it writes has it as `qtsplus_version`
# Patches that are read and encoded together without gradients. They fill a GPU and take a few hundred MB in bfloat16.
PATCHES_PER_CHUNK = 16384
QUERY_STATES = ("embeddings", "layer")
REDUCTIONS = ("max", "mean", "sum")
POSITION_IDS = ("original", "sequential")
SEEN_AREA = 0.8  # A calibration with less does not tell what a video shows from what it does not show.
CHOICES: dict[str, tuple[str, ...]] = {
    "budget": ("rho", "mass", "loss"),
    "query_states": QUERY_STATES,
    "reduction": REDUCTIONS,
    "gate": ("gumbel", "detached", "soft"),
    "position_ids": POSITION_IDS,
}
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
_ABOVE_0 = 1e-12
_LARGEST = 2**31 - 1
# The least and the most of every number; its annotation says whether it is a whole one and whether it may be absent.
_RANGES: dict[str, tuple[float, float]] = {
    "rho_min": (_ABOVE_0, 1),
    "rho_max": (_ABOVE_0, 1),
    "n_max": (1, _LARGEST),
    "token_price": (_ABOVE_0, 10**9),
    "relevance_mass": (_ABOVE_0, 1),
    "budget_hidden_size": (1, _LARGEST),
    "tau_s": (_ABOVE_0, 10**9),
    "attention_layer": (0, _LARGEST),
    "attention_group": (1, _LARGEST),
    "attention_mass": (_ABOVE_0, 1),
    "scoring_layers": (1, _LARGEST),
    "reencode_layers": (0, _LARGEST),
    "dropout": (0, 0.999),
    "evidence_share": (_ABOVE_0, 1),
    "seen_threshold": (_ABOVE_0, 1),
    "seen_area": (_ABOVE_0, 1),
    "trained_seconds": (_ABOVE_0, 10**9),
    "lambda_t": (0, 10**9),
    "lambda_m": (0, 10**9),
    "lambda_s": (0, 10**9),
    "rho_prior": (0, 1),
    "target_n": (_ABOVE_0, _LARGEST),
}
# A saved configuration without these fields is older than they are and means the paper's values.
_BEFORE = {"query_states": "embeddings", "reduction": "max", "budget": "rho", "null_token": False}


class QTSplusConfig(PreTrainedConfig):
    r"""
    Hyperparameters of the selector (arXiv "Seeing the Forest and the Trees", Algorithm 1). Nested as
    `qtsplus_config` in a model's configuration.

    A saved configuration without `query_states`, `reduction`, `budget` or `null_token` is older than these fields and
    means the paper's values: `"embeddings"`, `"max"`, `"rho"` and no null token.

    > The budget, `n = min(ceil(rho * M), n_max)`

    Args:
        rho_min, rho_max (`float`, default to 0.05 and 0.5): bounds of the fraction of the visual tokens that is kept.
        n_max (`int`, defaults to 25600): hard cap on the kept tokens of one sample, in training as in inference.
        budget (`str`, defaults to `"loss"`): where rho comes from. With `"loss"` a head over the question and its
            relevance predicts how much the answer would lose with 1, 2, 4, ... tokens, and the budget is the count at
            which this loss and the price of the tokens are least together. Only `QTSplusTrainer` teaches that head;
            untaught it keeps `rho_min`. With the paper's `"rho"` the head predicts rho. `"mass"` needs no head: the
            fewest tokens whose relevance, with the null token's, sums to `relevance_mass`.
        token_price (`float`, defaults to 0.02): for `budget="loss"`, the gain that one more token must bring, in nats
            of the answer's log-probability; the lambdas add to it. Training sets it if there is a `target_n`.
        relevance_mass (`float`, defaults to 0.8): for `budget="mass"`.
        budget_hidden_size (`int`, defaults to 256): width of the budget head's hidden layer.

    > The gate and the method

        tau_s (`float`, defaults to 0.5): temperature of the training gate.
        gate (`str`, defaults to `"soft"`): which tokens training lets through (docs/training.md). `"soft"` lets three
            times as many through as the budget, each in part, so that the answers teach the scores. `"detached"` keeps
            the tokens that inference keeps, for scores that attention teaches. `"gumbel"` is the paper's sampled gate.
        selection (`str`, defaults to `"qtsplus"`): how tokens are chosen, one of `methods_qtsplus.METHODS`: the most
            relevant tokens; `"lm_attention"`, the tokens that the language model itself attends to in a first, shallow
            pass; `"all"`; or, independent of the question, `"uniform"` (the paper's UNIF), `"random"`,
            `"temporal_redundancy"` (as EVS), `"diversity"` (as DivPrune) or `"coverage"`, for summaries.

    > The relevance

        query_states (`str`, defaults to `"layer"`): how the words of the question are represented. `"embeddings"` is
            the paper's, every word by itself; `"layer"` adds one self-attention layer of the selector over them.
        scoring_layers (`int`, defaults to 1): cross-attention layers; the last one's attention is the relevance.
        null_token (`bool`, defaults to `True`): one learned token competes with the visual ones for the relevance and
            stands for "none of them". The visual tokens' relevance sums to 1 less its share.
        reduction (`str`, defaults to `"mean"`): how a token's scores over heads and words of the question become its
            relevance: `"max"` (the paper), `"mean"`, or, for questions without options, `"sum"`; see
            relevance_qtsplus.py.
        evidence_share (`float`, defaults to 0.5): the fraction of the highest relevance from which on a token counts
            as evidence.
        seen_threshold (`float`, *optional*): the `seen` of an answer from which on the video shows what was asked for.
            A calibration finds it with questions whose answer their video shows and with others. Only a model with a
            null token and a calibration has a `seen`, see [`says_seen`]. Training the scores removes the calibration.
        seen_area (`float`, *optional*): how often that calibration found a larger `seen` for a question of the first
            kind than for one of the second: the area under the curve, 0.5 by chance.

        trained_seconds (`float`, *optional*): the longest video that this model was trained on with its selector, which
            training notes. An answer about a longer video says so.

    > The language model's own attention, for `selection="lm_attention"`

        attention_layer (`int`, *optional*): the layer whose attention is read, counted from 0. It must have full
            attention. The default is the layer at 0.65 of the depth, as in published work; `qtsplus calibrate` finds
            the best one of a model.
        attention_heads (`list[int]`, *optional*): the heads of that layer that count; all if absent.
        attention_group (`int`, defaults to 8192): the most visual tokens that are read together. Time and memory of a
            group grow with its size; in larger groups more frames see each other.
        attention_mass (`float`, defaults to 0.6): the budget of this selection: as many tokens as hold this share of
            the attention to all visual tokens, within `rho_min` and `rho_max`.

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
    trained_seconds: float | None = None
    position_ids: str = "original"
    lambda_t: float = 0.1
    lambda_m: float = 0.17
    lambda_s: float = 0.05
    rho_prior: float | None = None
    target_n: float | None = None

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """A saved configuration keeps its meaning, whatever the defaults have become since."""
        return super().from_dict(_BEFORE | config_dict, **kwargs)

    def __post_init__(self, **kwargs):
        _check_names(kwargs)
        super().__post_init__(**kwargs)
        for name, kind in QTSplusConfig.__annotations__.items():
            self._check_field(name, kind)
        self._require(self.rho_min <= self.rho_max, "rho_min, rho_max", "rho_min <= rho_max")
        can_reach_target = self.target_n is None or self.budget != "mass"
        self._require(can_reach_target, "target_n, budget", "a target_n with another budget, which training moves")
        is_whole_calibration = (self.seen_threshold is None) == (self.seen_area is None)
        self._require(is_whole_calibration, "seen_threshold, seen_area", "both or neither")

    def _check_field(self, name: str, kind: Any) -> None:
        """Raises `ValueError` for a value that is not of the field's kind, or out of its range."""
        value = getattr(self, name)
        if name in CHOICES:
            self._require(value in CHOICES[name], name, f"one of {CHOICES[name]}")
        elif name in _RANGES:
            self._check_number(name, kind)
        elif name == "selection":
            is_method = isinstance(value, str) and (value in SELECTIONS or ":" in value)
            self._require(is_method, name, f"one of {SELECTIONS}, or the 'module:function' of another method")
        elif name == "attention_heads":
            are_heads = value is None or (_are_ids(value) and 0 < len(set(value)) == len(value))
            self._require(are_heads, name, "different whole numbers from 0 on, at least one")
        else:
            self._require(isinstance(value, bool), name, "true or false")

    def _check_number(self, name: str, kind: Any) -> None:
        value = getattr(self, name)
        if value is None and type(None) in get_args(kind):
            return
        is_whole = kind in (int, int | None)
        is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
        least, most = _RANGES[name]
        noun = "a whole number" if is_whole else "a number"
        self._require(is_number and least <= value <= most, name, f"{noun} from {least:,} to {most:,}")

    def _require(self, holds: bool, names: str, expected: str) -> None:
        if not holds:
            given = ", ".join(f"{name}={getattr(self, name)!r}" for name in names.split(", "))
            raise ValueError(f"QTSplusConfig got {given}; expected {expected}.")

    def seconds_exceeded_by(self, seconds: float) -> float | None:
        """The longest video of the training, in seconds, where one of so many seconds is longer; `None` elsewhere."""
        if self.trained_seconds is None or seconds <= self.trained_seconds:
            return None
        return self.trained_seconds

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
    classes = config_class.sub_configs | {"qtsplus_config": QTSplusConfig}
    specifications = getattr(config_class, "sub_configs_defaults", {})
    if specifications:
        specification = type(next(iter(specifications.values())))
        specifications = specifications | {"qtsplus_config": specification(config_class=QTSplusConfig)}
    return classes, specifications


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class QTSplusConfigMixin:
    """
    The fields of every configuration with a selector, added to the backbone's own: a [`QTSplusConfig`] as
    `qtsplus_config`, and the token ids by which the question is found in a prompt, here those of Qwen2.5's tokenizer.
    """

    keys_to_ignore_at_inference = ["cache", "past_key_values", "image_outputs", "video_outputs", "qtsplus"]

    qtsplus_config: dict | PreTrainedConfig | None = None  # the selector; its defaults where absent
    user_turn_token_ids: list[int] | tuple[int, ...] = (151644, 872)  # <|im_start|>user, without the line break
    turn_end_token_id: int = 151645  # <|im_end|>
    special_token_ids: list[int] | tuple[int, ...] = tuple(range(151643, 151657))  # never part of a question
    # The ids that begin and end a tool's response in a turn of the user: `<tool_response` and `</tool_response>`. The
    # first has no `>`, because that is one token with the line break behind it.
    tool_response_token_ids: list[list[int]] | tuple[tuple[int, ...], ...] = ((27, 14172, 9655), (522, 14172, 9655, 29))

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """
        As [`QTSplusConfig.from_dict`]; a stock configuration has no selector yet and gets a new one. A configuration of
        a later version is a `ValueError` if it has fields that this version does not know, and is logged otherwise.
        """
        selector = config_dict.get("qtsplus_config")
        if isinstance(selector, dict):
            _check_version(config_dict.get("qtsplus_version"), selector)
            config_dict = config_dict | {"qtsplus_config": _BEFORE | selector}
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def to_dict(self):
        """As stock, with the version of the code that writes it."""
        return super().to_dict() | {"qtsplus_version": VERSION}  # type: ignore[misc]

    def __post_init__(self, **kwargs):
        selector = self.qtsplus_config
        if selector is None:
            selector = {}
        if isinstance(selector, dict):
            selector = QTSplusConfig(**selector)
        if not isinstance(selector, PreTrainedConfig):
            raise ValueError(
                f"qtsplus_config={selector!r}: expected the selector's fields, as a dict or a QTSplusConfig."
            )
        tags = self.tool_response_token_ids
        if tags and (len(tags) != 2 or not all(tags)):
            raise ValueError(
                f"tool_response_token_ids={tags!r}: expected the ids that begin a response and that end it."
            )
        for name in ("user_turn_token_ids", "special_token_ids", "frame_text_token_ids"):
            ids = getattr(self, name, ())
            if not _are_ids(ids):
                raise ValueError(f"{name}={ids!r}: expected a list of token ids, whole numbers from 0 on.")
        self.qtsplus_config = selector
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


def _check_version(written: str | None, selector: dict) -> None:
    if written is None or parse(str(written)) <= parse(VERSION):
        return
    unknown = [name for name in sorted(selector) if not _is_known(name)]
    versions = f"The model was written by qtsplus {written}, and this is {VERSION}"
    if unknown:
        raise ValueError(
            f"{versions}, which does not know {', '.join(unknown)}: install {written}, or load the model where no "
            "qtsplus is installed, with trust_remote_code=True."
        )
    logging.get_logger(__name__).warning_once(f"{versions}: it loads, but install {written} if something is odd.")


def _is_known(name: str) -> bool:
    """Whether a field is one of [`QTSplusConfig`] or one that Transformers gives to every configuration."""
    inherited = hasattr(PreTrainedConfig, name) or hasattr(PreTrainedConfig, f"_{name}")
    return inherited or name in QTSplusConfig.__annotations__ or name.startswith("_") or name == "auto_map"


def _check_names(names: Iterable[str]) -> None:
    """Raises `ValueError` for a field that no [`QTSplusConfig`] has."""
    for name in names:
        if not _is_known(name):
            nearest = get_close_matches(name, QTSplusConfig.__annotations__, n=2, cutoff=0)
            raise ValueError(f"QTSplusConfig has no field {name!r}; the nearest are {' and '.join(nearest)}.")


def _are_ids(value: Any) -> bool:
    """Whether a value is a list of whole numbers from 0 on, as token ids and numbers of heads are."""
    if not isinstance(value, (list, tuple)):
        return False
    return all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in value)


__all__ = [
    "QTSplusConfig",
    "QTSplusConfigMixin",
    "Qwen2VLQTSplusConfig",
    "Qwen2_5_VLQTSplusConfig",
    "Qwen3VLQTSplusConfig",
    "Qwen3_5QTSplusConfig",
    "with_selector",
]
