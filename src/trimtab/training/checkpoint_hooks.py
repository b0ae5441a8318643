"""Checkpoint manager interface of a run, implemented by `trimtab.checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trimtab.core.errors import ValueGivenError


@dataclass(frozen=True)
class WindowDecision:
    """Composition of a window with an adaptive batch size. It depends on measured times, so a resumed run replays it.

    Args:
        num_batches: loader batches drawn.
        k: number of micro-batches decided, which sets the learning rate.
        is_cut: True if a single loader batch was split in two to measure the noise.
    """

    num_batches: int
    k: int
    is_cut: bool = False


class CheckpointHooks(Protocol):
    """Checkpoint manager. All ranks call its methods in the same windows."""

    keeps: bool

    def between(self) -> None:
        """Save a checkpoint or end the run if due; called between two windows."""

    def decided(self, index: int, window: WindowDecision) -> None:
        """Store the composition of window number `index`, before its first micro-batch."""

    def decided_before(self, index: int) -> WindowDecision | None:
        """Return the stored composition of window `index` from before a resume; None for later windows."""

    def save(self) -> None:
        """Save a checkpoint now."""

    def is_leaving(self) -> bool:
        """Return True if the run was asked to end and will end at the next `between`."""

    def close(self, error: BaseException | None = None) -> None:
        """Close the manager; `error` is the exception that ended the run, or None."""


class NoCheckpoints:
    """Null object for runs without checkpoints."""

    keeps = False

    def between(self) -> None:
        """Do nothing."""

    def decided(self, index: int, window: WindowDecision) -> None:
        """Do nothing."""

    def decided_before(self, index: int) -> None:
        """Return None."""

    def save(self) -> None:
        """Raise `ValueGivenError`, because the run has no checkpoints."""
        raise ValueGivenError(
            "run.checkpoint",
            problem="run.checkpoint() was called, but the run has no checkpoint folder.",
            hint="Pass checkpoints=Checkpoints(folder) to trimtab.start.",
            code="checkpoints.not_configured",
        )

    def is_leaving(self) -> bool:
        """Return False."""
        return False

    def close(self, error: BaseException | None = None) -> None:
        """Do nothing."""
