"""lmms-eval's own Qwen2.5-VL, which refuses folders that hold a QTSplus model."""

from typing import Any

from lmms_eval.models.chat import qwen2_5_vl as chat
from lmms_eval.models.simple import qwen2_5_vl as simple
from transformers import PreTrainedConfig


class _StockOnly:
    def __init__(self, pretrained: str = "Qwen/Qwen2.5-VL-3B-Instruct", **kwargs: Any):
        if "qtsplus_config" in PreTrainedConfig.get_config_dict(pretrained)[0]:
            raise ValueError(
                f"{pretrained!r} is a QTSplus model. The class qwen2_5_vl would load it without its selector and score "
                "another model; run it with --model qtsplus."
            )
        super().__init__(pretrained=pretrained, **kwargs)  # type: ignore[call-arg]  # a mixin's


class Qwen2_5_VL(_StockOnly, chat.Qwen2_5_VL):
    """The chat class."""


class Qwen2_5_VLSimple(_StockOnly, simple.Qwen2_5_VL):
    """The class behind `--force_simple`."""
