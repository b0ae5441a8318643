"""Snapshot of state changed by drawing batches: loaders, samplers, datasets and referenced objects.

The search follows attributes, slots, containers, random generators, open files, attributes of the user's classes, and
closures and globals of the user's functions. Iterators, queues and threads cannot be restored: data that contain such
an object are one-shot, and nothing is drawn from them.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import io
import operator
import queue
import random
import site
import socket
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trimtab.state.object_snapshots import ContainerSnapshot, TensorSnapshot, is_container

# Temporary use of a data loader: afterwards workers and the order of the next epochs are unchanged.


@contextlib.contextmanager
def draw_and_restore_loader(data: Any) -> Iterator[Any]:
    """Yield an object to draw from in place of `data`; on exit, restore the loader's torch generators and position.

    Covered generators are the `generator` attributes of the loader, its samplers and batch sampler. A loader with
    `state_dict` and `load_state_dict` restores its position through them. Persistent workers started here end when
    the yielded object and all its iterators are deleted.

    Not restored: an iterator, which has advanced; other state of samplers and datasets; random state inside existing
    persistent workers, which only private attributes of the loader could protect.
    """
    goes_on = isinstance(data, Iterator)
    generators = [] if goes_on else generators_of(data)
    states = [(generator, generator.get_state()) for generator in generators]
    lent = data if goes_on else _without_lasting(data)
    place = data.state_dict() if lent is data and not goes_on and is_stateful(data) else None
    try:
        yield lent
    finally:
        if place is not None:
            data.load_state_dict(place)
        for generator, state in states:
            generator.set_state(state)


def is_stateful(loader: Any) -> bool:
    """Return True if a loader can save and restore its position."""
    inner = getattr(loader, "base_dataloader", loader)  # Accelerate's wrapper has both methods for any inner loader
    return callable(getattr(inner, "state_dict", None)) and callable(getattr(inner, "load_state_dict", None))


def generators_of(data: Any) -> list[torch.Generator]:
    """Return the distinct torch generators of a loader, including samplers and a wrapped loader."""
    found, seen, waiting = list[torch.Generator](), set[int](), [data]
    while waiting:
        holder = waiting.pop(0)
        if holder is None or id(holder) in seen:
            continue
        seen.add(id(holder))
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is each for each in found):
            found.append(generator)
        waiting += [getattr(holder, name, None) for name in ("batch_sampler", "sampler", "wrapped")]
    return found


def _without_lasting(data: Any) -> Any:
    """Return a shallow copy if a loader keeps its iterator (persistent workers or position), else `data`.

    The kept iterator then lives as long as the copy. Existing workers are shared. A wrapper that shards a loader across
    ranks (`wrapped`) is copied too.
    """
    held = getattr(data, "wrapped", None)
    if isinstance(held, DataLoader) and (lent := _without_lasting(held)) is not held:
        data = copy.copy(data)
        data.wrapped = lent
        return data
    keeps_one = isinstance(data, DataLoader) and (has_lasting_workers(data) or is_stateful(data))
    return copy.copy(data) if keeps_one else data


def has_lasting_workers(data: Any) -> bool:
    """Return True if a loader's workers persist between epochs."""
    return isinstance(data, DataLoader) and data.persistent_workers and data.num_workers > 0


# Limits: objects in total, items of a container, distance from the root.
_MOST_OBJECTS, _MOST_ITEMS, _DEPTH = 20_000, 1_000, 12
_MOST_BYTES = 2**26  # limit for copies of tensors and arrays; larger ones are training data
_STREAMS = (queue.Queue, queue.SimpleQueue, threading.Thread, BaseProcess, socket.socket)
_OWN_ITERATORS = ("_iterator", "_initial_iter_for_state_dict")  # of a DataLoader: drawing uses a copy without these
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device)
_Undo = Callable[[], object]


