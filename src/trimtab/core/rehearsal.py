"""What all ranks of a job did by a plan, for some windows and before they train."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from trimtab.core.plan import Plan


@dataclass(frozen=True)
class Ran:
    """A rehearsal of a plan, the same on every rank.

    Args:
        plan: as it was told, its gradients sent as they are kept. block_s: seconds of a window on the slowest rank, of
            each block of windows; (): it did not run. peaks: bytes of each counted window, of the rank that held most;
            (): none was counted. slower: how many times what was told of it, as it was told, it took; None: not known.
            refusal: why it did not run, or "". took_s: seconds that the rehearsal took.
    """

    plan: Plan
    block_s: tuple[float, ...] = ()
    peaks: tuple[int, ...] = ()
    slower: float | None = None
    refusal: str = ""
    took_s: float = 0.0

    @property
    def window_s(self) -> float:
        """Median seconds of a window."""
        return statistics.median(self.block_s)

    @property
    def peak_bytes(self) -> int | None:
        """Median of the counted windows; None: not counted.

        Over gloo a window's peak goes by when its threads let go of what they sent: the largest of a few windows is
        that of a busy moment, and does not repeat.
        """
        return statistics.median_high(self.peaks) if self.peaks else None
