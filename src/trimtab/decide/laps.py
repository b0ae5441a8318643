"""Which arms of a stage are run for another lap: who has lost is not.

Where a stage accepts, losing is to the incumbent alone, and it runs to the end: its blocks are half of every verdict.
Where a stage only puts candidates in order, losing is to whoever leads, and the incumbent may lose as any other. An arm
that is dropped is behind, however far. A fast one's chance of losing three blocks in a row is small, an equal one's
loss costs nothing, and what is put first is proved by blocks of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol, TypeVar

from trimtab.core.profile import Candidate
from trimtab.decide.readings import WORTH_SAVING, is_behind


class Ran(Protocol):
    """What of an arm counts: its candidate, the seconds of its blocks, its peak, and whether it is the control."""

    @property
    def candidate(self) -> Candidate: ...
    @property
    def block_s(self) -> Sequence[float]: ...
    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def control(self) -> bool: ...


Arm = TypeVar("Arm", bound=Ran)


def still_open(running: Sequence[Arm], incumbent: Arm, *, orders: bool) -> list[Arm]:
    """Return who of those that ran every lap until now is run for another.

    Args:
        incumbent: the stage's first, which may have failed. orders: whether the stage only puts in order.
    """
    rival = _leader(running, incumbent) if orders else incumbent
    return [arm for arm in running if arm.control or not has_lost(arm, rival)]


def has_lost(arm: Ran, rival: Ran) -> bool:
    """Return whether an arm is behind another: not one with a fused step alone, whose gain drowns in a whole one."""
    if arm is rival or not rival.block_s or arm.candidate.alike(rival.candidate, "fused_optimizer"):
        return False
    is_lighter = (arm.peak_bytes or 2**63) <= (1 - WORTH_SAVING) * (rival.peak_bytes or 0)
    return is_behind(arm.block_s, rival.block_s, is_lighter=is_lighter)


def _leader(running: Sequence[Arm], incumbent: Arm) -> Arm:
    raced = [arm for arm in running if arm.block_s and not arm.control]
    return min(raced, key=lambda arm: statistics.median(arm.block_s), default=incumbent)
