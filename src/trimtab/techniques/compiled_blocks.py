"""Compilation of a model's repeated blocks, each kind once: in a transformer, one layer instead of all of them."""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from trimtab.measure.blocks import find_blocks
from trimtab.techniques.activation_checkpointing import keeps_activations
from trimtab.techniques.replaced_classes import ReplacedClass, replace_classes

OPTIONS: dict[str, Any] = {"options": {"fallback_random": True}}  # Dropout masks as without compilation.
_Shapes = tuple[tuple[str, torch.Size], ...]
_Groups = dict[tuple[type[nn.Module], _Shapes], list[nn.Module]]
# The compiled function of each kind of block, kept because a plan's trials and its run compile the same blocks.
_compiled: weakref.WeakKeyDictionary[type[nn.Module], dict[_Shapes, Callable[..., Any]]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def repeated_blocks(model: nn.Module) -> _Groups:
    """Return the blocks of a model by class and parameter shapes; {} if no kind repeats.

    The result includes kinds with a single block, for example the first blocks of the stages of a ResNet. If no block
    repeats, inner blocks are returned, for example the layers of an encoder and a decoder. Blocks with a forward on the
    instance are left out.
    """
    if isinstance(model, torch.jit.ScriptModule):  # Has no modules by name.
        return {}
    groups: _Groups = {}
    blocks = [model.get_submodule(name) for name in find_blocks(model)]
    for block in blocks:
        if next(block.children(), None) is not None and "forward" not in vars(block):
            shapes = tuple((key, parameter.shape) for key, parameter in block.named_parameters())
            groups.setdefault((type(block), shapes), []).append(block)
    if any(len(group) > 1 for group in groups.values()):
        return groups
    inner: _Groups = {}
    for block in itertools.chain.from_iterable(groups.values()):
        for kind, group in repeated_blocks(block).items():
            inner.setdefault(kind, []).extend(group)
    return inner


class CompiledBlocks:
    """The forwards of a model's repeated blocks, compiled at the first call of each kind.

    Hooks of a block, for example FSDP2's, run outside of the compiled code. Blocks run in eager mode with hooks on
    inner modules (torch ignores hooks in code reused from an earlier block), without gradients (for example in
    `generate()`), and in transforms of `torch.func`.
    """

    def __init__(self, model: nn.Module) -> None:
        blocks, self._calls = list[nn.Module](), list[_BlockCall]()
        for (kind, shapes), group in repeated_blocks(model).items():
            known = _compiled.setdefault(kind, {})
            if shapes not in known:
                known[shapes] = torch.compile(_call_of_a_kind(), **OPTIONS)
            blocks += group
            self._calls += [_BlockCall(known[shapes], block) for block in group]
        self.undo = replace_classes(blocks, [_Compiled] * len(blocks), self._calls)

    def turn(self, *, on: bool) -> None:
        """Run the blocks compiled, or in eager mode."""
        for call in self._calls:
            call.is_on = on


class KeyValueCaches:
    """The key-value caches of a Transformers model; training does not need caches."""

    def __init__(self, model: nn.Module) -> None:
        configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
        self._configs = [each for each in configs.values() if hasattr(each, "use_cache") and hasattr(each, "to_dict")]

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Turn the caches off inside the context, if gradients are computed.

        Every block changes a separate part of the cache. This would cause a compilation per block, and torch does not
        compile recomputed blocks with such changes.
        """
        cached = [each for each in self._configs if each.use_cache is True] if torch.is_grad_enabled() else []
        for config in cached:
            config.use_cache = False
        try:
            yield
        finally:
            for config in cached:
                config.use_cache = True


class _Compiled(ReplacedClass):
    """Mixin of a block whose forward is compiled."""

    state_name = "_trimtab_compiled"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call: _BlockCall = vars(self)[self.state_name]
        if call.runs_eagerly():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return call.compiled(self, args, kwargs)


def has_compiled_blocks(modules: Iterable[nn.Module]) -> bool:
    """Return True if the forward of a module is compiled by a run."""
    return any(issubclass(type(module), _Compiled) for module in modules)


def _run_forward(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of a block; the block is an argument, so that equal blocks share the compiled code."""
    return super(_Compiled, block).forward(*args, **kwargs)


def _call_of_a_kind() -> Callable[..., Any]:
    """Return a copy of `_run_forward`: torch limits the number of compiled versions by code object."""
    code = _run_forward.__code__.replace(co_name=f"{_run_forward.__name__}_{next(_numbers)}")
    return types.FunctionType(code, globals())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _BlockCall:
    """The compiled forward of a block."""

    def __init__(self, compiled: Callable[..., Any], block: nn.Module) -> None:
        self.compiled, self.is_on = compiled, True
        inner = (module for module in block.modules() if module is not block)
        self._hooks = [getattr(module, name) for module in inner for name in _HOOKS]

    def runs_eagerly(self) -> bool:
        """Return True if the next call must not use the compiled code."""
        return not self.is_on or any(self._hooks) or keeps_activations()
