"""All-gather of small host values between ranks, sent without waiting."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.distributed.error_propagation import ErrorStore
from trimtab.distributed.process_group import time_limit_s
from trimtab.distributed.unix_socket_gather import WIDEST, SocketMesh, host_mesh
from trimtab.measure.sharded_norms import is_sharded
from trimtab.runtime.gradient_sync import data_parallel
from trimtab.runtime.metadata_exchange import Figures, Gathered


def connect(model: nn.Module) -> RankExchange | None:
    """Return the exchange between the ranks that reduce a model's gradients; None for a single rank.

    None also for a model without DDP or FSDP2, which may still reduce gradients by hand if `has_peers` is True.
    """
    if not has_peers():
        return None
    parallel = data_parallel(model)
    group: dist.ProcessGroup | None
    if parallel is not None:
        group = parallel.process_group
    elif is_sharded(model):
        group = dist.group.WORLD
    else:
        return None
    return RankExchange(group) if dist.get_world_size(group) > 1 else None


def has_peers() -> bool:
    """Return True if this process is a rank of several; the loop may then reduce gradients by hand."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


_numbers = itertools.count()


class RankExchange:
    """Gathers values of all ranks on the host, without waiting for a device.

    Ranks on a single machine use sockets, others a separate gloo group, created on first use. The order relative to the
    model's collectives is therefore free, and trimtab's time limit applies instead of the model's group's.

    Args:
        group: process group of the ranks; None: all ranks.
    """

    has_peers = True

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._timeout_s = time_limit_s()
        self._trouble = ErrorStore(next(_numbers))
        self.num_ranks = dist.get_world_size(group)
        self._of = group
        self._group: dist.ProcessGroup | None = None
        self._mesh: SocketMesh | None = None
        self._put: Callable[[], Gathered] | None = None

    def ask(self, figures: Figures) -> Callable[[], Gathered]:
        """Send this rank's values without waiting; return a function that waits for the values of all ranks."""
        self._meet()
        if self._mesh is not None and len(figures) <= WIDEST:
            answer: Callable[[], Gathered] = self._mesh.ask(figures)
        else:
            answer = self._gathering(figures)

        def wait() -> Gathered:
            try:
                return answer()
            except RuntimeError as error:  # a rank is gone or exceeded the time limit
                raise self.failed(error) from error

        return wait

    def _meet(self) -> None:
        if self._group is None:
            self._group = self._connected()
            self._mesh = host_mesh(self._group, self._timeout_s)

    def texts(self, own: str) -> list[str]:
        """Return a text from every rank; a collective."""
        said: list[Any] = [None] * self.num_ranks
        try:
            self._meet()
            dist.all_gather_object(said, own, group=self._group)
        except RuntimeError as error:
            raise self.failed(error) from error
        return [str(each) for each in said]

    def _gathering(self, figures: Figures) -> Callable[[], Gathered]:
        own = torch.tensor(list(figures), dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self.num_ranks)]
        work: dist.Work = dist.all_gather(gathered, own, group=self._group, async_op=True)

        def wait() -> Gathered:
            work.wait()
            return [each.tolist() for each in gathered]

        return wait

    def put(self, figures: Figures) -> None:
        """Send this rank's values without waiting."""
        self._put = self.ask(figures)

    def take(self) -> Gathered | None:
        """Return all ranks' values of the last `put`, once; waits for late ranks. None if nothing was put."""
        put, self._put = self._put, None
        return None if put is None else put()

    def share(self, figures: Figures) -> Gathered:
        """Return the values of all ranks; waits for all ranks, but not for a device."""
        return self.ask(figures)()

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over ranks of a scalar tensor, ordered with the device's other work."""
        total = value.detach().clone()
        dist.all_reduce(total, group=self._of)
        return total

    def failed(self, error: BaseException) -> BaseException:
        """Publish the error that ends this rank; return the root cause, possibly the error of a different rank."""
        reason = self._trouble.explained(error)
        self._trouble.tell(reason)
        return reason

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise a `RankError` with the lost rank in place of torch's error from a collective; unrelated errors pass."""
        try:
            yield
        except RuntimeError as error:
            reason = self._trouble.explained(error)
            if reason is error:
                raise
            self._trouble.tell(reason)
            raise reason from error

    def recovered(self) -> None:
        """Withdraw the published error, because it did not end this rank."""
        self._trouble.recovered()

    def close(self) -> None:
        """Destroy the group and drop pending exchanges."""
        self._put = None
        if self._mesh is not None:
            self._mesh.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = self._mesh = None

    def _connected(self) -> dist.ProcessGroup:
        ranks = dist.get_process_group_ranks(self._of or dist.group.WORLD)
        limit = timedelta(seconds=self._timeout_s)
        # Only for part of the ranks: local synchronisation names a group after its members, so that a second group of
        # all ranks would have the same name.
        is_part = len(ranks) < dist.get_world_size()
        made: dist.ProcessGroup = dist.new_group(ranks, limit, "gloo", use_local_synchronization=is_part)
        return made
