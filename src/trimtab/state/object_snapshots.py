"""Snapshots of single objects: tensors, gradients, containers, variables and arrays, restored in place."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

from trimtab.state.iterators import has_position, iterators_in, replace_iterator

_ROOTS_OF_CONTAINERS = (OrderedDict, dict, list, set, deque, bytearray)
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()


def is_container(value: Any) -> bool:
    """Return True for a mutable container, including instances of subclasses."""
    return isinstance(value, _ROOTS_OF_CONTAINERS)


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield each container, tuple and tensor reachable from the roots once, including the roots."""
    seen: set[int] = set()
    pending = list(roots)
    while pending:
        value = pending.pop()
        if id(value) in seen or not (is_container(value) or isinstance(value, tuple | Tensor)):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, dict):
            pending.extend(value.values())
        elif not isinstance(value, Tensor):
            pending.extend(value)


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's values.

    CUDA tensors are copied to the CPU, so that the copy does not count in the GPU peak.
    """
    data = tensor.data
    return data.to("cpu", copy=True) if data.is_cuda else data.clone()


def device_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's values on its device, from which a GPU restores many times faster."""
    return tensor.data.clone()


class TensorSnapshot:
    """Snapshot of a tensor: storage, strides, values and `requires_grad`.

    Args:
        tensor: Tensor to restore later.
        copied: Function that copies the values. None stores a checksum only, which detects a change but cannot undo it.
    """

    def __init__(self, tensor: Tensor, copied: Callable[[Tensor], Tensor | None] | None = host_copy) -> None:
        self.tensor = tensor
        self._data = tensor.data
        self._version = version_of(tensor)
        self._wants_grad = tensor.requires_grad if tensor.is_leaf else None
        self._sum = checksum(self._data) if copied is None else None
        self._copy = copied(tensor) if copied is not None and can_write(tensor) and _has_memory(tensor) else None

    @property
    def is_checked_only(self) -> bool:
        """True if the snapshot is a checksum without a copy."""
        return self._sum is not None

    def has_changed(self) -> bool:
        """Return True if shape, dtype, device, values or `requires_grad` differ.

        A different memory format is not a change.
        """
        tensor, data = self.tensor, self._data
        if self._wants_grad is not None and tensor.requires_grad is not self._wants_grad:
            return True
        if tensor.shape != data.shape or tensor.dtype != data.dtype or tensor.device != data.device:
            return True
        if self._copy is not None and (same := same_values(self._copy, tensor)) is not None:
            return not same
        if self._sum is not None:
            return checksum(tensor.data) != self._sum
        return version_of(tensor) != self._version

    def restore(self) -> None:
        """Restore the tensor in place."""
        self.tensor.data = self._data
        if self._copy is not None:
            if not _has_memory(self._data):
                self._data.untyped_storage().resize_(_last_byte(self._data))
            self._data.copy_(self._copy)
        if self._wants_grad is not None and self.tensor.requires_grad is not self._wants_grad:
            self.tensor.requires_grad_(self._wants_grad)


class GradientSnapshot:
    """Snapshot of a tensor's gradient; also of a missing gradient.

    Args:
        owner: Tensor with the gradient.
        copied: Function that copies the values. If it returns None, changes are detected by the gradient's version.
    """

    def __init__(self, owner: Tensor, copied: Callable[[Tensor], Tensor | None] = host_copy) -> None:
        self._owner, self._grad = owner, owner.grad
        self._copy = None if owner.grad is None else copied(owner.grad)
        self._version = None if owner.grad is None else version_of(owner.grad)

    def has_changed(self) -> bool:
        """Return True if the gradient differs."""
        now, copy = self._owner.grad, self._copy
        if now is None or self._grad is None:
            return now is not self._grad
        if copy is None:
            return now is not self._grad or version_of(now) != self._version
        return now.shape != copy.shape or now.dtype != copy.dtype or same_values(copy, now) is False

    def restore(self) -> None:
        """Restore the gradient as the same tensor object."""
        grad, copy = self._grad, self._copy
        self._owner.grad = grad if grad is None or copy is None else grad.copy_(copy)


_NO_KEYS: dict[Any, Any] = {}


