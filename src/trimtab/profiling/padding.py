"""Padding tokens of batches of text, counted from attention masks or from ignored labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.plans.profile import PaddingCount
from trimtab.training.batch import tensors_in

_IGNORED = -100  # torch's default `ignore_index` of cross-entropy, and the label of padding in Transformers
_INTEGERS = (torch.int64, torch.int32)
_LEAST_RUN = 2  # A single ignored label at the end of a sample is usual for shifted labels, and no padding.


class PaddingCounter:
    """Sum of the padding tokens over batches. A batch without a recognizable padding is left out."""

    def __init__(self) -> None:
        self._tokens = self._padding = self._fixed = self._num_batches = 0
        self._source = ""

    def add(self, batch: Any) -> None:
        """Count the padding of a batch; the first countable batch determines the source of all."""
        found = _of_mask(batch), _of_labels(batch)
        for source, is_padding in zip(("attention_mask", "labels"), found, strict=True):
            if is_padding is None or self._source not in ("", source):
                continue
            self._tokens += is_padding.numel()
            self._padding += int(is_padding.sum())
            self._fixed += int(is_padding.all(0).sum()) * len(is_padding)
            self._num_batches, self._source = self._num_batches + 1, source
            return

    def result(self, library: str) -> PaddingCount | None:
        """Return the sum; None if no batch was counted."""
        if not self._num_batches:
            return None
        return PaddingCount(self._tokens, self._padding, self._fixed, self._num_batches, self._source, library)


def text_library(model: nn.Module, loader: Any) -> str:
    """Return "trl" or "transformers" if the library provides the collate function or a module of the model, or ""."""
    collate = getattr(loader, "collate_fn", None)
    kinds = (type(collate), collate, *map(type, model.modules()))
    packages = {(getattr(kind, "__module__", None) or "").partition(".")[0] for kind in kinds}
    return next((name for name in ("trl", "transformers") if name in packages), "")


def _of_mask(batch: Any) -> Tensor | None:
    """Return the padding positions (samples, tokens) by a mask that is 0 at padding and 1 at tokens."""
    masks = (_attention_mask(each) for each in (batch, *(batch if isinstance(batch, list | tuple) else ())))
    mask = next((each for each in masks if each is not None), None)
    if mask is None or mask.dim() != 2 or not mask.numel():
        return None
    # Other masks, such as a causal mask (tokens, tokens), have no entry for each token of the batch.
    integers = [each for each in tensors_in(batch) if each is not mask and each.dtype in _INTEGERS]
    if not any(each.shape == mask.shape for each in integers):
        return None
    is_padding = mask == 0
    # An additive mask has large negative values; the mask of packed samples may count them, as 1, 2 and 3.
    return is_padding if bool((mask >= 0).all()) else None


def _attention_mask(value: Any) -> Tensor | None:
    mask = value.get("attention_mask") if isinstance(value, Mapping) else getattr(value, "attention_mask", None)
    return mask if isinstance(mask, Tensor) and _is_dense(mask) else None


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _of_labels(batch: Any) -> Tensor | None:
    """Return the padding positions by labels: runs of ignored labels over a repeated token at an end of a sample.

    Ignored labels alone do not show padding, because the tokens of a prompt are often ignored too.
    """
    tensors = [each for each in tensors_in(batch) if _is_dense(each) and each.dim() == 2 and each.numel()]
    tensors = [each for each in tensors if each.dtype in _INTEGERS]
    labels = next((each for each in tensors if bool((each == _IGNORED).any())), None)
    if labels is None:
        return None
    tokens = next((each for each in tensors if each is not labels and each.shape == labels.shape), None)
    if tokens is None:
        return None
    at_end = _run_at_end(tokens, labels)
    at_start = _run_at_end(tokens.flip(1), labels.flip(1)).flip(1)
    return at_end | at_start


def _run_at_end(tokens: Tensor, labels: Tensor) -> Tensor:
    """Return a mask of the run at the end of each row that repeats the row's last token under ignored labels."""
    is_alike = (labels == _IGNORED) & (tokens == tokens[:, -1:])
    run = is_alike.flip(1).cumprod(1).flip(1).bool()
    return run & (run.sum(1, keepdim=True) >= _LEAST_RUN)
