"""Modules that a loss or a hook runs beside the model (a GAN's other network, a teacher, an average of the weights):
found, and left as they were.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.measure.held import HeldGradient, HeldTensor, is_container, tensors_of
from trimtab.measure.snapshot import Snapshot

_DEPTH = 4  # a loss, what it calls, what that is a method of, what it holds
_MOST_ITEMS = 1000  # of a container; a longer one holds data


class Bystanders:
    """Buffers and gradients of the modules that a loss refers to, but for the model's; a context manager.

    Found are globals and closures of functions, arguments of partials, owners of methods and what these hold. Their
    parameters are not copied: a loss steps none. Those of modules that hooks of the optimizer refer to are: averages of
    weights are kept so.
    """

    def __init__(self, loss_fn: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        own = {id(tensor) for tensor in tensors_of(model)}
        kept, read = ({id(t): t for m in modules_of(by) for t in tensors_of(m)} for by in (_hooks(optimizer), loss_fn))
        others = [tensor for key, tensor in (read | kept).items() if key not in own]
        written = [each for each in others if id(each) in kept or not isinstance(each, nn.Parameter)]
        self._tensors = [HeldTensor(each) for each in written]
        self._grads = [HeldGradient(each) for each in others]

    def restore(self) -> None:
        """Put everything back."""
        for tensor in self._tensors:
            tensor.restore()
        for grad in self._grads:
            grad.restore()

    def __enter__(self) -> Bystanders:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()


@contextlib.contextmanager
def unchanged_by(loss_fn: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Snapshot]:
    """Leave a loop as it was found, with what loss and hooks run beside the model; yields what holds the loop."""
    with Snapshot(model, optimizer) as snapshot, Bystanders(loss_fn, model, optimizer):
        yield snapshot


def _hooks(optimizer: torch.optim.Optimizer) -> tuple[Callable[..., Any], ...]:
    """Return what runs with each step of an optimizer."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # which a class of the user's may not have
    return tuple(hook for name in names for hook in getattr(optimizer, name, {}).values())


def modules_of(user: Any) -> Iterator[nn.Module]:
    """Yield the modules that a function refers to, or several, as far as that shows."""
    seen, pending = set[int](), [(user, 0)]
    while pending:
        value, depth = pending.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        else:
            pending.extend((each, depth + 1) for each in _referred(value))


def _referred(value: Any) -> Iterator[Any]:
    """Yield what a function, an object of the user's or a container refers to; not what classes and packages do."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            found = inspect.getclosurevars(value)
            yield from (*found.nonlocals.values(), *found.globals.values(), *(value.__defaults__ or ()))
            yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, tuple) or is_container(value):
        if len(value) <= _MOST_ITEMS:
            yield from value.values() if isinstance(value, dict) else value
    elif not isinstance(value, type | types.ModuleType | Tensor):
        yield from (*getattr(value, "__dict__", {}).values(), vars(type(value)).get("__call__"))
