"""Disables dropout in modules and functional calls, while all modules stay in training mode."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from trimtab.runtime.dropout import dropout_modules

# Name parts of third-party layers that may draw their own masks (DropPath, DropBlock).
_OWN_DROP_NAMES = ("drop", "stochasticdepth")


@contextlib.contextmanager
def dropout_off(model: nn.Module, drawing: Collection[nn.Module] = ()) -> Iterator[None]:
    """Disable dropout inside the context.

    Probabilities of torch's modules are set to 0. Functional dropout, attention dropout, dropout between recurrent
    layers and randomized ReLU are intercepted at torch's functions, so modules stay in training mode.

    Args:
        model: the model.
        drawing: modules from `own_droppers` that draw random numbers. Layers with their own masks are put into
            evaluation mode, and probabilities are set to 0.
    """
    own = own_droppers(model)
    modes = [module for module in drawing if _is_drop_layer(module) and module.training]
    found = [(module, name) for module, name in dropout_modules(model) if module not in own or module in drawing]
    probabilities = [(module, name, getattr(module, name)) for module, name in found]
    for module in modes:
        module.training = False
    for module, name, _ in probabilities:
        setattr(module, name, 0.0)
    try:
        with _DropoutOff():
            yield
    finally:
        for module, name, probability in probabilities:
            setattr(module, name, probability)
        for module in modes:
            module.training = True


def own_droppers(model: nn.Module) -> set[nn.Module]:
    """Return modules outside torch that may drop values with their own masks.

    These are layers with a telling class name, such as `DropPath`, and modules with a dropout probability.
    """
    named = {module for module in model.modules() if _is_drop_layer(module)}
    return named | {module for module, _ in dropout_modules(model) if not _is_of_torch(module)}


def _is_drop_layer(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return not _is_of_torch(module) and not any(module.children()) and any(part in name for part in _OWN_DROP_NAMES)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


class _DropoutOff(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        replacement = _REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(func, list(args), dict(kwargs or {}))


def _input(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["input"]


def _input_and_mask(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    value = _input(func, args, kwargs)
    return value, torch.ones_like(value, dtype=torch.bool)


def _without_attention_dropout(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    place = 4  # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, ...)
    if len(args) > place:
        args[place] = 0.0
    else:
        kwargs["dropout_p"] = 0.0
    return func(*args, **kwargs)


def _not_training(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.arguments["training"] = False  # In these functions, `training` only controls random numbers.
    return func(*bound.args, **bound.kwargs)


def _without_layer_dropout(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    # The only float argument of a recurrent kernel; its position differs between padded and packed inputs.
    return func(*(0.0 if isinstance(arg, float) else arg for arg in args), **kwargs)


_REPLACEMENTS: dict[Callable[..., Any], Callable[[Callable[..., Any], list[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys(
        (
            F.dropout,
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.alpha_dropout,
            F.feature_alpha_dropout,
            torch.dropout,
            torch.dropout_,
            torch.alpha_dropout,
            torch.alpha_dropout_,
            torch.feature_dropout,
            torch.feature_dropout_,
            torch.feature_alpha_dropout,
            torch.feature_alpha_dropout_,
        ),
        _input,
    ),
    torch.native_dropout: _input_and_mask,
    F.scaled_dot_product_attention: _without_attention_dropout,
    **dict.fromkeys((F.multi_head_attention_forward, F.rrelu), _not_training),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _without_layer_dropout),
}
