"""Exchange of a few host numbers between ranks in each window (an all-gather of metadata).

All ranks must send the same number of values, in the same order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Figures = Sequence[float]
Gathered = list[list[float]]


class MetadataExchange(Protocol):
    """Metadata exchange between ranks.

    Attributes:
        num_ranks: number of ranks.
        has_peers: True if the user's own code reduces gradients over several processes, with different losses.
    """

    num_ranks: int
    has_peers: bool

    def ask(self, figures: Figures) -> Callable[[], Gathered]:
        """Send this rank's values without waiting; return a function that waits for the values of all ranks."""

    def put(self, figures: Figures) -> None:
        """Send this rank's values, to be taken in a later window, without waiting."""

    def take(self) -> Gathered | None:
        """Return the values of all ranks from the last `put`, once; None if nothing was put."""

    def share(self, figures: Figures) -> Gathered:
        """Return the values of all ranks. Waits for all ranks; independent of `put`."""

    def texts(self, own: str) -> list[str]:
        """Return a text from each rank. Waits for all ranks; used for checks at the start of a job."""

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a scalar tensor over all ranks, without synchronising with the device."""

    def failed(self, error: BaseException) -> BaseException:
        """Report this rank's error; return the root cause, possibly an error of another rank."""

    def recovered(self) -> None:
        """Withdraw a reported error from which this rank recovered."""

    def close(self) -> None:
        """End the exchange."""


class SingleProcessExchange:
    """Exchange of a single process.

    Args:
        has_peers: True if the user's loop reduces gradients over other processes by hand.
    """

    num_ranks = 1

    def __init__(self, *, has_peers: bool = False) -> None:
        self.has_peers = has_peers
        self._figures: list[float] | None = None

    def ask(self, figures: Figures) -> Callable[[], Gathered]:
        return lambda: [list(figures)]

    def put(self, figures: Figures) -> None:
        self._figures = list(figures)

    def take(self) -> Gathered | None:
        figures, self._figures = self._figures, None
        return None if figures is None else [figures]

    def share(self, figures: Figures) -> Gathered:
        return [list(figures)]

    def texts(self, own: str) -> list[str]:
        return [own]

    def sum(self, value: Tensor) -> Tensor:
        return value

    def failed(self, error: BaseException) -> BaseException:
        return error

    def recovered(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._figures = None
