"""Blocks of a model, the units of activation checkpointing: found in its module tree, and observed by hooks.

Two blocks are linked if the first one's output is used only as the second one's input. Links are found in a forward on
fake tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trimtab.core.errors import ValueGivenError
from trimtab.measure.fake_tensors import EagerDispatchMode, FakeTensors
from trimtab.measure.memory_trace import LossFn, cannot_trace

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


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


@contextlib.contextmanager
def hook_blocks(
    model: nn.Module,
    blocks: Iterable[str],
    enter: Callable[[str, Any, Any], None],
    leave: Callable[[str, Any], None],
) -> Iterator[None]:
    """Call `enter(name, args, kwargs)` before and `leave(name, result)` after every forward of a block."""
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


@dataclass(frozen=True)
class BlockGraph:
    """Names of blocks in execution order, and links.

    A link is True for a block whose single output is the next block's first argument and has no further use, if both
    get the same remaining arguments.
    """

    names: tuple[str, ...]
    links: tuple[bool, ...]


def blocks_of(model: nn.Module, loss_fn: LossFn, batch: Any, named: tuple[str, ...] = ()) -> BlockGraph:
    """Return a model's blocks that run exactly once in a forward, with their links. Nothing is computed.

    Raises:
        ModelError: The forward cannot be traced, for example because it reads a tensor's value.
        ValueGivenError: A name is not a module, lies inside another named module, or runs several times or never.
    """
    blocks, fakes, watch = find_blocks(model, named), FakeTensors(), _Watch()
    try:
        model, batch = fakes.copy((model, batch))
        with fakes, watch.hooked(model, blocks), watch:
            loss_fn(model, batch)
    except Exception as error:  # an arbitrary model may use operators without a fake implementation
        raise cannot_trace(error) from error
    found = watch.found()
    if others := [name for name in named if name not in found.names]:
        listed = f"{', '.join(map(repr, others))[:80]}"
        raise ValueGivenError(
            "blocks",
            got=listed,
            expected="modules that each run exactly once in a forward",
            problem=f"blocks lists {listed}, which a forward runs several times or never.",
            hint="List modules that each run exactly once in a forward.",
            code="blocks.not_run_once",
        )
    return found


@dataclass
class _Call:
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any = None


class _Watch(EagerDispatchMode):
    """Dispatch mode that records the calls of blocks, and the outputs used outside the following block."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._inside: list[int] = []  # indices of calls in progress
        self._made_by: dict[int, set[int]] = {}  # storage -> indices of calls that returned it, or a view of it
        self._shared: set[int] = set()  # indices of calls whose outputs have other uses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # reading a fake tensor's device does not use the tensor
            self._look((args, kwargs), self._inside[-1] if self._inside else None)
        return func(*args, **(kwargs or {}))

    def _look(self, values: Any, by: int | None) -> None:
        for tensor in tree_iter(values):
            if isinstance(tensor, Tensor):
                makers = self._made_by.get(tensor.untyped_storage()._cdata, ())
                self._shared |= {maker for maker in makers if by not in (maker, maker + 1)}

    @contextlib.contextmanager
    def hooked(self, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:

        def enter(name: str, args: Any, kwargs: Any) -> None:
            self._inside.append(len(self._calls))
            self._calls.append(_Call(name, args, kwargs))

        def leave(_: str, result: Any) -> None:
            index = self._inside.pop()
            self._calls[index].result = result
            for tensor in tree_iter(result):
                if isinstance(tensor, Tensor):
                    self._made_by.setdefault(tensor.untyped_storage()._cdata, set()).add(index)

        whole = model.register_forward_hook(lambda _, args, result: self._look(result, None))
        try:
            with hook_blocks(model, blocks, enter, leave):
                yield
        finally:
            whole.remove()

    def found(self) -> BlockGraph:
        names = [call.name for call in self._calls]
        once = [index for index, name in enumerate(names) if names.count(name) == 1]
        links = tuple(self._is_linked(before, after) for before, after in itertools.pairwise(once))
        return BlockGraph(tuple(names[index] for index in once), links)

    def _is_linked(self, before: int, after: int) -> bool:
        ours, theirs = self._calls[before], self._calls[after]
        if after != before + 1 or before in self._shared or not (ours.args and theirs.args):
            return False
        rest = (ours.args[1:], ours.kwargs), (theirs.args[1:], theirs.kwargs)
        return isinstance(ours.result, Tensor) and theirs.args[0] is ours.result and same_arguments(*rest)


def same_arguments(ours: Arguments, theirs: Arguments) -> bool:
    """Return True if two calls have the same arguments: identical objects, or equal plain values."""
    if len(ours[0]) != len(theirs[0]) or set(ours[1]) != set(theirs[1]):
        return False
    pairs = [*zip(ours[0], theirs[0], strict=True), *((ours[1][name], theirs[1][name]) for name in ours[1])]
    return all(a is b or (isinstance(a, bool | int | float | str) and type(a) is type(b) and a == b) for a, b in pairs)


# Notification of recomputation in a backward.

_Listener = Callable[[], contextlib.AbstractContextManager[object]]
_listeners: list[_Listener] = []


@contextlib.contextmanager
def listen_to_recomputation(listener: _Listener) -> Iterator[None]:
    """Run every recomputation inside the block within the context manager returned by `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Mark the code inside the context as recomputation."""
    with contextlib.ExitStack() as stack:
        for listener in tuple(_listeners):
            stack.enter_context(listener())
        yield
