"""The published models inside vLLM, as models out of its tree: vLLM finds [`register`] by itself, as a plugin.

`LLM(model=folder)` and vLLM's OpenAI server take a published folder as it is. vLLM's own classes run the vision tower
and the language model; between them stands the selector of this package, the same code as in Transformers.
"""

import logging

from ..hub import backbones

logger = logging.getLogger(__name__)

# How the names of our classes begin, in Transformers and in models.py.
BACKBONES = ("Qwen2_5_VLQTSplus", "Qwen2VLQTSplus", "Qwen3VLQTSplus", "Qwen3_5QTSplus")

# In mm_processor_kwargs, of a request or of the server; and in the server's additional_config.
SETTINGS = ("retention", "max_visual_tokens", "selection", "reencode")
OPTIONS = ("qtsplus_cache_gb", "qtsplus_keep_keys")


def register() -> None:
    """
    Makes the models known to vLLM, in each of its processes. In a vLLM that was never tried it says so instead, and
    leaves vLLM's own models alone.
    """
    import vllm

    if not (0, 29) <= vllm.__version_tuple__[:2] <= (0, 33):
        logger.error(
            "qtsplus takes vLLM 0.29 to 0.33, and this is %s: its models are not registered.",
            vllm.__version__,
        )
        return
    backbones.register_backbones()
    for name in BACKBONES:
        vllm.ModelRegistry.register_model(f"{name}ForConditionalGeneration", f"{__name__}.models:{name}InVLLM")
