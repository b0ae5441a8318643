"""What a forward may depend on that is no input: where its model's tensors lie, and what else its modules hold."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FEW = 256  # of a container of more, as of a vocabulary, how many it holds is all that is looked at
_MINE = "_compiled_call_impl"  # what calls this


class ModuleState:
    """A model's modules, listed once, and what they hold, asked for at each call.

    That is, where parameters, buffers and other tensors lie; plain values; and the things that modules hold in lists,
    tuples, dicts and sets. What lies deeper is not followed.

    Attributes:
        modules: all of them, the model first.
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
        """Whether somebody looks into a module's calls."""
        return any(self._hooks) or bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]

    @property
    def modes(self) -> list[bool]:
        """Which modules are in training."""
        return [module.training for module in self.modules]

    def has_changed(self) -> bool:
        """Return whether something is elsewhere or other than when this was asked last; True the first time."""
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
        # What is read of another device's is fixed in what is recorded.
        seen += [each._version for each in tensors if each.device != self._device]
        if seen == self._seen and _is_same(plain, self._plain):
            return False
        # What is kept here is not freed, so that nothing else comes to have its address.
        self._seen, self._plain, self._kept = seen, plain, kept
        return True


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(isinstance(each, _PLAIN) for each in value))


def _is_same(ours: list[Any], theirs: list[Any]) -> bool:
    try:
        return ours == theirs
    except Exception:  # something that cannot be compared has come in a value's place
        return False
