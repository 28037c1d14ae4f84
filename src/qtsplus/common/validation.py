"""Settings that a person writes: YAML read strictly, and values checked against the types that a dataclass declares."""

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import islice
from numbers import Integral
from os import PathLike
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from .files import first_line

Settings = TypeVar("Settings")

# No unknown fields, and neither NaN nor infinity is a number.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


_DEEPEST = 50  # lists and mappings inside each other; settings need about five
# Ruamel raises these also for a value that does not fit its tag, such as `!!bool x` or the 99th of a month.
_NO_VALUE = (YAMLError, ValueError, TypeError, KeyError, OverflowError)


def parse_yaml(text: str, name: str):
    """
    Reads YAML 1.2 of plain values; a `ValueError`, with the `name` of what is read, for anything else. Aliases are
    refused, since a few of them can stand for billions of values.
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        _check_size(yaml.parse(text))
        return yaml.load(text)
    except MarkedYAMLError as error:
        line = ""
        if error.problem_mark is not None:
            line = f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"{name} is not YAML that can be read{line}: {error.problem}.") from error
    except _NO_VALUE as error:
        problem = first_line(error).removesuffix(".")
        raise ValueError(f"{name} is not YAML that can be read: {problem}.") from error


def _check_size(events: Iterable) -> None:
    """Raises `ValueError` for aliases, and for values inside too many others."""
    depth = 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            raise ValueError(f"line {line} has the alias *{event.anchor}; expected the values themselves")
        if isinstance(event, CollectionStartEvent):
            depth += 1
        if isinstance(event, CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise ValueError(f"line {line} has more than {_DEEPEST} lists or mappings inside each other")


def build(
    where: str,
    kind: type[Settings],
    values: Mapping,
) -> Settings:
    """
    A dataclass, with [`STRICT`] as its `__pydantic_config__`, of values that a person wrote.

    Args:
        where: stands in front of a field's name in the error, such as "tiny.yaml: training.".

    Raises:
        ValueError: an unknown or a missing field, a value of another type, or one that the dataclass refuses.
    """
    try:
        return TypeAdapter(kind).validate_json(_as_json(values), strict=True)
    except ValidationError as error:
        raise ValueError(explain(error, values, where)) from None
    except ImportError as error:  # such as DeepSpeed
        raise ValueError(f"{where.rstrip('.')} asks for a package that is not installed: {error}") from error
    except TypeError as error:  # an unknown field of a nested section of Transformers'
        raise ValueError(f"{where.rstrip('.')}: {error}") from error


def check_types(
    where: str,
    kind: type,
    values: Mapping,
) -> None:
    """As [`build`], for some fields of a class that is none of ours; nothing is built."""
    try:
        model = _model(kind, tuple(values))
        model.__pydantic_validator__.validate_json(_as_json(values), strict=True)
    except ValidationError as error:
        raise ValueError(explain(error, values, where)) from None


@cache
def _model(kind: type, names: tuple[str, ...]):
    types: dict = {}
    for field in fields(kind):
        if field.name in names:
            types[field.name] = (field.type, ...)
    return create_model("Fields", __config__=STRICT, **types)


def _as_json(values: Mapping) -> str:
    """JSON has lists where Python also has tuples, and texts where it has enumerations, as YAML."""
    return json.dumps(values, default=str)


# Plain words for the kinds of problems that pydantic describes in a programmer's.
_SAID = {
    "missing": "is missing",
    "missing_argument": "is missing",
    "unexpected_keyword_argument": "is no field",
    "extra_forbidden": "is no field",
    "json_invalid": "a text holds half a character (a lone surrogate); expected Unicode",
    "nested": "it holds brackets in brackets, more than 200 deep",
}
_EXPECTED = {"string_type": "a text", "dict_type": "a mapping", "model_type": "a mapping", "tuple_type": "a list"}
_WORDS = {"greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "more than"}


def explain(error: ValidationError, values, where: str = "") -> str:
    """The errors of pydantic about `values` in a line: the first fields, their values and what is expected."""
    expected: dict[str, dict[str, None]] = {}  # by the problem, such as the kinds of a union, each once
    for problem in error.errors(include_url=False):
        kind = "nested" if "recursion" in problem["msg"] else problem["type"]
        clause, _, wanted = _clause(kind, problem).partition("; expected ")
        name = where + _name(problem["loc"], values, kind in _SAID)
        # A dataclass's own words begin with the name of a field.
        if name != where or clause[:1].isupper():
            name += " "
        kinds = expected.setdefault(f"{name}{clause}".strip(), {})
        if wanted:
            kinds[wanted] = None
    clauses = []
    for clause, kinds in islice(expected.items(), 3):
        if kinds:
            clause += f"; expected {' or '.join(kinds)}"
        clauses.append(clause)
    return "; ".join(clauses) + "."


def _clause(kind: str, problem) -> str:
    """What is wrong with a value, and what is expected."""
    if kind == "value_error":  # from the dataclass itself, or from a check of ours
        return str(problem["ctx"]["error"]).removesuffix(".")
    if kind in _SAID:
        return _SAID[kind]
    expected = _EXPECTED.get(kind)
    if expected is None:
        expected = problem["msg"].removeprefix("Input should be ")
    for word, plain in _WORDS.items():
        expected = expected.replace(word, plain)
    return f"is {show(problem['input'])}; expected {expected}"


def _name(place: Sequence[int | str], values, missing: bool) -> str:
    """A field by its place, without the names that pydantic gives to keys and to the kinds of a union."""
    names = []
    for part in place:
        is_missing = missing and part == place[-1]
        if isinstance(values, Mapping) and (part in values or is_missing):
            name = str(part)
            if not name.isprintable() or len(name) >= 80:
                name = show(part)
            names.append(name)
            values = values.get(part)
        elif isinstance(values, (list, tuple)) and isinstance(part, int):
            names.append(str(part))
            values = values[part] if part < len(values) else None
    return ".".join(names)


def check_count(name: str, value, what: str) -> None:
    """A `ValueError` for what is no whole number from 1 to what 32 bits hold."""
    is_count = isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) < 2**31
    if not is_count:
        raise ValueError(f"{name}={value!r}: expected a whole number of {what}, at least 1 and below 2,147,483,648.")


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
