"""Bytes of one optimizer step: what holds them, when, and where most are held at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Transients are what is neither kept for backward nor a gradient: results on their way, and scratch of an operator
# where it shows.
PARTS = ("parameters", "buffers", "batch", "optimizer", "gradients", "activations", "transients")


@dataclass(frozen=True)
class Moment:
    """Bytes by part at one moment.

    Args:
        at: share of the step's allocations and releases that came before. phase: "forward", "backward" or "step".
    """

    at: float
    phase: str
    bytes_by_part: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Of all parts."""
        return sum(self.bytes_by_part.values())


@dataclass(frozen=True)
class BlockMemory:
    """What a block keeps for backward.

    Args:
        name: as in the module tree. saved_bytes: alive when the forward of a micro-batch was over, made inside the
            block's own.
    """

    name: str
    saved_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """One optimizer step, its optimizer's state already there.

    Args:
        peak: the moment with most bytes. timeline: the largest moments of equal stretches of the step, in order.
        most_bytes: of each part, whenever it has them. blocks: those that were asked about, in the order they were
            entered.
    """

    peak: Moment
    timeline: tuple[Moment, ...]
    most_bytes: Mapping[str, int]
    blocks: tuple[BlockMemory, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return self.peak.total_bytes
