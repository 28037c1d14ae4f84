"""Settings that a person writes: YAML read strictly, and values checked against the types that a dataclass declares."""

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import islice
from numbers import Integral
from os import PathLike
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from .files import first_line

Settings = TypeVar("Settings")

# No unknown fields, and neither NaN nor infinity is a number.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


_DEEPEST = 50  # lists and mappings inside each other; settings need about five
# What Ruamel raises for a value that is not what its tag says, such as `!!bool x` or the 99th of a month.
_NO_VALUE = (ValueError, TypeError, KeyError, OverflowError)


def parse_yaml(text: str, name: str) -> Any:
    """
    Reads YAML 1.2 of plain values; a `ValueError`, with the `name` of what is read, for anything else. Aliases are
    refused, since a few of them can stand for billions of values.
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        _check_size(yaml.parse(text))
        return yaml.load(text)
    except MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"{name} is not YAML that can be read{line}: {error.problem}.") from error
    except (YAMLError, *_NO_VALUE) as error:
        raise ValueError(f"{name} is not YAML that can be read: {first_line(error).removesuffix('.')}.") from error


def _check_size(events: Iterable[Any]) -> None:
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


def build(where: str, kind: type[Settings], values: Mapping[str, Any]) -> Settings:
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


def check_types(where: str, kind: type, values: Mapping[str, Any]) -> None:
    """As [`build`], for some fields of a class that is none of ours; nothing is built."""
    try:
        _model(kind, tuple(values)).__pydantic_validator__.validate_json(_as_json(values), strict=True)
    except ValidationError as error:
        raise ValueError(explain(error, values, where)) from None


@cache
def _model(kind: type, names: tuple[str, ...]) -> Any:
    types: dict[str, Any] = {field.name: (field.type, ...) for field in fields(kind) if field.name in names}
    return create_model("Fields", __config__=STRICT, **types)


def _as_json(values: Mapping[str, Any]) -> str:
    """JSON has lists where Python also has tuples, and texts where it has enumerations, as YAML."""
    return json.dumps(values, default=str)


# What pydantic calls what is wrong, where its own words are of programmers.
_SAID = {
    **dict.fromkeys(("missing", "missing_argument"), "is missing"),
    **dict.fromkeys(("unexpected_keyword_argument", "extra_forbidden"), "is no field"),
    "json_invalid": "a text holds half a character (a lone surrogate); expected Unicode",
    "nested": "it holds brackets in brackets, more than 200 deep",
}
_EXPECTED = {"string_type": "a text", "dict_type": "a mapping", "tuple_type": "a list"}
_WORDS = {"greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "more than"}


def explain(error: ValidationError, values: Any, where: str = "") -> str:
    """What pydantic found wrong with `values`, in a line: the first fields, what stands there and what is expected."""
    wrong: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        kind = "nested" if "recursion" in problem["msg"] else problem["type"]
        expected = _EXPECTED.get(kind) or problem["msg"].removeprefix("Input should be ")
        for word, plain in _WORDS.items():
            expected = expected.replace(word, plain)
        said = _SAID.get(kind) or f"is {show(problem['input'])}; expected {expected}"
        if kind == "value_error":  # of the dataclass itself, or of a check of ours
            said = str(problem["ctx"]["error"]).removesuffix(".")
        clause, _, expected = said.partition("; expected ")
        name = where + _name(problem["loc"], values, kind in _SAID)
        # What a dataclass says of itself begins with the name of a field.
        name += " " * (name != where or said[:1].isupper())
        wrong.setdefault(f"{name}{clause}".strip(), []).extend([expected] if expected else [])
    clauses = ((clause, " or ".join(dict.fromkeys(kinds))) for clause, kinds in islice(wrong.items(), 3))
    return "; ".join(f"{clause}; expected {kinds}" if kinds else clause for clause, kinds in clauses) + "."


def _name(place: Sequence[int | str], values: Any, missing: bool) -> str:
    """A field by its place, without the names that pydantic gives to keys and to the kinds of a union."""
    names = []
    for part in place:
        if isinstance(values, Mapping) and (part in values or (missing and part == place[-1])):
            names.append(str(part) if str(part).isprintable() and len(str(part)) < 80 else show(part))
            values = values.get(part)
        elif isinstance(values, (list, tuple)) and isinstance(part, int):
            names.append(str(part))
            values = values[part] if part < len(values) else None
    return ".".join(names)


def check_count(name: str, value: Any, what: str) -> None:
    """A `ValueError` for what is no whole number from 1 to what 32 bits hold."""
    if isinstance(value, bool) or not (isinstance(value, Integral) and 1 <= int(value) < 2**31):
        raise ValueError(f"{name}={value!r}: expected a whole number of {what}, at least 1 and below 2,147,483,648.")


def check_path(name: str, value: Any) -> Any:
    """The path; a `ValueError` for what is none."""
    if not isinstance(value, (str, PathLike)):
        raise ValueError(f"{name}={value!r}: expected a path.")
    return value


def show(value: Any) -> str:
    """A value as YAML and JSON write it, cut where it is long."""
    constants = {None: "null", True: "true", False: "false"}
    return constants[value] if value is None or isinstance(value, bool) else reprlib.repr(value)
