"""Result of a dry run: a few windows of a plan on all ranks, before training."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from trimtab.core.plan import Plan


@dataclass(frozen=True)
class DryRunResult:
    """Dry run of a plan; identical on every rank.

    Args:
        plan: the plan, with the gradient communication that the dry run selected.
        block_s: seconds per window on the slowest rank, for each block of windows; () if it did not run.
        peaks: peak bytes of each measured window, on the rank with the largest peak; () if not measured.
        slower: ratio of measured to predicted seconds of the plan as first proposed; None if unknown.
        refusal: reason for not running, or "".
        took_s: seconds of the dry run.
        code: stable identifier of the refusal, "dry_run.out_of_memory" or "dry_run.failed"; "" if the plan ran.
    """

    plan: Plan
    block_s: tuple[float, ...] = ()
    peaks: tuple[int, ...] = ()
    slower: float | None = None
    refusal: str = ""
    took_s: float = 0.0
    code: str = ""

    @property
    def window_s(self) -> float:
        """Median seconds per window."""
        return statistics.median(self.block_s)

    @property
    def peak_bytes(self) -> int | None:
        """Median peak of the measured windows; None if not measured.

        Over gloo a window's peak depends on when its threads release send buffers, so the maximum of a few windows is
        not reproducible.
        """
        return statistics.median_high(self.peaks) if self.peaks else None