class ContainerSnapshot:
    """Snapshot of a container's items, restored in order into the same object.

    Methods of the built-in base class are called directly, to restore subclasses that refuse changes.
    """

    def __init__(self, container: Any) -> None:
        self.container = container
        self._kind: Any = type(container)
        if self._kind not in (dict, OrderedDict, list):
            self._kind = next(kind for kind in _ROOTS_OF_CONTAINERS if isinstance(container, kind))
        self.items = self._items()

    @property
    def key(self) -> Any:
        """Identity of the container."""
        return id(self.container)

    def again(self) -> ContainerSnapshot:
        """Return a new snapshot of the container."""
        return ContainerSnapshot(self.container)

    def _items(self) -> Any:
        if not self.container:  # the common case: empty dicts of hooks
            return _NO_KEYS if isinstance(self.container, dict) else ()
        if isinstance(self.container, dict):
            return dict(self._kind.items(self.container))
        return list(self._kind.__iter__(self.container))

    def changes(self) -> Iterator[Any]:
        """Yield the keys with changed values. `MISSING` is yielded for a change of the container as a whole."""
        before, now = self.items, self._items()
        if isinstance(now, dict):
            for key, value in before.items():
                if (other := now.get(key, MISSING)) is not value and not same_value(value, other):
                    yield key
            yield from (key for key in now if key not in before)
            if isinstance(self.container, OrderedDict) and list(before) != list(now) and before.keys() == now.keys():
                yield MISSING
        elif isinstance(self.container, set):
            if set(before) != set(now):
                yield MISSING
        elif len(before) != len(now) or not all(map(same_value, before, now)):
            yield MISSING

    def reader(self, key: Any) -> Callable[[], Any]:
        """Return a function that returns the current item under a key, or `MISSING`."""
        return functools.partial(self._item, key)

    def _item(self, key: Any) -> Any:
        try:
            return self._kind.__getitem__(self.container, key)
        except (KeyError, IndexError):
            return MISSING

    def exchange(self, key: Any, old: Any, new: Any) -> None:
        """Replace iterator `old` by `new` in the snapshot's item at `key` (the index, for a list)."""
        self.items[key] = replace_iterator(self.items[key], old, new)

    def restore(self) -> None:
        """Restore the items if they differ."""
        before, now = self.items, self._items()
        if _has_same_objects(before, now):
            return
        if isinstance(self.container, bytearray) and len(before) == len(now):  # a memoryview forbids resizing
            self.container[:] = bytes(before)
            return
        self._kind.clear(self.container)
        if isinstance(self.container, dict):
            for key, value in before.items():  # `update` is overridden by Counter, and shared with OrderedDict
                self._kind.__setitem__(self.container, key, value)
        elif isinstance(self.container, set):
            self._kind.update(self.container, before)
        else:
            self._kind.extend(self.container, before)


def _has_same_objects(before: Any, now: Any) -> bool:
    if len(before) != len(now):
        return False
    if isinstance(before, dict):
        return all(map(_is, before, now)) and all(map(_is, before.values(), now.values()))
    return all(map(_is, before, now))


def _is(left: Any, right: Any) -> bool:
    return left is right


class VariableSnapshot:
    """Snapshot of a variable: a closure cell, a global, a class attribute or a slot.

    Args:
        get: Returns the value, or `MISSING`.
        put: Sets the value; deletes the variable if the value is `MISSING`.
    """

    def __init__(self, get: functools.partial[Any], put: Callable[[Any], None]) -> None:
        self.get, self._put = get, put
        ids = [each if isinstance(each, str) else id(each) for each in get.args]
        self.key = (id(getattr(get.func, "__self__", None)), *ids)  # identity of the variable
        self.value = get()

    def again(self) -> VariableSnapshot:
        """Return a new snapshot of the variable."""
        return VariableSnapshot(self.get, self._put)

    def has_changed(self) -> bool:
        """Return True if the value differs."""
        return not same_value(self.value, self.get())

    def exchange(self, old: Any, new: Any) -> None:
        """Replace iterator `old` by `new` in the snapshot's value."""
        self.value = replace_iterator(self.value, old, new)

    def restore(self) -> None:
        """Set the variable to the saved object."""
        if self.get() is not self.value:
            self._put(self.value)


class ArraySnapshot:
    """Snapshot of a NumPy array's values."""

    def __init__(self, array: numpy.ndarray[Any, Any]) -> None:
        self.owner, self.key, self._copy = array, id(array), array.copy()

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return self._copy.nbytes

    def again(self) -> ArraySnapshot:
        """Return a new snapshot of the array."""
        return ArraySnapshot(self.owner)

    def has_changed(self) -> bool:
        """Return True if shape, dtype or values differ."""
        now, before = self.owner, self._copy
        if now.shape != before.shape or now.dtype != before.dtype:
            return True
        return bool(now.tobytes() != before.tobytes() if now.dtype != object else list(now.flat) != list(before.flat))

    def restore(self) -> None:
        """Restore the values in place. A read-only array cannot have changed."""
        if self.owner.shape != self._copy.shape:
            self.owner.resize(self._copy.shape, refcheck=False)
        if self.owner.flags.writeable:
            numpy.copyto(self.owner, self._copy)


# Comparison by value.


