"""Where the Hub files and the variants' configurations lie, in a checkout as in an installed wheel."""

from pathlib import Path

TINY = "qtsplus-tiny"
_PACKAGE = Path(__file__).resolve().parents[1]


def hub_root() -> Path:
    """The folder that holds the model's own files: the package in a wheel, the repository's root in a checkout."""
    return _PACKAGE if (_PACKAGE / "configuration_qtsplus.py").exists() else _PACKAGE.parents[1]


def hub_configs() -> Path:
    """The folder with one folder per published variant."""
    return hub_root() / "hub_configs"


def bundled_model() -> Path:
    """The folder of the tiny model, which answers where none is named."""
    return hub_configs() / TINY


def variants() -> list[str]:
    """The names of the variants that have a configuration, sorted."""
    return sorted(config.parent.name for config in hub_configs().glob("*/config.json"))


def require_variant(name: str) -> Path:
    """The folder of a variant; a `ValueError` where there is none."""
    if name not in variants():
        raise ValueError(f"There is no variant {name!r}; expected one of {', '.join(variants())}.")
    return hub_configs() / name
