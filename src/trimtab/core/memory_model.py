"""Memory of a step as a function of the micro-batch size, and its operators, from traces at two sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, takewhile

from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import PRECISIONS


def common_ends(one: Sequence[object], other: Sequence[object]) -> tuple[int, int]:
    """Return the lengths of the longest common prefix and of the longest common suffix, which do not overlap."""
    most = min(len(one), len(other))
    begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    ends = zip(reversed(one), reversed(other), strict=False)
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
    return begin, min(end, most - begin)


def aligned_peaks(
    few: Sequence[int], many: Sequence[int], few_kinds: Sequence[int], many_kinds: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return two aligned lists of values: moment by moment, and the maximum of each span in which the traces differ.

    Traces of equal length may differ too, because the order of the last nodes of torch's backward varies.

    Args:
        few, many: value at each moment, at the smaller and the larger batch size.
        few_kinds, many_kinds: change in the number of live tensors at each moment.
    """
    if len(few) == len(many):
        return _in_step(few, many, few_kinds, many_kinds)
    begin, end = common_ends(few_kinds, many_kinds)

    def shortened(values: Sequence[int]) -> list[int]:
        around = values[max(0, begin - 1) : len(values) - end + 1]
        return [*values[:begin], max(around, default=0), *values[len(values) - end :]]

    return shortened(few), shortened(many)


def _in_step(
    few: Sequence[int], many: Sequence[int], few_kinds: Sequence[int], many_kinds: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the values at moments with equal counts; other spans become their maximum, neighbours included.

    Neighbours count because an allocation between two releases in different order has its peak there. Only counts are
    compared. A maximum over different moments is not linear in the batch size, so an extrapolation below both sizes is
    too low.
    """
    is_same = [one == other for one, other in zip(accumulate(few_kinds), accumulate(many_kinds), strict=True)]
    ours, theirs = list[int](), list[int]()
    for same, group in groupby(range(len(few)), is_same.__getitem__):
        span = list(group)
        begin, end = max(0, span[0] - 1), span[-1] + 2
        ours += few[span[0] : span[-1] + 1] if same else [max(few[begin:end])]
        theirs += many[span[0] : span[-1] + 1] if same else [max(many[begin:end])]
    return ours, theirs


Line = tuple[float, float]  # (value at zero samples, increase per sample).


@dataclass(frozen=True)
class Operation:
    """An operator and its number of runs per step.

    Args:
        precision: computation precision: fp32, bf16, fp16, or tf32 for an fp32 convolution that torch runs in TF32.
        flops: FLOP per run, linear in the samples of a micro-batch.
        moved_bytes: bytes of arguments and results per run, linear in the samples.
        count: number of runs.
    """

    precision: str
    flops: Line
    moved_bytes: Line
    count: int = 1


@dataclass(frozen=True)
class StepWork:
    """Operators of a micro-batch (forward and backward) and of the optimizer step; identical operators are merged."""

    micro_batch: tuple[Operation, ...]
    step: tuple[Operation, ...]


Seen = tuple[str, float, float]  # Precision, FLOP and bytes of one operator run.


def operations(few: Sequence[Seen], many: Sequence[Seen], rows: tuple[int, int]) -> tuple[Operation, ...]:
    """Return the operators of a step that was traced at two batch sizes.

    A part that repeats more often at either size, such as a chunked loss, is summed to a single operator per
    precision.
    """
    if len(few) != len(many):
        begin, end = common_ends(*([(kind, flops > 0) for kind, flops, _ in seen] for seen in (few, many)))
        few, many = (
            [*seen[:begin], *_summed(seen[begin : len(seen) - end]), *seen[len(seen) - end :]] for seen in (few, many)
        )

    found: Counter[tuple[str, Line, Line]] = Counter(
        (a[0], _line(a[1], b[1], rows), _line(a[2], b[2], rows)) for a, b in zip(few, many, strict=True)
    )
    return tuple(Operation(*each, count) for each, count in found.items())


def _summed(seen: Sequence[Seen]) -> list[Seen]:
    """Return a single operator per precision with the total FLOP and bytes."""
    return [
        (kind, sum(each[1] for each in seen if each[0] == kind), sum(each[2] for each in seen if each[0] == kind))
        for kind in PRECISIONS
    ]


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
            found = {_line(a, b, rows) for a, b in zip(few, many, strict=True)}
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


def _line(few: float, many: float, rows: tuple[int, int]) -> Line:
    """Return the line through two values, at the smaller and the larger size."""
    fewer, more = rows
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
