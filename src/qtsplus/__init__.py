"""QTSplus: query-aware visual-token selection for video language models, as Transformers models.

The model's own files stand at the root of the repository, as a Hub repository has them. A wheel carries them inside
this package; an editable install finds them at the root, as `qtsplus.modeling_qtsplus` and so on.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backbones import class_modules

if TYPE_CHECKING:
    from .configuration_qtsplus import *  # noqa: F403
    from .library import Library as Library
    from .loading import load as load
    from .modeling_qtsplus import *  # noqa: F403
    from .modeling_qtsplus_frames import *  # noqa: F403
    from .processing_qtsplus import *  # noqa: F403
    from .selector_qtsplus import *  # noqa: F403
    from .session import VideoSession as VideoSession
    from .session import ask as ask
    from .stream import Stream as Stream
    from .summaries import summarise as summarise
    from .videos import encode as encode

__version__ = "0.1.0"

if not Path(__file__).with_name("configuration_qtsplus.py").exists():
    __path__.append(str(Path(__file__).resolve().parents[2]))  # noqa: F405  # of a clone

# Looked up on first use (PEP 562), so that `qtsplus --help` does not wait for torch.
_EXPORTS = {
    **class_modules(),
    "QTSplusConfig": "configuration_qtsplus",
    "QTSplusOutput": "selector_qtsplus",
    "QTSplusSelector": "selector_qtsplus",
    "load": "loading",
    "encode": "videos",
    "ask": "session",
    "VideoSession": "session",
    "Library": "library",
    "Stream": "stream",
    "summarise": "summaries",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(".loading", __name__)  # Transformers' Auto classes give ours too
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


__all__ = [*_EXPORTS, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]
