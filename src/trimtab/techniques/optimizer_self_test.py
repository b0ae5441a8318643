"""Self-test of a replaced optimizer step: both steps are compared on small copies of the user's parameters.

The fused kernels of torch differ by device and dtype, and a few are wrong: torch 2.13's fused SGD on a CPU leaves bf16
parameters unchanged. Copies keep everything that a kernel may depend on: dtype, device, order of strides and the
options of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_STEPS = 2
_MOST = 7  # Elements per dimension; an odd number leaves a remainder for vectors of any width.
# Multiples of the dtype's rounding error: a few operations, and moments kept in the parameter's dtype.
_ROUNDINGS = 16.0
# Fraction of a step: Muon's iterations use bf16 and amplify rounding of small singular values.
_MUON_APART = 0.5
_RATE = 0.25  # Relative to the parameter's size, so that each step is far above rounding.
_NOT_OPTIONS = ("params", "lr", "initial_lr", "fused", "foreach", "capturable")
_MUON = {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}

Class = type[torch.optim.Optimizer]
Key = tuple[Any, ...]


def fused_difference(optimizer: torch.optim.Optimizer) -> str:
    """Return the difference between fused and plain step on copies of the optimizer's parameters, or "" if none.

    Results are cached by class, options and kinds of parameters. No random numbers are drawn.
    """
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
        test = _SelfTest(type(optimizer), options, _samples(group["params"]), _rate_dtype(group))
        if found := test.found(_fused_difference):
            return found
    return ""


def muon_difference(matrices: Iterable[Tensor]) -> str:
    """Return the difference between Muon's step in the matrices' dtype and in double precision, or "" if none."""
    return _SelfTest(torch.optim.Muon, _MUON, _samples(matrices), None).found(_muon_difference)


class _SelfTest:
    """Copies of parameters, one per kind, and the options of their group."""

    def __init__(
        self, cls: Class, options: Mapping[str, Any], samples: Mapping[Key, Tensor], rate_dtype: torch.dtype | None
    ) -> None:
        self.cls, self.options, self.parameters, self.rate_dtype = cls, options, tuple(samples.values()), rate_dtype
        self._key = cls, tuple(sorted((n, repr(v)) for n, v in options.items())), tuple(samples), rate_dtype

    def found(self, difference: Callable[[_SelfTest], str]) -> str:
        """Return the result of a comparison, from the cache if possible."""
        key = (difference, *self._key)
        if key not in _results:
            _results[key] = difference(self) if self.parameters else ""
        return _results[key]

    def stepped(self, flags: Mapping[str, Any], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return copies of the parameters, in `dtype` or their own, after steps of a new optimizer."""
        copies = [nn.Parameter(_copy(parameter).to(dtype or parameter.dtype)) for parameter in self.parameters]
        groups = [
            {"params": [copy], "lr": self._rate(_copy(p))} for copy, p in zip(copies, self.parameters, strict=True)
        ]
        optimizer = self.cls(groups, lr=1e-3)  # type: ignore[call-arg]
        for group in optimizer.param_groups:
            group.update(self.options)
            group.update(flags)
        # Bypasses hooks that are registered globally for all optimizers.
        step = getattr(self.cls.step, "__wrapped__", self.cls.step)
        for number in range(_STEPS):
            for copy, parameter in zip(copies, self.parameters, strict=True):
                copy.grad = _gradient(copy, number).to(dtype or _grad_dtype(parameter))
            step(optimizer)
        return [copy.detach() for copy in copies]

    def _rate(self, copy: Tensor) -> float | Tensor:
        rate = _RATE * max(float(copy.abs().double().mean()) if copy.numel() else 0.0, 1e-3)
        return rate if self.rate_dtype is None else torch.tensor(rate, dtype=self.rate_dtype, device=copy.device)


_results: dict[Key, str] = {}


