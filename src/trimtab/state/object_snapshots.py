"""Snapshots of single objects: tensors, gradients, containers, variables, arrays and iterators, restored in place."""

from __future__ import annotations

import array
import contextlib
import copyreg
import ctypes
import functools
import gc
import inspect
import itertools
import multiprocessing.queues
import operator
import queue
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

CONTAINERS = (OrderedDict, dict, list, set, deque, bytearray)
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()


def is_container(value: Any) -> bool:
    """Return True for a mutable container, including instances of subclasses."""
    return isinstance(value, CONTAINERS)


# Tensors.


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
        self.tensor = self.owner = tensor
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
        self.owner, self._grad = owner, owner.grad
        self._copy = None if owner.grad is None else copied(owner.grad)
        self._version = None if owner.grad is None else version_of(owner.grad)

    def has_changed(self) -> bool:
        """Return True if the gradient differs."""
        now, copy = self.owner.grad, self._copy
        if now is None or self._grad is None:
            return now is not self._grad
        if copy is None:
            return now is not self._grad or version_of(now) != self._version
        return now.shape != copy.shape or now.dtype != copy.dtype or same_values(copy, now) is False

    def restore(self) -> None:
        """Restore the gradient as the same tensor object."""
        grad, copy = self._grad, self._copy
        self.owner.grad = grad if grad is None or copy is None else grad.copy_(copy)


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


def can_write(tensor: Tensor) -> bool:
    """Return True if the tensor can be written in place: strided, not expanded, and not an inference tensor."""
    return tensor.layout is torch.strided and not tensor.is_inference() and not shares_samples(tensor)


def shares_samples(tensor: Tensor) -> bool:
    """Return True for an expanded tensor, whose elements share memory and which cannot be written in place."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


# Containers, variables and arrays.


class ContainerSnapshot:
    """Snapshot of a container's items, restored in order into the same object.

    Methods of the built-in base class are called directly, to restore subclasses that refuse changes.
    """

    def __init__(self, container: Any) -> None:
        self.container = self.owner = container
        self.key: Any = id(container)
        self._kind: Any = type(container)
        if self._kind not in (dict, OrderedDict, list):
            self._kind = next(kind for kind in CONTAINERS if isinstance(container, kind))
        self.items = self._items()

    def again(self) -> ContainerSnapshot:
        """Return a new snapshot of the container."""
        return ContainerSnapshot(self.container)

    def _items(self) -> Any:
        if isinstance(self.container, dict):
            return dict(self._kind.items(self.container))
        return list(self._kind.__iter__(self.container))

    def has_changed(self) -> bool:
        """Return True if an item differs."""
        return any(True for _ in self.changes())

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
    if len(before) != len(now) or not all(map(operator.is_, before, now)):
        return False
    return not isinstance(before, dict) or all(map(operator.is_, before.values(), now.values()))


def get_attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a class, a slot, or the content of a closure cell; `MISSING` if there is none."""
    if isinstance(owner, type):
        return vars(owner).get(name, MISSING)
    try:
        return getattr(owner, name)
    except (AttributeError, ValueError):  # `ValueError` for a cell of a variable without a value
        return MISSING


def put_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, also of a frozen dataclass; delete the attribute if the value is `MISSING`."""
    kind = type if isinstance(owner, type) else object
    if value is MISSING:
        kind.__delattr__(owner, name)
    else:
        kind.__setattr__(owner, name, value)


def put_item(space: dict[str, Any], name: str, value: Any) -> None:
    """Set a global variable; delete it if the value is `MISSING`."""
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value


def key_of(get: functools.partial[Any]) -> tuple[Any, ...]:
    """Return the identity of a variable, by its getter."""
    parts = getattr(get.func, "__self__", None), *get.args
    return tuple(each if isinstance(each, str) else id(each) for each in parts)


class VariableSnapshot:
    """Snapshot of a variable: a closure cell, a global, a class attribute or a slot.

    Args:
        get: Returns the value, or `MISSING`.
        put: Sets the value; deletes the variable if the value is `MISSING`.
    """

    def __init__(self, get: functools.partial[Any], put: Callable[[Any], object]) -> None:
        self.get, self._put = get, put
        self.key, self.value = key_of(get), get()

    def again(self) -> VariableSnapshot:
        """Return a new snapshot of the variable."""
        return VariableSnapshot(self.get, self._put)

    def has_changed(self) -> bool:
        """Return True if the value differs."""
        return not same_value(self.value, self.get())

    def restore(self) -> None:
        """Set the variable to the saved object."""
        if self.get() is not self.value:
            self._put(self.value)


RAW_MEMORY = (array.array, ctypes.c_int.__mro__[1], ctypes.Array)  # classes that may hold plain numbers
_NUMBERS = set("bBhHiIlLqQfdg?")  # type codes of ctypes without pointers


def is_raw_memory(value: Any) -> bool:
    """Return True for an `array.array`, or a number or array of ctypes, as in shared memory."""
    kind: Any = type(value)
    while isinstance(getattr(kind, "_type_", None), type):
        kind = kind._type_
    return isinstance(value, RAW_MEMORY) and getattr(kind, "_type_", "d") in _NUMBERS


class ArraySnapshot:
    """Snapshot of the values of a NumPy array, an `array.array` or memory of ctypes."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.key, self._copy = owner, id(owner), _values(owner).copy()

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return int(self._copy.nbytes)

    def again(self) -> ArraySnapshot:
        """Return a new snapshot of the array."""
        return ArraySnapshot(self.owner)

    def has_changed(self) -> bool:
        """Return True if shape, dtype or values differ."""
        return not same_value(self._copy, _values(self.owner))

    def restore(self) -> None:
        """Restore the values in place. A read-only array cannot have changed."""
        if isinstance(self.owner, array.array) and len(self.owner) * self.owner.itemsize != self.nbytes:
            del self.owner[:]
            self.owner.frombytes(self._copy.tobytes())
        elif isinstance(self.owner, numpy.ndarray) and self.owner.shape != self._copy.shape:
            self.owner.resize(self._copy.shape, refcheck=False)
        if (values := _values(self.owner)).flags.writeable:
            numpy.copyto(values, self._copy)


