"""Batches: count rows, slice into micro-batches, move to a device. Any nesting of mappings, tuples, lists, dataclasses.

Leaves: a tensor with a first dimension holds one row per index; a list without such tensors holds one row per item,
which may be a dict or a tuple; 0-dim tensors, strings, numbers and None are the same for every row.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.core.errors import BatchError, ValueGivenError

Batch = Any
_CONSTANTS = (str, bytes, bool, int, float, complex, type(None))
_LEAVES = (Tensor, *_CONSTANTS)


def count_rows(batch: Batch) -> int:
    """Return the number of rows all leaves agree on.

    Raises:
        BatchError: no leaf has rows, leaves disagree, or a leaf is of a kind that cannot be sliced.
    """
    if rows := _rows_of_flat(batch):
        return rows
    sizes = {path: len(leaf) for path, leaf in _leaves(batch, "batch") if _has_rows(leaf)}
    if not sizes:
        raise BatchError(
            "batch", given=f"{type(batch).__name__} without rows", expected="tensors with a first dimension"
        )
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{path}: {size}" for path, size in list(sizes.items())[:6])
        raise BatchError(
            "batch",
            given=f"first dimensions that differ ({found})",
            expected="the same number of rows in every tensor and list",
            way_out="Put what is not per row into a 0-dim tensor, a string or a tuple of numbers.",
        )
    rows = next(iter(sizes.values()))
    if rows == 0:
        raise BatchError("batch", given="0 rows", expected="at least one row")
    return rows


def slices(batch: Batch, rows: int, micro_batch: int) -> Iterator[tuple[Batch, int]]:
    """Yield (micro-batch, its rows) in order; the last may be shorter. Tensors are views."""
    if rows <= micro_batch:
        yield batch, rows
        return
    for start in range(0, rows, micro_batch):
        stop = min(start + micro_batch, rows)
        yield row_slice(batch, slice(start, stop), of=rows), stop - start


def row_slice(batch: Batch, rows: slice, *, of: int | None = None) -> Batch:
    """Return some rows of a batch. Tensors are views.

    Args:
        of: the rows that it has, where they have been counted.
    """
    return _part(batch, lambda leaf: leaf[rows], of)


def rows_at(batch: Batch, indices: Sequence[int]) -> Batch:
    """Return as many rows as a batch has by their indices, any of them several times, laid out as its own."""

    def taken(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [leaf[index] for index in indices]
        found = leaf[torch.tensor(indices, device=leaf.device)]
        if found.stride() == leaf.stride() or min(leaf.stride()) <= 0:
            return found
        laid_out = torch.empty_strided(found.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return laid_out.copy_(found)

    return _part(batch, taken)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on `device`; the batch itself when nothing has to move."""
    for tensor in batch if _rows_of_flat(batch) else tensors_in(batch):
        if tensor.device != device:
            break
    else:
        return batch
    return _map(batch, lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf)


