"""Batches of a trainer's accumulated step, joined into one batch if this keeps the numerics.

A micro-batch of the joined batch may be larger than a loader batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import InfeasibleError
from trimtab.integrations.trainer_rules import accumulation_arguments
from trimtab.plans.plan import Plan
from trimtab.training.batch import BY_CONTAINERS
from trimtab.training.split_conditions import has_batch_statistics


class WindowBatches:
    """Decides on joining the batches of a window, for one run.

    Models with batch statistics are never joined, so that the statistics stay those of the trainer's batches.

    Args:
        model: the model.
        planning: arguments of `trimtab.plan`. With `longest_batch`, batches are not joined, as a joined batch could
            need more memory than was measured.
        are_apart: True if the loss of each batch is a separate mean.
    """

    def __init__(self, model: nn.Module, planning: Mapping[str, Any], *, are_apart: bool = False) -> None:
        self._planning = planning
        self._are_apart = are_apart or "longest_batch" in planning or has_batch_statistics(model)

    def planned(
        self, batches: Sequence[Any], make: Callable[..., Plan], known: Mapping[str, Any], *, is_alone: bool = True
    ) -> Plan:
        """Return a plan for the joined batches if joining provably keeps the numerics; else for the first batch.

        All ranks decide alike, since they have the same plan and equally many batches.

        Args:
            batches: the batches of a window.
            make: `trimtab.plan` with model, optimizer and loss; called with an example batch and further arguments.
            known: arguments of `trimtab.plan` by the trainer; those of the user take precedence.
            is_alone: True for a single process. With several ranks, a window that does not fit into one rank's memory
                raises.
        """

        def of_first() -> Plan:
            return make(batches[0], **accumulation_arguments(how, 1, len(batches)))

        how = {**known, **self._planning}
        if self._are_apart or len(batches) == 1:
            return of_first()
        window = _together(batches)
        if is_alone and len(window) > 1:  # With several ranks, all batches may have one shape on some ranks only.
            return of_first()
        try:
            plan = make(window[0], **accumulation_arguments(how, len(batches), len(batches)))
        except InfeasibleError:
            if not is_alone:
                raise
            return of_first()
        return plan if plan.proves_splitting else of_first()

    def joined(self, batches: Sequence[Any], plan: Plan) -> list[Any]:
        """Return the batches joined into one if joining keeps the numerics; else unchanged.

        The plan's check proves this. A plan set by hand for more samples than a batch has is followed without proof.
        """
        if self._are_apart or len(batches) == 1:
            return list(batches)
        samples = BY_CONTAINERS.read(batches[0]).samples or plan.batch_size
        is_by_hand = plan.check is None and plan.batch_size > samples
        return _together(batches) if is_by_hand or plan.proves_splitting else list(batches)


def _together(batches: Sequence[Any]) -> list[Any]:
    """Return the batches joined into one if their samples have equal shapes; else unchanged."""
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
    """Return shape per sample, dtype and device; None for a scalar."""
    return (tensor.shape[1:], tensor.dtype, tensor.device) if tensor.dim() else None
