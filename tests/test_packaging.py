"""The wheel and the sdist carry the package once, with the files of a Hub repository in `qtsplus.model`."""

import ast
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "src" / "qtsplus" / "model"
HUB_FILES = {path.name for path in MODEL.glob("*_qtsplus*.py")}
SHOWN = ("configuration_qtsplus.py", "modeling_qtsplus.py", "processing_qtsplus.py")  # at the top of the repository

# -S leaves out editable installs, so that only the unpacked wheel can provide the package.
IMPORT_FROM_WHEEL = """
import sys
sys.path[:0] = sys.argv[1:]
import qtsplus
from qtsplus import QTSplusSelector, Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus import QTSplusConfig, QTSplusOutput, Qwen2_5_VLQTSplusModel, Qwen2_5_VLQTSplusProcessor
from qtsplus.hub.files import hub_configs, variants
assert qtsplus.__path__ == [sys.argv[1] + "/qtsplus"], qtsplus.__path__
assert str(hub_configs()).startswith(sys.argv[1])
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
    assert {path.name for path in packaged.glob("model/*_qtsplus*.py")} == HUB_FILES
    for name in HUB_FILES:
        assert (packaged / "model" / name).read_bytes() == (MODEL / name).read_bytes()
        assert len(list(wheel_folder.rglob(name))) == 1
    for name in (
        "py.typed",
        "cli/__init__.py",
        "hub/publish.py",
        "cli/demo.mp4",
        "serve/page.js",
        "serve/page.css",
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
    assert {path.name for path in source.glob("src/qtsplus/model/*_qtsplus*.py")} == HUB_FILES
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
    files = [ROOT / "conftest.py"]
    files += [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    assert not [path for path in files if "benchmarks" in imported(path)]


# The rooms of the package, each of which may import those before it; within a group, also the others of it.
ROOMS = (
    ("common",),
    ("model",),
    ("hub", "data"),
    ("video",),
    ("asking",),
    ("library", "live", "training", "evaluation", "serve"),
    ("cli", "vllm"),
)


def rooms_imported(path: Path) -> set[str]:
    """The rooms that a file of the package imports from, by relative imports at its top or inside a function."""
    place = path.relative_to(ROOT / "src" / "qtsplus").parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == len(place) + 1:
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {module.split(".")[0] for module in modules}
    return found - {"__version__"}


def test_imports_between_rooms_run_in_one_direction():
    rank = {room: number for number, group in enumerate(ROOMS) for room in group}
    package = ROOT / "src" / "qtsplus"
    assert {path.parent.name for path in package.glob("*/__init__.py")} == set(rank)
    wrong = []
    for path in package.glob("*/*.py"):
        room = path.parent.name
        for other in rooms_imported(path):
            if rank[other] > rank[room]:
                wrong.append(f"{path.name} of {room} imports {other}")
    assert not wrong


@pytest.mark.parametrize("name", SHOWN)
def test_the_names_that_a_hub_repository_shows_are_links_at_the_top(name):
    """A clone in which git could not make links has a file there that names the target."""
    shown = ROOT / name
    target = str(shown.readlink()) if shown.is_symlink() else shown.read_text(encoding="utf-8").strip()
    assert target == f"src/qtsplus/model/{name}"
    assert {path.name for path in ROOT.glob("*_qtsplus*.py")} == set(SHOWN)


def test_every_export_can_be_had():
    import qtsplus

    for name in qtsplus.__all__:
        assert getattr(qtsplus, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Qwen3'"):
        _ = qtsplus.Qwen3
