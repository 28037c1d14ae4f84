"""Configuration of QTSplus, the query-aware visual-token selector, and of the Qwen-VL models with it."""

from dataclasses import dataclass

from transformers import PreTrainedConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

from .fields_qtsplus import check_fields, check_names, check_token_ids, require

# Lists of token ids, which JSON brings as lists; of a response's two tags, the ids of each.
Ids = list[int] | tuple[int, ...]
Tags = list[list[int]] | tuple[tuple[int, ...], ...]

VERSION = "0.1.0"  # of the code; every config.json that it writes has it as `qtsplus_version`
# Patches that are read and encoded together without gradients. They fill a GPU and take a few hundred MB in bfloat16.
PATCHES_PER_CHUNK = 16384
SEEN_AREA = 0.8  # A calibration with less does not tell what a video shows from what it does not show.


class QTSplusConfig(PreTrainedConfig):
    r"""
    Hyperparameters of the selector (arXiv "Seeing the Forest and the Trees", Algorithm 1). Nested as
    `qtsplus_config` in a model's configuration.

    > The budget, `n = min(ceil(rho * M), n_max)`

    Args:
        rho_min, rho_max (`float`, default to 0.05 and 0.5): bounds of the fraction of the visual tokens that is kept.
        n_max (`int`, defaults to 25600): hard cap on the kept tokens of one sample, in training as in inference.
        budget (`str`, defaults to `"loss"`): where rho comes from. With `"loss"` a head over the question and its
            relevance predicts how much the answer would lose with 1, 2, 4, ... tokens, and the budget is the count at
            which this loss and the price of the tokens are least together. Only `QTSplusTrainer` teaches that head;
            untaught it keeps `rho_min`. With the paper's `"rho"` the head predicts rho.
        token_price (`float`, defaults to 0.02): for `budget="loss"`, the gain that one more token must bring, in nats
            of the answer's log-probability; the lambdas add to it. Training sets it if there is a `target_n`.
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
        target_n (`float`, *optional*): dataset-level mean of kept tokens to aim at.

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
        require(self, self.rho_min <= self.rho_max, ["rho_min", "rho_max"], "rho_min <= rho_max")
        is_whole_calibration = (self.seen_threshold is None) == (self.seen_area is None)
        require(self, is_whole_calibration, ["seen_threshold", "seen_area"], "both or neither")

    @property
    def says_seen(self) -> bool:
        """Whether a calibration found that the null token tells what a video shows from what it does not show."""
        has_null_token = self.null_token and self.reduction != "max"
        return has_null_token and (self.seen_area or 0) >= SEEN_AREA


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
    user_turn_token_ids: Ids = (151644, 872)  # <|im_start|>user, without the line break
    turn_end_token_id: int = 151645  # <|im_end|>
    special_token_ids: Ids = tuple(range(151643, 151657))  # never part of a question
    # The ids that begin and end a tool's response in a turn of the user: `<tool_response` and `</tool_response>`. The
    # first has no `>`, because that is one token with the line break behind it.
    tool_response_token_ids: Tags = ((27, 14172, 9655), (522, 14172, 9655, 29))

    def to_dict(self):
        """As stock, with the version of the code that writes it."""
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

    tool_response_token_ids: Tags = ((151665,), (151666,))
    frame_text_token_ids: Ids = (27,)


class Qwen3_5QTSplusConfig(QTSplusConfigMixin, Qwen3_5Config):
    """Configuration of [`Qwen3_5QTSplusForConditionalGeneration`]; see [`Qwen3VLQTSplusConfig`]."""

    model_type = "qwen3_5_qtsplus"
    sub_configs, sub_configs_defaults = with_selector(Qwen3_5Config)

    user_turn_token_ids: Ids = (248045, 846)
    turn_end_token_id: int = 248046
    special_token_ids: Ids = tuple(range(248044, 248058))
    tool_response_token_ids: Tags = ((248066,), (248067,))
    frame_text_token_ids: Ids = (27,)


__all__ = [
    "QTSplusConfig",
    "QTSplusConfigMixin",
    "Qwen2VLQTSplusConfig",
    "Qwen2_5_VLQTSplusConfig",
    "Qwen3VLQTSplusConfig",
    "Qwen3_5QTSplusConfig",
    "with_selector",
]
