"""Puts the Hub files, which stand at the root, into the wheel's `qtsplus` package."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class HubFilesHook(BuildHookInterface):
    """Not for editable installs: there `qtsplus/__init__.py` finds the files at the root, and a copy would go stale."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        root = Path(self.root)
        for path in [*root.glob("*_qtsplus*.py"), root / "hub_configs"]:
            build_data["force_include"][str(path)] = f"qtsplus/{path.name}"
