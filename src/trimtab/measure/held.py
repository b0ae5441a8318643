"""Copies of single objects that a training step can change: each reports a change and restores the object in place."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trimtab.measure.iterators import exchanged, has_position, inside

_ROOTS_OF_CONTAINERS = (OrderedDict, dict, list, set, deque, bytearray)
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()


def is_container(value: Any) -> bool:
    """Return whether a value is a mutable container, or of a class derived from one."""
    return isinstance(value, _ROOTS_OF_CONTAINERS)


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every container, tuple and tensor that can be reached from the roots, each once, the roots among them."""
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
    """Return a copy of a tensor's values; the copy of a CUDA tensor is on the host and adds nothing to a GPU's peak."""
    data = tensor.data
    return data.to("cpu", copy=True) if data.is_cuda else data.clone()


def device_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's values on its own device, from which a GPU restores them many times faster."""
    return tensor.data.clone()


class HeldTensor:
    """Storage, strides, values and `requires_grad` of a tensor.

    Args:
        copied: makes the copy of the values; None holds a checksum, which finds a change and cannot restore it.
    """

    def __init__(self, tensor: Tensor, copied: Callable[[Tensor], Tensor | None] | None = host_copy) -> None:
        self.tensor = tensor
        self._data = tensor.data
        self._version = _version(tensor)
        self._wants_grad = tensor.requires_grad if tensor.is_leaf else None
        self._sum = checksum(self._data) if copied is None else None
        self._copy = copied(tensor) if copied is not None and can_write(tensor) and _has_memory(tensor) else None

    @property
    def is_checked_only(self) -> bool:
        """Whether a checksum is held and no copy."""
        return self._sum is not None

    def has_changed(self) -> bool:
        """Return whether shape, dtype, values or `requires_grad` differ; the memory format is no change."""
        tensor, data = self.tensor, self._data
        if self._wants_grad is not None and tensor.requires_grad is not self._wants_grad:
            return True
        if tensor.shape != data.shape or tensor.dtype != data.dtype or tensor.device != data.device:
            return True
        if self._copy is not None and (same := same_values(self._copy, tensor)) is not None:
            return not same
        if self._sum is not None:
            return checksum(tensor.data) != self._sum
        return _version(tensor) != self._version

    def restore(self) -> None:
        """Restore the tensor in place."""
        self.tensor.data = self._data
        if self._copy is not None:
            if not _has_memory(self._data):
                self._data.untyped_storage().resize_(_last_byte(self._data))
            self._data.copy_(self._copy)
        if self._wants_grad is not None and self.tensor.requires_grad is not self._wants_grad:
            self.tensor.requires_grad_(self._wants_grad)


class HeldGradient:
    """The gradient of a tensor and its values; also the absence of a gradient.

    Args:
        copied: makes the copy of the values. Where it makes none, the gradient's version shows changes in place.
    """

    def __init__(self, owner: Tensor, copied: Callable[[Tensor], Tensor | None] = host_copy) -> None:
        self._owner, self._grad = owner, owner.grad
        self._copy = None if owner.grad is None else copied(owner.grad)
        self._version = None if owner.grad is None else _version(owner.grad)

    def has_changed(self) -> bool:
        """Return whether there is another gradient than before."""
        now, copy = self._owner.grad, self._copy
        if now is None or self._grad is None:
            return now is not self._grad
        if copy is None:
            return now is not self._grad or _version(now) != self._version
        return now.shape != copy.shape or now.dtype != copy.dtype or same_values(copy, now) is False

    def restore(self) -> None:
        """Restore the gradient on the same object."""
        grad, copy = self._grad, self._copy
        self._owner.grad = grad if grad is None or copy is None else grad.copy_(copy)


_NO_KEYS: dict[Any, Any] = {}


class HeldContainer:
    """The items of a container, restored in order into the same object.

    Methods of the built-in class are called, so that a derived class that refuses changes can be restored too.
    """

    def __init__(self, container: Any) -> None:
        self.container = container
        self._kind: Any = type(container)
        if self._kind not in (dict, OrderedDict, list):
            self._kind = next(kind for kind in _ROOTS_OF_CONTAINERS if isinstance(container, kind))
        self.items = self._items()

    @property
    def key(self) -> Any:
        """Which container it is."""
        return id(self.container)

    def again(self) -> HeldContainer:
        """Return the items as they are now."""
        return HeldContainer(self.container)

    def _items(self) -> Any:
        if not self.container:  # as most dicts of hooks are
            return _NO_KEYS if isinstance(self.container, dict) else ()
        if isinstance(self.container, dict):
            return dict(self._kind.items(self.container))
        return list(self._kind.__iter__(self.container))

    def changes(self) -> Iterator[Any]:
        """Yield the keys whose values differ; `MISSING` stands for the container as a whole."""
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
        """Return what returns an item; `MISSING` if there is none."""
        return functools.partial(self._item, key)

    def _item(self, key: Any) -> Any:
        try:
            return self._kind.__getitem__(self.container, key)
        except (KeyError, IndexError):
            return MISSING

    def exchange(self, key: Any, old: Any, new: Any) -> None:
        """Hold another iterator in place of the old one in an item; by key of a dict, else by index."""
        self.items[key] = exchanged(self.items[key], old, new)

    def restore(self) -> None:
        """Restore the items, if others are in their place."""
        before, now = self.items, self._items()
        if _has_same_objects(before, now):
            return
        if isinstance(self.container, bytearray) and len(before) == len(now):  # a memoryview keeps the size
            self.container[:] = bytes(before)
            return
        self._kind.clear(self.container)
        if isinstance(self.container, dict):
            for key, value in before.items():  # not `update`, which a Counter overrides and an OrderedDict shares
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


