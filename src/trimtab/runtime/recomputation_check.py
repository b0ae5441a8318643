"""Comparison of a recomputed forward with the original forward.

State that no reference leads to (iterators, thread-local and context variables, environment, clocks, system random
numbers) cannot be restored for a recomputation. If such state matters, the two results differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from trimtab.core.errors import ModelError

_MOST_VALUES = 4096  # Largest number of values compared per result tensor.
_ROUNDING = 1e-3  # Relative; atomic additions on a GPU change the order of a sum, and so its last bits.
_UNITS_OF_ROUNDING = 4  # Multiples of the machine epsilon of the result's dtype.


class RecomputationCheck:
    """Callable for the results of the forward and its recomputation; the second call compares them.

    Args:
        names: names of the recomputed modules, for the message.

    Raises:
        ModelError: the recomputation's result differs (code "recompute.differs").
    """

    def __init__(self, names: str) -> None:
        self._names = names
        self._first: list[Tensor] | None = None
        self._tolerance = _ROUNDING

    def __call__(self, result: Any) -> None:
        # Selective checkpointing replays intercepted operators, and must not intercept those of this comparison.
        with _disable_current_modes():
            self._compare(result)

    def _compare(self, result: Any) -> None:
        values = [_sample(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _is_readable(leaf)]
        if self._first is None:
            self._first, self._tolerance = values, _tolerance(values)
            return
        same = len(values) == len(self._first) and all(map(self._is_close, self._first, values))
        if not same:
            raise _differs(self._names)

    def _is_close(self, before: Tensor, again: Tensor) -> bool:
        if before.shape != again.shape:
            return False
        finite = before.isfinite() & again.isfinite()
        before, again = before.double()[finite], again.double()[finite]
        return bool((again - before).norm() <= self._tolerance * before.norm())


def argument_changed(names: str) -> ModelError:
    """Return the error for a forward that changes an argument in place."""
    return ModelError(
        "plan.recompute",
        problem=f"The forward of {names} changes an argument in place, so that activation checkpointing would "
        "recompute it from changed inputs.",
        hint=f"Use out-of-place operations in {names} (relu, not relu_), or use a plan with recompute=None.",
        code="recompute.side_effects",
    )


def buffer_changed(name: str) -> ModelError:
    """Return the error for a large buffer that changes first in a later forward, when no copy was made."""
    return ModelError(
        "plan.recompute",
        problem=f"The large buffer {name} of a recomputed block changed for the first time in a later forward, for "
        "which no copy exists.",
        hint="Repeat the step, since the next forward copies the buffer, or use a plan with recompute=None.",
        code="recompute.side_effects",
    )


def _differs(names: str) -> ModelError:
    return ModelError(
        "plan.recompute",
        problem=f"The recomputed forward of {names} returned a different result than the first forward.",
        hint=f"Pass values that change between calls (a random number, a counter, an iterator's item) to {names} as "
        "arguments, or use a plan with recompute=None.",
        code="recompute.differs",
    )


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _MOST_VALUES)].clone()


def _is_readable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta and not tensor.is_complex()


def _tolerance(values: list[Tensor]) -> float:
    """Return the relative tolerance for the dtypes of `values` and of autocast."""
    types = {value.dtype for value in values if value.is_floating_point()}
    types |= {torch.get_autocast_dtype(kind) for kind in {value.device.type for value in values} if _casts(kind)}
    return max((_UNITS_OF_ROUNDING * torch.finfo(each).eps for each in types), default=0.0) + _ROUNDING


def _casts(kind: str) -> bool:
    return torch.is_autocast_enabled(kind)
