"""Squared gradient norm of every micro-batch, without copying gradients (math: section 3).

A hook on each leaf receives a backward's gradient before accumulation, once even for tied weights. The hook only
stores a reference. Norms are computed for a chunk of gradients in one batched call, because a norm per hook would
launch a kernel per parameter. The scalars stay on the device and are read a window later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.measure.timing import OverheadTimer

# Maximum bytes of gradients whose accumulation or release is delayed.
CHUNK_BYTES = 32 * 2**20
_HOOK = "set_all_reduce_hook"


class _Norms:
    """Sum of `||g||^2` over the gradients of every backward between `on` and `off`; `spent` is the overhead."""

    def __init__(self) -> None:
        self.spent = OverheadTimer()
        self._total: Tensor | None = None

    def on(self) -> None:
        """Start a window."""
        self.spent = OverheadTimer()

    def at_once(self) -> None:
        """Keep no references, because the gradients' memory may be overwritten before `take`."""

    def off(self) -> None:
        """End a window, and discard pending gradients."""
        self.forget()

    def close(self) -> None:
        """End permanently, and restore the model's hooks."""
        self.off()

    def forget(self) -> None:
        """Discard gradients since the last `take`."""
        self._total = None

    def _add(self, gradients: list[Tensor]) -> None:
        with self.spent.span(gradients[0].device):
            total = squared_norm(gradients)
            self._total = total if self._total is None else self._total + total


class GradientNorms(_Norms):
    """Sum of `||g||^2` for every backward while hooks are installed on parameters, which each `on` iterates again."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._parameters = tuple(parameters) if isinstance(parameters, Iterator) else parameters
        self._remove: list[Callable[[], None]] = []
        self._held: list[Tensor] = []
        self._bytes, self._most_bytes = 0, 0
        self._seen: set[int] = set()
        self._in_parts = False

    def on(self) -> None:
        start = time.perf_counter()
        self.forget()
        super().on()
        self._most_bytes = CHUNK_BYTES
        if not self._remove:
            leaves = [p for p in self._parameters if p.requires_grad]
            self._remove = [p.register_hook(partial(self._keep, i)).remove for i, p in enumerate(leaves)]
        self.spent.outside_s += time.perf_counter() - start

    def at_once(self) -> None:
        self._most_bytes = 0

    def off(self) -> None:
        start = time.perf_counter()
        for remove in self._remove:
            remove()
        self._remove.clear()
        self.forget()
        self.spent.outside_s += time.perf_counter() - start

    def forget(self) -> None:
        super().forget()
        self._held.clear()
        self._seen.clear()
        self._bytes, self._in_parts = 0, False

    def take(self) -> Tensor:
        """Return `||g||^2` since the last call as a scalar tensor on the gradients' device.

        NaN if a leaf's gradient arrived in parts, as for a parameter in several segments of reentrant checkpointing:
        the squares of parts do not add up to the square of the sum.
        """
        self._sum_up()
        total = torch.zeros(()) if self._total is None else self._total
        total = total * math.nan if self._in_parts else total
        self.forget()
        return total

    def _keep(self, leaf: int, gradient: Tensor) -> None:
        start = time.perf_counter()
        self._in_parts |= leaf in self._seen
        self._seen.add(leaf)
        self._held.append(gradient.detach())
        self._bytes += gradient.numel() * gradient.element_size()
        self.spent.host_s += time.perf_counter() - start
        if self._bytes >= self._most_bytes:
            self._sum_up()

    def _sum_up(self) -> None:
        if self._held:
            self._add(self._held)
            self._held.clear()
            self._bytes = 0


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """Return the sum of squares over all tensors as a scalar on their device; 0 for an empty list.

    Accumulated in float32 or float64, because a sum of half-precision squares overflows immediately.
    """
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if not dense:
        return torch.zeros(())
    dense = [torch.view_as_real(g) if g.is_complex() else g for g in dense]
    dtype = torch.float64 if any(g.dtype is torch.float64 for g in dense) else torch.float32
    return torch.stack(torch._foreach_norm(dense, 2.0, dtype)).square().sum()


# Squared gradient norms of FSDP2 models, where gradients are reduced into shards and parameter hooks never fire.


def is_sharded(model: nn.Module) -> bool:
    """Return True if FSDP2 shards any module of the model."""
    return any(map(is_sharded_itself, model.modules()))


def is_flat_sharded(model: nn.Module) -> bool:
    """Return True if FSDP1 shards any module, by class name: importing FSDP1 takes as long as torch."""
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def shows_reductions(model: nn.Module) -> bool:
    """Return True if each reduction of a sharded model can be observed; torch scales float16 after the hook."""

    def reduce_dtype(module: Any) -> torch.dtype | None:
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        return getattr(getattr(state, "_mp_policy", None), "reduce_dtype", None)

    sharded = filter(is_sharded_itself, model.modules())
    return all(hasattr(module, _HOOK) and reduce_dtype(module) is not torch.float16 for module in sharded)


def is_sharded_itself(module: nn.Module) -> bool:
    """Return True if FSDP2 shards this module."""
    return hasattr(module, _HOOK) or hasattr(module, "set_requires_gradient_sync")


class ShardedNorms(_Norms):
    """Sum of `||g||^2` over this rank's shards of each reduced gradient; the caller sums over ranks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.is_on = False
        self._modules = [module for module in model.modules() if is_sharded_itself(module)]
        self._undo: list[Callable[[], None]] = []

    def on(self) -> None:
        super().on()
        self._undo = self._undo or [_hooked(module, self._see) for module in self._modules]
        self.is_on, self._total = True, None

    def off(self) -> None:
        self.is_on, self._total = False, None

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def take(self) -> Tensor:
        """Return the sum since the last call as a scalar tensor.

        NaN without a reduction: the loop may disable reductions except in the last micro-batch.
        """
        total, self._total = self._total, None
        return torch.full((), math.nan) if total is None else total

    def _see(self, reduced: Tensor) -> None:
        if self.is_on:
            self._add([reduced])


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


class PartialNorms(_Norms):
    """`||S_j||^2` of the gradients accumulated after every backward, for this rank's shards or unsharded gradients."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._parameters = parameters

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
    """Return True if a parameter's shards are replicated, or if some ranks hold no shard."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and (mesh.ndim > 1 or mesh.size() != dist.get_world_size())


def local_shard(gradient: Any) -> Tensor:
    """Return the gradient, or this rank's shard of a DTensor."""
    shard: Tensor = gradient.to_local() if is_shard(gradient) else gradient
    return shard
