"""Peak memory of a rank, by ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.memory_model import PeakMemoryModel
from trimtab.core.profile import Candidate

# ZeRO stage, and True if gradients are reduced once per window, as stages 0 and 1 always do.
Way = tuple[int, bool]
WAYS: tuple[Way, ...] = ((0, True), (1, True), (2, True), (2, False), (3, True), (3, False))


@dataclass(frozen=True)
class RankPeakMemory:
    """Peak memory of a rank as a function of the micro-batch size, traced without a run.

    Args:
        candidate: the settings; the micro-batch is ignored.
        way: ZeRO stage and reduction.
        whole: peak of a window with a single micro-batch.
        sliced: peak of a window with several micro-batches.
    """

    candidate: Candidate
    way: Way
    whole: PeakMemoryModel
    sliced: PeakMemoryModel
