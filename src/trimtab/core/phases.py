"""Where the seconds of a step go: by phase, by class of module, and by what bounds its operators. Values only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec

# In the order of a step. What is recomputed is no part of the backward; the rest is what no other phase is.
PHASES = ("data", "forward", "recompute", "backward", "communication", "optimizer", "rest")
# What each phase is, for one who reads it.
MEANINGS = {
    "data": "waiting for the next batch",
    "forward": "model and loss",
    "recompute": "forwards that a backward runs again",
    "backward": "gradients",
    "communication": "waiting for other ranks after the backward",
    "optimizer": "the optimizer's step",
    "rest": "the loop itself: moving and slicing batches, zeroing, clipping, counting",
}
PHASES_SCHEMA = 1


@dataclass(frozen=True)
class Lap:
    """A few steps of one arm, with the clock of phases and without.

    Args:
        seconds: by phase, per batch of the task, clocked; together those of a clocked step. parts: those of the forward
            and the backward by class of module, as "forward Linear"; what is in none is "forward". plain_s: of a step
            without the clock, right before or after.
    """

    seconds: Mapping[str, float]
    parts: Mapping[str, float]
    plain_s: float

    @property
    def clocked_s(self) -> float:
        """Seconds of a step under the clock."""
        return math.fsum(self.seconds.values())


@dataclass(frozen=True)
class Roof:
    """Seconds that the operators of a phase take at the least, by a device's peaks (Williams et al. 2009).

    Args:
        compute_s: of operators whose FLOP take longer than their bytes. memory_s: of the others. flops, moved_bytes: of
            all of them.
    """

    compute_s: float
    memory_s: float
    flops: float
    moved_bytes: float

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return self.compute_s + self.memory_s

    def times(self, factor: float) -> Roof:
        """Return that of so many times the operators."""
        return Roof(*(factor * each for each in (self.compute_s, self.memory_s, self.flops, self.moved_bytes)))


@dataclass(frozen=True)
class ArmPhases:
    """One arm's laps.

    Args:
        laps: one per round. roofs: by phase, "forward", "backward" (with what it recomputes) and "optimizer"; {}: not
            known. notes: phases that are not told apart, and roofs that are not known, with the reason.
    """

    laps: tuple[Lap, ...]
    roofs: Mapping[str, Roof] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def has(self) -> tuple[str, ...]:
        """The phases that were seen, in order."""
        return tuple(phase for phase in PHASES if any(phase in lap.seconds for lap in self.laps))

    def mean_s(self, phase: str) -> float:
        """Return a phase's mean seconds over the laps."""
        return math.fsum(lap.seconds.get(phase, 0.0) for lap in self.laps) / len(self.laps)


@dataclass(frozen=True)
class Gain:
    """The plain loop and the plan, lap by lap in turns: round i of the one is paired with round i of the other.

    Args:
        changes: of the plan, in words. device: whose peaks the roofs are of. num_ranks: that trained together; seconds
            are rank 0's. environment: machine and versions.
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
        """How many trained together, in words; "" of one process."""
        return f"on {self.num_ranks} ranks" if self.num_ranks > 1 else ""

    def __post_init__(self) -> None:
        if self.schema != PHASES_SCHEMA:
            raise FormatError("gain.schema", given=repr(self.schema), expected=str(PHASES_SCHEMA))
        if len(self.reference.laps) != len(self.plan.laps) or not self.plan.laps:
            given = f"{len(self.reference.laps)} laps of the reference, {len(self.plan.laps)} of the plan"
            raise FormatError("gain", given=given, expected="as many of each, one at the least")
