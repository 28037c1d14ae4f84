"""Settings that a person writes: YAML read strictly, and values checked against the types that a dataclass declares."""

import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
    type(None): "null",
}


class _Loader(yaml.SafeLoader):
    """YAML 1.2 where 1.1 surprises: 1e-6 is a number, yes and no are texts. And no key stands twice."""

    # A copy without the resolver of booleans, which are registered by their first letters.
    yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, name: str) -> Any:
    """
    Reads YAML that holds nothing but plain values.

    Args:
        name: of what is read, for the error.

    Raises:
        ValueError: it is no YAML, or names Python objects.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506, a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"{name} is not YAML that can be read{line}: {error.problem}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{name} is not YAML that can be read: {reason}.") from error


def set_yaml_fields(text: str, name: str, section: str, values: Mapping[str, Any]) -> str:
    """
    The same YAML with some fields of a section set; comments and layout stay as they are.

    Args:
        text, name: the YAML, and what it is called in an error.
        section: of the top level, with a field on each line.
        values: such as JSON can hold. `None` is written only over a field that is there.

    Raises:
        ValueError: there is no such section, or it is laid out otherwise.
    """
    expected, edited = parse_yaml(text, name), text
    found = expected.get(section) if isinstance(expected, dict) else None
    content: dict[str, Any] = found if isinstance(found, dict) else {}
    in_lines = bool(content) and not _section(text, section).flow_style
    for field, value in values.items() if in_lines else ():
        if value is not None or field in content:
            content[field] = value
            edited = _set_field(edited, section, field, json.dumps(value))
    if not in_lines or parse_yaml(edited, name) != expected:
        raise ValueError(
            f"{name} has no section {section!r} with a field on each line: write {json.dumps(values)} there."
        )
    return edited


def _section(text: str, name: str) -> Any:
    whole: Any = yaml.compose(text, Loader=_Loader)
    return next(node for key, node in whole.value if key.value == name)


def _set_field(text: str, section: str, field: str, value: str) -> str:
    fields = _section(text, section).value
    for key, node in fields:
        if key.value == field:
            return f"{text[: key.start_mark.index]}{field}: {value}{text[_end(node) :]}"
    first, last = fields[0][0], fields[-1][1]
    end = text.find("\n", _end(last))  # behind a comment
    end = len(text) if end < 0 else end
    return f"{text[:end]}\n{' ' * first.start_mark.column}{field}: {value}{text[end:]}"


def _end(node: Any) -> int:
    """Where a value ends in the text; a block's own mark stands behind the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node.end_mark.index


def check_types(where: str, kind: Any, values: Mapping[str, Any]) -> None:
    """
    Checks values against the annotations of the fields that they are for.

    A whole number is a number, a list is as good as a tuple, and neither true nor NaN nor infinity is a number.

    Args:
        where: stands in front of a field's name in the error, such as "tiny.yaml: training.".
        kind: the dataclass.
        values: by field, some or all of them.

    Raises:
        ValueError: the first value of another type, with the type that was expected.
    """
    types = {field.name: field.type for field in fields(kind)}
    for name, value in values.items():
        if not _matches(value, types[name]):
            raise ValueError(f"{where}{name} is {show(value)}; expected {_describe(types[name])}.")


def show(value: Any) -> str:
    """A value as YAML and JSON write it, cut where it is long."""
    constants = {None: "null", True: "true", False: "false"}
    return constants[value] if value is None or isinstance(value, bool) else reprlib.repr(value)


def _matches(value: Any, expected: Any) -> bool:
    origin, arguments = get_origin(expected), get_args(expected)
    if expected is Any or isinstance(expected, str):  # a text only names a type
        return True
    if origin in (Union, UnionType):
        return any(_matches(value, option) for option in arguments)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in arguments)
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return False
        items = arguments if origin is tuple and Ellipsis not in arguments else arguments[:1] * len(value)
        return len(items) == len(value) and all(map(_matches, value, items))
    if origin is dict:
        keys, entries = arguments
        return isinstance(value, dict) and all(_matches(k, keys) and _matches(v, entries) for k, v in value.items())
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, expected)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _describe(expected: Any) -> str:
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_describe, arguments)))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (list, tuple):
        count = f" of {len(arguments)}" if origin is tuple and Ellipsis not in arguments else ""
        return f"a list{count} (each item {_describe(arguments[0])})"
    if isinstance(expected, type) and issubclass(expected, Enum):
        return _NAMES[str]  # how it is written
    return _NAMES.get(origin or expected, getattr(expected, "__name__", str(expected)))


__all__ = ["check_types", "parse_yaml", "set_yaml_fields", "show"]
