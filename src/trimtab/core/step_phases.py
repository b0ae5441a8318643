"""Breakdown of a step's seconds: by phase, by module class, and by compute or memory bound. Values only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec

# Explanation of each phase, for reports, in the order of a step. Recomputation is not part of the backward.
MEANINGS = {
    "data": "waiting for the next batch",
    "forward": "model and loss",
    "recompute": "recomputation in the backward pass",
    "backward": "gradients",
    "communication": "waiting for other ranks after backward",
    "optimizer": "optimizer step",
    "rest": "the rest of the loop: copying and slicing batches, zeroing and clipping gradients, counting",
}
PHASES = tuple(MEANINGS)
PHASES_SCHEMA = 2


@dataclass(frozen=True)
class TimedRound:
    """A few timed steps of an arm (a round), with the phase clock and without.

    Args:
        seconds: seconds by phase, per batch of the task; they sum to a clocked step.
        parts: seconds of forward and backward by module class, such as "forward Linear"; "forward" is the rest.
        plain_s: seconds of a step without the clock, right before or after.
    """

    seconds: Mapping[str, float]
    parts: Mapping[str, float]
    plain_s: float

    @property
    def clocked_s(self) -> float:
        """Seconds of a step with the clock."""
        return math.fsum(self.seconds.values())


@dataclass(frozen=True)
class RooflineBound:
    """Lower bound on the seconds of a phase's operators, by a device's peaks (roofline; Williams et al. 2009)."""

    compute_s: float
    memory_s: float
    flops: float
    moved_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds of all operators."""
        return self.compute_s + self.memory_s

    def times(self, factor: float) -> RooflineBound:
        """Return the bound for `factor` times the operators."""
        return RooflineBound(*(factor * each for each in (self.compute_s, self.memory_s, self.flops, self.moved_bytes)))


@dataclass(frozen=True)
class ArmPhases:
    """Rounds of an arm.

    Args:
        laps: one per round.
        roofs: lower bounds by phase, "forward", "backward" (with recomputation) and "optimizer"; {} if unknown.
        notes: phases that were not distinguished and unknown bounds, with the reason.
    """

    laps: tuple[TimedRound, ...]
    roofs: Mapping[str, RooflineBound] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def has(self) -> tuple[str, ...]:
        """Phases that occurred, in order."""
        return tuple(phase for phase in PHASES if any(phase in lap.seconds for lap in self.laps))

    def mean_s(self, phase: str) -> float:
        """Return a phase's mean seconds over the rounds."""
        return math.fsum(lap.seconds.get(phase, 0.0) for lap in self.laps) / len(self.laps)


@dataclass(frozen=True)
class TimedGain:
    """Interleaved rounds of the baseline and the plan; round i of the baseline is paired with round i of the plan.

    Args:
        device: device whose peaks give the lower bounds.
        num_ranks: ranks that trained together; seconds are rank 0's.
    """

    task: str
    reference: ArmPhases
    plan: ArmPhases
    changes: str
    device: DeviceSpec
    num_ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    schema: int = PHASES_SCHEMA

    @property
    def on_ranks(self) -> str:
        """The number of ranks as text; "" for one process."""
        return f"on {self.num_ranks} ranks" if self.num_ranks > 1 else ""

    def __post_init__(self) -> None:
        if self.schema != PHASES_SCHEMA:
            raise FormatError("gain.schema", got=repr(self.schema), expected=str(PHASES_SCHEMA))
        if len(self.reference.laps) != len(self.plan.laps) or not self.plan.laps:
            given = f"{len(self.reference.laps)} rounds of the reference and {len(self.plan.laps)} of the plan"
            raise FormatError("gain", got=given, expected="the same number of rounds for both, at least 1")
