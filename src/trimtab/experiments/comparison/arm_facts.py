"""What one arm's step takes, and how much of the device that is. Values only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.core.hardware import DeviceSpec


@dataclass(frozen=True)
class ArmFacts:
    """What was measured of one arm apart from the races; with an error it takes no part in them.

    Args:
        peak_bytes: peak of a step. phases_s: seconds per batch of the task by phase.
        flops_per_row: counted in a step as it ran, recomputation included, over its rows; None: not counted. Of several
            ranks rank 0's own over the rows of all, so that times rows per second it is what one rank computes.
        precision: what its matrix products compute in, "": not known. peak: the precision whose peak they are held
            against; "": the same. Of a loop in fp32 whose convolutions torch computes in TF32 it is that.
        terms_per_row: what the loss counted in a row, padding not; where it is a mean, the task's own figure. None: not
            known, from a file written before it was measured.
        terms_by_rank: the same of each rank's own rows, where there are several.
    """

    peak_bytes: int | None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    flops_per_row: float | None = None
    precision: str = ""
    error: str = ""
    terms_per_row: float | None = None
    terms_by_rank: tuple[float, ...] = ()
    peak: str = ""

    @property
    def is_current(self) -> bool:
        """Whether all was looked at that is today, so that a file of it need not be measured again."""
        return bool(self.error) or (self.precision != "" and self.terms_per_row is not None)


def utilisation(
    device: DeviceSpec | None, fact: ArmFacts | None, reference: ArmFacts | None, rows_per_s: Sequence[float]
) -> tuple[float | None, float | None]:
    """Return (MFU, HFU): FLOP/s of the model, and as the arm runs it, over the device's peak (math: section 8).

    Args:
        reference: the loop whose FLOP are the model's, whatever an arm computes besides.
        rows_per_s: of the arm, one per seed.
    """
    if device is None or fact is None or reference is None or not fact.precision or not rows_per_s:
        return None, None
    rate = statistics.median(rows_per_s)
    model, hardware = (
        None if flop is None else device.utilisation(flop * rate, fact.peak or fact.precision)
        for flop in (reference.flops_per_row, fact.flops_per_row)
    )
    return model, hardware
