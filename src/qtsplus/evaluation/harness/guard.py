"""lmms-eval's own Qwen2.5-VL, which refuses folders that hold a QTSplus model."""

from typing import Any

from lmms_eval.models.chat import qwen2_5_vl as chat
from lmms_eval.models.simple import qwen2_5_vl as simple
from transformers import PreTrainedConfig


def require_stock(pretrained: str) -> None:
    """
    Raises:
        ValueError: the folder or repository holds a QTSplus model.
    """
    config, _ = PreTrainedConfig.get_config_dict(pretrained)
    if "qtsplus_config" in config:
        raise ValueError(
            f"{pretrained!r} is a QTSplus model. The class qwen2_5_vl would load it without its selector and score "
            "another model; run it with --model qtsplus."
        )


class Qwen2_5_VL(chat.Qwen2_5_VL):
    """The chat class."""

    def __init__(self, pretrained: str = "Qwen/Qwen2.5-VL-3B-Instruct", **kwargs: Any):
        require_stock(pretrained)
        super().__init__(pretrained=pretrained, **kwargs)


class Qwen2_5_VLSimple(simple.Qwen2_5_VL):
    """The class behind `--force_simple`."""

    def __init__(self, pretrained: str = "Qwen/Qwen2.5-VL-3B-Instruct", **kwargs: Any):
        require_stock(pretrained)
        super().__init__(pretrained=pretrained, **kwargs)
