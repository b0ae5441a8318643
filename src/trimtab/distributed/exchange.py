"""Host figures shared between ranks by one small collective a window, waited for a window later."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from trimtab.measure.sharded_norms import is_flat_sharded, is_sharded
from trimtab.runtime.exchange import Figures
from trimtab.runtime.gradient_sync import data_parallel


def connect(model: nn.Module) -> RankExchange | None:
    """Return the exchange between the ranks that reduce a model's gradients together; None where there is one alone.

    A model that neither DDP nor FSDP holds trains alone, as far as can be seen: `has_peers` says whether that is sure.
    """
    if not has_peers():
        return None
    parallel = data_parallel(model)
    if parallel is not None:
        group = parallel.process_group
    elif is_sharded(model) or is_flat_sharded(model):
        group = dist.group.WORLD
    else:
        return None
    return RankExchange(group) if dist.get_world_size(group) > 1 else None


def has_peers() -> bool:
    """Return whether this process is one of several, with which a loop may reduce gradients by hand."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


class RankExchange:
    """Gathers every rank's figures over gloo: they are on the host, and no device has to wait for them.

    The first figures, which all ranks send in the same window, make a group of its own where theirs is none of gloo.
    """

    has_peers = True

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.num_ranks = dist.get_world_size(group)
        self._of = group
        self._group: dist.ProcessGroup | None = None
        self._work: dist.Work | None = None
        self._gathered: list[torch.Tensor] = []

    def put(self, figures: Figures) -> None:
        """Send this rank's figures; does not wait for the others."""
        self._work, self._gathered = self._gather(figures)

    def take(self) -> list[list[float]] | None:
        """Return the figures of every rank that were put last, once; waits for ranks that are late."""
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        return [each.tolist() for each in self._gathered]

    def share(self, figures: Figures) -> list[list[float]]:
        """Return the figures of every rank; waits for all of them, but not for a device."""
        work, gathered = self._gather(figures)
        work.wait()
        return [each.tolist() for each in gathered]

    def _gather(self, figures: Figures) -> tuple[dist.Work, list[torch.Tensor]]:
        if self._group is None:
            self._group = self._connected()
        own = torch.tensor(list(figures), dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self.num_ranks)]
        work: dist.Work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        return work, gathered

    def close(self) -> None:
        """Give up the group that was made, and what is still under way."""
        self._work = None
        if self._group is not None and self._group is not self._of:
            dist.destroy_process_group(self._group)
        self._group = None

    def _connected(self) -> dist.ProcessGroup | None:
        if dist.get_backend(self._of) == "gloo":
            return self._of
        ranks = dist.get_process_group_ranks(self._of or dist.group.WORLD)
        made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return made
