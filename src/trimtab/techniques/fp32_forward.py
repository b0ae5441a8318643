"""Forward of some modules in fp32 while the model runs under autocast, applied in place and reversible.

The class of a module is replaced by a subclass whose forward disables autocast and converts half-precision arguments to
fp32. Parameter names, state and `isinstance` checks are unaffected, and a copy of the model is a plain model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.nn import LossHead

_USE = "_trimtab_fp32"
_HALF = (torch.bfloat16, torch.float16)


@dataclass
class Fp32Use:
    """State of a module in fp32.

    Attributes:
        device_type: type of the device whose autocast is disabled in the module.
        is_used: True if the module's forward was called under autocast; not set in compiled code.
    """

    device_type: str
    is_used: bool = False


class InFp32:
    """Mixin placed before a module's own class in the method resolution order."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.__dict__[_USE], super().forward, args, kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        rebuild, arguments, *rest = reduced
        if arguments and isinstance(arguments[0], type) and issubclass(arguments[0], InFp32):
            rebuild, arguments = _plain, (_own_class(arguments[0]), *arguments[1:])
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _USE}
        return rebuild, arguments, *rest


class _LossInFp32(InFp32):
    """Mixin for `trimtab.nn.LossHead`, whose loss is a second entry point."""

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.__dict__[_USE], super().loss, args, kwargs)  # type: ignore[misc]


def run_in_fp32(modules: Sequence[nn.Module], device_type: str) -> tuple[list[Fp32Use], Callable[[], None]]:
    """Disable autocast in the forward of some modules.

    Args:
        modules: distinct modules with weights in fp32 or float64.
        device_type: type of the device whose autocast is disabled, such as "cuda".

    Returns:
        The use of each module, and a function that restores the classes.
    """
    plain = [type(module) for module in modules]
    kinds = [_swapped(kind) for kind in plain]
    uses = [Fp32Use(device_type) for _ in modules]

    def undo() -> None:
        for module, before, kind in zip(modules, plain, kinds, strict=True):
            if type(module) is kind:  # Skip modules whose class the user replaced since.
                module.__class__ = before
            module.__dict__.pop(_USE, None)

    try:
        for module, kind, use in zip(modules, kinds, uses, strict=True):
            module.__dict__[_USE] = use
            module.__class__ = kind
    except BaseException:  # A class with another memory layout, or Ctrl-C after some classes were replaced.
        undo()
        raise
    return uses, undo


def _call(use: Fp32Use, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function in fp32 if autocast is enabled, and unchanged if not."""
    if not torch.is_autocast_enabled(use.device_type):
        return function(*args, **kwargs)
    if not torch.compiler.is_compiling():
        use.is_used = True
    args = [_widened(each) for each in args]
    kwargs = {name: _widened(each) for name, each in kwargs.items()}
    with torch.autocast(use.device_type, enabled=False):
        return function(*args, **kwargs)


def _widened(argument: Any) -> Any:
    """Return an argument with half-precision tensors in fp32; the same object if it contains none.

    The forward may fill a list or dict of the caller, so containers are only rebuilt if a conversion requires it.
    """
    return tree_map(_to_fp32, argument) if any(map(_is_half, tree_leaves(argument))) else argument


def _to_fp32(leaf: Any) -> Any:
    return leaf.float() if _is_half(leaf) else leaf


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in _HALF


@functools.cache
def _swapped(plain: type[nn.Module]) -> type[nn.Module]:
    mixin = _LossInFp32 if issubclass(plain, LossHead) else InFp32
    return type(plain.__name__, (mixin, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__})


def _own_class(kind: type) -> type:
    """Return the class before the mixin, which also holds if activation checkpointing replaced the class again."""
    order = kind.__mro__
    return order[order.index(InFp32) + 1]


def _plain(kind: type[nn.Module], *others: Any) -> nn.Module:
    return kind.__new__(kind, *others)
