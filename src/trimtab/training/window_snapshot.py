"""Snapshot of the state that a window's forward passes may change, for repeating or skipping the window.

After an out-of-memory error, the state from before the window is restored and the window is repeated in smaller
micro-batches. A skipped step restores the state too, except for random generators.
"""

from __future__ import annotations

import functools
import operator
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trimtab.core import validation
from trimtab.core.errors import MemoryLimitError, ValueGivenError
from trimtab.plans.plan import Plan
from trimtab.state.forward_state import Replayed, is_traced, state_recorder
from trimtab.state.generators import GeneratorSnapshot
from trimtab.state.loop_state import ChangeKind, LoopState, StateChange
from trimtab.state.object_snapshots import ArraySnapshot, ContainerSnapshot, TensorSnapshot, VariableSnapshot, checksum
from trimtab.training.hooks import Hook, Outcome
from trimtab.training.out_of_memory import MicroBatchLimit, free_memory, is_out_of_memory, out_of_memory_in_step
from trimtab.training.split_conditions import has_batch_statistics, keeps_maths
from trimtab.training.window import Window

_LARGE = 2**20  # Bytes of a buffer that is copied only after it changed.
_SMALL = 2**16  # Bytes of a tensor that later watched windows copy.
_FULLY_WATCHED = 2  # Number of watched windows that copy all tensors; later ones copy small tensors only.


