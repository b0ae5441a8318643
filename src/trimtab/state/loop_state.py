"""Snapshot of a training loop's state, to detect, report and undo the changes made by a trial.

`measure.reach` finds the objects: parameters, buffers, attributes and containers of modules, closures and globals of
the loss, of forwards and of hooks, random generators, the optimizer, gradients and the batch.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trimtab.state.generators import NUMPYS, PYTHONS, GeneratorSnapshot, is_generator, same_state
from trimtab.state.iterators import IteratorSnapshot, has_position, iterators_in
from trimtab.state.object_snapshots import (
    MISSING,
    ArraySnapshot,
    ContainerSnapshot,
    GradientSnapshot,
    TensorSnapshot,
    VariableSnapshot,
    device_copy,
    host_copy,
    reachable,
    tensors_of,
)
from trimtab.state.peak_memory import most_bytes
from trimtab.state.process_state import ProcessState
from trimtab.state.raw_memory import MemorySnapshot, is_raw_memory
from trimtab.state.reachable_objects import ChangeKind, ObjectPath, ObjectWalk, ReachableObject

__all__ = ["ChangeKind", "LoopState", "StateChange", "unchanged_by"]

# Paths of torch's global generators in `StateChange`.
TORCH_GENERATORS = ("torch's generator", "torch's CUDA generator")
_ROOM = 3  # copies stay on a GPU only if this multiple of their size is free above the peak; trials need memory too
_MOST_BESIDE = 2**30  # limit for copies of tensors outside the model; beyond it only checksums are stored

Other = VariableSnapshot | ArraySnapshot | GeneratorSnapshot | IteratorSnapshot | MemorySnapshot
Held = TensorSnapshot | GradientSnapshot | ContainerSnapshot | Other

_TEXTS = {
    ChangeKind.FROZEN_PARAMETER: "parameter without gradient",
    ChangeKind.CLOSURE: "variable",
    ChangeKind.GENERATOR: "random generator",
    ChangeKind.GRADIENT: "gradient of",
    ChangeKind.OPTIMIZER: "optimizer state",
    ChangeKind.BATCH: "the batch:",
}


@dataclass(frozen=True)
class StateChange:
    """An object that differs from its snapshot.

    Attributes:
        path: Location, such as "teacher.0.weight", "memory.queue", "bag in loss_fn" or "Python's random".
        kind: Kind of object.
    """

    path: str
    kind: ChangeKind

    def __str__(self) -> str:
        return f"{_TEXTS.get(self.kind, self.kind.value)} {self.path}"


class LoopState:
    """Snapshot of all state that a forward, a loss or an optimizer step can change.

    As a context manager it restores the state on exit, also after an error.

    Args:
        model: Model. Functions used by its forwards and hooks are followed.
        optimizer: Optimizer with its state, parameter groups and hooks.
        loss_fn: Loss, followed through closures, globals, default arguments, partials and methods.
        batch: Tensors and containers passed to the loss.
        modules: Further trained modules, such as a criterion with parameters; by name or in a sequence.
        peak_bytes: Peak GPU memory in bytes while the snapshot exists. Copies stay on the GPU if they fit in addition
            to this peak, which makes restoring many times faster. None stores copies on the CPU, outside any GPU peak.
        most_bytes_copied: Larger tensors of the model are not copied and not restored. Their changes are detected by
            tensor version, except changes through `.data`. None copies all tensors.
        logs: True to compare append-only containers as well: needed for a part of a loop, if other parts may read them.
            False only removes the added items when restoring.
        of_forwards: True for a cheap snapshot of state that forwards may change: no gradients and no append-only
            containers, checksums instead of copies for trainable parameters, and for other tensors beyond 1 GiB in
            total.
        iterators: True to include iterators and queues.
        held_elsewhere: Ids of tensors that the caller restores; they are not copied.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        batch: Any = None,
        modules: Sequence[nn.Module] | Mapping[str, nn.Module] = (),
        peak_bytes: int | None = None,
        most_bytes_copied: int | None = None,
        logs: bool = False,
        of_forwards: bool = False,
        iterators: bool = True,
        held_elsewhere: Container[int] = (),
    ) -> None:
        self._process = ProcessState.capture(wakes_cuda=False)
        self._copied = host_copy if peak_bytes is None or not _has_room(model, optimizer, peak_bytes) else device_copy
        self._most_bytes, self._beside = most_bytes_copied, 0
        self._tensors: list[tuple[TensorSnapshot, ObjectPath]] = []
        self._gradients: list[tuple[GradientSnapshot, ObjectPath]] = []
        self._containers: list[tuple[ContainerSnapshot, ReachableObject]] = []
        self._others: list[tuple[Other, ObjectPath]] = []
        self._logs: list[ContainerSnapshot] = []
        self._of_forwards, self._held_elsewhere = of_forwards, held_elsewhere
        self._of_loss: set[int] = set()
        found, of_loss, added_to = _walked(model, optimizer, loss_fn, batch, modules, logs=logs)
        for each in found:
            if iterators or not _is_positioned(each):
                self._hold(each)
        for each in of_loss:
            if iterators or not _is_positioned(each):
                self._of_loss.add(id(self._hold(each)))
        if not of_forwards:
            self._logs += [ContainerSnapshot(each.value) for each in added_to]
        self._iterators = [(each, place) for each, place in self._others if isinstance(each, IteratorSnapshot)]
        if self._iterators:
            self._name_iterators()

    def is_of_loss(self, held: Held) -> bool:
        """Return True if an object was reached only through the loss."""
        return id(held) in self._of_loss

    def _hold(self, reached: ReachableObject) -> Held:
        """Take a snapshot of an object and return it."""
        value, place = reached.value, reached.place
        if reached.get is not None and reached.put is not None:
            held: Other = VariableSnapshot(reached.get, reached.put)
        elif isinstance(value, Tensor):
            tensor = TensorSnapshot(value, self._copier(value, reached))
            self._tensors.append((tensor, place))
            if value.is_leaf and not self._of_forwards:
                copied = _by_version if self._is_large(value) else self._copied
                self._gradients.append((GradientSnapshot(value, copied), place.then("", ChangeKind.GRADIENT)))
            return tensor
        elif isinstance(value, numpy.ndarray):
            held = ArraySnapshot(value)
        elif not isinstance(value, dict) and is_generator(value):
            held = GeneratorSnapshot(value)
        elif has_position(value):
            held = IteratorSnapshot(value)
        elif is_raw_memory(value):
            held = MemorySnapshot(value)
        else:
            container = ContainerSnapshot(value)
            self._containers.append((container, reached))
            return container
        self._others.append((held, place))
        return held

    def _name_iterators(self) -> None:
        """Link each iterator with the variables and container items that refer to it."""
        known = {held.key: held for held, _ in self._iterators}
        for other, _ in self._others:
            if isinstance(other, VariableSnapshot):
                for index, each in enumerate(iterators_in(other.value)):
                    if (held := known.get(id(each))) is not None:
                        held.held_by.append(other.exchange)
                        held.get = held.get or functools.partial(_inside_of, other.get, index)
        for container, _ in self._containers:
            items = container.items
            if not isinstance(items, dict | list) or isinstance(container.container, set | bytearray):
                continue
            for key, item in items.items() if isinstance(items, dict) else enumerate(items):
                for index, each in enumerate(iterators_in(item)):
                    if (held := known.get(id(each))) is not None:
                        held.held_by.append(functools.partial(container.exchange, key))
                        held.get = held.get or functools.partial(_inside_of, container.reader(key), index)

    def not_restorable(self) -> list[StateChange]:
        """Return the changed iterators and queues that cannot be restored."""
        found = (StateChange(place.path(), place.kind) for held, place in self._iterators if _is_lost(held))
        return list(dict.fromkeys(found))

    def _copier(self, tensor: Tensor, reached: ReachableObject) -> Callable[[Tensor], Tensor | None] | None:
        if id(tensor) in self._held_elsewhere:
            return _by_version
        if self._of_forwards and self._is_large(tensor):
            return _by_version
        if self._of_forwards and reached.place.kind is ChangeKind.PARAMETER:
            return None
        if reached.is_beside or self._of_forwards:
            self._beside += tensor.nbytes if tensor.layout is torch.strided else 0
            return None if self._beside > _MOST_BESIDE else self._copied
        return _by_version if self._is_large(tensor) else self._copied

    def _is_large(self, tensor: Tensor) -> bool:
        most = self._most_bytes
        return most is not None and tensor.layout is torch.strided and tensor.nbytes > most

    def held(self) -> Iterator[tuple[Held, str]]:
        """Yield each snapshot with the path of its object, except for gradients."""
        for tensor, place in self._tensors:
            yield tensor, place.path()
        for container, reached in self._containers:
            yield container, reached.place.path()
        for other, place in self._others:
            yield other, place.path()

    def changes(self) -> list[StateChange]:
        """Return the current differences from the snapshot, compared by value, in the order of discovery."""
        return list(dict.fromkeys(change for change, _ in self.changed()))

    def changed(self) -> Iterator[tuple[StateChange, Held | None]]:
        """Yield each change with the snapshot that undoes it, or None for torch's global generators."""
        for tensor, place in self._tensors:
            if tensor.has_changed():
                yield StateChange(place.path(), place.kind), tensor
        for container, reached in self._containers:
            for key in container.changes():
                more = "" if key is MISSING else f".{key}" if reached.is_named else f"[{key!r:.40}]"
                yield StateChange(reached.place.path(more), reached.place.kind), container
        for gradient, place in self._gradients:
            if gradient.has_changed():
                yield StateChange(place.path(), place.kind), gradient
        for other, place in self._others:
            if other.has_changed():
                yield StateChange(place.path(), place.kind), other
        for name, generator in self._drawn():
            yield StateChange(name, ChangeKind.GENERATOR), generator

    def _drawn(self) -> Iterator[tuple[str, GeneratorSnapshot | None]]:
        """Yield the global random generators whose state has changed."""
        before, now = self._process, ProcessState.capture(wakes_cuda=False)
        if not same_state(before.cpu_rng, now.cpu_rng):
            yield TORCH_GENERATORS[0], None
        if len(before.cuda_rng) == len(now.cuda_rng) and not all(map(same_state, before.cuda_rng, now.cuda_rng)):
            yield TORCH_GENERATORS[1], None
        if not same_state(before.python_rng, now.python_rng):
            yield "Python's random", GeneratorSnapshot(PYTHONS, before.python_rng)
        if not same_state(before.numpy_rng, now.numpy_rng):
            yield "numpy.random", GeneratorSnapshot(NUMPYS, before.numpy_rng)

    def holder_of(self, held: Held) -> tuple[Any, Callable[[], Any]] | None:
        """Return (key, getter) of a variable that refers to an object, or None if there is none.

        The getter returns the variable's current value.
        """
        value = getattr(held, {ContainerSnapshot: "container", TensorSnapshot: "tensor"}.get(type(held), "owner"), None)
        for other, _ in self._others:
            if isinstance(other, VariableSnapshot) and other.value is value:
                return other.key, other.get
        for container, _ in self._containers:
            if isinstance(container.container, dict):
                for key, item in container.items.items():
                    if item is value:
                        return (id(container.container), key), functools.partial(container.container.get, key)
        return None

    def restore(self) -> None:
        """Restore the state bitwise, in the same objects. Can be called repeatedly."""
        for iterator, _ in self._iterators:
            iterator.restore()
        for container, _ in self._containers:
            container.restore()
        for log in self._logs:
            log.restore()
        for tensor, place in self._tensors:
            tensor.restore()
            if tensor.is_checked_only and tensor.has_changed():
                self._warn_of(place)
        for gradient, _ in self._gradients:
            gradient.restore()
        for other, _ in self._others:
            if not isinstance(other, IteratorSnapshot):
                other.restore()
        self._process.restore()

    def _warn_of(self, place: ObjectPath) -> None:
        changed = StateChange(place.path(), place.kind)
        text = f"A training step changed {changed}, which is too large to be copied and was not restored."
        warnings.warn(f"{text} Reload its value before you continue.", RuntimeWarning, stacklevel=3)

    def __enter__(self) -> LoopState:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()


