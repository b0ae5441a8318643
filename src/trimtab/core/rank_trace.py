"""Peak bytes of one rank of several, by how they share the model."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.peak_model import PeakModel
from trimtab.core.profile import Candidate

# Ways to share: a ZeRO stage, and whether gradients are reduced once a window; of the first two they always are.
Way = tuple[int, bool]
WAYS: tuple[Way, ...] = ((0, True), (1, True), (2, True), (2, False), (3, True), (3, False))


@dataclass(frozen=True)
class RankTrace:
    """A rank's peak by the rows of its micro-batches, traced without running it.

    Args:
        candidate: its micro-batch means nothing here. way: of sharing. whole: of a window of one micro-batch; sliced:
            of several.
    """

    candidate: Candidate
    way: Way
    whole: PeakModel
    sliced: PeakModel