def _fused_difference(test: _SelfTest) -> str:
    """Return the difference between the fused and the plain step of a class, or "" if none."""
    try:
        plain = test.stepped({"fused": False, "foreach": None})
        fused = test.stepped({"fused": True, "foreach": None})
    except Exception as error:  # A kernel may refuse a dtype or a device with any error.
        return f"the step fails on copies of the parameters ({_failure(error)})"
    return _first_difference(
        test, plain, fused, eps=0.0 if test.rate_dtype is None else torch.finfo(test.rate_dtype).eps
    )


def _muon_difference(test: _SelfTest) -> str:
    """Return the difference between a step in the parameters' dtype and in double precision, or "" if none."""
    try:
        exact, own = test.stepped({}, torch.float64), test.stepped({})
    except Exception as error:
        return f"the step fails on copies of the parameters ({_failure(error)})"
    for parameter, one, other in zip(test.parameters, exact, own, strict=True):
        moved, apart = (one - _copy(parameter)).norm(), (one - other).norm()
        if not bool(apart <= _MUON_APART * moved):
            return _where(parameter, float(apart / moved))
    return ""


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.120}"


def _first_difference(test: _SelfTest, plain: Sequence[Tensor], others: Sequence[Tensor], eps: float) -> str:
    for parameter, one, other in zip(test.parameters, plain, others, strict=True):
        if why := _difference(_copy(parameter), one, other, eps):
            return _where(parameter, why)
    return ""


def _where(parameter: Tensor, apart: float) -> str:
    kind, shape = str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape)
    return f"{kind} parameters of shape {shape} on {parameter.device} differ by {apart:.2g} of the length of the step"


def _difference(before: Tensor, plain: Tensor, other: Tensor, eps: float) -> float:
    """Return the distance of two results in units of the step; 0 if rounding explains the distance."""
    if before.numel() == 0:
        return 0.0
    start, one, two = (each.double() for each in (before, plain, other))
    moved, apart = (one - start).abs().max(), (one - two).abs().max()
    allowed = _ROUNDINGS * max(eps, torch.finfo(before.dtype).eps) / 2 * (start.abs().max() + moved)
    if bool(apart <= allowed) or torch.allclose(one, two, rtol=0.0, atol=0.0, equal_nan=True):
        return 0.0
    return float(apart / moved.clamp_min(1e-30))


def _samples(parameters: Iterable[Tensor]) -> dict[Key, Tensor]:
    """Return one parameter of each kind."""
    return {_kind(local): local for local in map(_local, parameters) if local.requires_grad}


def _local(parameter: Tensor) -> Tensor:
    """Return the local shard of a sharded parameter; other parameters unchanged."""
    to_local = getattr(parameter, "to_local", None)
    local: Tensor = parameter if to_local is None else to_local()
    return local


def _kind(parameter: Tensor) -> Key:
    shape = tuple(min(size, _MOST) for size in parameter.shape)
    return parameter.dtype, parameter.device, shape, _order(parameter), _grad_dtype(parameter)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions in order of decreasing stride."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda each: (-strides[each], each)))


def _rate_dtype(group: Mapping[str, Any]) -> torch.dtype | None:
    return group["lr"].dtype if isinstance(group["lr"], Tensor) else None


def _grad_dtype(parameter: Tensor) -> torch.dtype:
    found = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None  # A shard is a view, not a leaf.
    return found if isinstance(found, torch.dtype) else parameter.dtype


def _copy(parameter: Tensor) -> Tensor:
    """Return the first elements of a parameter in each dimension, with the same order of strides."""
    corner = parameter.detach()[tuple(slice(_MOST) for _ in parameter.shape)]
    order = _order(parameter)
    permuted = corner.permute(order).clone(memory_format=torch.contiguous_format)
    return permuted.permute([order.index(dimension) for dimension in range(corner.dim())])


def _gradient(parameter: Tensor, step: int) -> Tensor:
    """Return a gradient of both signs with magnitudes from 0.5 to 1.5, in the memory format of the parameter."""
    index = torch.arange(parameter.numel())
    values = (0.5 + (index.double() * 0.618034 + 0.31 * step).frac()) * torch.where(index % 3 == 0, -1.0, 1.0)
    return torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(values.view(parameter.shape))
