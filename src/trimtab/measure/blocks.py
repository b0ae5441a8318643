"""Blocks of a model, the units of activation checkpointing: found in its module tree, and observed by hooks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from trimtab.core.errors import ValueGivenError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, named: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of a model's blocks in tree order, or the validated names in `named`.

    A block is a module with submodules that is a member of a `Sequential`, `ModuleList` or `ModuleDict`, or has a
    sibling of the same class. A container of such modules, for example a stage of a ResNet, is not a block, but its
    members are. Modules inside a block are not blocks. If a model has no blocks, for example a `Sequential` of layers,
    its layers are returned.

    Raises:
        ValueGivenError: A name is not a module, or lies inside another named module.
    """
    names = tuple(named)
    if names:
        _check(model, names)
        return names
    layers = (name for name, module in model.named_modules() if name and not _has_members(module))
    return tuple(_composite("", model)) or tuple(layers)


@contextlib.contextmanager
def hook_blocks(
    model: nn.Module,
    blocks: Iterable[str],
    enter: Callable[[str, Any, Any], None],
    leave: Callable[[str, Any], None],
) -> Iterator[None]:
    """Call `enter(name, args, kwargs)` before and `leave(name, result)` after each forward of a block."""
    with contextlib.ExitStack() as hooks:
        for name in blocks:
            block = model.get_submodule(name)
            before = block.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: enter(name, args, kwargs), with_kwargs=True
            )
            hooks.callback(before.remove)
            after = block.register_forward_hook(lambda _, args, result, name=name: leave(name, result))
            hooks.callback(after.remove)
        yield


def find_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules for separate timing: blocks, their members, and modules outside of blocks."""
    yield from _parts(model, "", frozenset(find_blocks(model)))


def _parts(module: nn.Module, prefix: str, blocks: frozenset[str]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in blocks:
            yield child
            yield from _parts(child, f"{path}.", frozenset())
        elif isinstance(child, _CONTAINERS) or any(block.startswith(f"{path}.") for block in blocks):
            yield from _parts(child, f"{path}.", blocks)
        else:
            yield child


def _check(model: nn.Module, names: tuple[str, ...]) -> None:
    known = {name for name, _ in model.named_modules()}
    for name in names:
        if name not in known or not name:
            raise ValueGivenError(
                "blocks",
                got=f"{name!r:.80}",
                expected="names of submodules of the model",
                hint="Use names from model.named_modules(), such as 'layers.0'.",
                code="blocks.unknown_module",
            )
        if names.count(name) > 1 or any(name.startswith(f"{other}.") for other in names):
            raise ValueGivenError(
                "blocks",
                got=f"{name!r:.80}",
                expected="separate modules",
                problem=f"blocks lists {name!r:.80} twice, or together with a module that contains it.",
                hint="List each module once, without the modules inside it.",
                code="blocks.overlap",
            )


def _composite(prefix: str, module: nn.Module) -> Iterator[str]:
    """Yield the outermost blocks below a module."""
    siblings = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if not _has_members(child):
            continue
        is_container = isinstance(child, _CONTAINERS)
        is_repeated = siblings[type(child)] > 1 and not is_container
        holds_blocks = is_container and any(map(_has_members, child.children()))
        if (is_repeated or isinstance(module, _CONTAINERS)) and not holds_blocks:
            yield path
        else:
            yield from _composite(path, child)


def _has_members(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