def _walked(
    model: nn.Module,
    optimizer: Any,
    loss_fn: Any,
    batch: Any,
    modules: Sequence[Any] | Mapping[str, Any],
    *,
    logs: bool,
) -> tuple[list[ReachableObject], list[ReachableObject], list[ReachableObject]]:
    """Return objects reached from the loop, objects reached only through the loss, and append-only containers."""
    walk = ObjectWalk(skips_logs=not logs)
    walk.enter(model, "", ChangeKind.ATTRIBUTE)
    named = modules if isinstance(modules, Mapping) else {_name_of(each, i): each for i, each in enumerate(modules)}
    for name, module in named.items():
        walk.enter(module, name, ChangeKind.ATTRIBUTE)
    if optimizer is not None:
        walk.enter_optimizer(optimizer)
    walk.enter(batch, "batch", ChangeKind.BATCH)
    number = len(walk.found)
    if loss_fn is not None:
        walk.enter_function(loss_fn)
    return walk.found[:number], walk.found[number:], walk.logs()


def _is_positioned(reached: ReachableObject) -> bool:
    return reached.get is None and has_position(reached.value)


def _is_lost(held: IteratorSnapshot) -> bool:
    return not held.is_restorable and held.has_changed()


def _inside_of(get: Callable[[], Any], index: int) -> Any:
    """Return the iterator at `index` inside a variable's value, or `MISSING`."""
    found = iterators_in(get())
    return found[index] if index < len(found) else MISSING


def _name_of(module: nn.Module, index: int) -> str:
    return f"{type(module).__name__} (modules[{index}])"


def unchanged_by(loss_fn: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> LoopState:
    """Return a context manager that restores the loop on exit, including objects used by the loss and hooks."""
    return LoopState(model, optimizer, loss_fn=loss_fn)


def _by_version(tensor: Tensor) -> None:
    """Make no copy."""


def _has_room(model: nn.Module, optimizer: torch.optim.Optimizer | None, peak_bytes: int) -> bool:
    """Return True if every GPU has room for `_ROOM` times the copies in addition to the peak."""
    held = Counter[torch.device]()
    for tensor in {id(t): t for t in (*tensors_of(model), *_tensors(getattr(optimizer, "state", {})))}.values():
        for each in (tensor, tensor.grad):
            if each is not None and each.is_cuda:
                held[each.device] += each.numel() * each.element_size()
    return all(peak_bytes + _ROOM * size < most_bytes(device) for device, size in held.items())


def _tensors(root: Any) -> Iterator[Tensor]:
    return (value for value in reachable([root]) if isinstance(value, Tensor))
