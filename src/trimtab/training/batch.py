"""Operations on batches: count and select samples, split, move to a device, rebuild containers.

A batch is any nesting of mappings, lists, tuples and dataclasses. The module `sample_count` determines which
parts of a batch belong to which sample. Objects of unknown classes pass through unchanged, except for a move to the
device by their own `to` method.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import BatchError, ValueGivenError
from trimtab.training import sample_count as of_batch
from trimtab.training.sample_count import SampleCount, is_leaf, leaf_samples, set_fields

_LEAVES = of_batch.PLAIN | {Tensor}
_DEPTH = 4  # Depth of the search for tensors in the attributes of objects.


class EmptyBatch:
    """Placeholder that a loader yields instead of a batch on a rank without samples of that batch."""


def iterate(field: str, batches: Any) -> Iterator[Any]:
    """Return an iterator over batches; raise `BatchError` if `batches` is not iterable."""
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise BatchError(
            field, got=f"a {type(batches).__name__}", expected="an iterable of batches, such as a DataLoader"
        )
    return iter(batches)


def _flat(batch: Any) -> Collection[Tensor] | None:
    """Return the tensors of a flat tuple, list or dict of tensors, the most common batch; None for other batches."""
    kind = type(batch)
    items: Collection[Tensor]
    if kind is tuple or kind is list:
        items = batch
    elif kind is dict:
        items = batch.values()
    else:
        return None
    for each in items:
        if type(each) is not Tensor:
            return None
    return items


# Selection of samples.


def _part(batch: Any, taken: Callable[[Any], Any], samples: int) -> Any:
    """Return a batch with `taken` applied to each leaf with a sample dimension."""
    kind = type(batch)
    if _flat(batch) is not None and (kind is not list or of_batch.quick_samples(batch)):
        items = [taken(each) if each.ndim else each for each in (batch.values() if kind is dict else batch)]
        return dict(zip(batch, items, strict=True)) if kind is dict else kind(items)
    return _map(batch, lambda leaf: taken(leaf) if leaf_samples(leaf, samples) else leaf, samples=samples, taken=taken)


def samples_at(batch: Any, indices: Sequence[int]) -> Any:
    """Return the samples at the given indices, in the memory layout of the batch.

    Args:
        indices: as many indices as the batch has samples; repetitions are allowed.

    Raises:
        BatchError: the samples of the batch are unknown, or it cannot be split.
    """
    reading = of_batch.read_sample_count(batch)
    if reading.samples is None or not reading.is_splittable:
        raise not_splittable(reading.reason)

    def taken(leaf: Any) -> Any:
        if isinstance(leaf, list | tuple):
            return type(leaf)(leaf[index] for index in indices)
        if isinstance(leaf, np.ndarray):
            return leaf[list(indices)]
        found = leaf[torch.tensor(indices, device=leaf.device)]
        if found.stride() == leaf.stride() or min(leaf.stride()) <= 0:
            return found
        laid_out = torch.empty_strided(found.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return laid_out.copy_(found)

    return _part(batch, taken, reading.samples)


def not_splittable(reason: str) -> BatchError:
    """Return the error for a batch whose samples cannot be separated."""
    return BatchError(
        "batch",
        got=f"a batch that cannot be split ({reason})",
        expected="samples along the first dimension of every tensor and list",
        hint="Pass functions as count= and split= to trimtab.start: count(batch) and split(batch, start, stop). Or use "
        "a micro-batch as large as the batch.",
        code="batch.not_splittable",
    )


# Devices and containers.


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on `device`; the batch itself if nothing has to move."""
    tensors, others = _flat(batch), list[Any]()
    if tensors is None:
        tensors, others = _contents(batch)
    for tensor in tensors:
        if tensor.device != device:
            return _map(batch, lambda leaf: _moved(leaf, device))
    return _map(batch, lambda leaf: _moved(leaf, device)) if any(map(_is_movable, others)) else batch


def _is_movable(leaf: Any) -> bool:
    return not is_leaf(leaf) and callable(getattr(leaf, "to", None))


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    if not _is_movable(leaf):
        return leaf
    try:
        return leaf.to(device)
    except Exception as error:  # `to` is code of another package.
        name = type(leaf).__name__
        raise BatchError(
            "batch",
            problem=f"A {name} of the batch could not be moved to {device}: {name}.to raised {type(error).__name__}: "
            f"{error}.",
            hint="Move the object to the device in the loader's collate function.",
            code="batch.move_failed",
        ) from error


