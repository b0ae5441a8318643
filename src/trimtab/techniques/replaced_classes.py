"""Replacement of the classes of a model's modules, applied in place and reversible.

The class of a module is replaced by a subclass with a mixin, whose forward comes before the module's own. Parameter
names, state and `isinstance` checks are unaffected, and a copy of the model is a plain model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import nn


class ReplacedClass:
    """Base of the mixins. A module can have several mixins, one of each kind.

    Attributes:
        state_name: name of the module's attribute with the state of the mixin, which copies of the module lack.
    """

    state_name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """Skip the `__init_subclass__` of the module's class, which may need arguments or register the new class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        rebuild, arguments, *rest = reduced
        if arguments and isinstance(arguments[0], type) and issubclass(arguments[0], ReplacedClass):
            rebuild, arguments = _plain, (_own_class(arguments[0]), *arguments[1:])
        if rest and isinstance(rest[0], dict):
            states = {kind.state_name for kind in type(self).__mro__ if "state_name" in vars(kind)}
            rest[0] = {name: value for name, value in rest[0].items() if name not in states}
        return rebuild, arguments, *rest


def replace_classes(
    modules: Sequence[nn.Module], mixins: Sequence[type[ReplacedClass]], states: Sequence[object]
) -> Callable[[], None]:
    """Add a mixin with a state to the class of every module; return a function that restores the classes.

    Modules that have the mixin already, and modules with a forward on the instance, must be refused before.
    """
    plain = [type(module) for module in modules]
    kinds = [_with_mixin(mixin, kind) for mixin, kind in zip(mixins, plain, strict=True)]

    def undo() -> None:
        for module, before, kind, mixin in zip(modules, plain, kinds, mixins, strict=True):
            if type(module) is kind:  # Skip modules whose class the user replaced since.
                module.__class__ = before
            module.__dict__.pop(mixin.state_name, None)

    try:
        for module, kind, mixin, state in zip(modules, kinds, mixins, states, strict=True):
            module.__dict__[mixin.state_name] = state
            module.__class__ = kind
    except BaseException:  # A class with another memory layout, or Ctrl-C after some classes were replaced.
        undo()
        raise
    return undo


def _own_class(kind: type) -> type[nn.Module]:
    """Return the class of a module before all replacements."""
    return next(each for each in kind.__mro__ if not issubclass(each, ReplacedClass))


def _plain(kind: type[nn.Module], *others: Any) -> nn.Module:
    return kind.__new__(kind, *others)


@functools.cache
def _with_mixin(mixin: type[ReplacedClass], plain: type[nn.Module]) -> type[nn.Module]:
    return type(plain.__name__, (mixin, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__})


class ForwardCall(Protocol):
    """The new forward of a block."""

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the block, whose own forward is `forward`."""


class _Called(ReplacedClass):
    """Mixin of a block whose forward goes through a `ForwardCall`."""

    state_name = "_trimtab_call"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_of(self).run(self, super().forward, args, kwargs)  # type: ignore[misc]


def replace_forwards(modules: Sequence[nn.Module], calls: Sequence[ForwardCall]) -> Callable[[], None]:
    """Send the forward of every module through a call; return a function that restores the classes."""
    return replace_classes(modules, [_Called] * len(modules), calls)


def is_replaced(module: nn.Module) -> bool:
    """Return True if the forward of a module goes through a `ForwardCall`."""
    return issubclass(type(module), _Called)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before all replacements."""
    return _own_class(type(module))


def call_of(module: Any) -> Any:
    """Return the `ForwardCall` of a module."""
    return module.__dict__[_Called.state_name]
