"""Batch control for plans with a fixed batch size, which measures nothing."""

from __future__ import annotations

import contextlib
from typing import Any

from trimtab.losses import Count
from trimtab.runtime.window import Window


class FixedBatchSize:
    """Null object with the interface of `BatchControl`.

    Args:
        num_batches: loader batches per window, as set by the user or by a trainer's configuration.
    """

    noise = None

    def __init__(self, num_batches: int = 1) -> None:
        self.num_batches = num_batches

    def micro_batch_of(self, rows: int, planned: int, num_batches: int) -> int:
        """Return `planned`."""
        return planned

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Return a null context."""
        return contextlib.nullcontext()

    def rate_factor(self, num_batches: float) -> float:
        """Return 1."""
        return 1.0

    def opened(self, window: Window) -> None:
        """Do nothing."""

    def begun(self, rows: int, *, of_next: bool, last: bool) -> None:
        """Do nothing."""

    def backward_begins(self) -> None:
        """Do nothing."""

    def backward_done(self, rows: int, terms: Count) -> None:
        """Do nothing."""

    def stepping(self, *window: Any) -> None:
        """Do nothing."""

    def stepped(self, num_batches: int, agreed: float, *, applied: bool) -> None:
        """Do nothing."""

    def dropped(self) -> None:
        """Do nothing."""

    def ran_out(self) -> bool:
        """Return False: the window was not enlarged."""
        return False

    def close(self) -> None:
        """Return None: there is no overhead to report."""
