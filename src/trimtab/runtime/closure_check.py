"""Detection of optimizers, such as many SAM versions, with an optional closure in the signature but not in fact.

A user-defined step that reads the closure is tried on a copy of the optimizer with small substitute parameters.
"""

from __future__ import annotations

import copy
import dis
import inspect
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.measure.closures import references

_MOST = 4  # Largest size of each dimension of a substitute parameter.
_PLAIN = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, int, float, bool, type(None))


def closure_failure(optimizer: torch.optim.Optimizer) -> str:
    """Return the error of a step without a closure if a step with a closure succeeds, else "".

    Optimizer, parameters and state stay unchanged. Steps that refer to other user objects are not tried, because a
    trial could change these objects; the result is then "".
    """
    if optimizer not in _known:
        _known[optimizer] = _closure_failure(optimizer)
    return _known[optimizer]


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()


def _closure_failure(optimizer: torch.optim.Optimizer) -> str:
    steps = list(_own_steps(optimizer))
    if not any(map(_may_need, steps)) or not all(map(_is_self_contained, steps)) or "step" in vars(optimizer):
        return ""
    without = _tried(optimizer, with_closure=False)
    return without if without and _tried(optimizer, with_closure=True) == "" else ""


def _own_steps(optimizer: torch.optim.Optimizer) -> Iterator[types.FunctionType]:
    """Yield the step functions of the optimizer's user-defined classes."""
    for cls in type(optimizer).__mro__:
        step = vars(cls).get("step")
        found = inspect.unwrap(step) if callable(step) else None
        if isinstance(found, types.FunctionType) and not cls.__module__.startswith("torch."):
            yield found


def _may_need(step: types.FunctionType) -> bool:
    """Return True if a step function reads a parameter named closure."""
    has_closure = "closure" in inspect.signature(step).parameters
    return has_closure and any(each.argval == "closure" for each in dis.get_instructions(step))


def _is_self_contained(step: types.FunctionType) -> bool:
    """Return True if a step function refers to no object outside of the optimizer that a step could change."""
    return all(isinstance(value, _PLAIN) for value in references(step))


def _tried(optimizer: torch.optim.Optimizer, *, with_closure: bool) -> str:
    """Return the error of a step on a copy of an optimizer, or ""; "not copied" if there is no copy."""
    try:
        stood_in, copied = _copied(optimizer)
    except Exception:  # User-defined attributes may raise any error when copied.
        return "not copied" if with_closure else ""

    def closure() -> Tensor:
        loss = sum((p.float() if not p.is_complex() else p.abs()).square().sum() for p in stood_in)
        for p in stood_in:
            p.grad = torch.full_like(p, 1e-3)
        return torch.as_tensor(loss).detach()

    closure()
    step: Callable[..., Any] = type(copied).step
    try:
        with torch.enable_grad():
            step(copied, closure) if with_closure else step(copied)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.100}"
    return ""


def _copied(optimizer: torch.optim.Optimizer) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Return substitute parameters, and a copy of the optimizer that holds the substitutes and empty state.

    Raises:
        ValueError: the optimizer holds a module, whose copy could be large.
    """
    memo: dict[int, Any] = {}
    stood_in = []
    held = {name: value for name, value in vars(optimizer).items() if not name.endswith("_hooks")}
    inner = [value for value in held.values() if isinstance(value, torch.optim.Optimizer)]
    if any(isinstance(value, nn.Module) for value in held.values()):
        raise ValueError("the optimizer holds a module")
    for each in (optimizer, *inner):
        memo[id(each.state)] = defaultdict(dict)
        for p in (p for group in each.param_groups for p in group["params"]):
            if id(p) not in memo:
                shape = [min(size, _MOST) for size in p.shape]
                values = torch.full(shape, 0.5, dtype=p.dtype, device=p.device)
                memo[id(p)] = nn.Parameter(values, requires_grad=p.requires_grad)
                stood_in += [memo[id(p)]] if p.requires_grad else []
    copied = object.__new__(type(optimizer))
    vars(copied).update({name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")})
    vars(copied).update(copy.deepcopy(held, memo))  # `Optimizer.__deepcopy__` would leave out attributes of subclasses.
    return stood_in, copied
