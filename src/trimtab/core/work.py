"""What the operators of a step compute and move: enough to say how long they take on a device that is not here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.alignment import common_ends

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
Line = tuple[float, float]  # at no rows, and what each row adds


@dataclass(frozen=True)
class Operation:
    """An operator and how often a step runs it.

    Args:
        precision: of what it computes with: fp32, bf16, fp16, or tf32 of a convolution in fp32 that torch runs so.
        flops, moved_bytes: of one run, as lines in the rows of a micro-batch; bytes are those of its arguments and
            results.
    """

    precision: str
    flops: Line
    moved_bytes: Line
    count: int = 1


@dataclass(frozen=True)
class StepWork:
    """Operators of one micro-batch, forward and backward, and of the optimizer's step; alike ones are counted."""

    micro_batch: tuple[Operation, ...]
    step: tuple[Operation, ...]


Seen = tuple[str, float, float]  # precision, FLOP and bytes of one operator as it ran


def operations(few: Sequence[Seen], many: Sequence[Seen], rows: tuple[int, int]) -> tuple[Operation, ...]:
    """Return the operators of a step that was seen at two numbers of rows.

    What one of the two does more often, as a loss in chunks, is summed up as one operator of each precision.
    """
    fewer, more = rows
    if len(few) != len(many):
        begin, end = common_ends(*([(kind, flops > 0) for kind, flops, _ in seen] for seen in (few, many)))
        few, many = (
            [*seen[:begin], *_summed(seen[begin : len(seen) - end]), *seen[len(seen) - end :]] for seen in (few, many)
        )

    def line(a: float, b: float) -> Line:
        slope = (b - a) / (more - fewer)
        return a - fewer * slope, slope

    found: Counter[tuple[str, Line, Line]] = Counter(
        (a[0], line(a[1], b[1]), line(a[2], b[2])) for a, b in zip(few, many, strict=True)
    )
    return tuple(Operation(*each, count) for each, count in found.items())


def _summed(seen: Sequence[Seen]) -> list[Seen]:
    """Return one operator a precision, of all that is done and moved in it."""
    return [
        (kind, sum(each[1] for each in seen if each[0] == kind), sum(each[2] for each in seen if each[0] == kind))
        for kind in PRECISIONS
    ]
