"""A stranger's chat template is a program: it is tried on one question, within bounds, before it is used."""

import re
import sys
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.utils import Namespace
from transformers.utils.chat_template_utils import _compile_jinja_template

MOST = 10**6  # characters that a question may become, and the largest number or text on the way
STEPS = 10**5  # lines of the template that may run; those of the backbones run a few hundred

_OPERATORS = {
    "*": lambda left, right: left * right,
    "**": lambda left, right: left**right,
    "%": lambda left, right: left % right,
}


class _TooMuch(Exception):
    """A bound of a trial was reached."""


def check_template(source: str, what: str, **inputs: Any) -> None:
    """
    Writes out a chat template once; a `ValueError` about `what` for one that makes more of a question than a prompt.

    Args:
        source: Jinja, as Transformers renders it.
        inputs: what the template is given, such as `messages`.
    """
    environment = _compile_jinja_template("").environment.overlay()
    environment.intercepted_binops = frozenset(_OPERATORS)
    environment.call_binop = _bounded_operation  # also keeps Jinja from computing constants as it compiles
    try:
        for constant in environment.parse(source).find_all(nodes.Const):
            if isinstance(constant.value, int) and abs(constant.value) > MOST:
                raise _TooMuch
        _write_out(environment.from_string(source), inputs)
    except (_TooMuch, MemoryError) as error:
        raise ValueError(
            f"{what} has a chat template that makes more than a prompt of one question, or runs without end; expected "
            f"at most {MOST:,} characters and {STEPS:,} steps."
        ) from error
    except RecursionError as error:
        raise ValueError(f"{what} has a chat template that calls itself without end.") from error
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        line = " ".join(str(error).split())
        raise ValueError(f"{what} has a chat template that cannot be used: {type(error).__name__}: {line}") from error


def _write_out(template: Any, inputs: Mapping[str, Any]) -> None:
    """Renders a template while each of its lines is watched."""
    steps = 0

    def watch_line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > STEPS:
            raise _TooMuch
        for value in frame.f_locals.values():
            _check_size(value)
        return watch_line

    def watch_call(frame: Any, event: str, argument: Any) -> Any:
        return watch_line if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(watch_call)
    try:
        size = 0
        for text in template.generate(**inputs):
            size += len(text)
            if size > MOST:
                raise _TooMuch
    finally:
        sys.settrace(before)


def _check_size(value: Any) -> None:
    """Looks at a variable of a template, and at those in a namespace."""
    held = [value]
    if isinstance(value, Namespace):  # which gives what the template has put in there for every name, also __dict__
        held += object.__getattribute__(value, "_Namespace__attrs").values()
    for one in held:
        if isinstance(one, (str, list, tuple)) and len(one) > MOST:
            raise _TooMuch


def _bounded_operation(context: Any, operator: str, left: Any, right: Any) -> Any:
    """What an operator gives that makes much of little."""
    if operator == "%" and isinstance(left, str) and re.search(r"\d{7}|\*", left):
        raise _TooMuch
    if operator == "*":
        for text, count in ((left, right), (right, left)):
            if isinstance(text, (str, list, tuple)) and isinstance(count, int) and len(text) * count > MOST:
                raise _TooMuch
    if operator == "**" and (abs(left) > MOST or abs(right) > 64):
        raise _TooMuch
    result = _OPERATORS[operator](left, right)
    if isinstance(result, int) and abs(result) > MOST:
        raise _TooMuch
    return result
