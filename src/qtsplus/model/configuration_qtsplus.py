"""Configurations of the Qwen-VL models with the query-aware visual-token selector; its own is in fields_qtsplus.py."""

from dataclasses import dataclass

from transformers import PreTrainedConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

from .fields_qtsplus import Ids, QTSplusConfig, check_token_ids

# Of a tool's response the ids of its two tags.
Tags = list[list[int]] | tuple[tuple[int, ...], ...]

VERSION = "0.1.0"  # of the code; every config.json that it writes has it as `qtsplus_version`
# Patches that are read and encoded together without gradients. They fill a GPU and take a few hundred MB in bfloat16.
PATCHES_PER_CHUNK = 16384


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
