"""What a run tells whoever keeps it on disk, and is told again where it goes on: the seam to `trimtab.checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trimtab.core.errors import ValueGivenError


@dataclass(frozen=True)
class Decided:
    """What a window of a freed batch was made by: it depends on times, and is the same again only where it was kept.

    Args:
        num_batches: of the loader, drawn for it. k: as decided, which its rate follows. is_cut: whether a loader batch
            that fits was cut in two.
    """

    num_batches: int
    k: int
    is_cut: bool = False


class Keeper(Protocol):
    """Keeps a run. All ranks call it in the same windows."""

    keeps: bool

    def between(self) -> None:
        """The window before is over and the next not drawn: the run may be saved here, or left for good."""

    def decided(self, index: int, window: Decided) -> None:
        """The window after so many others is about to run; said before its first micro-batch."""

    def decided_before(self, index: int) -> Decided | None:
        """Return what that window was made by before the run was cut off; None where it had not come so far."""

    def save(self) -> None:
        """Save the run as it is."""

    def is_leaving(self) -> bool:
        """Return whether the run was told to end, and is left at the next `between`."""

    def close(self, error: BaseException | None = None) -> None:
        """The run is over, by an error or without one."""


class NotKept:
    """As `Keeper`, where nobody keeps the run."""

    keeps = False

    def between(self) -> None:
        """Do nothing."""

    def decided(self, index: int, window: Decided) -> None:
        """Do nothing."""

    def decided_before(self, index: int) -> None:
        """Return that nothing was."""

    def save(self) -> None:
        """Raise `ValueGivenError`: there is nowhere to save it."""
        raise ValueGivenError("run.checkpoint", given="no checkpoints", expected="start(..., checkpoints=...)")

    def is_leaving(self) -> bool:
        """Return that it was not."""
        return False

    def close(self, error: BaseException | None = None) -> None:
        """Do nothing."""
