"""Where the variants' configurations are, in a clone as in an installed wheel."""

from pathlib import Path

TINY = "qtsplus-tiny"
_PACKAGE = Path(__file__).resolve().parents[1]


def hub_configs() -> Path:
    """The folder with one folder per published variant: beside the package in a wheel, at the top of a clone."""
    packaged = _PACKAGE / "hub_configs"
    if packaged.is_dir():
        return packaged
    return _PACKAGE.parents[1] / "hub_configs"


def variants() -> list[str]:
    """The names of the variants that have a configuration, sorted."""
    return sorted(config.parent.name for config in hub_configs().glob("*/config.json"))


def require_variant(name: str) -> Path:
    """The folder of a variant; a `ValueError` where there is none."""
    if name not in variants():
        raise ValueError(f"There is no variant {name!r}; expected one of {', '.join(variants())}.")
    return hub_configs() / name
