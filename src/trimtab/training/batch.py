"""Operations on batches: count and select samples, split, move to a device, rebuild containers.

A batch is any nesting of mappings, lists, tuples and dataclasses. The module `sample_count` determines which
parts of a batch belong to which sample. Objects of unknown classes pass through unchanged, except for a move to the
device by their own `to` method.
"""

from __future__ import annotations

import copy
import functools
import warnings
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import BatchError, ValueGivenError
from trimtab.training import sample_count as of_batch
from trimtab.training.sample_count import SampleCount, is_image, is_leaf, leaf_samples, set_fields


class NestedLists:
    """Decides on copying nested lists for the loss, by checking for in-place changes.

    A batch of texts may hold thousands of word lists, and copying them may take longer than a small step. Micro-batches
    1, 2, 4, 8, ... of a run get copies, which are compared with the originals after the backward. Other micro-batches
    get the originals, as in a plain loop. Once a copy was changed, all later micro-batches get copies.

    Attributes:
        are_copied: True if the next micro-batch gets copies.
        is_used: True if the current micro-batch has nested containers, so that `returned` must be called.
    """

    def __init__(self) -> None:
        self.are_copied, self._are_changed, self.is_used = True, False, False
        self._number = 1  # Number of the next micro-batch.
        self._pairs: list[tuple[Sequence[Any], list[Any]]] = []

    def copies_of(self, items: Sequence[Any], kind: Any) -> list[Any]:
        """Return copies of lists or dicts, and keep them for comparison."""
        copies = list(map(kind.copy, items))
        self._pairs.append((items, copies))
        return copies

    def returned(self) -> None:
        """Compare the copies with the originals, after the loss and its backward."""
        pairs, self._pairs, self.is_used = self._pairs, [], False
        if not self._are_changed:
            self._are_changed = any(list(items) != copies for items, copies in pairs)
        self._number += 1
        self.are_copied = self._are_changed or not self._number & (self._number - 1)

    def dropped(self) -> None:
        """Drop the copies of a micro-batch whose loss raised."""
        self._pairs, self.is_used = [], False


Batch = Any
_LEAVES = of_batch.PLAIN | {Tensor}
_LONG = 16  # Lists from this length on are copied deeply only if a loss changes them in place.
_DEPTH = 4  # Depth of the search for tensors in the attributes of objects.


def flat_samples(batch: Any) -> int:
    """Return the number of samples of a flat tuple, list or dict of dense tensors of equal length; else 0."""
    kind = type(batch)
    if kind is dict:
        items = batch.values()
    elif kind is tuple or kind is list:
        items = batch
    else:
        return 0
    samples, is_images = 0, kind is list
    for each in items:
        if type(each) is not Tensor or not each.dim() or (samples and each.size(0) != samples):
            return 0
        if each.layout is not torch.strided or each.is_nested:
            return 0
        samples, is_images = each.size(0), is_images and is_image(each)
    return 0 if is_images else samples


def part(batch: Batch, chosen: slice, samples: int) -> Batch:
    """Return a slice of a batch that has `samples` samples. Tensors are views."""
    return _part(batch, lambda leaf: leaf[chosen], samples)


