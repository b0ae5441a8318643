"""A model's blocks, from its module tree: the parts that what backward needs is kept or computed again by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from trimtab.core.errors import ValueGivenError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, named: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of a model's blocks in the order of its tree; those that are `named`, where some are.

    Blocks are members of a `Sequential`, `ModuleList` or `ModuleDict` that have members of their own, and siblings of
    one class that have. Containers of blocks, as the stages of a ResNet, are gone into; blocks are not. Where a model
    has none, as a plain `Sequential` of layers, its layers are.

    Raises:
        ValueGivenError: a name that is no module's, or lies inside another.
    """
    names = tuple(named)
    if names:
        _check(model, names)
        return names
    return tuple(_composite("", model)) or tuple(_layers(model))


def find_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that seconds are told apart by: blocks, their members, and what lies outside of blocks."""
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
            raise ValueGivenError("blocks", given=f"{name!r:.80}", expected="names of modules below the model")
        if names.count(name) > 1 or any(name.startswith(f"{other}.") for other in names):
            raise ValueGivenError("blocks", given=f"{name!r:.80} inside another", expected="blocks apart")


def _composite(prefix: str, module: nn.Module) -> Iterator[str]:
    """Yield the outermost blocks below a module."""
    siblings = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if not _has_members(child):
            continue
        is_repeated = siblings[type(child)] > 1 and not isinstance(child, _CONTAINERS)
        if (is_repeated or isinstance(module, _CONTAINERS)) and not _holds_blocks(child):
            yield path
        else:
            yield from _composite(path, child)


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether a module is a container of modules that have members."""
    return isinstance(module, _CONTAINERS) and any(map(_has_members, module.children()))


def _has_members(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _layers(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if name and not _has_members(module):
            yield name
