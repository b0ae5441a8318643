"""Peak memory of a step as a function of the micro-batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.core.errors import ValueGivenError

Line = tuple[float, float]  # (bytes at zero samples, bytes per sample).


@dataclass(frozen=True)
class PeakMemoryModel:
    """Peak memory as the upper envelope of lines: at every moment, the bytes held are linear in the samples.

    Args:
        lines: (bytes at zero samples, bytes per sample) by rising slope; each line is the highest for some batch
            size.
    """

    lines: tuple[Line, ...]

    @classmethod
    def through(cls, few: Iterable[float], many: Iterable[float], rows: tuple[int, int]) -> PeakMemoryModel:
        """Return the model of a step with known bytes at the same moments for two batch sizes.

        Args:
            few, many: bytes at each moment, at the smaller and the larger size.
            rows: the two sizes, in samples, in ascending order.

        Raises:
            ValueGivenError: the numbers of moments differ, or the sizes are not ascending.
        """
        fewer, more = rows
        if not 0 < fewer < more:
            raise ValueGivenError("rows", got=str(rows), expected="two positive numbers of samples in ascending order")
        try:
            found = {_line(a, b, fewer, more) for a, b in zip(few, many, strict=True)}
        except ValueError:
            given, expected = "different numbers of moments", "the same number of moments at both batch sizes"
            raise ValueGivenError("moments", got=given, expected=expected) from None
        return cls(_envelope(found))

    def beside(self, held_bytes: int) -> PeakMemoryModel:
        """Return the model with additional bytes held throughout the step."""
        return PeakMemoryModel(tuple((base + held_bytes, slope) for base, slope in self.lines))

    def peak_bytes(self, rows: int) -> int:
        """Return the peak of a micro-batch of a given number of samples."""
        most = max((base + rows * slope for base, slope in self.lines), default=math.nan)
        if not math.isfinite(most):
            given, expected = f"a peak of {most} bytes for {rows} samples", "a finite peak"
            raise ValueGivenError("peak_model.lines", got=given, expected=expected, code="number.range")
        return math.ceil(most)


def _line(few: float, many: float, fewer: int, more: int) -> Line:
    slope = (many - few) / (more - fewer)
    return few - fewer * slope, slope


def _envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines that are highest for some positive batch size, by rising slope."""
    kept: list[Line] = []
    for base, slope in sorted(lines, key=lambda line: (line[1], line[0])):
        while kept and (base >= kept[-1][0] or (len(kept) > 1 and _is_below(kept[-2], kept[-1], (base, slope)))):
            kept.pop()
        kept.append((base, slope))
    return tuple(kept)


def _is_below(flatter: Line, middle: Line, steeper: Line) -> bool:
    """Return True if the middle of three lines is nowhere the highest."""
    (a, p), (b, q), (c, r) = flatter, middle, steeper
    return (a - c) * (q - p) <= (a - b) * (r - p)
