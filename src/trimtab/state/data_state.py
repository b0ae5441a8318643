"""Snapshot of state changed by drawing batches: loaders, samplers, datasets and referenced objects.

The search follows attributes, slots, containers, random generators, open files, attributes of the user's classes, and
closures and globals of the user's functions. Iterators, queues and threads cannot be restored: data that contain such
an object are one-shot, and nothing is drawn from them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import queue
import socket
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trimtab.state.loop_state import Other, snapshot_of
from trimtab.state.object_snapshots import TensorSnapshot
from trimtab.state.reachable_objects import NEVER_ENTERED, ChangeKind, ObjectPath, ObjectWalk, ReachableObject

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


def rebuilt_loader(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """Return a new DataLoader over the same dataset, sampler and collate function, with some arguments changed.

    The loader must have the iteration of `DataLoader` itself (`has_known_iteration`).
    """
    if loader.batch_sampler is None:
        order = {"sampler": loader.sampler, "batch_size": None}
    else:
        order = {"batch_sampler": loader.batch_sampler}
    same = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
    }
    return DataLoader(loader.dataset, **{**order, **same, **changed})


def has_known_iteration(loader: Any) -> bool:
    """Return True for a DataLoader whose attributes determine its batches: no own `__iter__`, no position to restore.

    A loader with a custom iteration or a data position cannot be rebuilt from its attributes.
    """
    is_plain = isinstance(loader, DataLoader) and getattr(type(loader), "__iter__", None) is DataLoader.__iter__
    return is_plain and not is_stateful(loader)


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


_MOST_OBJECTS = 20_000
_MOST_BYTES = 2**26  # limit for copies of tensors and arrays; larger ones are training data
_STREAMS = (queue.Queue, queue.SimpleQueue, threading.Thread, BaseProcess, socket.socket)
# Packages of handles of open files, which forked processes must not share.
_FILE_PACKAGES = frozenset(("h5py", "lmdb", "netCDF4", "sqlite3", "tables", "zarr"))
_LMDB = ("Environment", "Transaction", "Cursor")  # its compiled classes, which are named without a module
_OWN_ITERATORS = ("_iterator", "_initial_iter_for_state_dict")  # of a DataLoader: drawing uses a copy without these


class _DataWalk(ObjectWalk):
    """Walk through datasets, loaders and files; ends at an object without restorable state.

    Attributes:
        one_shot: Path and type of that object, or "".
        has_files: True if open, readable files or handles of a package of files were found.
    """

    most_depth = 8

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.one_shot, self.has_files, self._root = "", False, data
        self.enter(data, "data", ChangeKind.ATTRIBUTE, is_beside=True)

    def _visit(self, value: Any, place: ObjectPath) -> None:
        if self.one_shot or id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return
        if _is_stream(value):
            self.one_shot = f"{place.path()} (a {type(value).__name__})"
        elif has_lasting_workers(value) and getattr(value, "_iterator", None) is not None:
            self.one_shot = f"{place.path()} (persistent workers that have started)"
        else:
            super()._visit(value, place)

    def _handler_of(self, kind: Any) -> Any:
        if issubclass(kind, NEVER_ENTERED):
            return None
        if issubclass(kind, io.IOBase):
            return _DataWalk._file
        if any(map(_is_handle, kind.__mro__)):
            return _DataWalk._handle
        handler = super()._handler_of(kind)
        is_object = handler in (None, ObjectWalk._loader, ObjectWalk._object, ObjectWalk._package_object)
        return _DataWalk._part if is_object else handler

    def _file(self, value: Any, place: ObjectPath) -> None:
        if value.readable():  # a log would be overwritten
            with contextlib.suppress(OSError):  # A buffer in memory has no descriptor; a fork copies it.
                self.has_files = value.fileno() >= 0 or self.has_files
            get = functools.partial(value.tell)
            self.found.append(ReachableObject(get(), place, get=get, put=value.seek))

    def _handle(self, value: Any, place: ObjectPath) -> None:
        """Record a handle; its state is in the package."""
        self.has_files = True

    def _part(self, value: Any, place: ObjectPath) -> None:
        """Add the attributes of an object of any class, or the state of an object that saves its own."""
        if is_stateful(value) and not isinstance(value, DataLoader):
            if value is not self._root:  # `draw_and_restore_loader` restores the loader itself
                get = functools.partial(value.state_dict)
                self.found.append(ReachableObject(get(), place, get=get, put=value.load_state_dict))
            return
        if isinstance(value, DataLoader):
            self._seen.update(id(vars(value).get(name)) for name in _OWN_ITERATORS)
        self._object(value, place)


class DataState:
    """Snapshot of training data.

    Attributes:
        one_shot: Path of a part that cannot be restored, such as "data.dataset.items (a tuple_iterator)"; "" if none.
        has_files: True if the data hold open files, or handles such as of h5py or sqlite3, which forked processes would
            share.
    """

    def __init__(self, data: Any) -> None:
        walk = _DataWalk(data)
        self.one_shot, self.has_files = walk.one_shot, walk.has_files
        self._held: list[Other | TensorSnapshot] = []
        num_bytes = 0
        for each in () if self.one_shot else walk.found:
            if each.get is None and isinstance(each.value, Tensor | numpy.ndarray):
                is_dense = not isinstance(each.value, Tensor) or each.value.layout is torch.strided
                num_bytes += each.value.nbytes if is_dense else 0
                if not is_dense or num_bytes > _MOST_BYTES:
                    continue
            is_tensor = each.get is None and isinstance(each.value, Tensor)
            self._held.append(TensorSnapshot(each.value) if is_tensor else snapshot_of(each))

    def restore(self) -> None:
        """Restore all parts. Can be called repeatedly."""
        for held in self._held:
            held.restore()


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


def _is_handle(kind: Any) -> bool:
    module = str(kind.__module__)
    return module.partition(".")[0] in _FILE_PACKAGES or (module == "builtins" and kind.__name__ in _LMDB)


def _is_stream(value: Any) -> bool:
    """Return True for an iterator, queue, thread or unseekable file: drawing removes items permanently."""
    if isinstance(value, io.IOBase):
        try:
            return value.readable() and not value.seekable()
        except ValueError:  # a closed file
            return False
    return not isinstance(value, type) and (hasattr(type(value), "__next__") or isinstance(value, _STREAMS))
