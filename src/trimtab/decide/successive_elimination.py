"""Successive elimination: selection of a search phase's candidates for the next round.

In a phase that may replace the incumbent, candidates are compared only with the incumbent, which runs to the end,
because every verdict needs its blocks. If a phase only ranks candidates, the comparison is with the current leader,
and the incumbent may drop out too. A fast candidate rarely loses three blocks in a row; dropping a candidate of equal
speed costs nothing; and the top of the ranking is proved later by separate blocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol, TypeVar

from trimtab.core.profile import Candidate
from trimtab.decide.trial_statistics import WORTH_SAVING, is_behind


class RunningCandidate(Protocol):
    """Properties of a running candidate: settings, block times, peak memory, and True for the A/A control."""

    @property
    def candidate(self) -> Candidate: ...
    @property
    def block_s(self) -> Sequence[float]: ...
    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def control(self) -> bool: ...


Arm = TypeVar("Arm", bound=RunningCandidate)


def still_open(running: Sequence[Arm], incumbent: Arm, *, orders: bool) -> list[Arm]:
    """Return the candidates to run in the next round.

    Args:
        running: candidates present in every round so far.
        incumbent: first of the phase; may have failed.
        orders: the phase only ranks its candidates.
    """
    rival = _leader(running, incumbent) if orders else incumbent
    return [arm for arm in running if arm.control or not has_lost(arm, rival)]


def has_lost(arm: RunningCandidate, rival: RunningCandidate) -> bool:
    """Return True if a candidate is behind a rival.

    Never True for a fused step alone, because its gain is too small to show in a whole step.
    """
    if arm is rival or not rival.block_s or arm.candidate.alike(rival.candidate, "fused_optimizer"):
        return False
    is_lighter = (arm.peak_bytes or 2**63) <= (1 - WORTH_SAVING) * (rival.peak_bytes or 0)
    return is_behind(arm.block_s, rival.block_s, is_lighter=is_lighter)


def _leader(running: Sequence[Arm], incumbent: Arm) -> Arm:
    raced = [arm for arm in running if arm.block_s and not arm.control]
    return min(raced, key=lambda arm: statistics.median(arm.block_s), default=incumbent)
