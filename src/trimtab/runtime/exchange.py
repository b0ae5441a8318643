"""Host figures that ranks share, a few times a window: what one rank says is gathered from all of them.

Every rank says as many figures, in the same order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Figures = Sequence[float]
Gathered = list[list[float]]


class Exchange(Protocol):
    """Between ranks.

    `has_peers`: whether what one rank alone sees, as its own loss, may differ from what others do.
    """

    num_ranks: int
    has_peers: bool

    def ask(self, figures: Figures) -> Callable[[], Gathered]:
        """Send this rank's figures without waiting; returns what waits for those of every rank."""

    def put(self, figures: Figures) -> None:
        """Send this rank's figures, to be taken in a later window; does not wait for the others."""

    def take(self) -> Gathered | None:
        """Return the figures of every rank that were put last, once; None where nothing is under way."""

    def share(self, figures: Figures) -> Gathered:
        """Return the figures of every rank, beside what was put; waits for all of them."""

    def texts(self, own: str) -> list[str]:
        """Return a text of every rank; waits for all of them. For what is compared once, as a job starts."""

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over ranks of a scalar where it is, without waiting for its device."""

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others what this rank ends with; returns what is behind it: the error, or another rank's end."""

    def recovered(self) -> None:
        """What this rank told did not end it."""

    def close(self) -> None:
        """Nothing more is put or taken."""


class Alone:
    """One process: what is put is there to be taken.

    Args:
        has_peers: whether there are others, that may reduce gradients with it by hand.
    """

    num_ranks = 1

    def __init__(self, *, has_peers: bool = False) -> None:
        self.has_peers = has_peers
        self._figures: list[float] | None = None

    def ask(self, figures: Figures) -> Callable[[], Gathered]:
        """Return what returns the figures."""
        return lambda: [list(figures)]

    def put(self, figures: Figures) -> None:
        """Keep the figures."""
        self._figures = list(figures)

    def take(self) -> Gathered | None:
        """Return them."""
        figures, self._figures = self._figures, None
        return None if figures is None else [figures]

    def share(self, figures: Figures) -> Gathered:
        """Return the figures."""
        return [list(figures)]

    def texts(self, own: str) -> list[str]:
        """Return the text."""
        return [own]

    def sum(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    def failed(self, error: BaseException) -> BaseException:
        """Return the error: there is nobody to tell."""
        return error

    def recovered(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Drop what was put."""
        self._figures = None
