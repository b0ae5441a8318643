"""Compilation of a model's repeated blocks, each kind once: in a transformer, one layer instead of all of them."""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trimtab.measure.blocks import find_blocks
from trimtab.techniques.activation_checkpointing import keeps_activations

OPTIONS: dict[str, Any] = {"options": {"fallback_random": True}}  # Dropout masks as without compilation.
_Shapes = tuple[tuple[str, torch.Size], ...]
_Groups = dict[tuple[type[nn.Module], _Shapes], list[nn.Module]]
# The compiled function of each kind of block, kept because a plan's trials and its run compile the same blocks.
_compiled: weakref.WeakKeyDictionary[type[nn.Module], dict[_Shapes, Callable[..., Any]]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def repeated_blocks(model: nn.Module) -> _Groups:
    """Return the blocks of a model by class and parameter shapes; {} if no kind repeats.

    The result includes kinds with a single block, for example the first blocks of the stages of a ResNet. If no block
    repeats, inner blocks are returned, for example the layers of an encoder and a decoder.
    """
    if isinstance(model, torch.jit.ScriptModule):  # Has no modules by name.
        return {}
    groups: _Groups = {}
    blocks = [model.get_submodule(name) for name in find_blocks(model)]
    for block in blocks:
        if next(block.children(), None) is not None:
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
    """The calls of a model's repeated blocks, compiled at the first call of each kind.

    Blocks run in eager mode with hooks (torch ignores hooks in code reused from an earlier block), without gradients
    (for example in `generate()`), and in transforms of `torch.func`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._calls: dict[nn.Module, Callable[..., Any]] = {}
        for (kind, shapes), group in repeated_blocks(model).items():
            known = _compiled.setdefault(kind, {})
            if shapes not in known:
                known[shapes] = torch.compile(_call_of_a_kind(), **OPTIONS)
            for block in group:
                self._calls[block] = _calling(known[shapes], block)
        self.turn(on=True)

    def turn(self, *, on: bool) -> None:
        """Run the blocks compiled, or in eager mode."""
        for block, call in self._calls.items():
            block._compiled_call_impl = call if on else None

    def undo(self) -> None:
        """Restore the blocks' original calls."""
        for block in self._calls:
            vars(block).pop("_compiled_call_impl", None)


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


def _call_block(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a block; the block is an argument, so that equal blocks share the compiled code."""
    return block._call_impl(*args, **kwargs)


def _call_of_a_kind() -> Callable[..., Any]:
    """Return a copy of `_call_block`: torch limits the number of compiled versions by code object."""
    code = _call_block.__code__.replace(co_name=f"{_call_block.__name__}_{next(_numbers)}")
    return types.FunctionType(code, globals())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _calling(compiled: Callable[..., Any], block: nn.Module) -> Callable[..., Any]:
    hooks = [getattr(module, name) for module in block.modules() for name in _HOOKS]

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(hooks) or keeps_activations():
            return block._call_impl(*args, **kwargs)
        return compiled(block, args, kwargs)

    return call
