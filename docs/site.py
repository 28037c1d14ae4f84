"""What `make docs` needs beside mkdocs: the files that pages point to outside docs/, and links between docstrings."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+")


def on_files(files: Files, config: Any) -> Files:
    """A mkdocs hook: adds the files of the repository that the pages name, and those that these name."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    known = set()
    while pages:
        page = pages.pop()
        if page in known or not page.is_file():
            continue
        known.add(page)
        name = page.relative_to(ROOT).as_posix()
        if not name.startswith("docs/"):
            files.append(File.generated(config, name, abs_src_path=str(page)))
        if page.suffix == ".md":
            pages += [(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A mkdocs hook: the pages of docs/ stand at the root of the site, beside those of the root."""
    name = Path(page.file.abs_src_path or "").relative_to(ROOT).as_posix() if page.file.abs_src_path else ""
    if name.startswith("docs/reference/"):
        return markdown
    there = (
        (lambda link: link[0].removeprefix("../"))
        if name.startswith("docs/")
        else (lambda link: link[0].replace("docs/", "", 1))
    )
    return LINK.sub(there, markdown)


class DocstringLinks(griffe.Extension):
    """A griffe extension: [`name`] in a docstring is a link where the reference has the name, else code."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        places: dict[str, str] = {}
        objects = list(_objects(pkg))
        for one in objects:
            places.setdefault(one.name, one.path)
            if one.parent is not None:
                places.setdefault(f"{one.parent.name}.{one.name}", one.path)

        def linked(match: re.Match[str]) -> str:
            place = places.get(match[1])
            code = f"<code>{match[1]}</code>"
            return f'<autoref optional identifier="{place}">{code}</autoref>' if place else f"`{match[1]}`"

        for one in objects:
            if one.docstring:
                one.docstring.value = re.sub(r"\[`([^`]+)`\](?![\[(])", linked, one.docstring.value)


def _objects(parent: Any) -> Any:
    for one in parent.members.values():
        if not one.is_alias:
            yield one
            yield from _objects(one)
