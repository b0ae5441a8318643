"""Snapshot of a training loop's state, to detect, report and undo the changes made by a trial.

`ObjectWalk` finds the objects: parameters, buffers, attributes and containers of modules, closures and globals of the
loss, of forwards and of hooks, random generators, the optimizer, gradients and the batch.
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
from trimtab.state.object_snapshots import (
    MISSING,
    ArraySnapshot,
    ContainerSnapshot,
    GradientSnapshot,
    PositionSnapshot,
    TensorSnapshot,
    VariableSnapshot,
    device_copy,
    has_position,
    host_copy,
    is_container,
    is_raw_memory,
)
from trimtab.state.peak_memory import alive_between_steps, most_bytes
from trimtab.state.process_state import ProcessState
from trimtab.state.reachable_objects import ChangeKind, ObjectPath, ObjectWalk, ReachableObject

__all__ = ["ChangeKind", "LoopState", "StateChange", "unchanged_by"]

# Paths of torch's global generators in `StateChange`.
TORCH_GENERATORS = ("torch's generator", "torch's CUDA generator")
_ROOM = 3  # copies stay on a GPU only if this multiple of their size is free above the peak; trials need memory too
_MOST_BESIDE = 2**30  # limit for copies of tensors outside the model; beyond it only checksums are stored

Other = ContainerSnapshot | VariableSnapshot | ArraySnapshot | GeneratorSnapshot | PositionSnapshot
Held = TensorSnapshot | GradientSnapshot | Other

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


def snapshot_of(reached: ReachableObject) -> Other:
    """Return a snapshot of a found object other than a tensor."""
    value = reached.value
    if reached.get is not None and reached.put is not None:
        return VariableSnapshot(reached.get, reached.put)
    if is_container(value):  # the most frequent case: tables of modules
        return ContainerSnapshot(value)
    if isinstance(value, numpy.ndarray) or is_raw_memory(value):
        return ArraySnapshot(value)
    return GeneratorSnapshot(value) if is_generator(value) else PositionSnapshot(value)


class LoopState:
    """Snapshot of all state that a forward, a loss or an optimizer step can change.

    As a context manager it restores the state on exit, also after an error.

    Args:
        model: Model. Functions used by its forwards and hooks are followed. None if all modules are in `modules`.
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
        iterators: True to include the positions of iterators and queues.
        held_elsewhere: Ids of tensors that the caller restores; they are not copied.
    """

    def __init__(
        self,
        model: nn.Module | None,
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
        fits = peak_bytes is not None and model is not None and _has_room(model, optimizer, peak_bytes)
        self._copied = device_copy if fits else host_copy
        self._most_bytes, self._beside_bytes = most_bytes_copied, 0
        self._of_forwards, self._held_elsewhere = of_forwards, held_elsewhere
        walk = ObjectWalk(skips_logs=not logs)
        if model is not None:
            walk.enter(model, "", ChangeKind.ATTRIBUTE)
        names = {f"{type(each).__name__} (modules[{i}])": each for i, each in enumerate(modules)}
        for name, module in (modules if isinstance(modules, Mapping) else names).items():
            walk.enter(module, name, ChangeKind.ATTRIBUTE)
        if optimizer is not None:
            walk.enter_optimizer(optimizer)
        walk.enter(batch, "batch", ChangeKind.BATCH)
        num_before_loss = len(walk.found)
        if loss_fn is not None:
            walk.enter_function(loss_fn)
        self._held: list[tuple[Held, ReachableObject]] = []
        self._of_loss: set[int] = set()
        for index, each in enumerate(walk.found):
            if iterators or each.get is not None or not has_position(each.value):
                held = self._hold(each)
                if index >= num_before_loss:
                    self._of_loss.add(id(held))
        self._logs = [] if of_forwards else [ContainerSnapshot(each.value) for each in walk.logs()]

    def is_of_loss(self, held: Held) -> bool:
        """Return True if an object was reached only through the loss."""
        return id(held) in self._of_loss

    def _hold(self, reached: ReachableObject) -> Held:
        """Take a snapshot of an object and return it."""
        value = reached.value
        if reached.get is not None or not isinstance(value, Tensor):
            held: Held = snapshot_of(reached)
            self._held.append((held, reached))
            return held
        held = TensorSnapshot(value, self._copier(value, reached.place))
        self._held.append((held, reached))
        if value.is_leaf and not self._of_forwards:
            copied = _by_version if self._is_large(value) else self._copied
            gradient = reached._replace(place=reached.place.then("", ChangeKind.GRADIENT))
            self._held.append((GradientSnapshot(value, copied), gradient))
        return held

    def _copier(self, tensor: Tensor, place: ObjectPath) -> Callable[[Tensor], Tensor | None] | None:
        if id(tensor) in self._held_elsewhere or (self._of_forwards and self._is_large(tensor)):
            return _by_version
        if self._of_forwards and place.kind is ChangeKind.PARAMETER:
            return None
        if place.is_beside or self._of_forwards:
            self._beside_bytes += tensor.nbytes if tensor.layout is torch.strided else 0
            return None if self._beside_bytes > _MOST_BESIDE else self._copied
        return _by_version if self._is_large(tensor) else self._copied

    def _is_large(self, tensor: Tensor) -> bool:
        most = self._most_bytes
        return most is not None and tensor.layout is torch.strided and tensor.nbytes > most

    def held(self) -> Iterator[tuple[Held, str]]:
        """Yield each snapshot with the path of its object, except for gradients."""
        for held, reached in self._held:
            if not isinstance(held, GradientSnapshot):
                yield held, reached.place.path()

    def changes(self) -> list[StateChange]:
        """Return the current differences from the snapshot, compared by value, in the order of discovery."""
        return list(dict.fromkeys(change for change, _ in self.changed()))

    def changed(self) -> Iterator[tuple[StateChange, Held | None]]:
        """Yield each change with the snapshot that undoes it, or None for torch's global generators."""
        for held, reached in self._held:
            if isinstance(held, ContainerSnapshot):
                for key in held.changes():
                    more = "" if key is MISSING else f".{key}" if reached.is_named else f"[{key!r:.40}]"
                    yield StateChange(reached.place.path(more), reached.place.kind), held
            elif held.has_changed():
                yield StateChange(reached.place.path(), reached.place.kind), held
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

    def not_restorable(self) -> list[StateChange]:
        """Return the changed iterators and queues, which cannot be restored."""
        found = ((held, each.place) for held, each in self._held if isinstance(held, PositionSnapshot))
        return list(dict.fromkeys(StateChange(place.path(), place.kind) for held, place in found if held.has_changed()))

    def holder_of(self, held: Held) -> tuple[Any, Callable[[], Any]] | None:
        """Return (key, getter) of a variable that refers to an object, or None if there is none.

        The getter returns the variable's current value.
        """
        if isinstance(held, VariableSnapshot):
            return held.key, held.get
        value = held.owner
        for other, _ in self._held:
            if isinstance(other, VariableSnapshot) and other.value is value:
                return other.key, other.get
        for other, _ in self._held:
            if isinstance(other, ContainerSnapshot) and isinstance(other.container, dict):
                for key, item in other.items.items():
                    if item is value:
                        return (other.key, key), functools.partial(other.container.get, key)
        return None

    def restore(self) -> None:
        """Restore the state bitwise, in the same objects. Can be called repeatedly."""
        for held, reached in self._held:
            held.restore()
            if isinstance(held, TensorSnapshot) and held.is_checked_only and held.has_changed():
                changed = StateChange(reached.place.path(), reached.place.kind)
                text = f"A training step changed {changed}, which is too large to be copied and was not restored."
                warnings.warn(f"{text} Reload its value before you continue.", RuntimeWarning, stacklevel=2)
        for log in self._logs:
            log.restore()
        self._process.restore()

    def __enter__(self) -> LoopState:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()


def unchanged_by(loss_fn: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> LoopState:
    """Return a context manager that restores the loop on exit, including objects used by the loss and hooks."""
    return LoopState(model, optimizer, loss_fn=loss_fn)


def _by_version(tensor: Tensor) -> None:
    """Make no copy."""


def _has_room(model: nn.Module, optimizer: torch.optim.Optimizer | None, peak_bytes: int) -> bool:
    """Return True if every GPU has room for `_ROOM` times the copies in addition to the peak."""
    held = Counter[torch.device]()
    for tensor in {id(each): each for each in alive_between_steps(model, optimizer)}.values():
        for each in (tensor, tensor.grad):
            if each is not None and each.is_cuda:
                held[each.device] += each.numel() * each.element_size()
    return all(peak_bytes + _ROOM * size < most_bytes(device) for device, size in held.items())
