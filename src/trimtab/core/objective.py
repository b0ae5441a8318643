"""Objective, hard limits and reference loop of a plan (paper eq. 3; math: section 1)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.units import parse_bytes

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
_OF_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def precision_name(value: object) -> object:
    """Return the name in `PRECISIONS` of a torch dtype or of a dtype's name; any other value unchanged."""
    is_dtype = isinstance(value, str) or type(value).__name__ == "dtype"
    return _OF_DTYPES.get(str(value).removeprefix("torch."), value) if is_dtype else value


@dataclass(frozen=True)
class Cost:
    """Cost of a loop in seconds, bytes and joules.

    None means unknown, never zero; an infinite time means that the target was never reached.
    """

    time_s: float
    memory_bytes: float | None = None
    energy_j: float | None = None


@dataclass(frozen=True)
class Objective:
    """Weights of `C = wT*T/T0 + wM*M/M0 + wE*E/E0`, normalised to sum 1 (paper eq. 3).

    `(T0, M0, E0)` is the reference loop's cost on the same machine in the same run, so `C(reference) = 1`.

    Args:
        time: weight of seconds per sample.
        memory: weight of peak bytes.
        energy: weight of joules per sample; needs a meter or given watts.

    Raises:
        ValueGivenError: a weight is negative or not finite, or all are zero.
    """

    time: float = 1.0
    memory: float = 0.0
    energy: float = 0.0

    def __post_init__(self) -> None:
        weights = {f.name: validation.number(f.name, getattr(self, f.name), low=0) for f in dataclasses.fields(self)}
        shares = validation.shares(tuple(weights.values()))
        if shares is None:
            raise ValueGivenError("objective", got=f"weights {weights}", expected="at least one positive weight")
        for name, share in zip(weights, shares, strict=True):
            object.__setattr__(self, name, share)

    def without_energy(self) -> Objective:
        """Return the weights of time and memory, for a machine without a meter; `ValueGivenError` if both are 0."""
        if self.time == self.memory == 0:
            raise ValueGivenError(
                "energy",
                got="no energy meter",
                problem="The objective weights only energy, and this machine has no energy meter.",
                hint="Give time or memory a weight too, pass watts with trimtab.Metering(watts=...), or plan on a "
                "machine with an energy meter.",
                code="energy.no_meter",
            )
        return Objective(self.time, self.memory)

    def score(self, cost: Cost, reference: Cost) -> float:
        """Return C; 1 for the reference, smaller is better.

        Raises:
            ValueGivenError: a weighted term is unknown in the cost or in the reference.
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
                problem=f"The objective gives {name} the weight {weight:g}, but {name} was not measured.",
                hint=f"Set Objective({name}=0), or measure {name} first.",
                code="objective.not_measured",
            )
        return weight * (ours / theirs)


@dataclass(frozen=True)
class Budget:
    """Hard limits; None means no limit.

    Args:
        memory: peak bytes of a training step (an int, or a size such as "8GiB"); on CUDA it applies to reserved
            memory.
        time: seconds per optimizer step.
        energy: joules per optimizer step; `plan` refuses it without a meter.
    """

    memory: int | str | None = None
    time: float | None = None
    energy: float | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes("memory", self.memory))
        for name in ("time", "energy"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, validation.number(name, getattr(self, name), low=0, open_low=True))

    def within(self, memory_bytes: int | None) -> Budget:
        """Return the budget with its memory limited to a device's."""
        limits = [limit for limit in (self.memory_bytes, memory_bytes) if limit is not None]
        return replace(self, memory=min(limits, default=None))

    def of_batch(self, num_batches: int) -> Budget:
        """Return the budget of a batch, if an optimizer step accumulates several: equal parts of time and energy."""
        time, energy = (None if limit is None else limit / num_batches for limit in (self.time, self.energy))
        return self if num_batches == 1 else replace(self, time=time, energy=energy)

    def is_within(self, other: Budget) -> bool:
        """Return True if every limit of the other budget is implied by this one."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("memory", "time", "energy"))
        return all(theirs is None or (ours is not None and ours <= theirs) for ours, theirs in pairs)

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit in bytes."""
        return None if self.memory is None else int(self.memory)


@dataclass(frozen=True)
class Reference:
    """The user's loop before planning, as the baseline of a plan. Undeclared, it is "assumed fp32 eager".

    Args:
        precision: fp32, tf32, bf16 or fp16 (autocast). A torch dtype or its name is accepted.
        clip_norm: gradient-norm limit of the user's loop, or None.
        accumulate: batches that the user's loop accumulates per optimizer step; the example batch holds all of them.
            The loop's micro-batch is an equal part of the example, and its peak is the default memory limit.
        declared: True if the user declared it, False if it is assumed.
        keeps_gradients: True if the loop calls `run.backward` and `run.step` itself, as trainers do, or reads gradients
            (`p.grad`) after `run.train_step`. Planning then does not choose `step_in_backward`, which frees gradients
            within the backward pass.
    """

    precision: str = "fp32"
    clip_norm: float | None = None
    declared: bool = True
    accumulate: int = 1
    keeps_gradients: bool = False

    def __post_init__(self) -> None:
        name = validation.one_of("reference.precision", precision_name(self.precision), PRECISIONS)
        object.__setattr__(self, "precision", name)
        if self.clip_norm is not None:
            validation.number("reference.clip_norm", self.clip_norm, low=0, open_low=True)
        validation.integer("reference.accumulate", self.accumulate)
        if not isinstance(self.keeps_gradients, bool):
            raise ValueGivenError("reference.keeps_gradients", got=repr(self.keeps_gradients), expected="true or false")

    def describe(self) -> str:
        """Return the description for reports."""
        clip = f", clip {self.clip_norm:g}" if self.clip_norm is not None else ""
        accumulates = f", accumulating {self.accumulate} batches" if self.accumulate > 1 else ""
        return f"{'declared' if self.declared else 'assumed'} {self.precision} eager{clip}{accumulates}"


ASSUMED_REFERENCE = Reference(declared=False)
