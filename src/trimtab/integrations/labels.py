"""Labels of a host's batches: which of them count, and where a loss is a mean over something that nobody counts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

IGNORED = -100  # a label that does not count
_LABELS = ("labels", "shift_labels")  # of which a host's version counts one


class WindowLabels:
    """What is asked of a window's labels in each of its micro-batches, and is the same in all.

    Args:
        is_known: whether these are the rows, and their labels what is counted.

    Attributes:
        batch_rows: of a batch that is not split.
    """

    def __init__(self, batches: Sequence[Any], *, is_known: bool = True) -> None:
        self._batches, self._is_known = batches, is_known
        self.batch_rows = max((len(batch["labels"]) for batch in batches if "labels" in batch), default=0)

    def is_whole(self, rows: int) -> bool:
        """Return whether so many rows are the window: where that counts nothing, it is the host's own affair."""
        return len(self._batches) <= 1 and rows >= self.batch_rows

    @functools.cached_property
    def count_in_all_rows(self) -> bool:
        """Whether something counts in every row, and so in every micro-batch; waits for the device once a window."""
        if not self._is_known:
            return False
        columns = [batch[name] for batch in self._batches for name in _LABELS if name in batch]
        if not columns or not all(isinstance(column, Tensor) and column.dim() for column in columns):
            return False
        return bool(torch.stack([_in_all_rows(column) for column in columns]).all())


def _in_all_rows(labels: Tensor) -> Tensor:
    """Return whether labels count in every row, be it of next tokens, whose first label nothing predicts."""
    counts = labels.ne(IGNORED)  # (B,) or (B, T)
    return (counts[..., 1:].flatten(1).any(-1) if counts.dim() > 1 else counts).all()


def smooths_by_itself(smoother: Any) -> bool:
    """Return whether smoothed labels are divided by what they predict, whatever the host counts, as once they were."""
    return smoother is not None and "num_items_in_batch" not in inspect.signature(type(smoother).__call__).parameters


def counts_nothing(count: Tensor | float) -> bool:
    """Return whether nothing counts in a micro-batch: a mean over that is no number, whatever a model is told.

    Waits for the device. While shapes alone are traced nobody knows, and something is taken to count.
    """
    try:
        return float(count) == 0  # weights may sum to less than one
    except DataDependentOutputException:
        return False


def labels_of(batches: Sequence[Any]) -> list[Tensor]:
    """Return the labels of batches that are classes, in each of which some may be told not to count."""
    labels = [batch["labels"] for batch in batches if "labels" in batch]
    return [each for each in labels if isinstance(each, Tensor) and not each.is_floating_point()]


def has_ignored(labels: Sequence[Tensor]) -> bool:
    """Return whether a label does not count; waits for the device."""
    return any(bool(each.eq(IGNORED).any()) for each in labels)


def counts_unpredicted(labels: Sequence[Tensor]) -> bool:
    """Return whether a first label counts, which no causal model predicts, where rows count unlike many."""
    firsts = any(each.dim() > 1 and bool(each[:, 0].ne(IGNORED).any()) for each in labels)
    return firsts and has_ignored(labels)
