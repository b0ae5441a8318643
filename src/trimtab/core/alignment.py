"""Two runs of the same course, of which one may do a part more often: what they have in common at both ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def common_ends(one: Sequence[object], other: Sequence[object]) -> tuple[int, int]:
    """Return how many items two sequences begin with alike, and how many of the others they end with alike."""
    most = min(len(one), len(other))
    begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    ends = zip(reversed(one), reversed(other), strict=False)
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
    return begin, min(end, most - begin)


def aligned_peaks(
    few: Sequence[int], many: Sequence[int], few_kinds: Sequence[object], many_kinds: Sequence[object]
) -> tuple[list[int], list[int]]:
    """Return values moment by moment: all where two courses are as long, else of what only one has the largest.

    Args:
        few, many: a value at each moment. few_kinds, many_kinds: what each moment is.
    """
    if len(few) == len(many):
        return list(few), list(many)
    begin, end = common_ends(few_kinds, many_kinds)

    def shortened(values: Sequence[int]) -> list[int]:
        around = values[max(0, begin - 1) : len(values) - end + 1]
        return [*values[:begin], max(around, default=0), *values[len(values) - end :]]

    return shortened(few), shortened(many)
