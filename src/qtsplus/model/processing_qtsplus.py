"""Processors of the Qwen-VL models. Each has only what differs from [`QTSplusProcessorMixin`]."""

from transformers import Qwen2_5_VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor

from .processor_mixin_qtsplus import QTSplusProcessorMixin


class Qwen2_5_VLQTSplusProcessor(QTSplusProcessorMixin, Qwen2_5_VLProcessor):
    r"""[`Qwen2_5_VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""


class Qwen2VLQTSplusProcessor(QTSplusProcessorMixin, Qwen2VLProcessor):
    r"""[`Qwen2VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""


class Qwen3VLQTSplusProcessor(QTSplusProcessorMixin, Qwen3VLProcessor):
    r"""[`Qwen3VLProcessor`] that also says which tokens are the question, and reads videos with their true times."""

    frame_text = "<0.5 seconds>"

    def _calculate_timestamps(self, indices, *times):
        # A copy, because stock's appends a frame to an odd number of indices.
        return super()._calculate_timestamps(list(indices), *times)


class Qwen3_5QTSplusProcessor(Qwen3VLQTSplusProcessor):
    r"""As [`Qwen3VLQTSplusProcessor`]: Qwen3.5 has the same stock class."""


__all__ = [
    "QTSplusProcessorMixin",
    "Qwen2VLQTSplusProcessor",
    "Qwen2_5_VLQTSplusProcessor",
    "Qwen3VLQTSplusProcessor",
    "Qwen3_5QTSplusProcessor",
]
