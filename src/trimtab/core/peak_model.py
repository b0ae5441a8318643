"""Peak memory of a step as a function of a micro-batch's rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.core.errors import ValueGivenError

Line = tuple[float, float]  # bytes at no rows, bytes a row


@dataclass(frozen=True)
class PeakModel:
    """The highest of some lines: at every moment of a step the bytes held are a line in the rows, and none is above it.

    Args:
        lines: (bytes at no rows, bytes a row), by rising bytes a row: each is the highest for some number of rows.
    """

    lines: tuple[Line, ...]

    @classmethod
    def through(cls, few: Iterable[float], many: Iterable[float], rows: tuple[int, int]) -> PeakModel:
        """Return the model of a step whose bytes are known at the same moments for two numbers of rows.

        Raises:
            ValueGivenError: not as many moments, or not two numbers of rows.
        """
        fewer, more = rows
        if not 0 < fewer < more:
            raise ValueGivenError("rows", given=str(rows), expected="two numbers of rows, the lower one first")
        try:
            found = {_line(a, b, fewer, more) for a, b in zip(few, many, strict=True)}
        except ValueError:
            given = "steps of different lengths"
            raise ValueGivenError("moments", given=given, expected="the same operators at both sizes") from None
        return cls(_envelope(found))

    def beside(self, held_bytes: int) -> PeakModel:
        """Return the model of the same step where so much more is held throughout."""
        return PeakModel(tuple((base + held_bytes, slope) for base, slope in self.lines))

    def peak_bytes(self, rows: int) -> int:
        """Return the peak of a micro-batch of so many rows."""
        most = max((base + rows * slope for base, slope in self.lines), default=math.nan)
        if not math.isfinite(most):
            given, expected = f"{most} bytes of {rows} rows", "a finite peak"
            raise ValueGivenError("peak_model.lines", given=given, expected=expected, code="number.range")
        return math.ceil(most)


def _line(few: float, many: float, fewer: int, more: int) -> Line:
    slope = (many - few) / (more - fewer)
    return few - fewer * slope, slope


def _envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines that are the highest for some number of rows above none, by rising slope."""
    kept: list[Line] = []
    for base, slope in sorted(lines, key=lambda line: (line[1], line[0])):
        while kept and (base >= kept[-1][0] or (len(kept) > 1 and _is_below(kept[-2], kept[-1], (base, slope)))):
            kept.pop()
        kept.append((base, slope))
    return tuple(kept)


def _is_below(flatter: Line, middle: Line, steeper: Line) -> bool:
    """Return whether the middle one of three lines is nowhere the highest."""
    (a, p), (b, q), (c, r) = flatter, middle, steeper
    return (a - c) * (q - p) <= (a - b) * (r - p)