class DataState:
    """Snapshot of training data.

    Attributes:
        one_shot: Path of a part that cannot be restored, such as "data.dataset.items (a tuple_iterator)"; "" if none.
    """

    def __init__(self, data: Any) -> None:
        self.one_shot = ""
        self._undo: list[_Undo] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # references that keep ids from being reused
        self._bytes = 0
        self._pending: list[tuple[Any, str, int]] = [(data, "data", 0)]
        while self._pending and not self.one_shot and len(self._seen) < _MOST_OBJECTS:
            self._visit(*self._pending.pop())

    def restore(self) -> None:
        """Restore all parts. Can be called repeatedly."""
        for undo in self._undo:
            undo()

    def _visit(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, (*_PLAIN, types.ModuleType)) or id(value) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if (undo := _generator(value) or _file(value)) is not None:
            self._undo.append(undo)
        elif _is_stream(value):
            self.one_shot = f"{path} (a {type(value).__name__})"
        elif isinstance(value, Tensor | numpy.ndarray):
            self._hold_values(value)
        elif is_container(value) or isinstance(value, tuple | frozenset):
            self._container(value, path, depth)
        elif isinstance(value, type):
            self._class(value, path, depth)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._function(value, path, depth)
        else:
            self._object(value, path, depth)

    def _push(self, value: Any, path: str, depth: int) -> None:
        self._pending.append((value, path, depth + 1))

    def _hold_values(self, value: Tensor | numpy.ndarray[Any, Any]) -> None:
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            return
        self._bytes += value.nbytes
        if self._bytes > _MOST_BYTES:
            return
        if isinstance(value, Tensor):
            self._undo.append(TensorSnapshot(value).restore)
        elif value.flags.writeable:
            copied = value.copy()
            self._undo.append(lambda: numpy.copyto(value, copied))

    def _container(self, value: Any, path: str, depth: int) -> None:
        if is_container(value):
            self._undo.append(functools.partial(_refill, ContainerSnapshot(value), value, _parts(value)))
        if len(value) <= _MOST_ITEMS:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self._push(item, f"{path}[{key!r:.40}]", depth)

    def _object(self, value: Any, path: str, depth: int) -> None:
        if depth and is_stateful(value) and not isinstance(value, DataLoader):
            self._undo.append(functools.partial(value.load_state_dict, value.state_dict()))
            return
        if has_lasting_workers(value) and getattr(value, "_iterator", None) is not None:
            self.one_shot = f"{path} (persistent workers that have started)"
            return
        if not depth and is_stateful(value) and not isinstance(value, DataLoader):
            return  # `draw_and_restore_loader` restores it through `load_state_dict`
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            self._undo.append(functools.partial(_rename, held, dict(held)))
            for name, each in held.items():
                if name not in _OWN_ITERATORS or not isinstance(value, DataLoader):
                    self._push(each, f"{path}.{name}", depth)
        for name in _slots(type(value)):
            with contextlib.suppress(AttributeError):
                each = getattr(value, name)
                self._undo.append(functools.partial(setattr, value, name, each))
                self._push(each, f"{path}.{name}", depth)
        self._push(type(value), type(value).__name__, depth)

    def _class(self, value: type, path: str, depth: int) -> None:
        """Take a snapshot of the attributes of a user class, and follow its methods."""
        if _is_library(value):
            return
        for base in value.__bases__:
            self._push(base, base.__name__, depth)
        for name, each in tuple(vars(value).items()):
            if isinstance(each, staticmethod | classmethod | property):
                functions = (each.fget, each.fset) if isinstance(each, property) else (each.__func__,)
                for function in functions:
                    self._push(function, f"{path}.{name}", depth)
            elif isinstance(each, types.FunctionType):
                self._push(each, f"{path}.{name}", depth)
            elif not name.startswith("__"):
                self._undo.append(functools.partial(_put_back, value, name, each))
                self._push(each, f"{path}.{name}", depth)

    def _function(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._push(part, path, depth)
            return
        if isinstance(value, types.MethodType):
            self._push(value.__self__, path, depth)
            value = value.__func__
        if not isinstance(value, types.FunctionType) or _is_library(value):
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that is not bound yet
                self._undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
                self._push(cell.cell_contents, f"{name} in {value.__qualname__}", depth)
        names, stored = _globals(value.__code__)
        for name in names & value.__globals__.keys():
            each = value.__globals__[name]
            if name in stored:
                self._undo.append(functools.partial(value.__globals__.__setitem__, name, each))
            self._push(each, f"{name} in {value.__qualname__}", depth)
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            self._push(default, f"a default of {value.__qualname__}", depth)


@contextlib.contextmanager
def draw_and_restore_data(data: Any) -> Iterator[Any]:
    """Yield an object to draw from in place of `data`, as `draw_and_restore_loader` does; on exit, restore the data.

    An iterator cannot be restored and has advanced.
    """
    state = None if isinstance(data, Iterator) else DataState(data)
    try:
        with draw_and_restore_loader(data) as lent:
            yield lent
    finally:
        if state is not None:
            state.restore()


def _generator(value: Any) -> _Undo | None:
    """Return a function that restores a random generator; None for other types."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    bits = value.bit_generator if isinstance(value, numpy.random.Generator) else value
    if isinstance(bits, numpy.random.BitGenerator):
        return functools.partial(setattr, bits, "state", bits.state)
    return None


def _file(value: Any) -> _Undo | None:
    """Return a function that restores the position of an open file; None for unseekable files and other types."""
    if isinstance(value, io.IOBase):
        with contextlib.suppress(OSError, ValueError):
            if value.readable() and value.seekable():
                return functools.partial(value.seek, value.tell())
    return None


def _is_stream(value: Any) -> bool:
    """Return True for an iterator, queue, thread or unseekable file: drawing removes items permanently."""
    if isinstance(value, io.IOBase):
        try:
            return value.readable()
        except ValueError:  # a closed file
            return False
    if isinstance(value, type | types.FunctionType | types.MethodType):
        return False
    return hasattr(type(value), "__next__") or isinstance(value, _STREAMS)


def _parts(container: Any) -> list[Any]:
    return [part for pair in container.items() for part in pair] if isinstance(container, dict) else list(container)


def _refill(held: ContainerSnapshot, container: Any, before: list[Any]) -> None:
    """Restore a container only after a change: clearing an unchanged container could disturb the owner's threads."""
    now = _parts(container)
    if len(now) != len(before) or not all(map(operator.is_, now, before)):
        held.restore()


def _rename(names: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore the changed attributes only."""
    for name in names.keys() - before.keys():
        del names[name]
    for name, value in before.items():
        if name not in names or names[name] is not value:
            names[name] = value


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        if not _is_library(each):
            yield from (slots,) if isinstance(slots, str) else slots


def _put_back(holder: type, name: str, value: Any) -> None:
    if vars(holder).get(name) is not value:
        setattr(holder, name, value)


@functools.cache
def _globals(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return two sets of globals: used, and assigned, by code including inner functions."""
    used, stored = set(code.co_names), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_GLOBAL":
            stored.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            more, bound = _globals(constant)
            used, stored = used | more, stored | bound
    return frozenset(used), frozenset(stored)


def _is_library(value: Any) -> bool:
    """Return True for a class or function of Python, torch or another installed package."""
    if isinstance(value, types.FunctionType):
        place = value.__code__.co_filename
    else:
        name = str(vars(value).get("__module__"))
        place = getattr(sys.modules.get(name), "__file__", None) or ""
        if name == "builtins" or (not place and name in sys.builtin_module_names):
            return True
    return place.startswith(("<frozen", *_library_folders()))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()})
