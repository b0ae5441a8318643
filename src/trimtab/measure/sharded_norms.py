"""Squared norms where gradients are sharded as they are reduced (FSDP2): hooks on parameters never fire there.

Each reduction hands its output, a shard of the mean over ranks, to a hook of the module; squares of the shards of all
ranks add up to those of a micro-batch over all ranks. It takes a reduction in every micro-batch. Norms of the sums so
far need no hook, and less is learned from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import ValueGivenError
from trimtab.measure.gradient_norms import squared_norm
from trimtab.measure.spent import Spent

_HOOK = "set_all_reduce_hook"


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 holds some of a model's modules."""
    return any(hasattr(module, _HOOK) or hasattr(module, "set_requires_gradient_sync") for module in model.modules())


def is_flat_sharded(model: nn.Module) -> bool:
    """Return whether FSDP1 holds some of a model's modules: known by name, its import costs as much as torch's own."""
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


class ShardedNorms:
    """`||g||^2` of this rank's shards of each reduced gradient; to be summed over ranks.

    Raises:
        ValueGivenError: this torch has no hook on reductions.
    """

    def __init__(self, model: nn.Module) -> None:
        self._total: Tensor | None = None
        self.is_on = False
        self.spent = Spent()
        sharded = [module for module in model.modules() if hasattr(module, _HOOK)]
        if not sharded:
            raise ValueGivenError(
                "plan.batch_rule",
                given="a sharded model, under a torch whose reductions cannot be seen",
                expected=f"FSDP2 with {_HOOK}",
                way_out="A newer torch, or a plan of a fixed batch.",
            )
        self._undo = [_hooked(module, self._see) for module in sharded]

    def on(self, *, at_once: bool = False) -> None:
        """Begin to see reductions."""
        self.is_on, self._total, self.spent = True, None, Spent()

    def off(self) -> None:
        """See no more of them."""
        self.is_on, self._total = False, None

    def close(self) -> None:
        """Put the modules' own hooks back."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def take(self) -> Tensor:
        """Return what was seen since the last call: a scalar."""
        total, self._total = self._total, None
        return torch.zeros(()) if total is None else total

    def _see(self, reduced: Tensor) -> None:
        if not self.is_on:
            return
        with self.spent.span(reduced.device):
            total = squared_norm([reduced])
            self._total = total if self._total is None else self._total + total


def _hooked(module: Any, see: Callable[[Tensor], None]) -> Callable[[], None]:
    """Let a module's reductions be seen, after a hook of the user's own; returns what puts that one back alone.

    Raises:
        ValueGivenError: they are in half precision, where torch divides by the ranks after the hook.
    """
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    if getattr(getattr(state, "_mp_policy", None), "reduce_dtype", None) is torch.float16:
        raise ValueGivenError("plan.batch_rule", given="FSDP2 that reduces in fp16", expected="bf16 or fp32 reductions")
    own = getattr(getattr(state, "_fsdp_param_group", None), "_all_reduce_hook", None)

    def both(reduced: Tensor) -> None:
        if own is not None:
            own(reduced)
        see(reduced)

    getattr(module, _HOOK)(both)
    return lambda: getattr(module, _HOOK)(own)


class PartialNorms:
    """`||S_j||^2` of the gradients as they have added up after each backward: of this rank's shards, or whole."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]

    def take(self) -> Tensor:
        """Return the squared norm of what the gradients are now: a scalar."""
        return squared_norm([local(p.grad) for p in self._parameters if p.grad is not None])


def local(gradient: Any) -> Tensor:
    """Return a gradient, or this rank's shard of it."""
    shard: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return shard
