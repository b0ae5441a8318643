"""What a window's forwards change besides gradients, as it was before them: buffers and torch's generators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_LARGE = 2**20  # bytes of a buffer from which on its version tells whether it changed


class WindowStart:
    """Copies of a model's buffers and the generators' states. Buffers registered later are not seen.

    A mask of many megabytes that no forward writes is copied once; small buffers always: batch statistics are written
    without a trace in the tensor's version.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [(module, name) for module in model.modules() for name in module._buffers]
        self._kept: list[tuple[Tensor, int, Tensor] | None] = [None] * len(self._places)
        self._device = next(model.parameters()).device
        self._generators: Any = None

    def note(self) -> None:
        """Take the state as it is now."""
        copies: list[Tensor] = []
        changed: list[Tensor] = []
        for index, (module, name) in enumerate(self._places):
            buffer, kept = module._buffers[name], self._kept[index]
            if buffer is None:
                self._kept[index] = None
            elif kept is None or kept[0] is not buffer or kept[1] != buffer._version or buffer.nbytes < _LARGE:
                if _overlaps(buffer):  # nobody can write into it
                    self._kept[index] = buffer, buffer._version, buffer
                    continue
                copy = torch.empty_like(buffer) if kept is None or kept[0] is not buffer else kept[2]
                self._kept[index] = buffer, buffer._version, copy
                copies.append(copy)
                changed.append(buffer)
        if changed:
            with torch.no_grad():
                torch._foreach_copy_(copies, changed)
        self._generators = self._states()

    def restore(self) -> None:
        """Put buffers and generators back."""
        self.restore_buffers()
        cpu, cuda = self._generators
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)

    def restore_buffers(self) -> None:
        """Put the buffers back: the tensors that stood there, with their values."""
        for (module, name), kept in zip(self._places, self._kept, strict=True):
            if kept is None:
                module._buffers[name] = None
                continue
            buffer, version, copy = kept
            if copy is not buffer and (buffer._version != version or buffer.nbytes < _LARGE):
                with torch.no_grad():
                    buffer.copy_(copy)
            module._buffers[name] = buffer

    def _states(self) -> Any:
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), cuda  # NumPy's alone would take 85 us a window


def _overlaps(buffer: Tensor) -> bool:
    """Return whether elements share memory, as those of an expanded tensor do."""
    return any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
