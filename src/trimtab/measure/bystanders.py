"""Modules that a loss or a hook runs beside the model (a GAN's other network, a teacher, an average of the weights):
found, and left as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trimtab.measure.closures import reached
from trimtab.measure.held import HeldGradient, HeldTensor, tensors_of
from trimtab.measure.snapshot import Snapshot


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
    return reached(user, nn.Module)
