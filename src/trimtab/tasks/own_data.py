"""Task data from map-style torch datasets, read completely into tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.tasks.task import DataSource, TaskData

_WAY_OUT = (
    "Have each item be a tuple of tensors or numbers, each of one shape in all items: pad or crop in the dataset."
)
_UNCOUNTED = (
    "Give the dataset that a DataLoader draws from, or list(...) of a stream that memory holds. Data that it does not "
    "hold is no task's: train in a loop of your own, by run.windows(loader)."
)


def of_datasets(train: Dataset[Any], held_out: Dataset[Any], *, name: str, judged_samples: int = 1024) -> TaskData:
    """Read two map-style datasets once into tensors. The datasets must be deterministic.

    Args:
        train: Training dataset, with a length; items are `(input, target)` or a single tensor.
        held_out: Validation dataset, as `train`.
        name: Name of the data in reports.
        judged_samples: Samples per validation batch.

    Raises:
        ValueGivenError: A dataset has no length, no items, no access by index, items without tensors, or random items.
    """
    columns = {field: _columns(field, data) for field, data in (("train", train), ("held_out", held_out))}
    rows = validation.integer("judged_samples", judged_samples)
    judged = [column.split(rows) for column in columns["held_out"]]
    digest = hashlib.sha256()
    for column in (*columns["train"], *columns["held_out"]):
        digest.update(column.contiguous().view(torch.uint8).numpy() if column.dim() else b"")
    source = DataSource(name, f"{type(train).__name__} and {type(held_out).__name__}", digest.hexdigest())
    return TaskData(columns["train"], tuple(zip(*judged, strict=True)), source)


def _length(field: str, dataset: Any) -> int:
    """Return the number of items. Refuses a loader or an iterable dataset, which has no access by index."""
    has_items = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    try:
        rows = len(dataset)
    except TypeError:
        has_items = False
    if not has_items:
        given = f"a {type(dataset).__name__}, which has no length or no items by index"
        expected = "a dataset with both, as torch.utils.data.TensorDataset"
        raise ValueGivenError(field, got=given, expected=expected, hint=_UNCOUNTED)
    return rows


def _columns(field: str, dataset: Any) -> tuple[Tensor, ...]:
    rows = _length(field, dataset)
    if rows == 0:
        raise ValueGivenError(field, got="a dataset of no items", expected="one item or more")
    try:
        found = default_collate([dataset[index] for index in range(rows)])
    except (RuntimeError, TypeError, ValueError) as error:
        given = f"items that do not make tensors ({str(error).partition(chr(10))[0]:.120})"
        raise ValueGivenError(field, got=given, expected="items of one shape", hint=_WAY_OUT) from None
    parts = (found,) if isinstance(found, Tensor) else found
    again = default_collate([dataset[0]])
    if isinstance(parts, Mapping) or not all(isinstance(part, Tensor) for part in parts):
        given = f"items that are a {type(dataset[0]).__name__}"
        raise ValueGivenError(field, got=given, expected="tensors, or tuples of them", hint=_WAY_OUT)
    again = (again,) if isinstance(again, Tensor) else again
    if not all(_is_same(part[:1], once_more) for part, once_more in zip(parts, again, strict=True)):
        hint = "Leave augmentation to the task: TaskData(augment=...), whose chance is each row's own (SampleDraws)."
        raise ValueGivenError(field, got="items that differ when they are read again", expected="the same", hint=hint)
    return tuple(parts)


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if both tensors are equal, NaN being equal to NaN."""
    same_kind = ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return same_kind and bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())
