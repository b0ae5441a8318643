"""Everything a trial may change, held so that it can be put back bit for bit, on the very same tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.measure.process_state import ProcessState

_SCALARS = (bool, int, float, str, type(None))


class Snapshot:
    """Values of a model, its optimizer and the process. Takes one copy of parameters, buffers and optimizer state.

    Usable as a context manager: the state is put back on leaving, also after an error.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._process = ProcessState.capture()
        self._tensors = [(t, t.data, _value_copy(t), _grad_copy(t)) for t in _tensors(model)]
        self._modules = [(vars(m), dict(vars(m)), _members(m)) for m in model.modules()]
        self._state = {
            parameter: (state, {name: (value, _copy(value)) for name, value in state.items()})
            for parameter, state in optimizer.state.items()
        }
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    def restore(self) -> None:
        """Put everything back; may be called again and again."""
        for attributes, saved, members in self._modules:
            attributes.clear()  # what a forward cached or added, and buffers it put a new tensor in the place of
            attributes.update(saved)
            for held, items in members:
                held.clear()
                held.update(items)
        for tensor, storage, value, grad in self._tensors:
            tensor.data = storage
            if value is not None:
                tensor.data.copy_(value)
            tensor.grad = None if grad is None else grad[0].copy_(grad[1])
        self._restore_optimizer()
        self._process.restore()

    def _restore_optimizer(self) -> None:
        self._optimizer.state.clear()
        for parameter, (state, items) in self._state.items():
            state.clear()
            for name, (value, copy) in items.items():
                state[name] = value.copy_(copy) if isinstance(value, Tensor) else copy
            self._optimizer.state[parameter] = state
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in group.keys() - saved.keys() - {"params"}:
                del group[name]
            group.update(saved)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a sha256 over all that `Snapshot` holds, addresses and hooks too: equal before and after a trial."""
    digest = hashlib.sha256()
    for line in _facts(model, optimizer):
        digest.update(line if isinstance(line, bytes) else repr(line).encode())
    return digest.hexdigest()


def _facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for tensor in _tensors(model):
        yield from _tensor_facts(tensor)
        yield from _tensor_facts(tensor.grad)
    for module in model.modules():
        yield _scalars(module)
        yield {name: len(value) for name, value in module.__dict__.items() if name.endswith("hooks") and value}
    for state in optimizer.state.values():
        for name, value in state.items():
            yield name
            yield from _tensor_facts(value) if isinstance(value, Tensor) else [value]
    yield [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    process = ProcessState.capture()
    yield [bytes(t.numpy()) for t in (process.cpu_rng, *process.cuda_rng)]
    yield process.python_rng, [*map(str, process.numpy_rng)], process.fp32_modes, process.num_threads
    yield process.grad_enabled, process.allocator


def _tensor_facts(tensor: Tensor | None) -> Iterator[Any]:
    if tensor is None:
        yield None
        return
    yield tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.data_ptr(), tensor.requires_grad
    yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _scalars(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if isinstance(value, _SCALARS)}


def _members(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (dict, its items) of what a module holds by name."""
    held = (vars(module).get(name) for name in ("_parameters", "_buffers", "_modules"))
    return [(items, dict(items)) for items in held if isinstance(items, dict)]


def shares_rows(tensor: Tensor) -> bool:
    """Return whether rows lie on the same memory (an expanded buffer): such a tensor cannot be written in place."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _value_copy(tensor: Tensor) -> Tensor | None:
    return None if shares_rows(tensor) else tensor.data.clone()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _grad_copy(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    return None if tensor.grad is None else (tensor.grad, tensor.grad.clone())
