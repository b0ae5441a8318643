"""The batches of a host's window: planned and trained on as one where that keeps the maths, else each as it is.

As one, a micro-batch may be larger than a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import InfeasibleError
from trimtab.core.plan import Plan
from trimtab.runtime.batching import BY_CONTAINERS
from trimtab.runtime.splitting import has_batch_statistics


class WindowBatches:
    """What becomes of a window's batches, for one run.

    Batch statistics are those of the host's batches, whatever is set.

    Args:
        planning: with the longest batch, what is planned is a batch of the loader: rows that happen to be of one shape
            are left apart, as they would be more than was measured. are_apart: whether each is a mean of its own.
    """

    def __init__(self, model: nn.Module, planning: Mapping[str, Any], *, are_apart: bool = False) -> None:
        self._are_apart = are_apart or "longest_batch" in planning or has_batch_statistics(model)

    def planned(self, batches: Sequence[Any], make: Callable[[Any, int], Plan], *, is_alone: bool = True) -> Plan:
        """Return a plan of batches as one, where training on them so is proved to keep the maths; else of the first.

        Ranks come to the same: they have one plan, and as many batches.

        Args:
            make: plans for an example of a number of the host's batches. is_alone: one process; else what of a window
                does not fit in memory is told by one rank alone, and ends planning.
        """
        if self._are_apart or len(batches) == 1:
            return make(batches[0], 1)
        window = _together(batches)
        if is_alone and len(window) > 1:  # where one rank's are of one shape another's may not be
            return make(batches[0], 1)
        try:
            plan = make(window[0], len(batches))
        except InfeasibleError:
            if not is_alone:
                raise
            return make(batches[0], 1)
        return plan if plan.proves_splitting else make(batches[0], 1)

    def joined(self, batches: Sequence[Any], plan: Plan) -> list[Any]:
        """Return batches as one where that keeps the maths; else unchanged.

        It is known of a plan that proved it, and left to one that was set by hand for more rows than a batch has.
        """
        if self._are_apart or len(batches) == 1:
            return list(batches)
        samples = BY_CONTAINERS.read(batches[0]).samples or plan.batch_rows
        is_by_hand = plan.check is None and plan.batch_rows > samples
        return _together(batches) if is_by_hand or plan.proves_splitting else list(batches)


def _together(batches: Sequence[Any]) -> list[Any]:
    """Return batches as one where their rows are of one shape; else unchanged."""
    first = batches[0]
    if not all(_is_alike(first, batch) for batch in batches):
        return list(batches)
    if isinstance(first, Mapping):
        return [{name: torch.cat([batch[name] for batch in batches]) for name in first}]
    return [type(first)(torch.cat(columns) for columns in zip(*batches, strict=True))]


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping) and set(one) == set(other):
        pairs = [(one[name], other[name]) for name in one]
    elif type(one) is type(other) and type(one) in (tuple, list) and len(one) == len(other):
        pairs = list(zip(one, other, strict=True))
    else:
        return False
    return all(isinstance(a, Tensor) and isinstance(b, Tensor) and _shape(a) == _shape(b) is not None for a, b in pairs)


def _shape(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what rows have in common; None where there are none."""
    return (tensor.shape[1:], tensor.dtype, tensor.device) if tensor.dim() else None