def _values(owner: Any) -> Any:
    """Return an array over the same memory, for immediate use: an `array.array` in use cannot grow."""
    if isinstance(owner, numpy.ndarray):
        return owner
    size = len(owner) * owner.itemsize if isinstance(owner, array.array) else ctypes.sizeof(owner)
    return numpy.frombuffer(owner, numpy.uint8) if size else numpy.zeros(0, numpy.uint8)


# Iterators and queues: positions are compared, and cannot be restored.

_QUEUES = (queue.SimpleQueue, multiprocessing.queues.Queue)
_OF_KEYS = (*map(type, (iter({}), iter({}.values()), iter({}.items()), iter(set()), reversed({}))),)
_POSITIONED = (
    *(each for each in vars(itertools).values() if isinstance(each, type) and hasattr(each, "__next__")),
    *(enumerate, zip, map, filter, reversed, types.GeneratorType, _BaseDataLoaderIter, *_QUEUES, *_OF_KEYS),
    *map(type, (iter([]), iter(()), iter(""), iter("\u0100"), iter(b""), iter(bytearray()), iter(deque()))),
    *map(type, (iter(range(0)), iter(range(2**70)), iter(int, 1), reversed([]))),
)


def has_position(value: Any) -> bool:
    """Return True for an iterator or queue with a known position: built-in, or of a `DataLoader`."""
    return is_positioned(type(value))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def is_positioned(kind: type) -> bool:
    """Return True for a class of iterators or queues with a known position."""
    return issubclass(kind, _POSITIONED)


class PositionSnapshot:
    """Position of an iterator or queue: changes when items are taken or put, and cannot be restored."""

    def __init__(self, iterator: Any) -> None:
        self.owner, self.key, self._position = iterator, id(iterator), _position(iterator)

    def has_changed(self) -> bool:
        """Return True if items were taken or put."""
        return bool(_position(self.owner) != self._position)

    def restore(self) -> None:
        """Do nothing."""


def _position(value: Any) -> Any:
    """Return the position in comparable form. Other objects in it are compared by identity, and kept alive."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        names = None if frame is None else {name: _part(each) for name, each in frame.f_locals.items()}
        return names, None if frame is None else frame.f_lasti, _part(value.gi_yieldfrom)
    if isinstance(value, _BaseDataLoaderIter):
        return value._num_yielded
    if isinstance(value, _QUEUES):
        with contextlib.suppress(NotImplementedError, OSError):  # a queue of processes on macOS, or a closed queue
            return value.qsize()
        return None
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, _OF_KEYS):
        return operator.length_hint(value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 no longer copies iterators of itertools
            factory, *parts = value.__reduce__()
    except TypeError:
        factory, parts = copyreg._reconstructor, []  # type: ignore[attr-defined]
    # A type without a reduction of its own, such as `itertools.pairwise`, shows its inner iterators only.
    is_own = factory is not copyreg._reconstructor  # type: ignore[attr-defined]
    return _part(tuple(parts)) if is_own else [_part(each) for each in gc.get_referents(value)]


def _part(value: Any) -> Any:
    if has_position(value):
        return _position(value)
    if isinstance(value, tuple):
        return tuple(map(_part, value))
    if type(value) is list:  # an exhausted iterator reduces to an empty list; `itertools.cycle` appends to its list
        return len(value), [_Same(each) for each in value[-1:]]
    return value if isinstance(value, (*_SCALARS, range)) else _Same(value)


class _Same:
    """Wrapper for comparing an object by identity."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


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
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        return left.tobytes() == right.tobytes() if left.dtype != object else list(left.flat) == list(right.flat)
    if type(left) in (torch.dtype, torch.device, range, slice, frozenset) or isinstance(left, set):
        return bool(left == right)
    if isinstance(left, dict):
        values = zip((*left, *left.values()), (*right, *right.values()), strict=True)
        return len(left) == len(right) and all(same_value(a, b, depth + 1) for a, b in values)
    if isinstance(left, tuple | list | deque):
        return len(left) == len(right) and all(same_value(a, b, depth + 1) for a, b in zip(left, right, strict=True))
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
