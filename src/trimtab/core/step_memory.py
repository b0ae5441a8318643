"""Memory of an optimizer step over time, by kind of tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Transients are neither saved for backward nor gradients: intermediate results, and operator workspaces as far as
# they are visible.
PARTS = ("parameters", "buffers", "batch", "optimizer", "gradients", "activations", "transients")


@dataclass(frozen=True)
class MemorySample:
    """Bytes by kind at a moment of the step.

    Args:
        at: fraction of the step's allocations and releases before this moment.
        phase: "forward", "backward" or "step".
        bytes_by_part: bytes by kind, with the names in `PARTS`.
    """

    at: float
    phase: str
    bytes_by_part: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Sum over all kinds."""
        return sum(self.bytes_by_part.values())


@dataclass(frozen=True)
class BlockMemory:
    """Memory that a block saves for backward.

    Args:
        name: name in the module tree.
        saved_bytes: bytes allocated in the block's forward and alive at the end of the micro-batch's forward.
    """

    name: str
    saved_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """Memory of an optimizer step, with the optimizer state already allocated.

    Args:
        peak: moment with the most bytes.
        timeline: peak of each of several equal stretches of the step, in order.
        most_bytes: maximum of each kind over the step.
        blocks: requested blocks, in the order of their forwards.
    """

    peak: MemorySample
    timeline: tuple[MemorySample, ...]
    most_bytes: Mapping[str, int]
    blocks: tuple[BlockMemory, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return self.peak.total_bytes
