"""Iterators and queues: their positions, copies of those that can be copied, and their replacement by a copy."""

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
_MOST = 100  # items of a tuple that are looked at
_BOUND = (types.MethodWrapperType, types.BuiltinMethodType)


def has_position(value: Any) -> bool:
    """Return whether a value is an iterator or a queue whose position is known: of Python, or of a `DataLoader`."""
    return is_positioned(type(value))


@functools.cache
def is_positioned(kind: type) -> bool:
    """Return whether objects of a class are such iterators or queues."""
    return issubclass(kind, _POSITIONED)


def position(value: Any) -> Any:
    """Return the position of an iterator or a queue, for comparison: equal until items are taken or put.

    Objects are compared by identity, and referred to, so that no other object takes their ids.
    """
    if isinstance(value, types.GeneratorType):
        return _of_generator(value)
    if isinstance(value, _BaseDataLoaderIter):
        return value._num_yielded
    if isinstance(value, _QUEUES):
        try:
            return value.qsize()
        except (NotImplementedError, OSError):  # of processes on macOS; or closed
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
    return () if type(value) is list and not value else _Same(value)  # an iterator at its end reduces to an empty list


def _of_state(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_of_state, value))
    if type(value) is list:  # of `itertools.cycle`, which only adds to it
        return len(value), [_Same(each) for each in value[-1:]]
    return _part(value)


class _Same:
    """An object that equals itself alone."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _reduced(iterator: Any) -> Any:
    """Return what `copy.copy` makes a copy from; raises `TypeError` if the iterator has no such parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 copies iterators of itertools no more
        if isinstance(iterator, itertools.count) and (args := _arguments_of(repr(iterator))) is not None:
            return itertools.count, args
        found = iterator.__reduce__()
    if found[0] in (copyreg._reconstructor, copyreg.__newobj__):  # type: ignore[attr-defined]
        raise TypeError(f"{type(iterator).__name__} cannot be copied")
    return found


def _arguments_of(text: str) -> Any:
    """Return the numbers in a text such as "count(3, 2)"; None if there are other objects."""
    try:
        return ast.literal_eval(f"({text.partition('(')[2].rpartition(')')[0]},)")
    except (ValueError, SyntaxError):
        return None


def copied(iterator: Any) -> Any:
    """Return an independent copy of an iterator, and of the iterators inside.

    Raises:
        TypeError: a generator, an iterator of a `DataLoader`, a queue, or another one that cannot be copied.
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
    return copied(value) if has_position(value) else value


def _copied_state(value: Any) -> Any:
    """Copy lists too: `itertools.cycle` adds to the list in its state."""
    if isinstance(value, tuple):
        return tuple(map(_copied_state, value))
    return list(value) if type(value) is list else _copied_part(value)


def inside(value: Any) -> list[Any]:
    """Return the iterators that a value is, or holds and cannot exchange: a tuple, a bound `__next__`."""
    if has_position(value):
        return [value]
    if type(value) is tuple and len(value) <= _MOST:
        return [each for item in value for each in inside(item)]
    return [value.__self__] if isinstance(value, _BOUND) and has_position(value.__self__) else []


def exchanged(value: Any, old: Any, new: Any) -> Any:
    """Return a value as `inside` takes it, with another iterator in place of the old one."""
    if value is old:
        return new
    if type(value) is tuple:
        return tuple(exchanged(each, old, new) for each in value)
    return getattr(new, value.__name__) if isinstance(value, _BOUND) and value.__self__ is old else value


class HeldIterator:
    """The position of an iterator or a queue; restored by a copy, which is bound to each name of the iterator.

    Attributes:
        owner: the iterator. held_by: sets another iterator in place of the owner, one for each name or container item.
        get: returns the iterator that the first of its names has now.
    """

    def __init__(self, iterator: Any) -> None:
        self.owner, self.key = iterator, id(iterator)
        self._position = position(iterator)
        self.held_by: list[Callable[[Any, Any], None]] = []
        self.get: Callable[[], Any] | None = None
        try:
            self._copy = copied(iterator)
        except (TypeError, ValueError, AttributeError):
            self._copy = None

    @property
    def is_restorable(self) -> bool:
        """Whether there is a copy, and a name to bind it to."""
        return self._copy is not None and bool(self.held_by)

    def has_changed(self) -> bool:
        """Return whether items were taken, or put; False if another object took its place: its name has changed."""
        now = self.owner if self.get is None else self.get()
        return has_position(now) and bool(position(now) != self._position)

    def restore(self) -> None:
        """Bind a copy at the position to each name of the iterator; before the names are restored."""
        if not self.is_restorable or position(self.owner) == self._position:
            return
        fresh = copied(self._copy)
        for exchange in self.held_by:
            exchange(self.owner, fresh)
        self.owner = fresh


def parts_of(iterator: Any) -> Iterator[Any]:
    """Yield what an iterator takes its items from, besides containers and other iterators of Python's."""
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
