"""Check of a model's parameters for NaN and infinity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def nonfinite_parameter(model: nn.Module) -> str | None:
    """Return the name of the first non-finite parameter, or None.

    Synchronizes each device once and allocates a scalar per parameter, so it suits saves and ends of runs, not every
    step. For a sharded parameter, only this rank's shard is checked.
    """
    return first_nonfinite(model.named_parameters())


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with a NaN or infinite value, or None."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    with torch.no_grad():
        for name, values in named:
            for local in _local(values):
                # The infinity norm is NaN if any value is NaN. Unlike isfinite(), it needs no mask of the tensor's
                # size.
                largest = torch.linalg.vector_norm(local, ord=float("inf"))
                by_device.setdefault(local.device, []).append((name, torch.isfinite(largest)))
        for found in by_device.values():
            finite = torch.stack([is_finite for _, is_finite in found]).tolist()
            for (name, _), is_finite in zip(found, finite, strict=True):
                if not is_finite:
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
