"""State that a window's forwards change besides gradients, as it was before them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.measure.generators import HeldGenerator
from trimtab.measure.held import HeldArray, HeldBinding, HeldContainer, HeldTensor
from trimtab.measure.loop_state import Change, ChangeKind, LoopState
from trimtab.runtime.forward_state import Replayed, holding, is_traced

_LARGE = 2**20  # bytes
_SMALL = 2**16  # bytes of a tensor that later watched windows copy
_FULLY_WATCHED = 2  # windows that are watched by the values of all tensors; later ones by those of small ones


class WindowStart:
    """The state that a window begins with, for a window that is repeated or skipped.

    Persistent buffers of floating point and all small ones are copied before every window: batch statistics are written
    without a trace in the tensor's version. Large ones of other kinds (quantised weights, masks, caches) are copied
    from the first window on that changed them by their version; what such a window did to them stays.

    Windows 1, 2, 4, 8, ... are watched (`measure.loop_state`): frozen parameters, attributes, containers, variables and
    generators that their forwards change are held before every window from then on. Plain numbers and lists that only
    the loss refers to are not: how often a loss was called is no part of a window.

    Args:
        watches: whether windows are watched.

    Attributes:
        loss_fn: followed by the watch too, where it is known.
        unheld: what forwards were seen to change that cannot be held, such as parameters that the optimizer steps.
    """

    def __init__(self, model: nn.Module, *, watches: bool = False) -> None:
        self._model, self._watches, self._windows = model, watches, 0
        self.loss_fn: Callable[..., Any] | None = None
        self.unheld: list[str] = []
        self._tables = [_table(module) for module in model.modules()]
        self._list_places()
        self._device = next(model.parameters()).device
        self._buffers: list[Tensor | None] = []
        self._always: tuple[list[Tensor], list[Tensor]] = [], []  # copies and tensors
        self._shapes: list[torch.Size] = []
        self._watched: list[_Watched] = []
        self._generators: Any = None
        self._watch: LoopState | None = None
        self._holds: dict[Any, Callable[[], Replayed | None]] = {}  # by the key of each object
        self._moving: dict[Any, Callable[[], Any]] = {}  # tensors besides buffers, by the key of their names
        self._held: list[Replayed] = []
        self._learned: list[HeldTensor] = []  # of this window, the first that moved them

    def _list_places(self) -> None:
        self._places = [
            (module, name, name not in module._non_persistent_buffers_set)
            for module in self._model.modules()
            for name in _table(module)
        ]
        self._number = sum(map(len, self._tables))

    def note(self) -> None:
        """Take the state as it is now. Where it raises, the last one stands."""
        if sum(map(len, self._tables)) != self._number:
            self._list_places()
        others = [value for get in self._moving.values() if isinstance(value := get(), Tensor)]
        buffers = [*(_table(module).get(name) for module, name, _ in self._places), *others]
        is_same = len(buffers) == len(self._buffers) and all(map(operator.is_, buffers, self._buffers))
        if not is_same or self._shapes != [each.shape for each in self._always[1]]:  # resized in place
            self._sort(buffers)
        if self._always[0]:
            torch._foreach_copy_(*self._always)
        for each in self._watched:
            each.note()
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        self._generators = torch.get_rng_state(), cuda  # NumPy's alone would take 85 us a window
        self._held = [held for hold in self._holds.values() if (held := hold()) is not None]
        self._learned = []
        self._windows += self._watches
        self._watch = None
        if self._watches and not self._windows & (self._windows - 1) and not is_traced(list(self._model.modules())):
            most = None if self._windows <= _FULLY_WATCHED else _SMALL
            self._watch = LoopState(
                self._model,
                loss_fn=self.loss_fn,
                most_bytes_copied=most,
                of_forwards=True,
                held_elsewhere={id(buffer) for buffer in self._always[1]},
            )

    def learn(self) -> None:
        """Compare a watched window's state with its start: called before anything but forwards and backwards ran."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        own = {id(table) for table in self._tables}
        own |= {id(buffer) for table in self._tables for buffer in table.values() if buffer is not None}
        own |= {id(buffer) for buffer in self._buffers}
        unheld = []
        for change, held in watch.changed():
            if isinstance(held, HeldTensor):
                if id(held.tensor) in own or change.kind is ChangeKind.GRADIENT:
                    continue
                if held.is_checked_only or not can_be_written(held.tensor) or change.kind is ChangeKind.PARAMETER:
                    unheld.append(str(change))
                if change.kind is not ChangeKind.PARAMETER and can_be_written(held.tensor):
                    key, get = watch.holder_of(held) or (id(held.tensor), functools.partial(_itself, held.tensor))
                    self._moving[key] = get
                    self._learned.append(held)
            elif isinstance(held, Replayed):
                is_own = isinstance(held, HeldContainer) and id(held.container) in own
                if not is_own and not (watch.is_of_loss(held) and _is_plain(change, held)):
                    key, hold = holding(held, watch.holder_of(held))
                    if key not in self._holds:
                        self._holds[key] = hold
                        self._held.append(held)
            elif held is not None:
                unheld.append(str(change))
        self.unheld += [each for each in unheld if each not in self.unheld]

    def _sort(self, buffers: list[Tensor | None]) -> None:
        """Make room for copies."""
        always, watched = [], []
        number = len(self._places)
        for index, buffer in enumerate(buffers):
            if buffer is None or not can_be_written(buffer):
                continue
            is_persistent = index >= number or self._places[index][2]
            changes = is_persistent and (index >= number or buffer.is_floating_point() or buffer.is_complex())
            if changes or buffer.nbytes < _LARGE:
                always.append(buffer.detach() if buffer.requires_grad else buffer)  # copies must not be in a graph
            else:
                watched.append(_Watched(buffer))
        self._always, self._watched = ([torch.empty_like(each) for each in always], always), watched
        self._buffers, self._shapes = buffers, [each.shape for each in always]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copies that are made before every window, on any device."""
        copies, _ = self._always
        states = [state for state in self._generators or () if state is not None]
        return sum(each.nbytes for each in (*copies, *states))

    def restore(self) -> None:
        """Restore buffers, generators and everything else that forwards changed."""
        self.restore_skipped()
        for each in self._held:
            if isinstance(each, HeldGenerator):
                each.restore()
        cpu, cuda = self._generators
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)

    def restore_skipped(self) -> None:
        """Restore all but random generators: a step that is skipped leaves them where a plain loop would."""
        self.learn()
        for each in self._held:
            if not isinstance(each, HeldGenerator):
                each.restore()
        for tensor in self._learned:
            tensor.restore()
        self._restore_buffers()

    def _restore_buffers(self) -> None:
        """Restore values, and persistent buffers that others took the place of.

        A cache that was made, or grew, stays: a module makes it again where it does not fit.
        """
        known = {(id(module), name) for module, name, _ in self._places}
        for module in self._model.modules():
            for name in [name for name in _table(module) if (id(module), name) not in known]:
                if name not in module._non_persistent_buffers_set:  # registered since
                    del module._buffers[name]
        for (module, name, is_persistent), buffer in zip(self._places, self._buffers, strict=False):
            if is_persistent:
                _table(module)[name] = buffer
        with torch.no_grad():
            for copy, buffer in zip(*self._always, strict=True):
                if buffer.shape == copy.shape:
                    buffer.copy_(copy)
                else:  # resized in place
                    buffer.data = copy.clone()
            for each in self._watched:
                each.restore()


def _table(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's buffers by name; of a scripted module, which keeps them elsewhere, a copy of the table."""
    table = module._buffers
    return table if isinstance(table, dict) else dict(module.named_buffers(recurse=False))


