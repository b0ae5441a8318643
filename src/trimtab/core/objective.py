"""What to minimise, under which hard limits, and against which loop (paper eq. 3; math: section 1)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError
from trimtab.core.units import parse_bytes

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Cost:
    """What a loop costs: seconds, bytes and joules. None is *unknown*, never zero; T = inf is "never reached"."""

    time_s: float
    memory_bytes: float | None = None
    energy_j: float | None = None


@dataclass(frozen=True)
class Objective:
    """Weights of `C = wT*T/T0 + wM*M/M0 + wE*E/E0`, normalised to sum 1 (paper eq. 3).

    `(T0, M0, E0)` is the reference's cost on the same machine in the same run, so `C(reference) = 1`.

    Args:
        time: weight of seconds a row. memory: of peak bytes. energy: of joules a row, which wants a meter or watts.

    Raises:
        ValueGivenError: a weight is negative or not finite, or all are zero.
    """

    time: float = 1.0
    memory: float = 0.0
    energy: float = 0.0

    def __post_init__(self) -> None:
        weights = {f.name: checks.number(f.name, getattr(self, f.name), low=0) for f in dataclasses.fields(self)}
        largest = max(weights.values())
        if largest == 0:
            raise ValueGivenError("objective", given=f"weights {weights}", expected="at least one weight above zero")
        shares = {name: weight / largest for name, weight in weights.items()}  # at most 1 each: no sum overflows
        total = math.fsum(shares.values())
        settled = abs(total * largest - 1) < 1e-15  # already of sum 1: read back exactly as written
        for name, share in shares.items():
            object.__setattr__(self, name, weights[name] if settled else share / total)

    def without_energy(self) -> Objective:
        """Return the weights of time and memory alone, normalised: what is left where there is no meter.

        Raises:
            ValueGivenError: energy alone was weighed, so that nothing is left.
        """
        if self.time == self.memory == 0:
            expected, way_out = "a weight on time or memory beside it", "Or a machine that has a meter."
            raise ValueGivenError("energy", given="energy alone, without a meter", expected=expected, way_out=way_out)
        return Objective(self.time, self.memory)

    def score(self, cost: Cost, reference: Cost) -> float:
        """Return C; 1 for the reference, smaller is better.

        Raises:
            ValueGivenError: a weighted term is unknown, in the cost or in the reference.
        """
        return math.fsum(
            self._term(name, weight, ours, theirs)
            for name, weight, ours, theirs in (
                ("time", self.time, cost.time_s, reference.time_s),
                ("memory", self.memory, cost.memory_bytes, reference.memory_bytes),
                ("energy", self.energy, cost.energy_j, reference.energy_j),
            )
            if weight > 0
        )

    @staticmethod
    def _term(name: str, weight: float, ours: float | None, theirs: float | None) -> float:
        if ours is None or theirs is None or not 0 < theirs < math.inf:
            raise ValueGivenError(
                name,
                given=f"weight {weight:g} on a quantity that could not be measured here",
                expected="a measured quantity",
                way_out=f"Set Objective({name}=0), or measure on a machine that has a meter.",
            )
        return weight * (ours / theirs)


@dataclass(frozen=True)
class Budget:
    """Hard limits; None is no limit.

    Args:
        memory: peak bytes of a training step (bytes, or a size such as "8GiB"); on CUDA it binds reserved memory.
        time: seconds per optimizer step.
        energy: joules per optimizer step; refused by `plan` where there is no meter.
    """

    memory: int | str | None = None
    time: float | None = None
    energy: float | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes("memory", self.memory))
        for name in ("time", "energy"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.number(name, getattr(self, name), low=0, open_low=True))

    def within(self, memory_bytes: int | None) -> Budget:
        """Return the budget with no more memory than a device has."""
        limits = [limit for limit in (self.memory_bytes, memory_bytes) if limit is not None]
        return replace(self, memory=min(limits, default=None))

    def is_within(self, other: Budget) -> bool:
        """Return whether whatever meets this budget meets another one."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("memory", "time", "energy"))
        return all(theirs is None or (ours is not None and ours <= theirs) for ours, theirs in pairs)

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit in bytes."""
        return None if self.memory is None else int(self.memory)


@dataclass(frozen=True)
class Reference:
    """The user's loop as it stands: what a plan is measured against. Undeclared, it is "assumed fp32 eager".

    Args:
        precision: fp32, tf32, bf16 or fp16 (autocast).
        clip_norm: the gradient-norm limit the user's loop applies, or None.
        accumulate: batches that the user's loop accumulates gradients over before it steps; the example batch holds all
            of them. The loop's micro-batch is that part of the example, and the default limit on memory its peak.
        declared: whether the user said so, rather than the library assuming it.
    """

    precision: str = "fp32"
    clip_norm: float | None = None
    declared: bool = True
    accumulate: int = 1

    def __post_init__(self) -> None:
        checks.one_of("reference.precision", self.precision, PRECISIONS)
        if self.clip_norm is not None:
            checks.number("reference.clip_norm", self.clip_norm, low=0, open_low=True)
        checks.integer("reference.accumulate", self.accumulate)

    def describe(self) -> str:
        """Return how reports name it."""
        clip = f", clip {self.clip_norm:g}" if self.clip_norm is not None else ""
        accumulates = f", accumulating {self.accumulate} batches" if self.accumulate > 1 else ""
        return f"{'declared' if self.declared else 'assumed'} {self.precision} eager{clip}{accumulates}"


ASSUMED_REFERENCE = Reference(declared=False)
