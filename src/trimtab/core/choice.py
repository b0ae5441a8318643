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
    """Outcome of the splitting check: the gradient of the whole batch compared with an unequal split (math: section 2).

    Args:
        splittable: whether micro-batches smaller than the batch compute the same gradient.
        reason: why, or why not.
        relative_difference: largest ||g_split - g_whole|| / ||g_whole|| of a parameter; None if it was not computed.
        tolerance: the limit for a parameter whose gradient is not near zero.
        code: stable identifier of the verdict, such as "split.proved" or "split.batch_statistics".
    """

    splittable: bool
    reason: str
    relative_difference: float | None = None
    tolerance: float = 1e-4
    code: str = ""


@dataclass(frozen=True)
class Proof:
    """Outcome of the plan's proof: two optimizer steps of the plain loop and of the plan, from one state.

    Args:
        holds: whether every gradient, parameter and buffer agrees to rounding.
        reason: what was compared, or what differs, in a sentence.
        code: stable identifier, such as "proof.holds", "proof.differs" or "proof.failed".
        settings: names of the settings that were applied in the proof.
        precisions: in which the two were compared.
        tensors: number of parameters and buffers compared.
        worst: largest difference, in units of its tolerance; None if nothing was compared.
    """

    holds: bool
    reason: str
    code: str
    settings: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    tensors: int = 0
    worst: float | None = None


@dataclass(frozen=True)
class Refuted:
    """A setting that a proof refused for this loop.

    Args:
        setting: name of a field of `Candidate`.
        value: the refused value; of a micro-batch any that is smaller than the batch.
        reason: what differs, with the name of the parameter or buffer.
    """

    setting: str
    value: Scalar
    reason: str


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
