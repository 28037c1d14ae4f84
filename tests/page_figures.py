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
    "two thirds": 2 / 3,
    "Five sixths": 5 / 6,
    "five": 5,
}
PRINTED = "|".join([r"[-+]?\d[\d,.]*\d%?", r"[-+]?\d%?", *WORDS])

NOT_PROSE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|(?<=\n\n)    .*?\n\n", re.DOTALL | re.MULTILINE)
# Where a line of prose goes on.
LINE_BREAK = re.compile(r"\n +(?=\S)|\n(?=[^\s|#-])")
NUMBER = r"(?<![\w.,-])[-+]?\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d)"
DECIMAL = r"(?<![\w.,-])[-+]?\d[\d,]*\.\d+(?![\w-]|\.\d)"
UNIT = r" ?(?:%|(?:times|points|ms|s|seconds|minutes|hours|GB|MB|kB|TFLOP|tokens)\b)"
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


def compare(page: str, source: str, text: str, content: str) -> tuple[str, str, list[str]]:
    """
    Looks for one listed text on a page.

    Returns:
        The content with the figures of the JSON file, the content without the text, and what is wrong.
    """
    texts = HOLE.split(text)
    pattern = f"({PRINTED})".join(pattern_of(words) for words in texts[::3])
    match = re.search(pattern, content)
    if match is None:
        return content, content, [f"{page} does not say: {text}"]
    expected = [printed(key, form, source) for key, form in zip(texts[1::3], texts[2::3], strict=True)]
    faults = []
    corrected = content
    for number, figure in reversed(list(enumerate(expected, 1))):
        if match[number] != figure:
            faults.append(f"{page} says {match[number]}, {source} {figure}: {texts[3 * number - 2]}")
        begin, end = match.span(number)
        corrected = corrected[:begin] + figure + corrected[end:]
    rest = content[: match.start()] + " " + content[match.end() :]
    return corrected, rest, faults


def unlisted_figures(content: str) -> list[str]:
    """The measurements on a page: numbers in tables, numbers with a unit, and decimal numbers."""
    prose = NOT_PROSE.sub("x", content)
    lines = LINE_BREAK.sub(" ", prose).splitlines()
    figures = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        is_head = following.startswith("|--")
        is_row = line.startswith("|")
        words = line.split("|", 2)[-1] if is_row else line
        matches = [] if is_head else (IN_TABLES if is_row else IN_PROSE).finditer(words)
        for match in matches:
            begin = max(match.start() - 40, 0)
            figures.append(words[begin : match.end() + 20].strip())
    return figures


def check(path: Path) -> tuple[str, list[str]]:
    """A page with the figures of the JSON files, and what is wrong with it."""
    page = path.relative_to(ROOT).as_posix()
    corrected = path.read_text(encoding="utf-8")
    rest = corrected
    faults: list[str] = []
    texts_by_file = dict(listed_texts().get(page, {}))
    settings = texts_by_file.pop("settings", [])
    for source, texts in texts_by_file.items():
        for text in texts:
            corrected, _, wrong = compare(page, source, text.strip(), corrected)
            _, rest, _ = compare(page, source, text.strip(), rest)
            faults += wrong
    for text in settings:
        rest, found = re.subn(pattern_of(text), " ", rest)
        if not found:
            faults.append(f"{page} does not say: {text}")
    for figure in unlisted_figures(rest):
        faults.append(f"{page} has a figure without a key in {LIST.name}: ... {figure} ...")
    return corrected, faults


if __name__ == "__main__":
    for page_path in PAGES:
        corrected_page, found_faults = check(page_path)
        print(*found_faults, sep="\n", end="\n" if found_faults else "")
        if sys.argv[1:] == ["--write"]:
            page_path.write_text(corrected_page, encoding="utf-8")
