"""Two runs of the same course, of which one may do a part more often: what they have in common at both ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, takewhile


def common_ends(one: Sequence[object], other: Sequence[object]) -> tuple[int, int]:
    """Return how many items two sequences begin with alike, and how many of the others they end with alike."""
    most = min(len(one), len(other))
    begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    ends = zip(reversed(one), reversed(other), strict=False)
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
    return begin, min(end, most - begin)


def aligned_peaks(
    few: Sequence[int], many: Sequence[int], few_kinds: Sequence[int], many_kinds: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return values moment by moment, and of a span in which two courses differ the largest of each.

    Torch runs a backward's last nodes in an order of its own, so that two of the same length may differ too.

    Args:
        few, many: a value at each moment. few_kinds, many_kinds: by how much there is more of what is counted.
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
    """Return all moments at which as many are there of one as of the other; of others the largest, with those beside.

    Of two that let go of the same before and after something comes, one has its largest where the other is in step. By
    counts alone: of things that come in another order no sign is seen. A largest of other moments is no line, and told
    too small for sizes that are smaller than both.
    """
    is_same = [one == other for one, other in zip(accumulate(few_kinds), accumulate(many_kinds), strict=True)]
    ours, theirs = list[int](), list[int]()
    for same, group in groupby(range(len(few)), is_same.__getitem__):
        span = list(group)
        begin, end = max(0, span[0] - 1), span[-1] + 2
        ours += few[span[0] : span[-1] + 1] if same else [max(few[begin:end])]
        theirs += many[span[0] : span[-1] + 1] if same else [max(many[begin:end])]
    return ours, theirs
