"""Measurements of an arm's step, and utilisation of the device. Values only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.core.hardware import DeviceSpec


@dataclass(frozen=True)
class ArmMetrics:
    """Measurements of an arm outside the paired runs; an arm with an error is excluded.

    Args:
        peak_bytes: peak memory of a step.
        phases_s: seconds per batch of the task by phase.
        flops_per_sample: FLOP of a step, recomputation included, per sample; None if not counted. With several ranks,
            rank
            0's FLOP over the samples of all ranks, so that FLOP times samples per second is the rate of a rank.
        precision: compute precision of matrix products, or "" if unknown.
        error: error of a failed arm, or "".
        terms_per_sample: loss terms per sample without padding, or the task's figure for a mean loss; None in older
            files.
        terms_by_rank: terms per sample on every rank, with several ranks.
        peak: precision whose peak FLOP/s applies, or "" for `precision`. An fp32 loop with TF32 convolutions uses
            "tf32".
    """

    peak_bytes: int | None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    flops_per_sample: float | None = None
    precision: str = ""
    error: str = ""
    terms_per_sample: float | None = None
    terms_by_rank: tuple[float, ...] = ()
    peak: str = ""

    @property
    def is_current(self) -> bool:
        """True if all fields of the current version are present, so that a stored file need not be measured again."""
        return bool(self.error) or (self.precision != "" and self.terms_per_sample is not None)


def utilisation(
    device: DeviceSpec | None, fact: ArmMetrics | None, reference: ArmMetrics | None, samples_per_s: Sequence[float]
) -> tuple[float | None, float | None]:
    """Return (MFU, HFU): FLOP/s of the model and of the arm over the device's peak (math: section 8).

    Args:
        device: specification with peak FLOP/s.
        fact: measurements of the arm.
        reference: measurements of the reference loop, whose FLOP define the model's work.
        samples_per_s: samples per second of the arm, by seed.
    """
    if device is None or fact is None or reference is None or not fact.precision or not samples_per_s:
        return None, None
    rate = statistics.median(samples_per_s)
    model, hardware = (
        None if flop is None else device.utilisation(flop * rate, fact.peak or fact.precision)
        for flop in (reference.flops_per_sample, fact.flops_per_sample)
    )
    return model, hardware
