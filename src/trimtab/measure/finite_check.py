"""Check of a model's parameters for NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def nonfinite_parameter(model: nn.Module) -> str | None:
    """Return the name of the first non-finite parameter, or None. Of a sharded parameter, only this shard is checked.

    Synchronizes the device for every parameter, so it suits saves and ends of runs, not every step.
    """
    return first_nonfinite(model.named_parameters())


@torch.no_grad()
def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with a NaN or infinite value, or None."""
    for name, values in named:
        for local in _local(values):
            # The infinity norm is NaN if any value is NaN. Unlike isfinite(), it needs no mask of the tensor's size.
            if not math.isfinite(torch.linalg.vector_norm(local, ord=math.inf)):
                return name
    return None


def _local(values: Any) -> Iterator[Tensor]:
    """Yield the tensor to check: the local shard, or the values of a sparse tensor. Integer tensors are skipped."""
    local = values.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    if local.is_meta or not (local.is_floating_point() or local.is_complex()):
        return
    if local.is_sparse:
        local = local.coalesce().values()
    if local.numel():
        yield local.float() if local.element_size() == 1 else local  # torch has no norm of 8-bit floats