class HeldBinding:
    """A name's value: of a closure's cell, a module's global, a class attribute or a slot.

    Args:
        get: returns the value, or `MISSING`.
        put: sets it, and deletes it for `MISSING`.
    """

    def __init__(self, get: functools.partial[Any], put: Callable[[Any], None]) -> None:
        self.get, self._put = get, put
        ids = [each if isinstance(each, str) else id(each) for each in get.args]
        self.key = (id(getattr(get.func, "__self__", None)), *ids)  # which name it is
        self.value = get()

    def again(self) -> HeldBinding:
        """Return the value as it is now."""
        return HeldBinding(self.get, self._put)

    def has_changed(self) -> bool:
        """Return whether the name has another value."""
        return not same_value(self.value, self.get())

    def exchange(self, old: Any, new: Any) -> None:
        """Hold another iterator in place of the old one in the value."""
        self.value = exchanged(self.value, old, new)

    def restore(self) -> None:
        """Set the name to the object that it had."""
        if self.get() is not self.value:
            self._put(self.value)


class HeldArray:
    """The values of a NumPy array."""

    def __init__(self, array: numpy.ndarray[Any, Any]) -> None:
        self.owner, self.key, self._copy = array, id(array), array.copy()

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self._copy.nbytes

    def again(self) -> HeldArray:
        """Return the values as they are now."""
        return HeldArray(self.owner)

    def has_changed(self) -> bool:
        """Return whether shape, dtype or values differ."""
        now, before = self.owner, self._copy
        if now.shape != before.shape or now.dtype != before.dtype:
            return True
        return bool(now.tobytes() != before.tobytes() if now.dtype != object else list(now.flat) != list(before.flat))

    def restore(self) -> None:
        """Restore the values in place; an array that cannot be written has not changed."""
        if self.owner.shape != self._copy.shape:
            self.owner.resize(self._copy.shape, refcheck=False)
        if self.owner.flags.writeable:
            numpy.copyto(self.owner, self._copy)


# Comparison by value.


def same_value(left: Any, right: Any, depth: int = 0) -> bool:
    """Return whether two objects are equal for a training step: the same scalars, values of tensors, or items."""
    if left is right:
        return True
    if type(left) is not type(right) or depth > 20:
        return False
    if isinstance(left, _SCALARS):
        return bool(left == right or (left != left and right != right))
    if isinstance(left, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and same_values(left.data, right) is True
    if isinstance(left, numpy.ndarray | numpy.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if type(left) in (torch.dtype, torch.device, range, slice, frozenset):
        return bool(left == right)
    if isinstance(left, dict):
        values = zip((*left, *left.values()), (*right, *right.values()), strict=True)
        return len(left) == len(right) and all(same_value(a, b, depth + 1) for a, b in values)
    if isinstance(left, tuple | list | deque):
        return len(left) == len(right) and all(same_value(a, b, depth + 1) for a, b in zip(left, right, strict=True))
    if isinstance(left, set):
        return left == right
    if (found := inside(left)) and all(map(has_position, inside(right))):  # whose positions are compared separately
        return len(found) == len(inside(right))
    if hasattr(left, "__func__") and hasattr(left, "__self__"):  # bound methods are made at each access
        return left.__func__ is right.__func__ and left.__self__ is right.__self__
    return False


def same_values(copy: Tensor, tensor: Tensor) -> bool | None:
    """Return whether two tensors of one shape and dtype are bitwise equal; None if they have no values, as on meta."""
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
        return torch.equal(_bytes(left), _bytes(right))  # NaN equals no NaN
    except (RuntimeError, NotImplementedError):
        return None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _local(tensor: Any) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


_CHUNK = 2**20  # elements whose 64-bit integers exist at a time


def checksum(tensor: Tensor) -> int | None:
    """Return a sum over a tensor's bytes as integers; None if it cannot be read."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        flat = _local(tensor).detach().reshape(-1)
        size = flat.element_size()
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size, torch.uint8)
        parts = flat.view(whole).split(_CHUNK)
        if flat.device.type == "cpu":  # torch would make a copy of each part in int64
            sums = torch.tensor([int(part.numpy().sum(dtype=numpy.int64)) for part in parts], dtype=torch.int64)
        else:
            sums = torch.stack([part.sum(dtype=torch.int64) for part in parts])
        return int((sums * torch.arange(1, len(parts) + 1, device=sums.device)).sum())
    return None


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's storage holds all of its elements; not if it was freed or shrunk in place."""
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):  # others hold their values elsewhere
        return True
    return tensor.untyped_storage().nbytes() >= _last_byte(tensor)


def _last_byte(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size()


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's parameters, and then its buffers."""
    yield from module.parameters()
    yield from module.buffers()


def can_write(tensor: Tensor) -> bool:
    """Return whether values can be copied into a tensor: not where rows share memory, nor under inference mode."""
    return tensor.layout is torch.strided and not tensor.is_inference() and not shares_rows(tensor)


def shares_rows(tensor: Tensor) -> bool:
    """Return whether rows lie on the same memory (an expanded buffer): such a tensor cannot be written in place."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