class WindowSnapshot:
    """Snapshot taken before a window, restored if the window is repeated or skipped.

    Small buffers and batch statistics are copied before every window. Large buffers (frozen weights, masks, codebooks,
    queues) are copied only after a window that changed them, detected by version counters, and in the first two windows
    also by checksums of persistent buffers, since some writes leave the version unchanged. The first change of a large
    persistent buffer cannot be undone: that window is not repeated, and skipping it causes a warning.

    Windows 1, 2, 3, 6, 12, ... are watched (`state.loop_state`): frozen parameters, attributes, containers, variables
    and generators that their forwards change are recorded before every later window. Plain numbers and lists that only
    the loss refers to are excluded: the number of calls of a loss is not part of a window.

    Args:
        model: the model.
        watches: True if windows are watched.

    Attributes:
        loss_fn: the loss, whose state is watched too; None if unknown.
    """

    def __init__(self, model: nn.Module, *, watches: bool = False) -> None:
        self._model, self._watches, self._windows = model, watches, 0
        self.loss_fn: Callable[..., Any] | None = None
        self._unheld: list[str] = []
        self._tables = [_table(module) for module in model.modules()]
        self._list_places()
        self._device = next(model.parameters()).device
        self._buffers: list[Tensor | None] = []
        self._always: tuple[list[Tensor], list[Tensor]] = [], []  # Copies, and the tensors copied.
        self._shapes: list[torch.Size] = []
        self._large: list[_LargeBuffer] = []
        self._generators: Any = None
        self._watch: LoopState | None = None
        self._holds: dict[Any, Callable[[], Replayed | None]] = {}  # By the key of each object.
        self._moving: dict[Any, Callable[[], Any]] = {}  # Tensors other than buffers, by the key of their names.
        self._held: list[Replayed] = []
        self._learned: list[TensorSnapshot] = []  # Tensors that changed for the first time in this window.

    def _list_places(self) -> None:
        self._places = [
            (module, name, name not in module._non_persistent_buffers_set)
            for module in self._model.modules()
            for name in _table(module)
        ]
        self._number = sum(map(len, self._tables))

    def note(self) -> None:
        """Take the snapshot. If this raises, the previous snapshot stays valid."""
        if sum(map(len, self._tables)) != self._number:
            self._list_places()
        others = [value for get in self._moving.values() if isinstance(value := get(), Tensor)]
        buffers = [*(_table(module).get(name) for module, name, _ in self._places), *others]
        is_same = len(buffers) == len(self._buffers) and all(map(operator.is_, buffers, self._buffers))
        if not is_same or self._shapes != [each.shape for each in self._always[1]]:  # A buffer was resized in place.
            self._sort(buffers)
        if self._always[0]:
            torch._foreach_copy_(*self._always)
        self._windows += self._watches
        for each in self._large:
            each.note(is_summed=0 < self._windows <= _FULLY_WATCHED)
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        self._generators = torch.get_rng_state(), cuda  # Without NumPy's generator, which would take 85 us per window.
        self._held = [held for hold in self._holds.values() if (held := hold()) is not None]
        self._learned = []
        self._watch = None
        if self._watches and _is_watched(self._windows) and not is_traced(list(self._model.modules())):
            most = None if self._windows <= _FULLY_WATCHED else _SMALL
            self._watch = LoopState(
                self._model,
                loss_fn=self.loss_fn,
                most_bytes_copied=most,
                of_forwards=True,
                iterators=False,
                held_elsewhere={id(buffer) for buffer in self._buffers},
            )

    def learn(self) -> None:
        """Compare a watched window's state with the snapshot; called after forwards and backwards only."""
        for each in self._large:
            each.learn()
        watch, self._watch = self._watch, None
        if watch is None:
            return
        own = {id(table) for table in self._tables}
        own |= {id(buffer) for table in self._tables for buffer in table.values() if buffer is not None}
        own |= {id(buffer) for buffer in self._buffers}
        unheld = []
        for change, held in watch.changed():
            if isinstance(held, TensorSnapshot):
                if id(held.tensor) in own or change.kind is ChangeKind.GRADIENT:
                    continue
                if held.is_checked_only or not can_be_written(held.tensor) or change.kind is ChangeKind.PARAMETER:
                    unheld.append(str(change))
                if change.kind is not ChangeKind.PARAMETER and can_be_written(held.tensor):
                    key, get = watch.holder_of(held) or (id(held.tensor), functools.partial(_itself, held.tensor))
                    self._moving[key] = get
                    self._learned.append(held)
            elif isinstance(held, Replayed):
                is_own = isinstance(held, ContainerSnapshot) and id(held.container) in own
                if not is_own and not (watch.is_of_loss(held) and _is_plain(change, held)):
                    key, hold = state_recorder(held, watch.holder_of(held))
                    if key not in self._holds:
                        self._holds[key] = hold
                        self._held.append(held)
            elif held is not None:
                unheld.append(str(change))
        self._unheld += [each for each in unheld if each not in self._unheld]

    @property
    def unheld(self) -> list[str]:
        """Names of changes that cannot be restored.

        These are changes of trained parameters, and of large buffers that this window was the first to change.
        """
        if not (lost := [each.place for each in self._large if each.is_lost]):
            return self._unheld
        paths = {id(module): f"{path}." if path else "" for path, module in self._model.named_modules()}
        return self._unheld + [f"buffer {paths.get(module, '')}{name}" for module, name in lost]

    def _sort(self, buffers: list[Tensor | None]) -> None:
        """Divide buffers into those copied before every window, with memory for the copies, and large buffers."""
        always: list[Tensor] = []
        large: list[_LargeBuffer] = []
        known = {id(each.buffer): each for each in self._large}
        moved = {each.place for each in self._large if each.has_moved}
        number = len(self._places)
        for index, buffer in enumerate(buffers):
            if buffer is None or not can_be_written(buffer):
                continue
            module, name, is_persistent = self._places[index] if index < number else (self._model, "", True)
            # Fused batch norms update statistics without a new version.
            is_moving = index >= number or (is_persistent and isinstance(module, _NormBase))
            if is_moving or buffer.nbytes < _LARGE:
                # Copies must not be part of an autograd graph.
                always.append(buffer.detach() if buffer.requires_grad else buffer)
            elif id(buffer) in known:
                large.append(known[id(buffer)])
            else:
                place = id(module), name
                large.append(_LargeBuffer(buffer, place, is_persistent=is_persistent, has_moved=place in moved))
        self._always, self._large = ([torch.empty_like(each) for each in always], always), large
        self._buffers, self._shapes = buffers, [each.shape for each in always]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copies made before every window, over all devices."""
        copies, _ = self._always
        states: list[Tensor] = [state for state in self._generators or () if state is not None]
        return sum(each.nbytes for each in (*copies, *states)) + sum(each.copied_bytes for each in self._large)

    def restore(self) -> None:
        """Restore buffers, random generators and everything else that forwards changed."""
        self.restore_skipped()
        for each in self._held:
            if isinstance(each, GeneratorSnapshot):
                each.restore()
        cpu, cuda = self._generators
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)

    def restore_skipped(self) -> None:
        """Restore all but random generators, which a skipped step advances in a plain loop too."""
        self.learn()
        for each in self._held:
            if not isinstance(each, GeneratorSnapshot):
                each.restore()
        for tensor in self._learned:
            tensor.restore()
        self._restore_buffers()

    def _restore_buffers(self) -> None:
        """Restore buffer values, and persistent buffers that were replaced.

        Caches that were created or grew are kept, since modules recreate a cache that does not fit.
        """
        known = {(id(module), name) for module, name, _ in self._places}
        for module in self._model.modules():
            for name in [name for name in _table(module) if (id(module), name) not in known]:
                if name not in module._non_persistent_buffers_set:  # Registered since the snapshot.
                    del module._buffers[name]
        for (module, name, is_persistent), buffer in zip(self._places, self._buffers, strict=False):
            if is_persistent:
                _table(module)[name] = buffer
        with torch.no_grad():
            for copy, buffer in zip(*self._always, strict=True):
                _write(buffer, copy)
            for each in self._large:
                each.restore()


def _is_watched(number: int) -> bool:
    """Return True for windows 1, 2, 3, 6, 12, 24, ...: a watched window takes as long as several others."""
    thirds, rest = divmod(number, 3)
    return number <= 2 or (rest == 0 and not thirds & (thirds - 1))


def _table(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's buffers by name; for a scripted module, a copy of the table."""
    table = module._buffers
    return table if isinstance(table, dict) else dict(module.named_buffers(recurse=False))


