"""Squared gradient norms of FSDP2 models, where gradients are reduced into shards and parameter hooks never fire.

FSDP2 passes each reduced shard (of the mean over ranks) to a module hook. The sum of squares over all ranks' shards is
the squared norm of a micro-batch's gradient over all ranks, which requires a reduction in every micro-batch. Without
the hook, `PartialNorms` measures norms of the accumulated gradients, which contain less information.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.measure.gradient_norms import squared_norm
from trimtab.measure.overhead_timer import OverheadTimer

_HOOK = "set_all_reduce_hook"


def is_sharded(model: nn.Module) -> bool:
    """Return True if FSDP2 shards any module of the model."""
    return any(map(is_sharded_itself, model.modules()))


def is_flat_sharded(model: nn.Module) -> bool:
    """Return True if FSDP1 shards any module.

    Recognised by class name, because importing FSDP1 takes as long as torch.
    """
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def shows_reductions(model: nn.Module) -> bool:
    """Return True if each reduction of a sharded model can be observed unscaled.

    False for a torch version without the hook, and for float16 reductions, which torch scales after the hook.
    """
    sharded = [module for module in model.modules() if is_sharded_itself(module)]
    return all(hasattr(module, _HOOK) and _reduce_dtype(module) is not torch.float16 for module in sharded)


def is_sharded_itself(module: nn.Module) -> bool:
    """Return True if FSDP2 shards this module."""
    return hasattr(module, _HOOK) or hasattr(module, "set_requires_gradient_sync")


def _reduce_dtype(module: Any) -> torch.dtype | None:
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    return getattr(getattr(state, "_mp_policy", None), "reduce_dtype", None)


class ShardedNorms:
    """Sum of `||g||^2` over this rank's shards of each reduced gradient; the caller sums over ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._total: Tensor | None = None
        self.is_on = False
        self.spent = OverheadTimer()
        self._modules = [module for module in model.modules() if is_sharded_itself(module)]
        self._undo: list[Callable[[], None]] = []

    def on(self) -> None:
        """Start observing reductions."""
        self._undo = self._undo or [_hooked(module, self._see) for module in self._modules]
        self.is_on, self._total, self.spent = True, None, OverheadTimer()

    def at_once(self) -> None:
        """Do nothing: reductions are processed immediately."""

    def off(self) -> None:
        """Stop observing reductions."""
        self.is_on, self._total = False, None

    def close(self) -> None:
        """Restore the modules' original hooks."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def forget(self) -> None:
        """Discard the sum since the last `take`."""
        self._total = None

    def take(self) -> Tensor:
        """Return the sum since the last call as a scalar tensor; NaN without a reduction.

        The user's loop may disable reductions except in the last micro-batch, which then reduces the accumulated
        gradient.
        """
        total, self._total = self._total, None
        return torch.full((), math.nan) if total is None else total

    def _see(self, reduced: Tensor) -> None:
        if not self.is_on:
            return
        with self.spent.span(reduced.device):
            total = squared_norm([reduced])
            self._total = total if self._total is None else self._total + total


def _hooked(module: Any, see: Callable[[Tensor], None]) -> Callable[[], None]:
    """Add an observer to a module's reduction hook; return a function that restores the original hook."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    own = getattr(getattr(state, "_fsdp_param_group", None), "_all_reduce_hook", None)

    def both(reduced: Tensor) -> None:
        if own is not None:
            own(reduced)
        see(reduced)

    getattr(module, _HOOK)(both)
    return lambda: getattr(module, _HOOK)(own)


class PartialNorms:
    """`||S_j||^2` of the gradients accumulated after each backward, for this rank's shards or unsharded gradients.

    Args:
        parameters: Parameters, iterated again at each call.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = parameters
        self.spent = OverheadTimer()

    def on(self) -> None:
        """Start a window."""
        self.spent = OverheadTimer()

    def at_once(self) -> None:
        """Do nothing: no references are kept."""

    def off(self) -> None:
        """End a window."""

    def close(self) -> None:
        """Do nothing: there are no hooks."""

    def forget(self) -> None:
        """Do nothing: gradients are read in `take` only."""

    def take(self) -> Tensor:
        """Return the squared norm of the current gradients as a scalar tensor."""
        gradients = [local_shard(p.grad) for p in self._parameters if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        with self.spent.span(gradients[0].device):
            return squared_norm(gradients)


def is_shard(parameter: Tensor) -> bool:
    """Return True for a sharded parameter (DTensor)."""
    return hasattr(parameter, "to_local")


def has_replicas(parameter: Any) -> bool:
    """Return True if a parameter's shards are replicated, or if some ranks hold no shard of it."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and (mesh.ndim > 1 or mesh.size() != dist.get_world_size())


def local_shard(gradient: Any) -> Tensor:
    """Return the gradient, or this rank's shard of a DTensor."""
    shard: Tensor = gradient.to_local() if is_shard(gradient) else gradient
    return shard
