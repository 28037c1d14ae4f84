"""Settings that a person writes: YAML read strictly, and values checked against the types that a dataclass declares."""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from os import PathLike
from pathlib import PurePosixPath
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent

from .files import first_line, printable, rewritten

Settings = TypeVar("Settings")

# No unknown fields, and neither NaN nor infinity is a number.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

# Ruamel raises these also for a value that does not fit its tag, such as `!!bool x` or the 99th of a month.
_NO_VALUE = (YAMLError, ValueError, TypeError, LookupError, OverflowError, RecursionError)


def parse_yaml(text: str | bytes, name: str):
    """
    Reads YAML 1.2 of plain values; a `ValueError`, with the `name` of what is read, for anything else. Aliases are
    refused, because a few of them can stand for billions of values.
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        for event in yaml.parse(text):
            if isinstance(event, AliasEvent):
                raise ValueError(f"it has the alias *{event.anchor}; expected the values themselves")
        return yaml.load(text)
    except MarkedYAMLError as error:
        line = ""
        if error.problem_mark is not None:
            line = f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"{name} is not YAML that can be read{line}: {error.problem}.") from error
    except _NO_VALUE as error:
        problem = first_line(error).removesuffix(".")
        raise ValueError(f"{name} is not YAML that can be read: {problem}.") from error


def build(where: str, kind: type[Settings], values: Mapping) -> Settings:
    """
    A dataclass, with [`STRICT`] as its `__pydantic_config__`, of values that a person wrote.

    Args:
        where: stands in front of a field's name in the error, such as "tiny.yaml: training.".

    Raises:
        ValueError: an unknown or a missing field, a value of another type, or one that the dataclass refuses.
    """
    try:
        # JSON has lists where Python also has tuples, and texts where it has enumerations, as YAML.
        text = json.dumps(values, default=str)
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        known = getattr(kind, "__dataclass_fields__", kind.__annotations__)
        raise ValueError(explain(error, values, where, known)) from None
    except ImportError as error:  # such as DeepSpeed
        raise ValueError(f"{where.rstrip('.')} asks for a package that is not installed: {error}") from error
    except TypeError as error:  # a list as a key, or an unknown field of a nested section of Transformers'
        raise ValueError(f"{where.rstrip('.')}: {error}") from error


def validated(kind, content, where: str = ""):
    """The content as a type for pydantic; a `ValueError` that names the fields that do not fit, see [`explain`]."""
    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        raise ValueError(explain(error, content, where)) from None


_adapter = cache(TypeAdapter)


# Plain words for the kinds of problems that pydantic describes in a programmer's.
_NO_FIELD = "is no field"
_SAID = {
    "missing": "is missing",
    "missing_argument": "is missing",
    "unexpected_keyword_argument": _NO_FIELD,
    "extra_forbidden": _NO_FIELD,
}
_EXPECTED = {"string_type": "a text", "dict_type": "a mapping", "model_type": "a mapping", "tuple_type": "a list"}
_WORDS = {
    "^Input should be ": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}
_NAMED = 3  # the most problems that a message describes


def explain(
    error: ValidationError,
    values,
    where: str = "",
    known=(),
) -> str:
    """
    The errors of pydantic about `values` in a line: the first fields, their values and what is expected. For an unknown
    field it names the `known` fields that are nearest.
    """
    clauses = []
    for problem in error.errors(include_url=False)[:_NAMED]:
        name = _name(problem["loc"], values, is_absent=problem["type"] in _SAID)
        clause = _clause(problem)
        if known and clause == _NO_FIELD and name in values:
            nearest = get_close_matches(name, known, cutoff=0)
            clause += f"; the nearest are {', '.join(nearest)}"
        clauses.append(f"{where}{name} {clause}" if name else re.sub(r"\.$", ": ", where) + clause)
    return printable("; ".join(clauses)) + "."


def _clause(problem) -> str:
    """What is wrong with a value, and what is expected."""
    kind = problem["type"]
    if kind == "value_error":  # from the dataclass itself, or from a check of ours
        return str(problem["ctx"]["error"]).removesuffix(".")
    if kind in _SAID:
        return _SAID[kind]
    if kind == "json_invalid":
        return problem["msg"]
    expected = rewritten(_EXPECTED.get(kind, problem["msg"]), _WORDS)
    return f"is {show(problem['input'])}; expected {expected}"


def _name(place: Sequence[int | str], values, is_absent: bool) -> str:
    """A field by its place, without the names that pydantic gives to keys and to the kinds of a union."""
    names = []
    for part in place:
        try:
            values = values[part]
        except (LookupError, TypeError):
            if not is_absent or part != place[-1]:
                continue
        names.append(str(part))
    return ".".join(names)


def check_inside(path: str) -> str:
    """A path in the folder of some videos; a `ValueError` for one that may lead elsewhere."""
    if path.startswith("/") or ".." in PurePosixPath(path).parts or "\0" in path:
        raise ValueError(f"is {show(path)}; expected a path inside the videos' folder, with neither / in front nor ..")
    return path


def check_path(name: str, value):
    """The path; a `ValueError` for what is none."""
    if not isinstance(value, (str, PathLike)):
        raise ValueError(f"{name}={value!r}: expected a path.")
    return value


def show(value) -> str:
    """A value as YAML and JSON write it, cut where it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return reprlib.repr(value)
