"""Squared norms where gradients are sharded as they are reduced (FSDP2): hooks on parameters never fire there.

Each reduction hands its output, a shard of the mean over ranks, to a hook of the module; squares of the shards of all
ranks add up to those of a micro-batch over all ranks. It takes a reduction in every micro-batch. Where this torch has
no such hook, norms of the sums so far are left, from which less is learned.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.measure.gradient_norms import squared_norm

_HOOK = "set_all_reduce_hook"


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 holds some of a model's modules."""
    return any(hasattr(module, _HOOK) or hasattr(module, "set_requires_gradient_sync") for module in model.modules())


class ShardedNorms:
    """`||g||^2` of this rank's shards of each reduced gradient; to be summed over ranks.

    Raises:
        AttributeError: this torch has no hook on reductions; `PartialNorms` needs none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._total: Tensor | None = None
        self.is_on = False
        self.spent_s = 0.0
        sharded = [module for module in model.modules() if hasattr(module, _HOOK)]
        if not sharded:
            raise AttributeError(_HOOK)
        for module in sharded:
            module.set_all_reduce_hook(self._see)

    def on(self) -> None:
        """Begin to see reductions."""
        self.is_on, self._total, self.spent_s = True, None, 0.0

    def off(self) -> None:
        """See no more of them."""
        self.is_on, self._total = False, None

    def take(self) -> Tensor:
        """Return what was seen since the last call: a scalar."""
        total, self._total = self._total, None
        return torch.zeros(()) if total is None else total

    def _see(self, reduced: Tensor) -> None:
        if not self.is_on:
            return
        start = time.perf_counter()
        total = squared_norm([reduced])
        self._total = total if self._total is None else self._total + total
        self.spent_s += time.perf_counter() - start


class PartialNorms:
    """`||S_j||^2` of the gradients as they have added up after each backward: of this rank's shards, or whole."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]

    def take(self) -> Tensor:
        """Return the squared norm of what the gradients are now: a scalar."""
        return squared_norm([_local(p.grad) for p in self._parameters if p.grad is not None])


def _local(gradient: Any) -> Tensor:
    shard: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return shard
