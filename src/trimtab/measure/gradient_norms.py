"""Squared gradient norm of each micro-batch, without copying gradients (math: section 3).

A hook on each leaf receives the gradient of one backward before accumulation, once even for tied weights. The hook only
stores a reference. Norms are computed for a chunk of gradients in one batched call, because a norm per hook would
launch a kernel per parameter. The scalars stay on the device and are read a window later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from trimtab.measure.overhead_timer import OverheadTimer

# Maximum bytes of gradients whose accumulation or release is delayed.
CHUNK_BYTES = 32 * 2**20


class GradientNorms:
    """Sum of `||g||^2` for each backward while hooks are installed.

    Args:
        parameters: Parameters, iterated again at each `on`; hooks are added if they require gradients.

    Attributes:
        spent: Overhead since `on`.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = tuple(parameters) if isinstance(parameters, Iterator) else parameters
        self._remove: list[Callable[[], None]] = []
        self._held: list[Tensor] = []
        self._bytes, self._most_bytes = 0, 0
        self._total: Tensor | None = None
        self._seen: set[int] = set()
        self._in_parts = False
        self.spent = OverheadTimer()

    def on(self) -> None:
        """Install the hooks for the backwards of a window."""
        start = time.perf_counter()
        self.forget()
        self.spent = OverheadTimer()
        self._most_bytes = CHUNK_BYTES
        if not self._remove:
            leaves = [p for p in self._parameters if p.requires_grad]
            self._remove = [p.register_hook(partial(self._keep, i)).remove for i, p in enumerate(leaves)]
        self.spent.outside_s += time.perf_counter() - start

    def at_once(self) -> None:
        """Stop keeping references, because the gradients' memory may be overwritten before `take`."""
        self._most_bytes = 0

    def off(self) -> None:
        """Remove the hooks and discard pending gradients."""
        start = time.perf_counter()
        for remove in self._remove:
            remove()
        self._remove.clear()
        self.forget()
        self.spent.outside_s += time.perf_counter() - start

    def close(self) -> None:
        """Remove the hooks permanently."""
        self.off()

    def forget(self) -> None:
        """Discard gradients since the last `take`."""
        self._held.clear()
        self._seen.clear()
        self._bytes, self._total, self._in_parts = 0, None, False

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
        if not self._held:
            return
        with self.spent.span(self._held[0].device):
            total = squared_norm(self._held)
            self._held.clear()
            self._bytes = 0
            self._total = total if self._total is None else self._total + total


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
