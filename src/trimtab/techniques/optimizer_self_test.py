"""Self-test of a replaced optimizer step: both steps are compared on small copies of the user's parameters.

The fused kernels of torch differ by device and dtype, and a few are wrong: torch 2.13's fused SGD on a CPU leaves bf16
parameters unchanged. Copies keep everything that a kernel may depend on: dtype, device, order of strides and the
options of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
_results: dict[tuple[Any, ...], str] = {}


def fused_difference(optimizer: torch.optim.Optimizer) -> str:
    """Return the difference between fused and plain step on copies of the optimizer's parameters, or "" if none.

    Results are cached by class, options and kinds of parameters. No random numbers are drawn.
    """
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
        rate_dtype = group["lr"].dtype if isinstance(group["lr"], Tensor) else None
        if found := _SelfTest(type(optimizer), options, group["params"], rate_dtype).found(_fused_difference):
            return found
    return ""


def muon_difference(matrices: Iterable[Tensor]) -> str:
    """Return the difference between Muon's step in the matrices' dtype and in double precision, or "" if none."""
    return _SelfTest(torch.optim.Muon, _MUON, matrices, None).found(_muon_difference)


class _SelfTest:
    """Copies of parameters, one per kind, and the options of their group."""

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        parameters: Iterable[Tensor],
        rate_dtype: torch.dtype | None,
    ) -> None:
        samples = {_kind(local): local for local in map(_local, parameters) if local.requires_grad}
        self.cls, self.options, self.parameters, self.rate_dtype = cls, options, tuple(samples.values()), rate_dtype
        self._key = cls, tuple(sorted((n, repr(v)) for n, v in options.items())), tuple(samples), rate_dtype

    def found(self, difference: Callable[[_SelfTest], str]) -> str:
        """Return the result of a comparison, from the cache if possible."""
        key = (difference, *self._key)
        if key not in _results:
            try:
                _results[key] = difference(self) if self.parameters else ""
            except Exception as error:  # A kernel may refuse a dtype or a device with any error.
                text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.120}"
                _results[key] = f"the step fails on copies of the parameters ({text})"
        return _results[key]

    def stepped(self, flags: Mapping[str, Any], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return copies of the parameters, in `dtype` or their own, after steps of a new optimizer."""
        copies = [nn.Parameter(_copy(parameter).to(dtype or parameter.dtype)) for parameter in self.parameters]
        groups = [{"params": [copy], "lr": self._rate(p)} for copy, p in zip(copies, self.parameters, strict=True)]
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

    def _rate(self, parameter: Tensor) -> float | Tensor:
        copy = _copy(parameter)
        rate = _RATE * max(float(copy.abs().double().mean()) if copy.numel() else 0.0, 1e-3)
        return rate if self.rate_dtype is None else torch.tensor(rate, dtype=self.rate_dtype, device=copy.device)


def _fused_difference(test: _SelfTest) -> str:
    """Compare the fused and the plain step of a class; rounding explains a distance of a few machine epsilons."""
    plain = test.stepped({"fused": False, "foreach": None})
    fused = test.stepped({"fused": True, "foreach": None})
    for parameter, one, two in zip(test.parameters, plain, fused, strict=True):
        if parameter.numel():
            start, one, two = _copy(parameter).double(), one.double(), two.double()
            moved, apart = (one - start).abs().max(), (one - two).abs().max()
            eps = max(torch.finfo(each).eps for each in (parameter.dtype, test.rate_dtype) if each is not None)
            is_close = bool(apart <= _ROUNDINGS * eps / 2 * (start.abs().max() + moved))
            if not is_close and not torch.allclose(one, two, rtol=0.0, atol=0.0, equal_nan=True):
                return _described(parameter, float(apart / moved.clamp_min(1e-30)))
    return ""


def _muon_difference(test: _SelfTest) -> str:
    """Compare a step in the parameters' dtype with the same step in double precision."""
    for parameter, one, two in zip(test.parameters, test.stepped({}, torch.float64), test.stepped({}), strict=True):
        moved, apart = (one - _copy(parameter)).norm(), (one - two).norm()
        if not bool(apart <= _MUON_APART * moved):
            return _described(parameter, float(apart / moved))
    return ""


def _described(parameter: Tensor, apart: float) -> str:
    kind, shape = str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape)
    return f"{kind} parameters of shape {shape} on {parameter.device} differ by {apart:.2g} of the length of the step"


def _local(parameter: Tensor) -> Tensor:
    """Return the local shard of a sharded parameter; other parameters unchanged."""
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local


def _kind(parameter: Tensor) -> tuple[Any, ...]:
    shape = tuple(min(size, _MOST) for size in parameter.shape)
    return parameter.dtype, parameter.device, shape, _order(parameter), _grad_dtype(parameter)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions in order of decreasing stride."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda each: (-strides[each], each)))


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
