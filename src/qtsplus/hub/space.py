"""A published folder as a Gradio Space as well: `app.py`, its requirements, and this package, which no index has."""

import shutil
from importlib.metadata import requires
from pathlib import Path

from huggingface_hub.repocard import metadata_load, metadata_save

from .files import hub_root

_PACKAGE = Path(__file__).resolve().parents[1]
_SPACE = {"sdk": "gradio", "sdk_version": "6.31.0", "app_file": "app.py"}
_APP = '''"""The page of `qtsplus app` for the model in this folder."""

from pathlib import Path

from qtsplus.app import launch
from qtsplus import load

launch(*load(Path(__file__).parent), allow_hosts=["*"])
'''


def write_space(folder: Path, title: str) -> None:
    """Adds what `python app.py` needs to the folder of a model, and what the Hub reads of a Space to its README.md."""
    shutil.copytree(_PACKAGE, folder / "qtsplus", ignore=shutil.ignore_patterns("__pycache__", "hub_configs"))
    for path in hub_root().glob("*_qtsplus*.py"):
        shutil.copyfile(path, folder / "qtsplus" / path.name)
    (folder / "app.py").write_text(_APP, encoding="utf-8")
    needed = [line for line in requires("qtsplus") or () if "extra ==" not in line or "extra == 'app'" in line]
    lines = [line.partition(";")[0].strip() + "\n" for line in needed]
    (folder / "requirements.txt").write_text("".join(lines), encoding="utf-8")
    card = folder / "README.md"
    metadata_save(card, {**(metadata_load(card) or {}), "title": title, **_SPACE})
