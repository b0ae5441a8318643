"""Operators of a step with FLOP and bytes moved, to predict their time on a target device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.trace_alignment import common_ends

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
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
    """Return a single operator per precision with the total FLOP and bytes."""
    return [
        (kind, sum(each[1] for each in seen if each[0] == kind), sum(each[2] for each in seen if each[0] == kind))
        for kind in PRECISIONS
    ]
