"""Host figures that ranks share, once a window: what is put in one window is taken, from all ranks, in a later one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Figures = Sequence[float]


class Exchange(Protocol):
    """Between ranks. Every rank puts as many figures, in the same windows.

    `has_peers`: whether what one rank alone sees, as its own loss, may differ from what others do.
    """

    num_ranks: int
    has_peers: bool

    def put(self, figures: Figures) -> None:
        """Send this rank's figures; does not wait for the others."""

    def take(self) -> list[list[float]] | None:
        """Return the figures of every rank that were put last, once; None where nothing is under way."""

    def share(self, figures: Figures) -> list[list[float]]:
        """Return the figures of every rank, beside what was put; waits for all of them."""

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

    def put(self, figures: Figures) -> None:
        """Keep the figures."""
        self._figures = list(figures)

    def take(self) -> list[list[float]] | None:
        """Return them."""
        figures, self._figures = self._figures, None
        return None if figures is None else [figures]

    def share(self, figures: Figures) -> list[list[float]]:
        """Return the figures."""
        return [list(figures)]

    def close(self) -> None:
        """Drop what was put."""
        self._figures = None
