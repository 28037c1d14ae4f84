"""
The measured figures of the pages, each with its key in a JSON file of `benchmarks/results`.

    python tests/page_figures.py            prints what is wrong
    python tests/page_figures.py --write    puts the figures of the JSON files on the pages

`benchmarks/results/pages.yaml` lists texts of each page under the JSON file of their figures:

- `{all tokens/right:.1f}` is a key and Python's format.
- `{speed-cpu.json/tokens/visual_tokens:,}` takes the key from another file.
- A `*` in a key, or in a file's name, is the mean over all that match.
- ` / `, ` - ` and ` * ` calculate from left to right.
- `{key:half}` is that word, if the number is within a tenth of it.

Texts under `settings` have numbers that nobody measured.
"""

import json
import operator
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIST = RESULTS / "pages.yaml"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

HOLE = re.compile(r"\{([^{}]+):([^{}:]+)\}")
OPERATORS = {
    "/": operator.truediv,
    "-": operator.sub,
    "*": operator.mul,
}
WORDS = {
    "a fortieth": 1 / 40,
    "half": 1 / 2,
    "Half": 1 / 2,
    "Five sixths": 5 / 6,
    "five": 5,
}
PRINTED = "|".join([r"[-+]?\d[\d,.]*\d%?", r"[-+]?\d%?", *WORDS])

NOT_PROSE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|(?<=\n\n)    .*?\n\n", re.DOTALL | re.MULTILINE)
TABLE_HEAD = re.compile(r"^\|.*\n\|--", re.MULTILINE)
# Where a line of prose goes on.
LINE_BREAK = re.compile(r"\n +(?=\S)|\n(?=[^\s|#-])")
NUMBER = r"(?<![\w.,-])[-+]?\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d)"
DECIMAL = r"(?<![\w.,-])[-+]?\d[\d,]*\.\d+(?![\w-]|\.\d)"
UNIT = r" ?(?:%|(?:times|points|ms|s|seconds|minutes|hours|GB|MB|kB|TFLOP|tokens|questions|videos)\b)"
COUNT = r"\b(?:two|three|four|five|six|seven|eight|nine|ten) times\b"
IN_PROSE = re.compile(f"{NUMBER}(?={UNIT})|{DECIMAL}|{COUNT}")
IN_TABLES = re.compile(NUMBER)


@cache
def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def listed_texts() -> dict[str, dict[str, list[str]]]:
    """By page and by file, the texts that are listed."""
    return yaml.safe_load(LIST.read_text(encoding="utf-8"))


def numbers_at(value: Any, names: list[str]) -> Iterator[float]:
    """The numbers at a path whose parts may be patterns."""
    if not names:
        yield value
        return
    name, *rest = names
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        if str(key) == name or fnmatchcase(str(key), name):
            yield from numbers_at(value[key], rest)


def term_of(term: str, source: str) -> float:
    """A number that is written out, or the mean of those at a key."""
    if re.fullmatch(r"[\d.]+", term):
        return float(term)
    named_file, _, key = term.rpartition(".json/")
    if named_file:
        source = f"{named_file}.json"
    names = key.split("/")
    numbers: list[float] = []
    for path in sorted(RESULTS.glob(source)):
        numbers += numbers_at(read_json(path), names)
    if not numbers:
        raise ValueError(f"{key} is not in {source}")
    return mean(numbers)


def printed(expression: str, form: str, source: str) -> str:
    """The number of a hole, as it should be on the page."""
    first, *steps = re.split(r" ([/*-]) ", expression)
    value = term_of(first, source)
    for name, term in zip(steps[::2], steps[1::2], strict=True):
        value = OPERATORS[name](value, term_of(term, source))
    if form not in WORDS:
        return format(value, form)
    is_near = abs(value / WORDS[form] - 1) <= 0.1
    return form if is_near else f"{value:.2f}"


def pattern_of(text: str) -> str:
    """Finds a text whose lines may break anywhere."""
    return r"\s+".join(re.escape(word) for word in re.split(r"\s+", text))


def compare(source: str, text: str, content: str) -> tuple[str, str] | None:
    """A listed text as the content has it, and with the figures of the JSON file; `None` if it is not there."""
    words, keys, forms = (HOLE.split(text)[start::3] for start in range(3))
    pattern = f"({PRINTED})".join(pattern_of(part) for part in words)
    match = re.search(pattern, content)
    if match is None:
        return None
    expected = match[0]
    for number in reversed(range(len(keys))):
        begin, end = match.span(number + 1)
        figure = printed(keys[number], forms[number], source)
        expected = expected[: begin - match.start()] + figure + expected[end - match.start() :]
    return match[0], expected


def unlisted_figures(content: str) -> list[str]:
    """The measurements on a page: numbers in tables, numbers with a unit, and decimal numbers."""
    prose = NOT_PROSE.sub("x", content)
    prose = LINE_BREAK.sub(" ", prose)
    figures = []
    for line in TABLE_HEAD.sub("", prose).splitlines():
        is_row = line.startswith("|")
        words = line.split("|", 2)[-1] if is_row else line
        for match in (IN_TABLES if is_row else IN_PROSE).finditer(words):
            begin = max(match.start() - 40, 0)
            figures.append(words[begin : match.end() + 20].strip())
    return figures


def check(path: Path) -> tuple[str, list[str]]:
    """A page with the figures of the JSON files, and what is wrong with it."""
    content = path.read_text(encoding="utf-8")
    page = path.relative_to(ROOT).as_posix()
    corrected = content
    unlisted = content
    faults = []
    for source, texts in listed_texts().get(page, {}).items():
        for text in texts:
            found = compare(source, text.strip(), content)
            if found is None:
                faults.append(f"{page} does not say: {text}")
                continue
            said, expected = found
            if said != expected:
                faults.append(f"{page} says: {said}\n{source} says: {expected}")
            corrected = corrected.replace(said, expected)
            unlisted = unlisted.replace(said, " ")
    for figure in unlisted_figures(unlisted):
        faults.append(f"{page} has a figure without a key in {LIST.name}: ... {figure} ...")
    return corrected, faults


if __name__ == "__main__":
    for page_path in PAGES:
        corrected_page, found_faults = check(page_path)
        for fault in found_faults:
            print(fault)
        if sys.argv[1:] == ["--write"]:
            page_path.write_text(corrected_page, encoding="utf-8")
