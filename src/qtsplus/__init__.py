"""QTSplus: query-aware visual-token selection for video language models, as Transformers models.

The model's own files stand at the root of the repository, because that is what a Hub repository looks like. A wheel
carries them inside this package; an editable install finds them at the root. Either way there is one copy, named
`qtsplus.modeling_qtsplus` and so on.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PACKAGE = Path(__file__).resolve().parent
if not (_PACKAGE / "configuration_qtsplus.py").exists():
    __path__.append(str(_PACKAGE.parents[1]))

if TYPE_CHECKING:
    from .configuration_qtsplus import QTSplusConfig, Qwen2_5_VLQTSplusConfig
    from .modeling_qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration, Qwen2_5_VLQTSplusModel
    from .modeling_qtsplus_internvl import (
        InternVLQTSplusConfig,
        InternVLQTSplusForConditionalGeneration,
        InternVLQTSplusModel,
        InternVLQTSplusProcessor,
    )
    from .modeling_qtsplus_llava_onevision import (
        LlavaOnevisionQTSplusConfig,
        LlavaOnevisionQTSplusForConditionalGeneration,
        LlavaOnevisionQTSplusModel,
        LlavaOnevisionQTSplusProcessor,
    )
    from .modeling_qtsplus_qwen2_vl import (
        Qwen2VLQTSplusConfig,
        Qwen2VLQTSplusForConditionalGeneration,
        Qwen2VLQTSplusModel,
        Qwen2VLQTSplusProcessor,
    )
    from .modeling_qtsplus_qwen3_5 import (
        Qwen3_5QTSplusConfig,
        Qwen3_5QTSplusForConditionalGeneration,
        Qwen3_5QTSplusModel,
        Qwen3_5QTSplusProcessor,
    )
    from .modeling_qtsplus_qwen3_vl import (
        Qwen3VLQTSplusConfig,
        Qwen3VLQTSplusForConditionalGeneration,
        Qwen3VLQTSplusModel,
        Qwen3VLQTSplusProcessor,
    )
    from .processing_qtsplus import Qwen2_5_VLQTSplusProcessor
    from .selector_qtsplus import QTSplusOutput, QTSplusSelector

# Looked up on first use (PEP 562), so that `qtsplus --help` does not wait for torch.
_EXPORTS = {
    "InternVLQTSplusConfig": "modeling_qtsplus_internvl",
    "InternVLQTSplusForConditionalGeneration": "modeling_qtsplus_internvl",
    "InternVLQTSplusModel": "modeling_qtsplus_internvl",
    "InternVLQTSplusProcessor": "modeling_qtsplus_internvl",
    "LlavaOnevisionQTSplusConfig": "modeling_qtsplus_llava_onevision",
    "LlavaOnevisionQTSplusForConditionalGeneration": "modeling_qtsplus_llava_onevision",
    "LlavaOnevisionQTSplusModel": "modeling_qtsplus_llava_onevision",
    "LlavaOnevisionQTSplusProcessor": "modeling_qtsplus_llava_onevision",
    "QTSplusConfig": "configuration_qtsplus",
    "QTSplusOutput": "selector_qtsplus",
    "QTSplusSelector": "selector_qtsplus",
    "Qwen2VLQTSplusConfig": "modeling_qtsplus_qwen2_vl",
    "Qwen2VLQTSplusForConditionalGeneration": "modeling_qtsplus_qwen2_vl",
    "Qwen2VLQTSplusModel": "modeling_qtsplus_qwen2_vl",
    "Qwen2VLQTSplusProcessor": "modeling_qtsplus_qwen2_vl",
    "Qwen2_5_VLQTSplusConfig": "configuration_qtsplus",
    "Qwen2_5_VLQTSplusForConditionalGeneration": "modeling_qtsplus",
    "Qwen2_5_VLQTSplusModel": "modeling_qtsplus",
    "Qwen2_5_VLQTSplusProcessor": "processing_qtsplus",
    "Qwen3_5QTSplusConfig": "modeling_qtsplus_qwen3_5",
    "Qwen3_5QTSplusForConditionalGeneration": "modeling_qtsplus_qwen3_5",
    "Qwen3_5QTSplusModel": "modeling_qtsplus_qwen3_5",
    "Qwen3_5QTSplusProcessor": "modeling_qtsplus_qwen3_5",
    "Qwen3VLQTSplusConfig": "modeling_qtsplus_qwen3_vl",
    "Qwen3VLQTSplusForConditionalGeneration": "modeling_qtsplus_qwen3_vl",
    "Qwen3VLQTSplusModel": "modeling_qtsplus_qwen3_vl",
    "Qwen3VLQTSplusProcessor": "modeling_qtsplus_qwen3_vl",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])


__all__ = [
    "InternVLQTSplusConfig",
    "InternVLQTSplusForConditionalGeneration",
    "InternVLQTSplusModel",
    "InternVLQTSplusProcessor",
    "LlavaOnevisionQTSplusConfig",
    "LlavaOnevisionQTSplusForConditionalGeneration",
    "LlavaOnevisionQTSplusModel",
    "LlavaOnevisionQTSplusProcessor",
    "QTSplusConfig",
    "QTSplusOutput",
    "QTSplusSelector",
    "Qwen2VLQTSplusConfig",
    "Qwen2VLQTSplusForConditionalGeneration",
    "Qwen2VLQTSplusModel",
    "Qwen2VLQTSplusProcessor",
    "Qwen2_5_VLQTSplusConfig",
    "Qwen2_5_VLQTSplusForConditionalGeneration",
    "Qwen2_5_VLQTSplusModel",
    "Qwen2_5_VLQTSplusProcessor",
    "Qwen3_5QTSplusConfig",
    "Qwen3_5QTSplusForConditionalGeneration",
    "Qwen3_5QTSplusModel",
    "Qwen3_5QTSplusProcessor",
    "Qwen3VLQTSplusConfig",
    "Qwen3VLQTSplusForConditionalGeneration",
    "Qwen3VLQTSplusModel",
    "Qwen3VLQTSplusProcessor",
    "__version__",
]