def with_new_containers(batch: Any) -> Any:
    """Return the same tensors in new containers, so that a loss may remove items from the batch.

    Immutable containers of tensors are returned unchanged.
    """
    if type(batch) is Tensor:
        return batch
    if _flat(batch) is not None:
        return batch if type(batch) is tuple else batch.copy()
    return _renewed(batch)


def _renewed(value: Any) -> Any:
    """Return new containers with the same leaves, without a call per constant for most batches."""
    kind = type(value)
    if kind is dict:
        return {key: item if type(item) in _LEAVES else _renewed(item) for key, item in value.items()}
    if kind is not list and kind is not tuple:
        return _map(value, lambda leaf: leaf.copy() if type(leaf) is list else leaf)
    kinds: set[Any] = set(map(type, value))
    if kinds <= _LEAVES:
        return kind(value)
    if len(kinds) == 1 and of_batch.is_plain(value):
        (each,) = kinds
        return kind(value) if each is tuple else kind(map(each.copy, value))
    return kind([item if type(item) in _LEAVES else _renewed(item) for item in value])


def deep_copy(batch: Any) -> Any:
    """Return a deep copy of a batch: tensors, arrays, and objects that can be copied."""
    return _map(batch, _copy)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, np.ndarray | list):
        return leaf.copy()
    if is_leaf(leaf):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # Iterators and open files are passed on as they are.
        return leaf


# Contents.


