"""QTSplus: query-aware visual-token selection for video language models, as Transformers models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .hub.backbones import class_modules

if TYPE_CHECKING:
    from .asking.session import VideoSession as VideoSession
    from .asking.session import ask as ask
    from .asking.summaries import summarise as summarise
    from .hub.loading import load as load
    from .library.library import Library as Library
    from .live.stream import Stream as Stream
    from .model.configuration_qtsplus import *  # noqa: F403
    from .model.modeling_qtsplus import *  # noqa: F403
    from .model.modeling_qtsplus_frames import *  # noqa: F403
    from .model.modeling_qtsplus_qwen3 import *  # noqa: F403
    from .model.processing_qtsplus import *  # noqa: F403
    from .model.selector_qtsplus import *  # noqa: F403
    from .video.encoded import encode as encode

__version__ = "0.1.0"

# Looked up on first use (PEP 562), so that `qtsplus --help` does not wait for torch.
_EXPORTS = {
    **class_modules(),
    "QTSplusConfig": "model.fields_qtsplus",
    "QTSplusOutput": "model.selector_qtsplus",
    "QTSplusSelector": "model.selector_qtsplus",
    "load": "hub.loading",
    "encode": "video.encoded",
    "ask": "asking.session",
    "VideoSession": "asking.session",
    "Library": "library.library",
    "Stream": "live.stream",
    "summarise": "asking.summaries",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(".hub.loading", __name__)  # Transformers' Auto classes give ours too
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


__all__ = [*_EXPORTS, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]
