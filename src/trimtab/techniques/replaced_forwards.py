"""Replacement of the forwards of a model's blocks, applied in place and reversible.

The class of a block is replaced by a subclass whose forward goes through a `ForwardCall`. Parameter names, state and
`isinstance` checks are unaffected, and a copy of the model is a plain model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

_CALL = "_trimtab_call"


class ForwardCall(Protocol):
    """The new forward of a block."""

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the block, whose own forward is `forward`."""


def replace_forwards(modules: Sequence[nn.Module], calls: Sequence[ForwardCall]) -> Callable[[], None]:
    """Send the forward of every module through a call; return a function that restores the classes.

    Modules replaced already, and modules with a forward on the instance, must be refused before.
    """
    plain = [(module, type(module)) for module in modules]

    def undo() -> None:
        for module, kind in plain:
            # Skip blocks whose class the user replaced since.
            if is_replaced(module) and own_class(module) is kind:
                module.__class__ = kind
            module.__dict__.pop(_CALL, None)

    try:
        for module, call in zip(modules, calls, strict=True):
            kind = _replaced(type(module))  # type: ignore[arg-type]  # a class is hashable
            module.__dict__[_CALL] = call
            module.__class__ = kind
    except BaseException:  # A class that cannot be subclassed, or Ctrl-C after some blocks were replaced.
        undo()
        raise
    return undo


def is_replaced(module: nn.Module) -> bool:
    """Return True if the forward of a module is replaced."""
    return issubclass(type(module), _Replaced)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before its replacement."""
    return type(module).__mro__[2]


def call_of(module: nn.Module) -> Any:
    """Return the `ForwardCall` of a replaced module."""
    return vars(module)[_CALL]


class _Replaced:
    """Mixin placed before a block's own class in the method resolution order."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call: ForwardCall = self.__dict__[_CALL]
        return call.run(self, super().forward, args, kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        _, (kind, *others), *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _CALL}
        return _plain, (type(self).__mro__[2] if kind is type(self) else kind, *others), *rest


def _plain(kind: type[nn.Module], *others: Any) -> nn.Module:
    return kind.__new__(kind, *others)


@functools.cache
def _replaced(plain: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (_Replaced, plain), names)