def same_value(left: Any, right: Any, depth: int = 0) -> bool:
    """Return True if two objects are equal for a training step: same scalar, same tensor values, or equal items."""
    if left is right:
        return True
    if type(left) is not type(right) or depth > 20:
        return False
    if isinstance(left, _SCALARS):
        return bool(left == right or (left != left and right != right))
    if isinstance(left, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and same_values(left.data, right) is True
    if isinstance(left, numpy.ndarray | numpy.generic):
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    if type(left) in (torch.dtype, torch.device, range, slice, frozenset):
        return bool(left == right)
    if isinstance(left, dict):
        values = zip((*left, *left.values()), (*right, *right.values()), strict=True)
        return len(left) == len(right) and all(same_value(a, b, depth + 1) for a, b in values)
    if isinstance(left, tuple | list | deque):
        return len(left) == len(right) and all(same_value(a, b, depth + 1) for a, b in zip(left, right, strict=True))
    if isinstance(left, set):
        return bool(left == right)
    # Iterators have their own snapshots, which compare the positions.
    if (found := iterators_in(left)) and all(map(has_position, iterators_in(right))):
        return len(found) == len(iterators_in(right))
    if hasattr(left, "__func__") and hasattr(left, "__self__"):  # each attribute access creates a new bound method
        return left.__func__ is right.__func__ and left.__self__ is right.__self__
    return False


def same_values(copy: Tensor, tensor: Tensor) -> bool | None:
    """Return True if two tensors of equal shape and dtype are bitwise equal; None if a tensor has no values (meta)."""
    if not _has_memory(tensor):
        return False
    left, right = _local(copy), _local(tensor.data)
    try:
        if left.device != right.device:
            right = right.to(left.device)
        if torch.equal(left, right):
            return True
        if left.layout is not torch.strided or left.shape != right.shape:
            return False
        return torch.equal(_bytes(left), _bytes(right))  # `torch.equal` treats NaN as unequal to itself
    except (RuntimeError, NotImplementedError):
        return None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _local(tensor: Any) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def version_of(tensor: Tensor) -> int | None:
    """Return the number of in-place changes of a tensor; None for inference tensors, which do not count them."""
    return None if tensor.is_inference() else tensor._version


_CHUNK = 2**20  # elements converted to int64 at a time


def checksum(tensor: Tensor) -> int | None:
    """Return an integer checksum of a tensor's bytes, or None if the tensor is unreadable."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        flat = _local(tensor).detach().reshape(-1)
        size = flat.element_size()
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size, torch.uint8)
        parts = flat.view(whole).split(_CHUNK)
        if flat.device.type == "cpu":  # torch would copy each part to int64, NumPy does not
            sums = torch.tensor([int(part.numpy().sum(dtype=numpy.int64)) for part in parts], dtype=torch.int64)
        else:
            sums = torch.stack([part.sum(dtype=torch.int64) for part in parts])
        return int((sums * torch.arange(1, len(parts) + 1, device=sums.device)).sum())
    return None


def _has_memory(tensor: Tensor) -> bool:
    """Return True if the storage holds all elements, False if it was freed or resized in place."""
    # Tensor subclasses may keep their values in other tensors.
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return True
    return tensor.untyped_storage().nbytes() >= _last_byte(tensor)


def _last_byte(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's parameters, then its buffers."""
    yield from module.parameters()
    yield from module.buffers()


def can_write(tensor: Tensor) -> bool:
    """Return True if the tensor can be written in place: strided, not expanded, and not an inference tensor."""
    return tensor.layout is torch.strided and not tensor.is_inference() and not shares_samples(tensor)


def shares_samples(tensor: Tensor) -> bool:
    """Return True for an expanded tensor, whose elements share memory and which cannot be written in place."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


# Objects reachable from a function: globals, closures, partial arguments, owners of methods, container items.

T = TypeVar("T")
_DEPTH = 4  # a loss, a function called by it, that method's owner, an attribute of the owner
_MOST_ITEMS = 1000  # a longer container is training data


def reachable_instances(user: Any, kind: type[T]) -> Iterator[T]:
    """Yield the instances of a class reachable from a function, object or tuple. Yielded objects are not entered."""
    seen, pending = set[int](), [(user, 0)]
    while pending:
        value, depth = pending.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            yield value
        else:
            pending.extend((each, depth + 1) for each in references(value))


def references(value: Any) -> Iterator[Any]:
    """Yield the objects referenced directly by a function, object or container; nothing for classes and modules."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        with contextlib.suppress(ValueError):  # a variable that is not bound yet
            found = inspect.getclosurevars(value)
            yield from (*found.nonlocals.values(), *found.globals.values(), *(value.__defaults__ or ()))
            yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, tuple) or is_container(value):
        if len(value) <= _MOST_ITEMS:
            yield from value.values() if isinstance(value, dict) else value
    elif not isinstance(value, type | types.ModuleType | Tensor):
        yield from (*getattr(value, "__dict__", {}).values(), vars(type(value)).get("__call__"))