def samples_at(batch: Batch, indices: Sequence[int]) -> Batch:
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


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on `device`; the batch itself if nothing has to move."""
    if contents_of(batch).are_on(device):
        return batch
    return _map(batch, lambda leaf: _moved(leaf, device))


def _flat(batch: Batch) -> Collection[Tensor] | None:
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


def with_new_containers(batch: Batch, inner: NestedLists | None = None, contents: BatchContents | None = None) -> Batch:
    """Return the same tensors in new containers, so that a loss may remove items from its batch.

    Immutable containers of tensors are returned as they are.

    Args:
        inner: decides on copying nested lists; None always copies.
        contents: contents of the batch, if known.
    """
    if type(batch) is Tensor:
        return batch
    if _flat(batch) is not None:
        return batch if type(batch) is tuple else batch.copy()
    if inner is not None:
        inner.is_used = True
    shared: Container[int] = () if inner is None or inner.are_copied or contents is None else contents.long_lists
    return _renewed(batch, inner, shared)


def handed_out(
    batch: Batch, device: torch.device, inner: NestedLists | None = None, contents: BatchContents | None = None
) -> Batch:
    """Return a micro-batch for the loss: on the device, in new containers. Arguments as for `with_new_containers`."""
    given = with_new_containers(batch, inner, contents)
    return given if contents is not None and contents.are_on(device) else to_device(given, device)


def _renewed(value: Any, inner: NestedLists | None, shared: Container[int]) -> Any:
    """Return new containers with the same leaves, avoiding a visit of each constant for most batches."""
    kind = type(value)
    if kind is dict:
        return {k: item if type(item) in _LEAVES else _renewed(item, inner, shared) for k, item in value.items()}
    if kind is not list and kind is not tuple:
        return _map(value, _unchanged)
    if id(value) in shared:
        return kind(value)
    kinds: set[Any] = set(map(type, value))
    if kinds <= _LEAVES:
        return kind(value)
    if kinds in ({list}, {dict}, {tuple}) and of_batch.levels_of_constants(value, 2):
        (each,) = kinds
        watched = inner if len(value) >= _LONG else None
        if each is tuple or (watched is not None and not watched.are_copied):
            return kind(value)
        return kind(map(each.copy, value) if watched is None else watched.copies_of(value, each))
    if kinds == {dict}:  # For example boxes and labels of a detection task.
        leaves = _LEAVES.issuperset
        return kind([d.copy() if leaves(map(type, d.values())) else _renewed(d, inner, shared) for d in value])
    return kind([_renewed(item, inner, shared) for item in value])


def _unchanged(leaf: Any) -> Any:
    return leaf.copy() if type(leaf) is list else leaf


def deep_copy(batch: Batch) -> Batch:
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


class EmptyBatch:
    """Placeholder that a loader yields instead of a batch on a rank without samples of that batch."""


class BatchContents(NamedTuple):
    """Tensors and other contents of a batch.

    Args:
        tensors: all tensors.
        others: objects of unknown classes.
        long_lists: long lists or tuples of lists or dicts of constants, by `id`, valid while the batch exists.
    """

    tensors: list[Tensor]
    others: list[Any]
    long_lists: dict[int, Any]

    def are_on(self, device: torch.device) -> bool:
        """Return True if nothing has to move to `device`."""
        for tensor in self.tensors:
            if tensor.device != device:
                return False
        return not any(map(_is_movable, self.others))

    def versions(self) -> tuple[int, ...]:
        """Return the version counters of all tensors, including tensors within objects, and the sizes of long lists."""
        tensors = self.tensors
        if self.others:
            tensors = tensors.copy()
            _collect_of(self.others, tensors, _DEPTH)
        sizes = [sum(map(len, each)) for each in self.long_lists.values()]
        try:
            return *[tensor._version for tensor in tensors], *sizes
        except RuntimeError:  # Tensors made in inference mode have no version counter.
            return *(-1 if tensor.is_inference() else tensor._version for tensor in tensors), *sizes


def contents_of(batch: Batch) -> BatchContents:
    """Return the tensors, objects and long lists of a batch."""
    contents = BatchContents([], [], {})
    _collect(batch, contents)
    return contents


def tensors_in(batch: Batch) -> Iterator[Tensor]:
    """Return an iterator over the tensors of a batch, including tensors in attributes of unknown objects."""
    contents = contents_of(batch)
    _collect_of(contents.others, contents.tensors, _DEPTH)
    return iter(contents.tensors)


def _collect_of(objects: Iterable[Any], tensors: list[Tensor], depth: int) -> None:
    """Append the tensors in attributes of objects to `tensors`."""
    for each in objects if depth else ():
        if not isinstance(each, type):
            for value in getattr(each, "__dict__", {}).values():
                contents = contents_of(value)
                tensors += contents.tensors
                _collect_of(contents.others, tensors, depth - 1)


def _collect(value: Any, contents: BatchContents) -> None:
    kind = type(value)
    if kind is dict:
        items: Iterable[Any] = value.values()
    elif kind is list or kind is tuple:
        if value and type(value[0]) is not Tensor and (levels := of_batch.levels_of_constants(value)):
            if levels == 2 and len(value) >= _LONG:
                contents.long_lists[id(value)] = value
            return
        items = value
    else:
        for _, leaf in of_batch.leaves(value):
            if isinstance(leaf, Tensor):
                contents.tensors.append(leaf)
            elif not is_leaf(leaf):
                contents.others.append(leaf)
        return
    for item in items:
        kind = type(item)
        if kind is Tensor:
            contents.tensors.append(item)
        elif kind is dict:  # Handled without a call per item, which matters for boxes and labels.
            for each in item.values():
                if type(each) is Tensor:
                    contents.tensors.append(each)
                elif type(each) not in of_batch.PLAIN:
                    _collect(each, contents)
        elif kind not in of_batch.PLAIN:
            _collect(item, contents)


def versions_of(batch: Batch) -> tuple[int, ...]:
    """Return version counters of a batch's tensors and sizes of its long lists, to detect in-place changes."""
    return contents_of(batch).versions()


