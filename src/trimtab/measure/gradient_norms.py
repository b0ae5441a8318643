"""Squared norms of each micro-batch's gradient, seen as it arrives at the leaves, without a copy (math: section 3).

A hook on each leaf sees the gradient of one backward before it is added to the sum, once for tied weights too. It only
keeps a reference; norms are taken of a chunk at a time in one batched call: a norm per hook would be a kernel per
parameter. Scalars stay on the device until somebody reads them, a window late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from trimtab.measure.spent import Spent

# Gradients held back from being freed or added up, at the most.
CHUNK_BYTES = 32 * 2**20


class GradientNorms:
    """Adds up `||g||^2` of each backward while its hooks are on. `spent`: what that took since `on`.

    Args:
        parameters: gone through again each time hooks are put on, those that require a gradient then.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = tuple(parameters) if isinstance(parameters, Iterator) else parameters
        self._remove: list[Callable[[], None]] = []
        self._held: list[Tensor] = []
        self._bytes, self._most_bytes = 0, 0
        self._total: Tensor | None = None
        self._seen: set[int] = set()
        self._in_parts = False
        self.spent = Spent()

    def on(self) -> None:
        """Put the hooks on, for the backwards of one window."""
        start = time.perf_counter()
        self.forget()
        self.spent = Spent()
        self._most_bytes = CHUNK_BYTES
        if not self._remove:
            leaves = [p for p in self._parameters if p.requires_grad]
            self._remove = [p.register_hook(partial(self._keep, i)).remove for i, p in enumerate(leaves)]
        self.spent.outside_s += time.perf_counter() - start

    def at_once(self) -> None:
        """Keep no references from here on: a gradient's own memory may be written before it is taken."""
        self._most_bytes = 0

    def off(self) -> None:
        """Take the hooks off; what was seen is dropped."""
        start = time.perf_counter()
        for remove in self._remove:
            remove()
        self._remove.clear()
        self.forget()
        self.spent.outside_s += time.perf_counter() - start

    def close(self) -> None:
        """Take the hooks off for good."""
        self.off()

    def forget(self) -> None:
        """Drop what was seen since the last `take`."""
        self._held.clear()
        self._seen.clear()
        self._bytes, self._total, self._in_parts = 0, None, False

    def take(self) -> Tensor:
        """Return `||g||^2` of what was seen since the last call: a scalar on the gradients' device.

        No number where a leaf's gradient came in parts, as of one used in several segments of reentrant checkpointing:
        squares of parts do not add up to that of their sum.
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
    """Return the sum of squares over all tensors: a scalar on their device, float32 at the least; 0 for none.

    Accumulated in float32 at the least: a sum of half-precision squares overflows at once.
    """
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if not dense:
        return torch.zeros(())
    dense = [torch.view_as_real(g) if g.is_complex() else g for g in dense]
    dtype = torch.float64 if any(g.dtype is torch.float64 for g in dense) else torch.float32
    return torch.stack(torch._foreach_norm(dense, 2.0, dtype)).square().sum()