def tensors_in(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    return (leaf for _, leaf in _leaves(batch, "batch") if isinstance(leaf, Tensor))


def holds_nan(batch: Batch) -> bool:
    """Return whether a value of a batch, or of several, is no number; waits for the device. A mask may be infinite."""
    floats = (tensor for tensor in tensors_in(batch) if tensor.is_floating_point())
    return any(bool(torch.isnan(tensor).any()) for tensor in floats)


def iterate(field: str, batches: Any) -> Iterator[Batch]:
    """Return an iterator over batches.

    Raises:
        BatchError: there is nothing to iterate over.
    """
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise BatchError(field, given=f"a {type(batches).__name__}", expected="a loader, list or generator of batches")
    return iter(batches)


def _rows_of_flat(batch: Any) -> int:
    """Return the rows of a tuple or list of tensors of as many rows: most are one, and every window asks; else 0."""
    rows = 0
    if type(batch) is tuple or type(batch) is list:
        for each in batch:
            if type(each) is not Tensor or not each.dim() or (rows and each.size(0) != rows):
                return 0
            rows = each.size(0)
    return rows


def _has_rows(leaf: Any) -> bool:
    return leaf.dim() > 0 if isinstance(leaf, Tensor) else isinstance(leaf, list)


def _is_row_list(value: Any) -> bool:
    return type(value) is list and all(isinstance(item, _CONSTANTS) for item in value)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _LEAVES) or _is_row_list(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif _is_dataclass(value):
        for name in _set_fields(value):
            yield from _leaves(getattr(value, name), f"{path}.{name}")
    else:
        raise BatchError(
            path,
            given=f"a {type(value).__name__}, which cannot be split by rows",
            expected="tensors, nested in dicts, tuples, lists or dataclasses",
            way_out="Yield such a structure from the loader's collate function.",
        )


def _part(batch: Batch, taken: Callable[[Any], Any], rows: int | None = None) -> Batch:
    """Return a batch of what is taken of each leaf that has rows."""
    if _rows_of_flat(batch):
        return type(batch)(map(taken, batch))
    rows = count_rows(batch) if rows is None else rows
    return _map(batch, lambda leaf: taken(leaf) if _has_rows(leaf) else leaf, rows=rows)


def _is_list_of_rows(value: Any, rows: int) -> bool:
    """Return whether a list that is no leaf holds a row per item, as one of dicts, of as many items as there are rows.

    Tuples of texts in a list of another length are columns, as torch's own collate function makes them, and go whole.

    Raises:
        BatchError: it could be read either way, or is of dicts of another number, in which nothing has rows.
    """
    if type(value) is not list or not value:
        return False
    inner = [leaf for _, leaf in _leaves(value, "") if _has_rows(leaf)]
    if any(isinstance(leaf, Tensor) for leaf in inner):
        return False  # columns, each of which is cut
    if len(value) != rows:
        if inner or not all(isinstance(item, Mapping) or _is_dataclass(item) for item in value):
            return False
        raise _not_of_rows(f"a list of {len(value)} {type(value[0]).__name__}s beside {rows} rows", "one for each row")
    if inner or any(isinstance(item, tuple) and len(item) == rows for item in value):
        given = f"{rows} rows and a list of as many lists or tuples that are as long"
        raise _not_of_rows(given, "what tells rows from columns")
    return True


def _not_of_rows(given: str, expected: str) -> BatchError:
    way_out = "Make a tensor of it, or a dict of lists: what is not per row a tuple of numbers, texts or tuples."
    return BatchError("batch", given=given, expected=expected, way_out=way_out)


def _map(value: Any, function: Callable[[Any], Any], *, rows: int | None = None) -> Any:
    """Return the same structure of what a function makes of each leaf; of its rows, where `rows` says how many."""
    each = functools.partial(_map, function=function, rows=rows)
    if isinstance(value, _LEAVES) or _is_row_list(value):
        return function(value)
    if rows is not None and _is_list_of_rows(value, rows):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: each(item) for key, item in value.items()}
        return items if type(value) is dict else _rebuild_mapping(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(each, value))
    if _is_dataclass(value):
        return _rebuild_dataclass(value, each, is_part=rows is not None)
    return type(value)(map(each, value))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _set_fields(value: Any) -> list[str]:
    """Return the fields that have a value: one of `init=False` may have none."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _rebuild_dataclass(original: Any, each: Callable[[Any], Any], *, is_part: bool) -> Any:
    """Return a copy with other fields: not by its constructor, which may not take them all, or may do more.

    Args:
        is_part: of its rows: it lacks tensors that are no fields and caches, which are of the whole; a loss that
            keeps a mask on its batch makes its own, and one that needs the whole's fails. It is warned of them.

    Raises:
        BatchError: it is a part, in which such a tensor's name would stand for the class's own.
    """
    made, fields = copy.copy(original), _set_fields(original)
    for name, value in list(getattr(made, "__dict__", {}).items()):
        if _is_cached(made, name):
            del made.__dict__[name]
        elif name not in fields and isinstance(value, Tensor):
            if not is_part:
                made.__dict__[name] = each(value)
            else:
                _leave_out(made, name)
    for name in fields:  # a frozen one's too
        object.__setattr__(made, name, each(getattr(original, name)))
    return made


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), functools.cached_property)


def _leave_out(part: Any, name: str) -> None:
    kind = type(part)
    if hasattr(kind, name):
        raise BatchError(
            "batch",
            given=f"{kind.__name__}.{name}, a tensor that is no field",
            expected="tensors in fields, which are split by rows",
            way_out="Declare it as a field, or compute it in the loss.",
        )
    del part.__dict__[name]
    _warn_of_no_field(kind, name)


@functools.cache  # once for each, and not once a micro-batch
def _warn_of_no_field(kind: type, name: str) -> None:
    said = f"batch: {kind.__name__}.{name} is a tensor that is no field; parts of a batch go without it."
    warnings.warn(f"{said} A loss that asks for it makes its own or fails: declare it as a field.", stacklevel=2)


def _rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def as_many_rows(longest: Any, example: Any) -> Any:
    """Return the longest batch; raise `ValueGivenError` where it has other rows than the example has."""
    rows, expected = count_rows(longest), count_rows(example)
    if rows != expected:
        raise ValueGivenError(
            "longest_batch",
            given=f"{rows} rows",
            expected=f"the {expected} of example_batch, for which the plan is made",
            way_out="Where the loader's rows vary too, give the example_batch that asks for most, alone.",
        )
    return longest
