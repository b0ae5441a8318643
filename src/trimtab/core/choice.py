"""One decision of a plan, what it does to the numbers, and what it was held against.

Marks: *exact* changes no number; *rounding* changes only rounding; *dynamics* changes the training itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

Scalar = bool | int | float | str | None


class Mark(enum.StrEnum):
    """What a change may do to the numbers."""

    EXACT = "exact"
    ROUNDING = "rounding"
    DYNAMICS = "dynamics"


@dataclass(frozen=True)
class Rejected:
    """A value that was considered and not taken."""

    value: Scalar
    reason: str


@dataclass(frozen=True)
class Choice:
    """One decision.

    Args:
        value: what was chosen.
        reason: why, in a sentence with the figures behind it.
        mark: what the change does to the numbers.
        changed: whether it differs from the reference loop.
        losers: what else was considered, and why it lost.
    """

    value: Scalar
    reason: str
    mark: Mark = Mark.EXACT
    changed: bool = False
    losers: tuple[Rejected, ...] = ()


@dataclass(frozen=True)
class Check:
    """Outcome of the gradient-equivalence proof: the batch whole against an unequal split (math: section 2).

    Args:
        splittable: whether a micro-batch smaller than the batch keeps the maths.
        reason: why, or why not.
        relative_difference: ||g_split - g_whole|| / ||g_whole||, or None when it could not be computed, or needed not
            be: what computes over the batch is refused for that.
        tolerance: the limit it was held against.
    """

    splittable: bool
    reason: str
    relative_difference: float | None = None
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Measured:
    """A loop's cost per optimizer step.

    Args:
        step_s: median seconds. peak_bytes: None: not measured. between_s: of predicted seconds, within which they are
            expected: by how far from predictions the blocks of trials lay, and no closer than what nine of ten
            predictions missed by; None: nothing was run. energy_j: joules, as the plan's meter counts them; or None.
    """

    step_s: float
    peak_bytes: int | None = None
    between_s: tuple[float, float] | None = None
    energy_j: float | None = None


@dataclass(frozen=True)
class FrontPoint:
    """Settings that nothing considered beats in time and memory; nor in energy, where that counts.

    Args:
        step_s: as predicted. peak_bytes: as counted, else as predicted. refusal: why they were not chosen from, or "".
        energy_j: as predicted, where it is known.
    """

    settings: str
    step_s: float
    peak_bytes: int
    refusal: str = ""
    energy_j: float | None = None
