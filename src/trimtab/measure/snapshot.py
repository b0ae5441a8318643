"""Everything a trial may change, held so that it can be put back bit for bit, on the very same tensors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.measure.held import (
    HeldContainer,
    HeldGradient,
    HeldTensor,
    device_copy,
    host_copy,
    is_container,
    reachable,
    tensors_of,
)
from trimtab.measure.memory import most_bytes
from trimtab.measure.process_state import ProcessState

_ROOM = 3  # times what is copied that a GPU has to have beside a peak: for what a trial takes once, as to record it
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


class Snapshot:
    """Values of a model, its optimizer and the process: parameters, buffers, gradients, optimizer state and groups,
    and what else modules and optimizer hold in tensors and containers, however nested.

    Usable as a context manager: the state is put back on leaving, also after an error.

    Args:
        peak_bytes: of a GPU, what runs while it is held: copies lie there too if there is room beside that, and are put
            back many times as fast. None: on the host, where they are in no peak that is counted meanwhile.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, peak_bytes: int | None = None) -> None:
        self._process = ProcessState.capture(wakes_cuda=False)
        copied = host_copy if peak_bytes is None or not _has_room(model, optimizer, peak_bytes) else device_copy
        self._grads = [HeldGradient(tensor, copied) for tensor in tensors_of(model)]
        named = {id(t): t for t in tensors_of(model)}
        others = list(reachable(_roots(model, optimizer)))
        named |= {id(value): value for value in others if isinstance(value, Tensor)}
        self._containers = [HeldContainer(value) for value in others if is_container(value)]
        self._tensors = [HeldTensor(tensor, copied) for tensor in named.values()]

    def restore(self) -> None:
        """Put everything back; may be called again and again."""
        for container in self._containers:
            container.restore()
        for tensor in self._tensors:
            tensor.restore()
        for grad in self._grads:
            grad.restore()
        self._process.restore()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()


def _has_room(model: nn.Module, optimizer: torch.optim.Optimizer, peak_bytes: int) -> bool:
    """Return whether each GPU that holds any of it has room beside such a peak for `_ROOM` times what is copied."""
    held = Counter[torch.device]()
    for tensor in {id(t): t for t in (*tensors_of(model), *_tensors(optimizer.state))}.values():
        for each in (tensor, tensor.grad):
            if each is not None and each.is_cuda:
                held[each.device] += each.numel() * each.element_size()
    return all(peak_bytes + _ROOM * size < most_bytes(device) for device, size in held.items())


def _tensors(root: Any) -> Iterator[Tensor]:
    return (value for value in reachable([root]) if isinstance(value, Tensor))


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a sha256 over all that `Snapshot` holds, addresses and hooks too: equal before and after a trial."""
    digest = hashlib.sha256()
    for line in _facts(model, optimizer):
        digest.update(line if isinstance(line, bytes) else repr(line).encode())
    return digest.hexdigest()


def _facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for tensor in tensors_of(model):
        yield from _tensor_facts(tensor)
        yield from _tensor_facts(tensor.grad)
    for value in reachable(_roots(model, optimizer)):
        yield from _tensor_facts(value) if isinstance(value, Tensor) else _container_facts(value)
    process = ProcessState.capture(wakes_cuda=False)
    yield [bytes(t.numpy()) for t in (process.cpu_rng, *process.cuda_rng)]
    yield process.python_rng, [*map(str, process.numpy_rng)], process.fp32_modes, process.num_threads
    yield process.grad_enabled, process.allocator


def _container_facts(value: Any) -> Iterator[Any]:
    yield type(value).__name__, id(value)
    if isinstance(value, dict):
        yield [(_item(key), _item(held)) for key, held in value.items()]
    else:
        items = [_item(held) for held in value]
        yield sorted(items) if isinstance(value, set) else items


def _item(value: Any) -> str:
    """Return a scalar's value, or which object it is: containers and tensors have facts of their own."""
    return f"{type(value).__name__} {value!r}" if isinstance(value, _SCALARS) else f"at {id(value)}"


def _tensor_facts(tensor: Tensor | None) -> Iterator[Any]:
    if tensor is None:
        yield None
        return
    if tensor.layout is not torch.strided:
        yield id(tensor), str(tensor.detach().coalesce() if tensor.is_sparse else tensor)
        return
    yield tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.data_ptr(), tensor.requires_grad
    yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _roots(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what modules and optimizer hold by name. A wrapped optimizer's state may not be among its own names."""
    return [*map(vars, model.modules()), vars(optimizer), optimizer.state, optimizer.param_groups]
