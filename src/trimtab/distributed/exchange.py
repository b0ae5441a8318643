"""Host figures shared between ranks by one small collective a window, waited for a window later."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trimtab.runtime.exchange import Figures


def connect() -> RankExchange | None:
    """Return the exchange between the ranks of this job; None in one process alone."""
    is_up = dist.is_available() and dist.is_initialized()
    return RankExchange() if is_up and dist.get_world_size() > 1 else None


class RankExchange:
    """Gathers every rank's figures over gloo: they are on the host, and no device has to wait for them.

    Made on all ranks at once.
    """

    def __init__(self) -> None:
        self.num_ranks = dist.get_world_size()
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._work: dist.Work | None = None
        self._gathered: list[torch.Tensor] = []

    def put(self, figures: Figures) -> None:
        """Send this rank's figures; does not wait for the others."""
        own = torch.tensor(list(figures), dtype=torch.float64)
        self._gathered = [torch.empty_like(own) for _ in range(self.num_ranks)]
        self._work = dist.all_gather(self._gathered, own, group=self._group, async_op=True)

    def take(self) -> list[list[float]] | None:
        """Return the figures of every rank that were put last, once; waits for ranks that are late."""
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        return [each.tolist() for each in self._gathered]
