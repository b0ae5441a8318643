"""What one arm's step takes, and how much of the device that is. Values only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.core.profile import Profile


@dataclass(frozen=True)
class ArmFacts:
    """What was measured of one arm apart from the races; with an error it takes no part in them.

    Args:
        peak_bytes: peak of a step. phases_s: seconds per step by phase.
        flops_per_row: counted in a step as it ran, recomputation included, over its rows; None: not counted.
        precision: what its matrix products compute in, "": not known.
    """

    peak_bytes: int | None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    flops_per_row: float | None = None
    precision: str = ""
    error: str = ""


def utilisation(profile: Profile, fact: ArmFacts | None, step_s: Sequence[float]) -> tuple[float | None, float | None]:
    """Return (MFU, HFU): FLOP/s of the model, and with recomputation, over the device's peak (math: section 8).

    Args:
        profile: of the reference loop, whose FLOP are the model's whatever else an arm computes.
        step_s: the arm's seconds per batch of the reference, one per seed.
    """
    if fact is None or not fact.precision or not step_s:
        return None, None
    rows = profile.loop.batch_rows
    done = fact.flops_per_row
    counts = (profile.loop.flops_per_step, None if done is None else done * rows)
    model, hardware = (
        None if flop is None else profile.device.utilisation(flop / statistics.median(step_s), fact.precision)
        for flop in counts
    )
    return model, hardware
