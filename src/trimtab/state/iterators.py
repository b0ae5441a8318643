"""Iterators and queues: comparing positions, copying, and replacing an iterator by a copy."""

from __future__ import annotations

import ast
import copyreg
import functools
import gc
import itertools
import multiprocessing.queues
import operator
import queue
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

_SCALARS = (bool, int, float, complex, str, bytes, range, type(None))
_QUEUES = (queue.SimpleQueue, multiprocessing.queues.Queue)
_OF_KEYS = (*map(type, (iter({}), iter({}.values()), iter({}.items()), iter(set()), reversed({}))),)
_COPIED = (
    *(each for each in vars(itertools).values() if isinstance(each, type) and hasattr(each, "__next__")),
    *(enumerate, zip, map, filter, reversed),
    *map(type, (iter([]), iter(()), iter(""), iter("\u0100"), iter(b""), iter(bytearray()), iter(deque()))),
    *map(type, (iter(range(0)), iter(range(2**70)), iter(int, 1), reversed([]))),
)
_POSITIONED = (*_COPIED, *_OF_KEYS, *_QUEUES, types.GeneratorType, _BaseDataLoaderIter)
_MOST = 100  # maximum length of an inspected tuple
_BOUND = (types.MethodWrapperType, types.BuiltinMethodType)


def has_position(value: Any) -> bool:
    """Return True for an iterator or queue with a known position: built-in, or of a `DataLoader`."""
    return is_positioned(type(value))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def is_positioned(kind: type) -> bool:
    """Return True for a class of iterators or queues with a known position."""
    return issubclass(kind, _POSITIONED)


def position(value: Any) -> Any:
    """Return the position of an iterator or queue in comparable form: it changes when items are taken or put.

    Objects are compared by identity. The position keeps the objects alive, so ids are not reused.
    """
    if isinstance(value, types.GeneratorType):
        return _of_generator(value)
    if isinstance(value, _BaseDataLoaderIter):
        return value._num_yielded
    if isinstance(value, _QUEUES):
        try:
            return value.qsize()
        except (NotImplementedError, OSError):  # a multiprocessing queue on macOS, or a closed queue
            return None
    if isinstance(value, _OF_KEYS):
        return operator.length_hint(value)
    try:
        _, args, *more = _reduced(value)
    except TypeError:
        return [_part(each) for each in gc.get_referents(value)]
    return type(value), tuple(map(_part, args)), tuple(map(_of_state, more))


def _of_generator(value: types.GeneratorType[Any, Any, Any]) -> Any:
    frame = value.gi_frame
    if frame is None:
        return None
    inner = value.gi_yieldfrom
    names = {name: _part(each) for name, each in frame.f_locals.items()}
    return frame.f_lasti, names, _part(inner)


def _part(value: Any) -> Any:
    if has_position(value):
        return position(value)
    if isinstance(value, tuple):
        return tuple(map(_part, value))
    if isinstance(value, _SCALARS):
        return value
    return () if type(value) is list and not value else _Same(value)  # an exhausted iterator reduces to an empty list


def _of_state(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_of_state, value))
    if type(value) is list:  # `itertools.cycle` only appends to this list
        return len(value), [_Same(each) for each in value[-1:]]
    return _part(value)


class _Same:
    """Wrapper for comparing an object by identity."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _reduced(iterator: Any) -> Any:
    """Return the parts used by `copy.copy`; raises `TypeError` if the iterator cannot be copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 no longer copies iterators of itertools
        if isinstance(iterator, itertools.count) and (args := _arguments_of(repr(iterator))) is not None:
            return itertools.count, args
        found = iterator.__reduce__()
    if found[0] in (copyreg._reconstructor, copyreg.__newobj__):  # type: ignore[attr-defined]
        raise TypeError(f"{type(iterator).__name__} cannot be copied")
    return found


