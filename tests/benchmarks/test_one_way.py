"""The laboratory imports the library, and never the other way round. `tests/test_packaging.py` looks into the wheel."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imported(path: Path) -> set[str]:
    """The first part of the name of every module that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).split(".")[0])
    return found


def test_the_library_never_imports_the_laboratory():
    files = [*ROOT.glob("*_qtsplus*.py"), *(ROOT / "src").rglob("*.py")]
    assert len(files) > 100
    assert not [path for path in files if "benchmarks" in imported(path)]


def test_the_laboratory_imports_the_library():
    assert "qtsplus" in imported(ROOT / "benchmarks" / "learned" / "work.py")