def checksum(batch: Batch) -> int:
    """Return a positive checksum of a batch's tensors; 0 if no tensor has several elements. Synchronises."""
    found = 0
    for tensor in tensors_in(batch):
        if tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() > 1:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            found = zlib.crc32(real.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def holds_nan(batch: Batch) -> bool:
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


def iterate(field: str, batches: Any) -> Iterator[Batch]:
    """Return an iterator over batches.

    Raises:
        BatchError: `batches` is not iterable.
    """
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise BatchError(
            field, got=f"a {type(batches).__name__}", expected="an iterable of batches, such as a DataLoader"
        )
    return iter(batches)


def _part(batch: Batch, taken: Callable[[Any], Any], samples: int) -> Batch:
    """Return a batch in which `taken` was applied to each leaf that has a sample dimension."""
    if flat_samples(batch):
        if type(batch) is dict:
            return {name: taken(tensor) for name, tensor in batch.items()}
        return type(batch)(map(taken, batch))
    return _map(batch, lambda leaf: taken(leaf) if leaf_samples(leaf, samples) else leaf, samples=samples, taken=taken)


def map_leaves(batch: Batch, function: Callable[[Any], Any]) -> Batch:
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

    Args:
        is_part: True if the copy has a part of the samples. Cached properties and tensors outside of fields belong to
            the whole batch and are left out, with a warning. A loss that needs such a tensor computes a new one or
            fails.

    Raises:
        BatchError: a class attribute of the same name would silently replace a tensor that is left out.
    """
    made, fields = copy.copy(original), set_fields(original)
    for name, value in list(getattr(made, "__dict__", {}).items()):
        if _is_cached(made, name):
            del made.__dict__[name]
        elif name not in fields and isinstance(value, Tensor):
            if not is_part:
                made.__dict__[name] = each(value)
            else:
                _leave_out(made, name)
    for name in fields:  # Frozen dataclasses need `object.__setattr__`.
        object.__setattr__(made, name, each(getattr(original, name)))
    return made


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), functools.cached_property)


def _leave_out(part: Any, name: str) -> None:
    kind = type(part)
    if hasattr(kind, name):
        raise BatchError(
            "batch",
            problem=f"{kind.__name__}.{name} is a tensor but not a field of the dataclass, so that it cannot be split "
            "into micro-batches.",
            got=f"{kind.__name__}.{name}",
            hint=f"Declare {name} as a field of {kind.__name__}, or compute it in the loss function.",
            code="batch.tensor_no_field",
        )
    del part.__dict__[name]
    _warn_of_no_field(kind, name)  # type: ignore[arg-type]  # a class is hashable


@functools.cache  # Once per field, not per micro-batch.
def _warn_of_no_field(kind: type, name: str) -> None:
    warnings.warn(
        f"{kind.__name__}.{name} is a tensor but not a field of the dataclass, so that micro-batches do not have it. "
        f"Declare {name} as a field of {kind.__name__}, or compute it in the loss function.",
        stacklevel=2,
    )


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


Count = Callable[[Any], int]
Split = Callable[[Any, int, int], Any]
UNKNOWN = "batch.samples_unknown"
_WAY_OUT = "Pass count=function to trimtab.plan and trimtab.start; count(batch) returns the number of samples."


@dataclass(frozen=True)
class BatchSplitting:
    """Counts the samples of a batch and splits it.

    Args:
        count: `count(batch)` -> number of samples; None reads it from the containers (`samples.read`).
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
        if self.count is None and self.split is None and (samples := flat_samples(batch)):
            return SampleCount(samples, is_splittable=True)
        reading = of_batch.read_sample_count(batch)
        if self.count is not None:
            samples = self._counted(self.count, batch)
            if reading.samples != samples:
                found = "unclear" if reading.samples is None else reading.samples
                reason = f"count(batch) returned {samples}, but the number found in its tensors is {found}"
                reading = SampleCount(
                    samples, reason=f"{reason}; split=function is needed", code="samples.count_differs"
                )
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
            found = part(batch, slice(start, stop), samples) if self.split is None else self._split(batch, start, stop)
            yield found, stop - start

    def part(self, batch: Any, start: int, stop: int, samples: int) -> Any:
        """Return the samples from `start` to `stop` of a batch of `samples` samples.

        Raises:
            BatchError: the batch cannot be split, or `split` returned an unexpected number of samples.
        """
        if self.split is None:
            _require_splittable(batch, samples)
            return part(batch, slice(start, stop), samples)
        return self._split(batch, start, stop)

    def _split(self, batch: Any, start: int, stop: int) -> Any:
        assert self.split is not None
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
            given = f"{found!r:.80} from count(batch)"
            expected = "a positive int, the number of samples of the batch"
            hint = "Return len(batch), or the length of one of its tensors."
            raise BatchError("count", got=given, expected=expected, hint=hint, code="batch.count_invalid")
        return found


BY_CONTAINERS = BatchSplitting()


def samples_unknown(field: str, reason: str) -> BatchError:
    """Return the error for a batch whose number of samples is needed but unknown."""
    given = f"a batch with an unknown number of samples ({reason})"
    expected = "the same number of samples in every tensor and list"
    return BatchError(field, got=given, expected=expected, hint=_WAY_OUT, code=UNKNOWN)


def of_same_size(longest: Any, example: Any, batching: BatchSplitting = BY_CONTAINERS) -> Any:
    """Return `longest`, a batch with the longest sequences, after checking its number of samples.

    Raises:
        ValueGivenError: `longest` and `example` differ in their number of samples.
    """
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
    if of_batch.quick_samples(batch) == samples:
        return
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
