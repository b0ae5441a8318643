"""Digest of a model, its optimizer and the process: equal before and after what must change nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.state.object_snapshots import is_container
from trimtab.state.process_state import ProcessState

_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a SHA-256 over model, optimizer and process state, including addresses and hooks."""
    digest = hashlib.sha256()
    for line in _facts(model, optimizer):
        digest.update(line if isinstance(line, bytes) else repr(line).encode())
    return digest.hexdigest()


def _facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for tensor in (*model.parameters(), *model.buffers()):
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
    """Return a scalar's value or an object's identity. Containers and tensors are digested separately."""
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
    """Return the attribute dictionaries of modules and optimizer.

    `state` of a wrapped optimizer may lie outside these dictionaries.
    """
    return [*map(vars, model.modules()), vars(optimizer), optimizer.state, optimizer.param_groups]


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield each container, tuple and tensor reachable from the roots once, including the roots."""
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
