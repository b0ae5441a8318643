"""Argument validation: each function returns the valid value or raises `ValueGivenError` with the field's name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from trimtab.core.errors import ValueGivenError


def number(
    field: str, value: object, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> float:
    """Return a finite float in `[low, high]` (`(low, high]` when `open_low`)."""
    bound = f"a finite number {'>' if open_low else '>='} {low:g}" if low > -math.inf else "a finite number"
    if high < math.inf:
        bound += f" and <= {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueGivenError(field, got=f"{value!r} ({type(value).__name__})", expected=bound)
    below = value <= low if open_low else value < low
    if not _finite(value) or below or value > high:
        raise ValueGivenError(field, got=repr(value), expected=bound)
    return float(value)


def float_value(field: str, value: object) -> float:
    """Return a float, which may be infinite or NaN, from a number or a one-element array or tensor."""
    shape, item = getattr(value, "shape", None), getattr(value, "item", None)
    alone = item() if isinstance(shape, tuple) and callable(item) and math.prod(shape) == 1 else value
    if isinstance(alone, bool) or not isinstance(alone, Real):
        raise ValueGivenError(
            field,
            got=f"{value!r:.80} ({type(value).__name__})",
            expected="a number",
            hint="Pass float(value), or for several values float(values.mean()).",
        )
    return float(alone)


def integer(field: str, value: object, *, low: int = 1, high: int = 2**62) -> int:
    """Return an int in `[low, high]`; a bool or a float is refused."""
    expected = f"a whole number >= {low}" if high >= 2**62 else f"a whole number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueGivenError(field, got=f"{value!r} ({type(value).__name__})", expected=expected)
    if not low <= value <= high:
        raise ValueGivenError(field, got=repr(value), expected=expected)
    return value


def not_negative(value: object, *fields: str) -> None:
    """Raise if a listed field of a dataclass is negative; NaN and None are accepted."""
    for field in fields:
        number_there = getattr(value, field)
        if number_there is not None and number_there < 0:
            name = f"{type(value).__name__}.{field}"
            raise ValueGivenError(name, got=repr(number_there), expected="zero or more", code="number.negative")


def positive_and_finite(field: str, values: Iterable[float]) -> None:
    """Raise unless all numbers are positive and finite."""
    for value in values:
        if not 0 < value < math.inf:
            raise ValueGivenError(field, got=repr(value), expected="finite and above zero", code="number.range")


def one_of(field: str, value: object, allowed: Iterable[str]) -> str:
    """Return a string after checking that `allowed` contains it."""
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        raise ValueGivenError(field, got=repr(value), expected="one of " + ", ".join(names))
    return value


def names(field: str, value: object) -> tuple[str, ...]:
    """Return an iterable of strings as a tuple; a single string is refused."""
    found = value if isinstance(value, Iterable) and not isinstance(value, str | bytes) else None
    given = None if found is None else tuple(found)
    if given is None or not all(isinstance(each, str) for each in given):
        raise ValueGivenError(field, got=f"{value!r:.80}", expected="a list of strings")
    return given


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # The int is too large for a float.
        return False


def shares(values: Sequence[float]) -> tuple[float, ...] | None:
    """Return numbers of at least 0, divided by their sum; None if all are 0.

    Numbers that already sum to 1 are kept exactly, so that a JSON round trip changes nothing.
    """
    largest = max(values)
    if largest == 0:
        return None
    total = math.fsum(value / largest for value in values)  # At most 1 each, so the sum cannot overflow.
    is_one = abs(total * largest - 1) < 1e-15
    return tuple(values if is_one else (value / largest / total for value in values))


def dataclass_or(field: str, value: Any, cls: type, default: Any) -> Any:
    """Return an instance of a dataclass, or the default for None."""
    if value is None:
        return default
    if not isinstance(value, cls):
        fields = ", ".join(f.name for f in dataclasses.fields(cls))
        raise ValueGivenError(field, got=repr(value), expected=f"a trimtab.{cls.__name__}({fields})")
    return value