def _itself(value: Any) -> Any:
    return value


def _is_plain(change: Change, held: Replayed) -> bool:
    """Return whether what changed is a number or a container without tensors, and no module's attribute."""
    if change.kind is not ChangeKind.CLOSURE or isinstance(held, HeldGenerator | HeldArray):
        return False
    if isinstance(held, HeldBinding):
        values = [held.value, held.get()]
    else:
        values = [*_values(held.items), *_values(held.container)]
    return not any(isinstance(value, Tensor) for value in values)


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def bytes_to_begin_anew(model: nn.Module) -> int:
    """Return what a run of the model keeps to begin a window anew, as it does where splitting keeps the maths."""
    start = WindowStart(model)
    start.note()
    return start.kept_bytes


class _Watched:
    """A buffer whose version tells whether it changed."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._version = buffer, buffer._version
        self._copy: Tensor | None = None

    def note(self) -> None:
        """Copy it, where it has changed since the last call."""
        if self._buffer._version != self._version:
            value = self._buffer.detach()
            self._copy = value.clone() if self._copy is None else self._copy.copy_(value)
            self._version = self._buffer._version

    def restore(self) -> None:
        """Put it back, where it has changed and was copied."""
        if self._copy is not None and self._buffer._version != self._version:
            self._buffer.copy_(self._copy)
            self._version = self._buffer._version


def can_be_written(buffer: Tensor) -> bool:
    """Return whether each element of a buffer has a place of its own that numbers can be put into."""
    if buffer.layout is not torch.strided or buffer.is_inference():
        return False
    shared = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return not shared  # elements of an expanded tensor share memory
