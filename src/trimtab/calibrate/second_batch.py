"""A second batch with other values, so that proofs do not rest on the example batch alone."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from trimtab.core.errors import BatchError
from trimtab.runtime.batch import map_leaves, samples_at
from trimtab.runtime.batch_splitting import BY_CONTAINERS, BatchSplitting
from trimtab.runtime.sample_count import read_sample_count

_MOST_SCALED = 0.1


def other_values(batch: Any, samples: int, wanted: int, batching: BatchSplitting = BY_CONTAINERS) -> Any | None:
    """Return a batch with the same samples in another order and with changed values; None if indexing fails.

    Floating-point values are scaled down by individual factors of up to a tenth, which preserves signs and the range
    [0, 1]. Masks of 0 and 1, and integers (labels, token ids, lengths), are unchanged.

    Args:
        batch: batch with `samples` samples.
        samples: number of samples in `batch`.
        wanted: number of samples of the result.
        batching: counts and splits batches.
    """
    if read_sample_count(batch).samples != samples:
        return None  # Only the user's functions know the samples.
    generator = torch.Generator().manual_seed(samples)
    order = torch.randperm(samples, generator=generator).tolist()
    indices = list(itertools.islice(itertools.cycle(order), wanted))

    def scaled(tensor: Tensor) -> Tensor:
        if (
            not isinstance(tensor, Tensor)
            or not tensor.is_floating_point()
            or tensor.layout is not torch.strided
            or bool(_is_mask(tensor))
        ):
            return tensor
        factor = 1 - _MOST_SCALED * torch.rand(tensor.shape, generator=generator)
        return (tensor.detach() * factor.to(tensor.device)).to(tensor.dtype).requires_grad_(tensor.requires_grad)

    try:
        other = map_leaves(samples_at(batch, indices), scaled)
        reading = batching.read(other)
    except (BatchError, RuntimeError, TypeError, IndexError):
        return None
    return other if reading.samples == wanted and reading.is_splittable else None


def _is_mask(tensor: Tensor) -> Tensor:
    return ((tensor == 0) | (tensor == 1)).all()
