"""Squared norms where gradients are sharded as they are reduced (FSDP2): hooks on parameters never fire there.

Each reduction hands its output, a shard of the mean over ranks, to a hook of the module; squares of the shards of all
ranks add up to those of a micro-batch over all ranks. It takes a reduction in every micro-batch. Where there is no such
hook, norms of the sums so far are taken, from which less is learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.measure.gradient_norms import squared_norm
from trimtab.measure.spent import Spent

_HOOK = "set_all_reduce_hook"


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 holds some of a model's modules."""
    return any(map(is_sharded_itself, model.modules()))


def is_flat_sharded(model: nn.Module) -> bool:
    """Return whether FSDP1 holds some of a model's modules: known by name, its import costs as much as torch's own."""
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def shows_reductions(model: nn.Module) -> bool:
    """Return whether each reduction of a sharded model can be seen as it is.

    Not under a torch without the hook; nor where they are in half precision, which torch divides by the ranks after it.
    """
    sharded = [module for module in model.modules() if is_sharded_itself(module)]
    return all(hasattr(module, _HOOK) and _reduce_dtype(module) is not torch.float16 for module in sharded)


def is_sharded_itself(module: nn.Module) -> bool:
    """Return whether FSDP2 holds a module."""
    return hasattr(module, _HOOK) or hasattr(module, "set_requires_gradient_sync")


def _reduce_dtype(module: Any) -> torch.dtype | None:
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    return getattr(getattr(state, "_mp_policy", None), "reduce_dtype", None)


class ShardedNorms:
    """`||g||^2` of this rank's shards of each reduced gradient, where they show; to be summed over ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._total: Tensor | None = None
        self.is_on = False
        self.spent = Spent()
        self._modules = [module for module in model.modules() if is_sharded_itself(module)]
        self._undo: list[Callable[[], None]] = []

    def on(self) -> None:
        """Begin to see reductions."""
        self._undo = self._undo or [_hooked(module, self._see) for module in self._modules]
        self.is_on, self._total, self.spent = True, None, Spent()

    def at_once(self) -> None:
        """They are seen as they come."""

    def off(self) -> None:
        """See no more of them."""
        self.is_on, self._total = False, None

    def close(self) -> None:
        """Put the modules' own hooks back."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def forget(self) -> None:
        """Drop what was seen since the last `take`."""
        self._total = None

    def take(self) -> Tensor:
        """Return what was seen since the last call: a scalar, nan where there was no reduction.

        As where the user's loop switches it off but for the last micro-batch, which then reduces the sum of all.
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
    """Let a module's reductions be seen, after a hook of the user's own; returns what puts that one back alone."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    own = getattr(getattr(state, "_fsdp_param_group", None), "_all_reduce_hook", None)

    def both(reduced: Tensor) -> None:
        if own is not None:
            own(reduced)
        see(reduced)

    getattr(module, _HOOK)(both)
    return lambda: getattr(module, _HOOK)(own)


class PartialNorms:
    """`||S_j||^2` of the gradients as they have added up after each backward: of this rank's shards, or whole.

    Args:
        parameters: gone through again each time.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = parameters
        self.spent = Spent()

    def on(self) -> None:
        """Begin a window."""
        self.spent = Spent()

    def at_once(self) -> None:
        """Nothing is kept."""

    def off(self) -> None:
        """The window is over."""

    def close(self) -> None:
        """The last one is."""

    def forget(self) -> None:
        """Nothing is seen before it is taken."""

    def take(self) -> Tensor:
        """Return the squared norm of what the gradients are now: a scalar."""
        gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        with self.spent.span(gradients[0].device):
            return squared_norm(gradients)


def is_shard(parameter: Tensor) -> bool:
    """Return whether a parameter is a shard of one."""
    return hasattr(parameter, "to_local")


def has_replicas(parameter: Any) -> bool:
    """Return whether several ranks hold the same shard of a parameter, or others hold none of it."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and (mesh.ndim > 1 or mesh.size() != dist.get_world_size())


def local(gradient: Any) -> Tensor:
    """Return a gradient, or this rank's shard of it."""
    shard: Tensor = gradient.to_local() if is_shard(gradient) else gradient
    return shard
