"""Which values of a caller count as numbers, and the errors for those that do not. It needs no PyTorch."""

import sys
from fractions import Fraction
from numbers import Real


def is_number(value) -> bool:
    """Whether a caller gave a number that tensors accept; they accept neither truth values nor a `Fraction`."""
    return isinstance(value, Real) and not isinstance(value, (bool, Fraction))


def require_positive(name: str, value) -> float:
    """The value as a number of Python's; `ValueError` unless it is a number above 0 that a float can hold."""
    # Float32 cannot be compared with the largest float, and products overflow in float16.
    if is_number(value):
        number = value.item() if hasattr(value, "item") else value
        if 0 < number <= sys.float_info.max:
            return number
    zero = "0 or " if name.endswith("start") else ""
    raise ValueError(f"Got {name}={value!r}; expected {zero}a finite number above 0.")


def require_count(name: str, value: float) -> int:
    """The integer that a value such as 2.0 is; `ValueError` unless it is a whole number above 0 that a float holds."""
    number = require_positive(name, value)
    count = int(number)
    if number != count:
        raise ValueError(f"Got {name}={value!r}; expected a whole number above 0.")
    return count
