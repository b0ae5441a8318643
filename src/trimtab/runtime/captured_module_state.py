"""Model state that a captured forward depends on: addresses of tensors, and attributes of modules."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FEW = 256  # In larger containers, such as a vocabulary, only the length is compared.
_MINE = "_compiled_call_impl"  # The attribute that holds the captured call itself.


class ModuleState:
    """Attributes and tensor addresses of all modules, compared at each call.

    This covers the addresses of parameters, buffers and other tensors, plain values, and items of lists, tuples, dicts
    and sets. Deeper nesting is not followed.

    Attributes:
        modules: all modules, the model first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = tuple(model.modules())
        self._device = next(model.parameters()).device
        held = [vars(module) for module in self.modules]
        self._hooks = [found for each in held for name in _HOOKS if (found := each.get(name)) is not None]
        self._tensors = [each[name] for each in held for name in ("_parameters", "_buffers")]
        self._parts, self._held = [each["_modules"] for each in held], held
        own = {_MINE, *vars(nn.Module())}
        others = [(each, name) for each in held for name in each if name not in own]
        self._values = [(each, name) for each, name in others if _is_plain(each[name])]
        self._things = [(each, name) for each, name in others if not _is_plain(each[name])]
        self._kept: list[Any] = []
        self._seen: list[Any] = []
        self._plain: list[Any] = []

    @property
    def has_hooks(self) -> bool:
        """True if a module has hooks, or global module hooks exist."""
        return any(self._hooks) or bool(torch.nn.modules.module._has_any_global_hook())

    @property
    def modes(self) -> list[bool]:
        """Training mode of each module."""
        return [module.training for module in self.modules]

    def has_changed(self) -> bool:
        """Return True if anything changed since the last call; True in the first call."""
        plain = [held.get(name) for held, name in self._values]
        kept = [each for each in chain.from_iterable(map(dict.values, self._tensors)) if each is not None]
        for held, name in self._things:
            kept.append(value := held.get(name))
            if isinstance(value, dict | list | tuple | set):
                plain.append(len(value))
                if len(value) <= _FEW:
                    kept += value.values() if isinstance(value, dict) else value
        seen = [len(each) - (_MINE in each) for each in self._held]
        seen += map(id, chain.from_iterable(map(dict.values, self._parts)))
        seen += map(id, kept)
        tensors = [each for each in kept if isinstance(each, Tensor)]
        seen += [each.data_ptr() if each.layout is torch.strided else 0 for each in tensors]
        seen += [each.requires_grad for each in tensors]
        # Values read from tensors of another device are constants in the captured graph.
        seen += [each._version for each in tensors if each.device != self._device]
        if seen == self._seen and _is_same(plain, self._plain):
            return False
        # The references keep freed addresses from being reused by other objects.
        self._seen, self._plain, self._kept = seen, plain, kept
        return True


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(isinstance(each, _PLAIN) for each in value))


def _is_same(ours: list[Any], theirs: list[Any]) -> bool:
    try:
        return ours == theirs
    except Exception:  # A value was replaced by an object that cannot be compared.
        return False
