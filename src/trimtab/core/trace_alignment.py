"""Alignment of two memory traces of a step at different batch sizes.

One of the two may repeat a part more often, such as a loss computed in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, takewhile


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
    """Return the values at moments with equal counts; a span with unequal counts becomes its maximum.

    The maximum includes the neighbouring moments: if two releases surround an allocation in a different order, the
    peak of one trace lies where the counts agree. Only counts are compared, so a different order with the same counts
    is not detected. A maximum over different moments is not linear in the batch size, and an extrapolation below both
    sizes is too low.
    """
    is_same = [one == other for one, other in zip(accumulate(few_kinds), accumulate(many_kinds), strict=True)]
    ours, theirs = list[int](), list[int]()
    for same, group in groupby(range(len(few)), is_same.__getitem__):
        span = list(group)
        begin, end = max(0, span[0] - 1), span[-1] + 2
        ours += few[span[0] : span[-1] + 1] if same else [max(few[begin:end])]
        theirs += many[span[0] : span[-1] + 1] if same else [max(many[begin:end])]
    return ours, theirs
