"""The wheel and the sdist carry the Hub files as `qtsplus.*`, once."""

import ast
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from qtsplus.hub.files import hub_root

ROOT = Path(__file__).resolve().parents[1]
HUB_FILES = {path.name for path in ROOT.glob("*_qtsplus*.py")}

# -S leaves out editable installs, so that only the unpacked wheel can provide the package.
IMPORT_FROM_WHEEL = """
import sys
sys.path[:0] = sys.argv[1:]
import qtsplus
from qtsplus import QTSplusSelector, Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus import QTSplusConfig, QTSplusOutput, Qwen2_5_VLQTSplusModel, Qwen2_5_VLQTSplusProcessor
from qtsplus.hub.files import hub_configs, hub_root, variants
assert qtsplus.__path__ == [sys.argv[1] + "/qtsplus"], qtsplus.__path__
assert all(str(path).startswith(sys.argv[1]) for path in [hub_root(), hub_configs()])
assert "qtsplus-tiny" in variants()
assert Qwen2_5_VLQTSplusConfig.__module__ == "qtsplus.model.configuration_qtsplus"
assert not [name for name in sys.modules if name.startswith(("configuration_qtsplus", "modeling_qtsplus"))]
"""

KNOWN = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # of Python since 3.10.12 and 3.11.4


def build(target: str, source: Path, to: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(to)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = to.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def wheel_folder(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_the_hub_files_beside_the_package(wheel_folder):
    packaged = wheel_folder / "qtsplus"
    assert {path.name for path in packaged.glob("*_qtsplus*.py")} == HUB_FILES
    for name in HUB_FILES:
        assert (packaged / name).read_bytes() == (ROOT / name).read_bytes()
        assert len(list(wheel_folder.rglob(name))) == 1
    for name in (
        "py.typed",
        "cli/__init__.py",
        "hub/publish.py",
        "demo.mp4",
        "app.js",
        "app.css",
        "hub_configs/qtsplus-tiny/tokenizer.json",
    ):
        assert (packaged / name).exists(), name
    assert {path.name.split("-")[0] for path in wheel_folder.iterdir()} == {"qtsplus"}


def test_the_wheel_imports_from_where_it_is_unpacked(wheel_folder, tmp_path):
    site_packages = sysconfig.get_paths()["purelib"]
    command = [sys.executable, "-I", "-S", "-c", IMPORT_FROM_WHEEL, str(wheel_folder), site_packages]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_wheel_built_from_the_sdist_is_the_same(wheel, tmp_path):
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", **KNOWN)
    (source,) = (tmp_path / "source").iterdir()
    assert {path.name for path in source.glob("*_qtsplus*.py")} == HUB_FILES
    again = build("wheel", source, tmp_path / "dist")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


def imported(path: Path) -> set[str]:
    """The first part of the name of every module that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).split(".")[0])
    return found


def test_neither_the_library_nor_its_tests_import_the_laboratory():
    files = [*ROOT.glob("*_qtsplus*.py"), ROOT / "conftest.py"]
    files += [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    assert not [path for path in files if "benchmarks" in imported(path)]


def test_a_checkout_uses_the_files_at_its_root():
    assert {"configuration_qtsplus.py", "modeling_qtsplus.py", "processing_qtsplus.py"} < HUB_FILES
    assert {path.name for path in hub_root().glob("*_qtsplus*.py")} == HUB_FILES
    import qtsplus.model.configuration_qtsplus as module

    assert module.__name__ == "qtsplus.model.configuration_qtsplus"
    assert Path(module.__file__).parent == hub_root()


def test_every_export_can_be_had():
    import qtsplus

    for name in qtsplus.__all__:
        assert getattr(qtsplus, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Qwen3'"):
        _ = qtsplus.Qwen3
