"""What a window's forwards change besides gradients, as it was before them: buffers and torch's generators."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

_LARGE = 2**20  # bytes


class WindowStart:
    """Copies of a model's buffers and the generators' states.

    Persistent buffers of floating point and all small ones are copied before every window: batch statistics are written
    without a trace in the tensor's version. Large ones of other kinds (quantised weights, masks, caches) are copied
    from the first window on that changed them by their version; what such a window did to them stays. Buffers that
    cannot be written in place, or that were registered later, are not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name, name not in module._non_persistent_buffers_set)
            for module in model.modules()
            for name in module._buffers.keys()  # noqa: SIM118 (a scripted module's are no mapping)
        ]
        self._device = next(model.parameters()).device
        self._buffers: list[Tensor | None] = []
        self._always: tuple[list[Tensor], list[Tensor]] = [], []  # copies and buffers
        self._watched: list[_Watched] = []
        self._generators: Any = None

    def note(self) -> None:
        """Take the state as it is now. Where it raises, the last one stands."""
        buffers = [_buffer(module, name) for module, name, _ in self._places]
        if len(buffers) != len(self._buffers) or not all(map(operator.is_, buffers, self._buffers)):
            self._sort(buffers)
        if self._always[0]:
            torch._foreach_copy_(*self._always)
        for each in self._watched:
            each.note()
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        self._generators = torch.get_rng_state(), cuda  # NumPy's alone would take 85 us a window

    def _sort(self, buffers: list[Tensor | None]) -> None:
        """Make room for copies."""
        always, watched = [], []
        for buffer, (_, _, is_persistent) in zip(buffers, self._places, strict=True):
            if buffer is None or not can_be_written(buffer):
                continue
            changes = is_persistent and (buffer.is_floating_point() or buffer.is_complex())
            if changes or buffer.nbytes < _LARGE:
                always.append(buffer.detach() if buffer.requires_grad else buffer)  # copies must not be in a graph
            else:
                watched.append(_Watched(buffer))
        self._always, self._watched = ([torch.empty_like(each) for each in always], always), watched
        self._buffers = buffers

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copies that are made before every window, on any device."""
        copies, _ = self._always
        states = [state for state in self._generators or () if state is not None]
        return sum(each.nbytes for each in (*copies, *states))

    def restore(self) -> None:
        """Put buffers and generators back."""
        self.restore_buffers()
        cpu, cuda = self._generators
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)

    def restore_buffers(self) -> None:
        """Put values back, and persistent tensors that others of their shape took the place of.

        A cache that was made, or grew, stays: what says how large it is stands beside it in Python.
        """
        for (module, name, is_persistent), buffer in zip(self._places, self._buffers, strict=True):
            now = _buffer(module, name)
            if is_persistent and buffer is not None and now is not None and now.shape == buffer.shape:
                module._buffers[name] = buffer
        with torch.no_grad():
            for copy, buffer in zip(*self._always, strict=True):
                buffer.copy_(copy)
            for each in self._watched:
                each.restore()


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    return module._buffers[name] if name in module._buffers else None  # noqa: SIM401 (as above)


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
