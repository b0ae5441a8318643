"""State of a checkpointed forward other than graph tensors, restored for the recomputation.

Attributes and parameters of modules are recorded by reference at every forward, so that `functional_call` and
assignments between forward and backward do not affect the recomputation. The first forwards of a block are watched
(`LoopState`): random generators of Python, NumPy and the user, containers, and variables that change are
restored for all later recomputations. Changes that cannot be undone, such as an in-place change of a tensor, raise an
error.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trimtab.core.errors import ModelError
from trimtab.state.generators import GLOBAL_GENERATORS, GeneratorSnapshot, is_generator
from trimtab.state.loop_state import LoopState, StateChange
from trimtab.state.object_snapshots import (
    ArraySnapshot,
    ContainerSnapshot,
    TensorSnapshot,
    VariableSnapshot,
    is_container,
    is_raw_memory,
)

_MOST_COMPARED = 100  # Number of objects compared around every forward.
_MOST_ITEMS = 10_000  # Number of items in a container that is copied at every forward.
_SMALL = 2**20  # Bytes of a tensor copied by later watched forwards; the first watched forward copies all.
Replayed = ArraySnapshot | VariableSnapshot | ContainerSnapshot | GeneratorSnapshot
Recorder = Callable[[], Replayed | None]


@dataclass
class _ObservedChanges:
    """Changes observed in forwards of a mode (training or evaluation), independent of the schedule.

    Attributes:
        calls: number of forwards since the first.
        holds: for each changed object, by key, a function that records the current state.
    """

    calls: int = 0
    holds: dict[Any, Recorder] = field(default_factory=dict)


# By first module, then by mode and remaining modules, so that a schedule tried again is not watched again.
_seen: weakref.WeakKeyDictionary[nn.Module, dict[Any, _ObservedChanges]] = weakref.WeakKeyDictionary()


class RecomputedForwards:
    """Forwards of modules that run as one recomputed function.

    Attributes:
        modules: the modules and all submodules.
        buffered: modules with buffers.
        parameters: parameter dictionaries of the modules; empty under FSDP2.
        tables: attribute and parameter dictionaries that are recorded.
        compared: recorders of the objects, by key, that only some calls may change; compared around every forward.
        compared_tensors: such tensors with paths. Version counters show in-place changes, which cannot be undone.
    """

    def __init__(self, named: dict[str, nn.Module]) -> None:
        self._named = named
        self._first, *others = named.values()
        self._others = tuple(map(id, others))
        self.compared: dict[Any, Recorder] | None = None  # None before the first watched forward
        self.compared_tensors: list[tuple[Tensor, str]] = []
        self._list_modules()

    def _list_modules(self) -> None:
        """List the submodules again, since user code may have added some."""
        self.modules = list(dict.fromkeys(each for module in self._named.values() for each in module.modules()))
        self.buffered = [each for each in self.modules if each._buffers]
        held = [vars(each) for each in self.modules]
        is_sharded = any(kind.__name__ == "FSDPModule" for each in self.modules for kind in type(each).__mro__)
        # FSDP2 itself swaps sharded and unsharded parameters before either forward.
        self.parameters = [] if is_sharded else [each["_parameters"] for each in held if each["_parameters"]]
        self.tables = held + self.parameters
        # Ids of attribute tables and buffers, which are recorded at every forward.
        self._own = {id(table) for table in (*self.tables, *(each._buffers for each in self.modules))}
        self._own |= {id(buffer) for each in self.buffered for buffer in each._buffers.values() if buffer is not None}

    @property
    def names(self) -> str:
        """Name of the module, or names of the first and the last module."""
        return " to ".join(dict.fromkeys((next(iter(self._named)), list(self._named)[-1])))

    def begin(self) -> ForwardState:
        """Return the state at the start of a forward, watched in calls 1, 2, 4, 8, ..."""
        seen = _seen.setdefault(self._first, {}).setdefault((self._first.training, *self._others), _ObservedChanges())
        # True for calls 1, 3, 7, ..., counted from 0.
        is_due = not _recomputing and (self.compared is None or not seen.calls & (seen.calls + 1))
        if is_due and is_traced(self.modules):
            return ForwardState(self, seen, None)
        seen.calls += not _recomputing
        if not is_due:
            return ForwardState(self, seen, None)
        self._list_modules()
        most = None if seen.calls == 1 else _SMALL
        # Iterators are compared only in the recomputation.
        watch = LoopState(None, modules=self._named, most_bytes_copied=most, logs=True, iterators=False)
        self._compare(watch)
        return ForwardState(self, seen, watch)

    def _compare(self, watch: LoopState) -> None:
        """List the watched objects that a forward may change in only some calls."""
        parameters = [p for module in self.modules for p in module._parameters.values() if p is not None]
        # Torch's own tables, such as those of hooks: comparing them costs tens of microseconds in every forward.
        named = (item for each in self.modules for item in vars(each).items())
        ignored = {id(value) for name, value in named if name.startswith("_") and isinstance(value, dict | set)}
        ignored |= self._own.union(*((id(each), id(vars(each))) for each in parameters))
        found: dict[Any, Recorder] = {}
        tensors = []
        for held, path in watch.held():
            if id(getattr(held, "owner", None)) in ignored:
                continue
            if isinstance(held, TensorSnapshot):
                if not held.tensor.is_inference():
                    tensors.append((held.tensor, path))
            elif isinstance(held, Replayed) and len(found) < _MOST_COMPARED and _is_small(held):
                key, hold = state_recorder(held, watch.holder_of(held))
                found[key] = hold
        self.compared, self.compared_tensors = found, tensors[:_MOST_COMPARED]

    def judge(self, watch: LoopState, seen: _ObservedChanges) -> list[Replayed]:
        """Return the state, from before the watched forward, of objects that no earlier forward changed.

        Raises:
            ModelError: a change cannot be replayed; it was undone.
        """
        found: list[Replayed] = []
        refused: list[StateChange] = []
        for change, held in watch.changed():
            if isinstance(held, ContainerSnapshot | TensorSnapshot) and id(held.owner) in self._own:
                continue
            if isinstance(held, Replayed) and _is_small(held):
                key, hold = state_recorder(held, watch.holder_of(held))
                if key not in seen.holds:
                    seen.holds[key] = hold
                    found.append(held)
            elif held is not None:  # Excludes torch's generators, which torch's checkpointing restores.
                refused.append(change)
        if refused:
            watch.restore()
            raise self.refusal(refused)
        return found

    def refusal(self, changes: Sequence[StateChange | str]) -> ModelError:
        """Return the error for a forward whose changes cannot be undone."""
        names = self.names
        what = ", ".join(map(str, changes[:3])) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")
        return ModelError(
            "plan.recompute",
            problem=f"The forward of {names} changes {what}, so that activation checkpointing would apply the change "
            f"twice.",
            got=what,
            hint=f"Move the change out of {names}, register the tensor as a buffer, or use a plan with recompute=None.",
            code="recompute.side_effects",
        )


class ForwardState:
    """References, variables and generator states at the start of a forward.

    Attributes:
        is_watched: True if changes by this forward are searched for, and the recomputation is compared with the
            forward.
    """

    def __init__(self, forwards: RecomputedForwards, seen: _ObservedChanges, watch: LoopState | None) -> None:
        self._forwards, self._seen, self._watch = forwards, seen, watch
        self.is_watched = watch is not None
        self._tables, self._parameters = forwards.tables, forwards.parameters

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Record the state before the enclosed forward, and the changes if the forward is watched.

        Raises:
            ModelError: the forward made a change that the recomputation would repeat.
        """
        forwards, known = self._forwards, self._seen.holds
        self._before = [dict(table) for table in self._tables]
        self._replayed = [held for hold in known.values() if (held := hold()) is not None]
        self._versions = self._current_versions()
        generators = [each for each in GLOBAL_GENERATORS if id(each.generator) not in known]
        peeked = [each.peek() for each in generators]
        compared = {} if self._watch is not None else forwards.compared or {}
        others = [(key, hold, now) for key, hold in compared.items() if key not in known and (now := hold())]
        tensors = [] if self._watch is not None else forwards.compared_tensors
        versions = [tensor._version for tensor, _ in tensors]
        yield
        if moved := [path for (each, path), version in zip(tensors, versions, strict=True) if each._version != version]:
            raise forwards.refusal(moved)
        if self._watch is not None:
            watch, self._watch = self._watch, None
            self._replayed += forwards.judge(watch, self._seen)
        # A generator that only a later forward draws from keeps its known state until then.
        drawn = [held for each, held in zip(generators, peeked, strict=True) if each.peek().state is not held.state]
        others += [(held.key, held.again, held) for held in drawn if held.key not in known]
        for key, hold, held in others:
            if held.has_changed():
                known[key] = hold
                self._replayed.append(held)

    def _current_versions(self) -> list[int]:
        try:
            return [p._version for table in self._parameters for p in table.values() if p is not None]
        except RuntimeError:  # Tensors made in inference mode have no version counter.
            return []

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Restore the recorded state for the enclosed recomputation, and the current state afterwards.

        Raises:
            ModelError: a parameter was changed in place since the forward.
        """
        global _recomputing
        now = [
            before if _is_same(table, before) else dict(table)
            for table, before in zip(self._tables, self._before, strict=True)
        ]
        others = [held for hold in self._seen.holds.values() if (held := hold()) is not None]
        _recomputing += 1
        try:
            _put(self._tables, self._before)
            for each in self._replayed:
                each.restore()
            if self._current_versions() != self._versions:
                raise _changed_since()
            yield
        finally:
            _recomputing -= 1
            _put(self._tables, now)
            for each in others:
                each.restore()


def _is_same(table: dict[str, Any], items: dict[str, Any]) -> bool:
    return len(table) == len(items) and all(map(operator.is_, table.values(), items.values()))


def _put(tables: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> None:
    for table, items in zip(tables, wanted, strict=True):
        if not _is_same(table, items):
            for name in [name for name in table if name not in items]:
                del table[name]
            table.update(items)


def _is_small(held: Replayed) -> bool:
    if isinstance(held, ArraySnapshot):
        return held.nbytes <= _SMALL
    return not isinstance(held, ContainerSnapshot) or len(held.items) <= _MOST_ITEMS


def state_recorder(held: Replayed, holder: Any) -> tuple[Any, Recorder]:
    """Return a key for a recorded object, and a function that records the current state of the object or its
    replacement."""
    if holder is None or isinstance(held, VariableSnapshot):
        return held.key, held.again
    where, get = holder

    def hold() -> Replayed | None:
        value = get()
        if is_generator(value):
            return GeneratorSnapshot(value)
        if isinstance(value, numpy.ndarray) or is_raw_memory(value):
            return ArraySnapshot(value)
        return ContainerSnapshot(value) if is_container(value) and len(value) <= _MOST_ITEMS else None

    return where, hold


_recomputing = 0  # Depth of nested recomputations. Forwards within them were watched before.


def is_traced(modules: Sequence[nn.Module]) -> bool:
    """Return True if tensor values cannot be read: dispatch mode, functorch transform, meta device, graph capture."""
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return any(p.is_meta for module in modules for p in module._parameters.values() if p is not None)


def _changed_since() -> ModelError:
    return ModelError(
        "plan.recompute",
        problem="Parameters of a recomputed block were changed in place between its forward and its backward.",
        hint="Update parameters (optimizer.step, averages) after the backward, or use a plan with recompute=None.",
        code="recompute.side_effects",
    )
