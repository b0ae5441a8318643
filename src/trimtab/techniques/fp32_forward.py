"""Forward of some modules in fp32 while the model runs under autocast, applied in place and reversible.

The forward disables autocast and converts half-precision arguments to fp32 (`techniques.replaced_classes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.nn import LossHead
from trimtab.techniques.replaced_classes import ReplacedClass, replace_classes

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


class InFp32(ReplacedClass):
    """Mixin of a module whose forward runs in fp32."""

    state_name = "_trimtab_fp32"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.__dict__[InFp32.state_name], super().forward, args, kwargs)  # type: ignore[misc]


class _LossInFp32(InFp32):
    """Mixin for `trimtab.nn.LossHead`, whose loss is a second entry point."""

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.__dict__[InFp32.state_name], super().loss, args, kwargs)  # type: ignore[misc]


def run_in_fp32(modules: Sequence[nn.Module], device_type: str) -> tuple[list[Fp32Use], Callable[[], None]]:
    """Disable autocast in the forward of some modules.

    Args:
        modules: distinct modules with weights in fp32 or float64.
        device_type: type of the device whose autocast is disabled, such as "cuda".

    Returns:
        The use of each module, and a function that restores the classes.
    """
    mixins = [_LossInFp32 if isinstance(module, LossHead) else InFp32 for module in modules]
    uses = [Fp32Use(device_type) for _ in modules]
    return uses, replace_classes(modules, mixins, uses)


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
