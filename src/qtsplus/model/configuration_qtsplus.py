"""Configurations of the Qwen-VL models with a selector; the selector's own is in fields_qtsplus.py."""

from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

from .fields_qtsplus import Ids, QTSplusConfig, QTSplusConfigMixin, Tags

# Patches that are read and encoded together without gradients. They fill a GPU and take a few hundred MB in bfloat16.
PATCHES_PER_CHUNK = 16384


class Qwen2_5_VLQTSplusConfig(QTSplusConfigMixin, Qwen2_5_VLConfig):
    """Configuration of [`Qwen2_5_VLQTSplusForConditionalGeneration`]; see [`QTSplusConfigMixin`]."""

    model_type = "qwen2_5_vl_qtsplus"


class Qwen2VLQTSplusConfig(QTSplusConfigMixin, Qwen2VLConfig):
    """Configuration of [`Qwen2VLQTSplusForConditionalGeneration`]; see [`QTSplusConfigMixin`]."""

    model_type = "qwen2_vl_qtsplus"


class Qwen3VLQTSplusConfig(QTSplusConfigMixin, Qwen3VLConfig):
    """
    Configuration of [`Qwen3VLQTSplusForConditionalGeneration`]; see [`QTSplusConfigMixin`]. `frame_text_token_ids` open
    the time in front of a frame (`<`).
    """

    model_type = "qwen3_vl_qtsplus"

    tool_response_token_ids: Tags = ((151665,), (151666,))
    frame_text_token_ids: Ids = (27,)


class Qwen3_5QTSplusConfig(QTSplusConfigMixin, Qwen3_5Config):
    """Configuration of [`Qwen3_5QTSplusForConditionalGeneration`]; see [`Qwen3VLQTSplusConfig`]."""

    model_type = "qwen3_5_qtsplus"

    user_turn_token_ids: Ids = (248045, 846)
    turn_end_token_id: int = 248046
    special_token_ids: Ids = tuple(range(248044, 248058))
    tool_response_token_ids: Tags = ((248066,), (248067,))
    frame_text_token_ids: Ids = (27,)


__all__ = [
    "QTSplusConfig",
    "Qwen2VLQTSplusConfig",
    "Qwen2_5_VLQTSplusConfig",
    "Qwen3VLQTSplusConfig",
    "Qwen3_5QTSplusConfig",
]