def _contents(batch: Any) -> tuple[list[Tensor], list[Any]]:
    """Return all tensors of a batch, and its objects of unknown classes."""
    tensors: list[Tensor] = []
    others: list[Any] = []

    def collect(value: Any) -> None:
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
        elif kind is dict:
            for item in value.values():
                collect(item)
        elif kind is list or kind is tuple:
            if not value or type(value[0]) is Tensor or not of_batch.is_plain(value):
                for item in value:
                    collect(item)
        elif kind not in of_batch.PLAIN:
            for _, leaf in of_batch.leaves(value):
                if isinstance(leaf, Tensor):
                    tensors.append(leaf)
                elif not is_leaf(leaf):
                    others.append(leaf)

    collect(batch)
    return tensors, others


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Return an iterator over the tensors of a batch, including tensors in attributes of unknown objects."""
    if (flat := _flat(batch)) is not None:
        return iter(flat)
    tensors, others = _contents(batch)
    _collect_of(others, tensors, _DEPTH)
    return iter(tensors)


def _collect_of(objects: Iterable[Any], tensors: list[Tensor], depth: int) -> None:
    """Append the tensors in attributes of objects to `tensors`."""
    for each in objects if depth else ():
        if not isinstance(each, type):
            for value in getattr(each, "__dict__", {}).values():
                found, others = _contents(value)
                tensors += found
                _collect_of(others, tensors, depth - 1)


def versions_of(batch: Any) -> tuple[int, ...]:
    """Return version counters of a batch's tensors, to detect in-place changes."""
    tensors = list(tensors_in(batch))
    try:
        return tuple([tensor._version for tensor in tensors])
    except RuntimeError:  # Tensors made in inference mode have no version counter.
        return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def checksum(batch: Any) -> int:
    """Return a positive checksum of a batch's tensors; 0 if no tensor has several elements. Synchronises."""
    found = 0
    for tensor in tensors_in(batch):
        if tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() > 1:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            found = zlib.crc32(real.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def holds_nan(batch: Any) -> bool:
    """Return True if a batch contains NaN. Infinite values are accepted, as masks contain them. Synchronises."""
    floats = (tensor for tensor in tensors_in(batch) if tensor.is_floating_point())
    return any(bool(torch.isnan(_values(tensor)).any()) for tensor in floats)


def _values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as a dense tensor, for operators that sparse and nested tensors lack."""
    if tensor.is_nested:
        return torch.cat([each.flatten() for each in tensor.unbind()])
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.values() if tensor.layout is not torch.strided else tensor


# Traversal.


def map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same structure with `function` applied to each leaf; objects of unknown classes are leaves."""
    return _map(batch, function)


def _map(
    value: Any,
    function: Callable[[Any], Any],
    *,
    samples: int | None = None,
    taken: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the same structure with `function` applied to each leaf.

    Args:
        samples: number of samples of the batch, if a part of the samples is selected; else None.
        taken: applied to lists and tuples with one item per sample.
    """
    each = functools.partial(_map, function=function, samples=samples, taken=taken)
    if is_leaf(value):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: each(item) for key, item in value.items()}
        return items if type(value) is dict else _rebuild_mapping(value, items)
    if of_batch.is_named_tuple(value):
        return type(value)(*map(each, value))
    if of_batch.is_dataclass(value):
        return _rebuild_dataclass(value, each, is_part=samples is not None)
    if not of_batch.is_sequence(value):
        return function(value)
    if samples is not None and taken is not None and of_batch.is_list_of_rows(value, samples):
        return taken(value)
    return type(value)(map(each, value))


def _rebuild_dataclass(original: Any, each: Callable[[Any], Any], *, is_part: bool) -> Any:
    """Return a copy of a dataclass instance with new field values, without calling the constructor.

    Cached properties are left out. A part of the samples also lacks tensors outside of fields, which belong to the
    whole batch: a loss that needs the tensor computes a new tensor or fails.
    """
    made, fields, kind = copy.copy(original), set_fields(original), type(original)
    for name, value in list(getattr(made, "__dict__", {}).items()):
        if isinstance(getattr(kind, name, None), functools.cached_property):
            del made.__dict__[name]
        elif name not in fields and isinstance(value, Tensor):
            if not is_part:
                made.__dict__[name] = each(value)
            elif hasattr(kind, name):  # The attribute of the class would silently replace the tensor.
                raise BatchError(
                    "batch",
                    problem=f"{kind.__name__}.{name} is a tensor but not a field of the dataclass, so that it cannot "
                    "be split into micro-batches.",
                    got=f"{kind.__name__}.{name}",
                    hint=f"Declare {name} as a field of {kind.__name__}, or compute it in the loss function.",
                    code="batch.tensor_no_field",
                )
            else:
                del made.__dict__[name]
    for name in fields:  # Frozen dataclasses need `object.__setattr__`.
        object.__setattr__(made, name, each(getattr(original, name)))
    return made


def _rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class with new values; a dict if the class does not allow this."""
    try:
        if not isinstance(original, MutableMapping):
            return type(original)(items)  # type: ignore[call-arg]
        made = copy.copy(original)
        for key, item in items.items():
            made[key] = item
    except Exception:  # For example a class that fixes the sizes of its tensors.
        return items
    return made


# Counting and splitting, by containers or by functions of the user.

Count = Callable[[Any], int]
Split = Callable[[Any, int, int], Any]
UNKNOWN = "batch.samples_unknown"


@dataclass(frozen=True)
class BatchSplitting:
    """Counts the samples of a batch and splits it.

    Args:
        count: `count(batch)` -> number of samples; None reads it from the containers (`sample_count`).
        split: `split(batch, start, stop)` -> batch of the samples from `start` to `stop`; None slices the containers.

    Raises:
        ValueGivenError: an argument is not callable.
    """

    count: Count | None = None
    split: Split | None = None

    def __post_init__(self) -> None:
        for name, expected in (("count", "count(batch) -> samples"), ("split", "split(batch, start, stop) -> batch")):
            value = getattr(self, name)
            if value is not None and not callable(value):
                given = f"a {type(value).__name__}"
                raise ValueGivenError(name, got=given, expected=f"a function {expected}", code=f"{name}.not_callable")

    def read(self, batch: Any) -> SampleCount:
        """Return the number of samples of a batch and whether the batch can be split.

        Raises:
            BatchError: the batch has no samples, or `count` raised or returned something else than a positive int.
        """
        reading = of_batch.read_sample_count(batch)
        if self.count is not None:
            samples = self._counted(self.count, batch)
            if reading.samples != samples:
                found = "unclear" if reading.samples is None else reading.samples
                reason = f"count(batch) returned {samples}, but the number found in its tensors is {found}; "
                reading = SampleCount(samples, reason=f"{reason}split=function is needed", code="samples.count_differs")
        if reading.samples == 0:
            raise BatchError(
                "batch",
                got="a batch of 0 samples",
                expected="at least one sample",
                hint="Skip empty batches in the loader, because a mean over no samples is NaN.",
                code="batch.no_samples",
            )
        if self.split is not None and reading.samples is not None:
            return SampleCount(reading.samples, is_splittable=True)
        return reading

    def require(self, batch: Any, field: str = "batch") -> int:
        """Return the number of samples of a batch.

        Raises:
            BatchError: the number is unknown (code "batch.samples_unknown"), or `read` raises.
        """
        reading = self.read(batch)
        if reading.samples is None:
            raise samples_unknown(field, reading.reason)
        return reading.samples

    def slices(self, batch: Any, samples: int, micro_batch: int, *, is_read: bool = False) -> Iterator[tuple[Any, int]]:
        """Yield (micro-batch, number of samples) in order; the last may be smaller. Tensors are views.

        Args:
            is_read: True if `read` found that the batch can be split.

        Raises:
            BatchError: the batch cannot be split, or `split` returned an unexpected number of samples.
        """
        if samples <= micro_batch:
            yield batch, samples
            return
        if self.split is None and not is_read:
            _require_splittable(batch, samples)
        for start in range(0, samples, micro_batch):
            stop = min(start + micro_batch, samples)
            yield self._selected(batch, start, stop, samples), stop - start

    def part(self, batch: Any, start: int, stop: int, samples: int) -> Any:
        """Return the samples from `start` to `stop` of a batch of `samples` samples; raises as `slices`."""
        if self.split is None:
            _require_splittable(batch, samples)
        return self._selected(batch, start, stop, samples)

    def _selected(self, batch: Any, start: int, stop: int, samples: int) -> Any:
        if self.split is None:
            return _part(batch, lambda leaf: leaf[start:stop], samples)
        try:
            found = self.split(batch, start, stop)
        except Exception as error:
            raise _failed("split", f"split(batch, {start}, {stop})", error) from error
        if self.count is not None and (size := self._counted(self.count, found)) != stop - start:
            raise BatchError(
                "split",
                problem=f"split(batch, {start}, {stop}) returned {size} samples (by count) instead of {stop - start}.",
                hint="Return the samples with indices start to stop - 1 as a batch.",
                code="batch.split_invalid",
            )
        return found

    def _counted(self, count: Count, batch: Any) -> int:
        try:
            found = count(batch)
        except Exception as error:
            raise _failed("count", "count(batch)", error) from error
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise BatchError(
                "count",
                got=f"{found!r:.80} from count(batch)",
                expected="a positive int, the number of samples of the batch",
                hint="Return len(batch), or the length of one of its tensors.",
                code="batch.count_invalid",
            )
        return found


BY_CONTAINERS = BatchSplitting()


def samples_unknown(field: str, reason: str) -> BatchError:
    """Return the error for a batch whose number of samples is needed but unknown."""
    return BatchError(
        field,
        got=f"a batch with an unknown number of samples ({reason})",
        expected="the same number of samples in every tensor and list",
        hint="Pass count=function to trimtab.plan and trimtab.start; count(batch) returns the number of samples.",
        code=UNKNOWN,
    )


def of_same_size(longest: Any, example: Any, batching: BatchSplitting = BY_CONTAINERS) -> Any:
    """Return `longest`, a batch with the longest sequences; `ValueGivenError` if `example` has other samples."""
    samples, expected = batching.read(longest).samples, batching.read(example).samples
    if None not in (samples, expected) and samples != expected:
        raise ValueGivenError(
            "longest_batch",
            got=f"{samples} samples",
            expected=f"{expected} samples, the size of example_batch",
            hint="If the loader's batches vary in size, pass the largest batch as example_batch, without "
            "longest_batch.",
            code="longest_batch.size",
        )
    return longest


def _require_splittable(batch: Any, samples: int) -> None:
    """Raise `BatchError` if the containers of a batch do not show which parts belong to which sample."""
    reading = of_batch.read_sample_count(batch)
    if reading.samples != samples or not reading.is_splittable:
        raise not_splittable(reading.reason or f"its tensors have {reading.samples} samples, not {samples}")


def _failed(field: str, call: str, error: Exception) -> BatchError:
    return BatchError(
        field,
        problem=f"The function passed as {field}= failed: {call} raised {type(error).__name__}: {error}.",
        hint=f"Pass a {field} function that accepts every batch of the loader.",
        code=f"batch.{field}_failed",
    )
