"""Containers, tensors and gradients that objects hold by reference: found, copied, and put back in place.

Dicts, lists, tuples, sets and deques are followed, to any depth and through cycles. Other objects are not entered and
not copied: what a trial changes inside them stays.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Exactly these: a subclass may refuse to be emptied and filled again.
_CONTAINERS = {dict, OrderedDict, defaultdict, Counter, list, set, deque}


def is_container(value: Any) -> bool:
    """Return whether a value is one of the containers that can be refilled in place."""
    return type(value) in _CONTAINERS


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every container, tuple and tensor that can be reached from the roots, each once, the roots among them."""
    seen: set[int] = set()
    pending = list(roots)
    while pending:
        value = pending.pop()
        if id(value) in seen or not (is_container(value) or isinstance(value, tuple | Tensor)):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, dict):
            pending.extend(value.values())
        elif not isinstance(value, Tensor):
            pending.extend(value)


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's values; a CUDA tensor's lies on the host, and adds nothing to the device's peak."""
    data = tensor.data
    return data.to("cpu", copy=True) if data.is_cuda else data.clone()


def device_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's values where they lie: of a GPU's it is put back many times as fast."""
    return tensor.data.clone()


class HeldTensor:
    """A tensor's storage, strides and values, to be put back on the same object."""

    def __init__(self, tensor: Tensor, copied: Callable[[Tensor], Tensor] = host_copy) -> None:
        self.tensor = tensor
        self._data = tensor.data
        self._copy = copied(tensor) if can_write(tensor) else None

    def restore(self) -> None:
        """Put everything back."""
        self.tensor.data = self._data
        if self._copy is not None:
            self._data.copy_(self._copy)


class HeldGradient:
    """A tensor's gradient and its values, to be put back on the same object; also that it has none."""

    def __init__(self, owner: Tensor, copied: Callable[[Tensor], Tensor] = host_copy) -> None:
        self._owner, self._grad = owner, owner.grad
        self._copy = None if owner.grad is None else copied(owner.grad)

    def restore(self) -> None:
        """Put everything back."""
        grad, copy = self._grad, self._copy
        self._owner.grad = grad if grad is None or copy is None else grad.copy_(copy)


class HeldContainer:
    """A container's items, to be put back into the same object."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self._items = dict(container) if isinstance(container, dict) else list(container)

    def restore(self) -> None:
        """Put everything back, in order."""
        self._container.clear()
        if isinstance(self._container, dict | set):
            self._container.update(self._items)
        else:
            self._container.extend(self._items)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's parameters, and then its buffers."""
    yield from module.parameters()
    yield from module.buffers()


def can_write(tensor: Tensor) -> bool:
    """Return whether values can be copied into a tensor: not where rows share memory, nor under inference mode."""
    return tensor.layout is torch.strided and not tensor.is_inference() and not shares_rows(tensor)


def shares_rows(tensor: Tensor) -> bool:
    """Return whether rows lie on the same memory (an expanded buffer): such a tensor cannot be written in place."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
