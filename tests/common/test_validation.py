"""What is said about values that a schema refuses."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, Field

from qtsplus.common.validation import STRICT, build, parse_yaml


def short(text: str) -> str:
    if len(text) > 3:
        raise ValueError(f"is {text!r}; expected three letters")
    return text


@dataclass(frozen=True)
class Inner:
    __pydantic_config__ = STRICT
    share: Annotated[float, Field(gt=0, le=1)] | None = None


@dataclass(frozen=True)
class Outer:
    __pydantic_config__ = STRICT
    name: Annotated[str, AfterValidator(short)] | int
    inner: Inner = field(default_factory=Inner)
    many: list[dict[str, Any]] | None = None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": 1.5}, "x.yaml: name is 1.5; expected a text; x.yaml: name is 1.5; expected a valid integer."),
        (
            {"name": "long"},
            "x.yaml: name is 'long'; expected three letters; x.yaml: name is 'long'; expected a valid integer.",
        ),
        ({"size": 1}, "x.yaml: name is missing; x.yaml: size is no field; the nearest are inner, name, many."),
        ({"name": 1, "inner": {"share": 2}}, "x.yaml: inner.share is 2; expected at most 1."),
        ({"name": 1, "inner": {"share": 0}}, "x.yaml: inner.share is 0; expected more than 0."),
        ({"name": 1, "inner": {"size": 2}}, "x.yaml: inner.size is no field."),
        ({"name": "\ud800"}, "x.yaml: Invalid JSON: unexpected end of hex escape at line 1 column 17."),
        ({"name": 1, "many": [{}, 5]}, "x.yaml: many.1 is 5; expected a mapping."),
    ],
)
def test_a_field_is_named_as_it_was_written(values, words):
    with pytest.raises(ValueError) as refused:
        build("x.yaml: ", Outer, values)
    assert str(refused.value) == words


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a [1, 1]\nb: [*a, *a]", "it has the alias *a; expected the values themselves"),
        ("a: &a {b: *a}", "it has the alias *a"),
        ("[" * 500 + "]" * 500, "maximum recursion depth exceeded"),
        ("a: 2001-99-99", "month must be in 1..12"),
        ("a: !!int x", "invalid literal for int"),
        ("a: !!bool x", "'x'"),
        ("? [a, {b: c}]\n: 1", "unhashable type"),
        ('a: "\\UFFFFFFFF"', "is not YAML that can be read"),
    ],
)
def test_yaml_that_is_no_plain_values_is_said_with_its_name(text, reason):
    with pytest.raises(ValueError) as refused:
        parse_yaml(text, "x.yaml")
    assert str(refused.value).startswith("x.yaml is not YAML that can be read: ")
    assert reason in str(refused.value)
