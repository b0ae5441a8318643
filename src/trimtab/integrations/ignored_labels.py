"""Labels of a trainer's batches: ignored labels, and losses that average over an unknown number of labels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

IGNORED = -100  # Label value that the loss ignores.
_LABELS = ("labels", "shift_labels")  # Names of labels, one of which the trainer counts, depending on its version.


class WindowLabels:
    """Properties of a window's labels, computed once for all micro-batches.

    Args:
        batches: the batches of the window.
        is_known: True if `batches` are the samples trained on, and their labels determine the count.

    Attributes:
        batch_size: samples of the largest batch.
    """

    def __init__(self, batches: Sequence[Any], *, is_known: bool = True) -> None:
        self._batches, self._is_known = batches, is_known
        self.batch_size = max((len(batch["labels"]) for batch in batches if "labels" in batch), default=0)

    def is_whole(self, rows: int) -> bool:
        """Return True if `rows` samples are the whole window.

        The trainer itself then handles a window without labels that count.
        """
        return len(self._batches) <= 1 and rows >= self.batch_size

    @functools.cached_property
    def count_in_all_rows(self) -> bool:
        """True if every sample, and so every micro-batch, has labels that count. Synchronises once per window."""
        if not self._is_known:
            return False
        columns = [batch[name] for batch in self._batches for name in _LABELS if name in batch]
        if not columns or not all(isinstance(column, Tensor) and column.dim() for column in columns):
            return False
        return bool(torch.stack([_in_all_rows(column) for column in columns]).all())


def _in_all_rows(labels: Tensor) -> Tensor:
    """Return a tensor that is True if every sample has labels that count, without the first label of a sequence.

    A causal model does not predict the first label.
    """
    counts = labels.ne(IGNORED)  # Shape (B,) or (B, T).
    return (counts[..., 1:].flatten(1).any(-1) if counts.dim() > 1 else counts).all()


def smooths_by_itself(smoother: Any) -> bool:
    """Return True if a label smoother of an older version divides by its own count instead of the trainer's."""
    return smoother is not None and "num_items_in_batch" not in inspect.signature(type(smoother).__call__).parameters


def counts_nothing(count: Tensor | float) -> bool:
    """Return True if no label of a micro-batch counts, so that a mean over its labels is NaN. Synchronises.

    False if the count cannot be read because only shapes are traced.
    """
    try:
        return float(count) == 0  # Not int: weights may sum to less than 1.
    except DataDependentOutputException:
        return False


def labels_of(batches: Sequence[Any]) -> list[Tensor]:
    """Return the labels that are class indices, which may include ignored labels."""
    labels = [batch["labels"] for batch in batches if "labels" in batch]
    return [each for each in labels if isinstance(each, Tensor) and not each.is_floating_point()]


def has_ignored(labels: Sequence[Tensor]) -> bool:
    """Return True if a label is ignored. Synchronises."""
    return any(bool(each.eq(IGNORED).any()) for each in labels)


def counts_unpredicted(labels: Sequence[Tensor]) -> bool:
    """Return True if batches have ignored labels, and first labels of sequences count.

    A causal model does not predict the first label.
    """
    firsts = any(each.dim() > 1 and bool(each[:, 0].ne(IGNORED).any()) for each in labels)
    return firsts and has_ignored(labels)