def _itself(value: Any) -> Any:
    return value


def _is_plain(change: StateChange, held: Replayed) -> bool:
    """Return True for a number or a container without tensors that is not a module's attribute."""
    if change.kind is not ChangeKind.CLOSURE or isinstance(held, GeneratorSnapshot | ArraySnapshot):
        return False
    if isinstance(held, VariableSnapshot):
        values = [held.value, held.get()]
    else:
        values = [*_values(held.items), *_values(held.container)]
    return not any(isinstance(value, Tensor) for value in values)


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def bytes_to_begin_anew(model: nn.Module) -> int:
    """Return the bytes that a run of the model keeps to repeat a window."""
    start = WindowSnapshot(model)
    start.note()
    return start.kept_bytes


class _LargeBuffer:
    """A large buffer, copied before a window only after it has changed once.

    Args:
        buffer: the buffer.
        place: id of the module, and name of the buffer.
        is_persistent: True if the buffer is part of the module's `state_dict`.
        has_moved: True if an earlier buffer of the same name changed.
    """

    def __init__(self, buffer: Tensor, place: tuple[int, str], *, is_persistent: bool, has_moved: bool) -> None:
        self.buffer, self.place, self.has_moved = buffer, place, has_moved
        self._is_persistent = is_persistent
        self._version = buffer._version
        self._copy: Tensor | None = None
        self._sum: int | None = None

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copy."""
        return 0 if self._copy is None else self._copy.nbytes

    @property
    def is_lost(self) -> bool:
        """True if this window changed a persistent buffer without a copy."""
        return self._is_persistent and self._copy is None and self._is_other

    @property
    def _is_other(self) -> bool:
        return self.has_moved or self.buffer._version != self._version

    def note(self, *, is_summed: bool) -> None:
        """Copy the buffer if it has ever changed, by its version.

        Args:
            is_summed: compute a checksum to detect changes of a persistent buffer without a new version.
        """
        if self._is_other:
            value = self.buffer.detach()
            is_alike = self._copy is not None and self._copy.shape == value.shape
            self._copy = self._copy.copy_(value) if self._copy is not None and is_alike else value.clone()
            self._version = self.buffer._version
        is_summed &= self._is_persistent and not self.has_moved
        self._sum = checksum(self.buffer) if is_summed else None

    def learn(self) -> None:
        """Compare with the checksum, if there is one."""
        self.has_moved |= self._sum is not None and checksum(self.buffer) != self._sum
        self._sum = None

    def restore(self) -> None:
        """Restore the values, if they changed and were copied."""
        if self._copy is not None and self._is_other:
            _write(self.buffer, self._copy)
            self._version = self.buffer._version


def _write(buffer: Tensor, copy: Tensor) -> None:
    if buffer.shape == copy.shape:
        buffer.copy_(copy)
    else:  # Resized in place.
        buffer.data = copy.clone()


def can_be_written(buffer: Tensor) -> bool:
    """Return True if each element of a buffer has its own memory and can be written to."""
    if buffer.layout is not torch.strided or buffer.is_inference():
        return False
    shared = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return not shared  # Elements of an expanded tensor share memory.


POLICIES = ("split", "stop")
# Added to errors that are not handled.
_HINT = (
    "In one process, or with zero_stage=0, trimtab.start(..., out_of_memory='split') repeats such a step with smaller "
    "micro-batches, unless other ranks wait for this rank."
)
_UNHELD = (
    "The step was not repeated with smaller micro-batches, because its forwards changed state that cannot be "
    "restored: {}."
)
_STATISTICS = " Batch statistics are then computed per micro-batch, which changes training."
_OTHERWISE = " This changes the gradient, because the loss or the model computes over the whole batch."
_UNPROVED = (
    " The gradient stays the same only if the loss of a sample does not depend on other samples, which "
    "trimtab.plan(...) checks."
)


def recovers_from(policy: str | None, plan: Plan, model: nn.Module, *, may_retry: bool) -> bool:
    """Return True if a run splits a window after an out-of-memory error.

    The default is to split if, as far as is known, splitting keeps the numerics.

    Args:
        policy: "split", "stop" or None for the default.
        may_retry: True if this rank can repeat a window while other ranks are in it.

    Raises:
        ValueGivenError: "split" is impossible here, or the policy is unknown.
    """
    if policy is None:
        return may_retry and keeps_maths(plan, model)
    validation.one_of("out_of_memory", policy, POLICIES)
    if policy == "split" and not may_retry:
        raise ValueGivenError(
            "out_of_memory",
            problem='out_of_memory="split" is not possible here, because ranks communicate within a step and would '
            "wait for a rank that repeats the step.",
            got="split",
            hint='Use out_of_memory="stop" with a smaller micro-batch, or a plan with zero_stage=0.',
            code="out_of_memory.ranks_communicate",
        )
    return policy == "split"


class OutOfMemoryRetry(Hook):
    """Repeats a window in smaller micro-batches after an out-of-memory error, and undoes skipped windows.

    Attributes:
        is_on: True if windows are repeated.
        limit: the micro-batch size that fits.
        may_skip: True if steps may be skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        note: Callable[[str, Mapping[str, Any]], None],
        *,
        is_on: bool,
        watches: bool = True,
    ) -> None:
        self._assumed = _OTHERWISE if not keeps_maths(plan, model) else _UNPROVED if plan.check is None else ""
        self._has_statistics = has_batch_statistics(model)
        self.is_on, self.limit = is_on, MicroBatchLimit()
        self._start, self._note = WindowSnapshot(model, watches=watches), note
        self._device = next(model.parameters()).device
        self._plan, self.may_skip, self._is_repeatable = plan, False, False
        self._samples_before: int | None = None
        self._has_warned = False
        self._is_noted = False  # True if a window's initial state is available.
        self._began = time.perf_counter()
        self._spent_s, self._saved, self._windows = 0.0, 0, 0

    def begin(self, loss_fn: Callable[..., Any]) -> None:
        """Begin a window that can be repeated as a whole, with its loss, whose state is restored too."""
        self._samples_before = self.limit.rows
        self._start.loss_fn = loss_fn
        self._is_repeatable, self._is_noted = True, False

    def window_begins(self, window: Window) -> None:
        """Save the state from before the window, if the window may be repeated, skipped or consists of padding."""
        if not (self.is_on and self._is_repeatable) and not self.may_skip and window.rows:
            return
        start = time.perf_counter()
        self._is_repeatable = self._is_noted = False
        self._start.note()
        self._is_noted = True
        self._windows += 1
        self._spent_s += time.perf_counter() - start

    def step_begins(self, *, is_scaled: bool) -> None:
        """Record the changes made by a watched window's forwards, before the optimizer changes anything."""
        self._start.learn()

    def passed(self, outcome: Outcome) -> None:
        """Adopt the limit of other ranks; count an applied window, and after some time try a larger micro-batch."""
        if outcome.agreed.limit is not None:
            self.limit.adopt(outcome.agreed.limit)
        if not outcome.applied or (self.limit.rows is None and not self.limit.grew):
            return
        before, planned = self.limit.rows, self._plan.micro_batch_of(self._plan.batch_size)
        if (after := self.limit.passed(planned)) is not None:
            self._note("grown", {"from": before, "to": after})

    def restore_skipped(self) -> None:
        """After a skipped step, restore everything that its forwards changed, except random generators."""
        self._start.restore_skipped()
        if self._start.unheld and not self._has_warned:
            self._has_warned = True
            text = f"A step was skipped, but state that its forwards changed could not be restored: {self._unheld}."
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        self._saved += 1

    @property
    def _unheld(self) -> str:
        return ", ".join(self._start.unheld[:3])

    def failure_of(self, error: BaseException, *, in_optimizer: bool, may_retry: bool = True) -> str | None:
        """Return the allocator's message if the dropped window can be repeated; None otherwise.

        Args:
            error: the exception that ended the window.
            in_optimizer: True if it was raised within the optimizer's step.
            may_retry: True if no other rank depends on this window yet.

        Raises:
            MemoryLimitError: memory ran out within the optimizer's step.
        """
        if not is_out_of_memory(error):
            return None
        failure = str(error).partition("\n")[0][:200]
        if in_optimizer:
            raise out_of_memory_in_step(failure) from error
        if not self.is_on or not may_retry:
            error.add_note(_HINT + (_STATISTICS if self._has_statistics else ""))
            return None
        if not self._is_noted:
            return None
        self._start.learn()
        if self._start.unheld:
            error.add_note(_UNHELD.format(self._unheld))
            return None
        return failure

    def split(self, window: Window, failure: str, *, once: bool) -> None:
        """Halve the micro-batch of a dropped window, and restore the state from before the window.

        Args:
            window: the window to repeat.
            failure: the allocator's message.
            once: True if later windows need less memory, so that the limit applies to this window only.

        Raises:
            MemoryLimitError: a single sample did not fit.
        """
        before = window.micro_batch
        self._start.restore()
        limit = MicroBatchLimit() if once else self.limit
        try:
            after = limit.shrink(before, failure)
        except MemoryLimitError:
            self.limit.rows = self._samples_before
            raise
        free_memory(self._device)
        window.split(after)
        self._saved += 1
        self._note("out_of_memory", {"from": before, "to": after, "error": failure})
        warnings.warn(
            f"Out of memory ({failure}): the step is repeated, with the micro-batch reduced from {before} to {after} "
            f"samples.{self._assumed}",
            RuntimeWarning,
            stacklevel=3,
        )

    def account(self) -> dict[str, Any] | None:
        """Return the overhead as a fraction of the run's host time, and the number of windows saved; None if unused."""
        if not self._windows:
            return None
        price = self._spent_s / (time.perf_counter() - self._began)
        return {"technique": "window start", "price": price, "windows": self._windows, "saved": self._saved}