def _arguments_of(text: str) -> Any:
    """Return the numbers in a text such as "count(3, 2)", or None if other objects occur."""
    try:
        return ast.literal_eval(f"({text.partition('(')[2].rpartition(')')[0]},)")
    except (ValueError, SyntaxError):
        return None


def copy_iterator(iterator: Any) -> Any:
    """Return an independent copy of an iterator, including inner iterators.

    Raises:
        TypeError: The iterator cannot be copied, such as a generator, a `DataLoader` iterator or a queue.
    """
    if not isinstance(iterator, _COPIED):
        raise TypeError(f"{type(iterator).__name__} cannot be copied")
    factory, args, *more = _reduced(iterator)
    made = factory(*map(_copied_part, args))
    if more and more[0] is not None:
        made.__setstate__(_copied_state(more[0]))
    return made


def _copied_part(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied_part, value))
    return copy_iterator(value) if has_position(value) else value


def _copied_state(value: Any) -> Any:
    """Copy an iterator's state, including lists: `itertools.cycle` appends to a list in the state."""
    if isinstance(value, tuple):
        return tuple(map(_copied_state, value))
    return list(value) if type(value) is list else _copied_part(value)


def iterators_in(value: Any) -> list[Any]:
    """Return the iterators in a value: the value itself, the items of a tuple, or the owner of a bound `__next__`."""
    if has_position(value):
        return [value]
    if type(value) is tuple and len(value) <= _MOST:
        return [each for item in value for each in iterators_in(item)]
    return [value.__self__] if isinstance(value, _BOUND) and has_position(value.__self__) else []


def replace_iterator(value: Any, old: Any, new: Any) -> Any:
    """Return the value with iterator `old` replaced by `new`, in the forms known to `iterators_in`."""
    if value is old:
        return new
    if type(value) is tuple:
        return tuple(replace_iterator(each, old, new) for each in value)
    return getattr(new, value.__name__) if isinstance(value, _BOUND) and value.__self__ is old else value


class IteratorSnapshot:
    """Snapshot of the position of an iterator or queue, restored by binding a copy to all its variables.

    Attributes:
        owner: The iterator.
        held_by: For each variable or container item that refers to the iterator, a function that replaces it.
        get: Returns the current iterator of the first variable.
    """

    def __init__(self, iterator: Any) -> None:
        self.owner, self.key = iterator, id(iterator)
        self._position = position(iterator)
        self.held_by: list[Callable[[Any, Any], None]] = []
        self.get: Callable[[], Any] | None = None
        try:
            self._copy = copy_iterator(iterator)
        except (TypeError, ValueError, AttributeError):
            self._copy = None

    @property
    def is_restorable(self) -> bool:
        """True if a copy exists and a variable can be bound to it."""
        return self._copy is not None and bool(self.held_by)

    def has_changed(self) -> bool:
        """Return True if items were taken or put.

        False if the variable refers to another object: that is the variable's change.
        """
        now = self.owner if self.get is None else self.get()
        return has_position(now) and bool(position(now) != self._position)

    def restore(self) -> None:
        """Bind a copy at the saved position to each variable. Must run before the variables are restored."""
        if not self.is_restorable or position(self.owner) == self._position:
            return
        fresh = copy_iterator(self._copy)
        for exchange in self.held_by:
            exchange(self.owner, fresh)
        self.owner = fresh


def parts_of(iterator: Any) -> Iterator[Any]:
    """Yield the functions and user objects from which an iterator takes its items."""
    try:
        pending: list[Any] = list(_reduced(iterator)[1:]) if isinstance(iterator, _COPIED) else []
    except TypeError:
        pending = gc.get_referents(iterator)
    for each in pending:
        if isinstance(each, tuple):
            pending.extend(each[:_MOST])
        elif isinstance(each, _COPIED):
            yield from parts_of(each)
        elif callable(each) or (hasattr(each, "__next__") and not has_position(each)):
            yield each
