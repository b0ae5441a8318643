"""Which of a model's blocks hand what they return to the next one and to nobody else, seen in a forward on fakes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trimtab.core.errors import ValueGivenError
from trimtab.measure.blocks import find_blocks
from trimtab.measure.fakes import Fakes
from trimtab.measure.traced_step import LossFn, cannot_trace
from trimtab.measure.watching import Watching


@dataclass(frozen=True)
class LinkedBlocks:
    """Blocks in the order they run in, each once.

    Args:
        links: of each but the last, whether its one result is what the next one is called with, beside arguments that
            are the same for both, and nothing else looks at it.
    """

    names: tuple[str, ...]
    links: tuple[bool, ...]


def find_linked_blocks(model: nn.Module, loss_fn: LossFn, batch: Any, blocks: Sequence[str]) -> LinkedBlocks:
    """Return those of some blocks that run once in a forward, and how they are linked. Nothing is computed.

    Raises:
        ModelError: the forward cannot be traced, as where it looks at a value; with torch's own reason.
    """
    fakes, watch = Fakes(), _Watch()
    try:
        model, batch = fakes.copy((model, batch))
        with fakes, watch.hooked(model, blocks), watch:
            loss_fn(model, batch)
    except Exception as error:  # whatever a model does, torch may have no fake of it
        raise cannot_trace(error) from error
    return watch.found()


def blocks_of(model: nn.Module, loss_fn: LossFn, batch: Any, named: tuple[str, ...] = ()) -> LinkedBlocks:
    """Return a model's blocks that run once in a forward, and how they are linked; those that are `named`, if any are.

    Raises:
        ModelError: as `find_linked_blocks`. ValueGivenError: a name is no module's, lies inside another, or is that of
            one that a forward runs several times, or never.
    """
    found = find_linked_blocks(model, loss_fn, batch, find_blocks(model, named))
    others = [name for name in named if name not in found.names]
    if others:
        raise ValueGivenError(
            "blocks",
            given=f"{', '.join(map(repr, others))[:80]}, which a forward runs several times, or never",
            expected="modules that each run once in a forward",
        )
    return found


@dataclass
class _Call:
    """A block's call: its name, its arguments, and what it returned."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any = None


class _Watch(Watching):
    """Notes calls of blocks, and whose results are looked at elsewhere than in the block that runs next."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._inside: list[int] = []  # calls that are open
        self._made_by: dict[int, set[int]] = {}  # storage -> calls that returned it, or a view of it
        self._shared: set[int] = set()  # calls whose results others look at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # a look at a fake's device is none at the tensor
            self._look((args, kwargs), self._inside[-1] if self._inside else None)
        return func(*args, **(kwargs or {}))

    def _look(self, values: Any, by: int | None) -> None:
        for tensor in tree_iter(values):
            if isinstance(tensor, Tensor):
                makers = self._made_by.get(tensor.untyped_storage()._cdata, ())
                self._shared |= {maker for maker in makers if by not in (maker, maker + 1)}

    @contextlib.contextmanager
    def hooked(self, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
        """Note the blocks' calls while this is open."""

        def enter(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
                self._inside.append(len(self._calls))
                self._calls.append(_Call(name, args, kwargs))

            return hook

        def leave(_: nn.Module, args: Any, result: Any) -> None:
            index = self._inside.pop()
            self._calls[index].result = result
            for tensor in tree_iter(result):
                if isinstance(tensor, Tensor):
                    self._made_by.setdefault(tensor.untyped_storage()._cdata, set()).add(index)

        handles = [model.register_forward_hook(lambda _, args, result: self._look(result, None))]
        for name in blocks:
            block = model.get_submodule(name)
            handles.append(block.register_forward_pre_hook(enter(name), with_kwargs=True))
            handles.append(block.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def found(self) -> LinkedBlocks:
        """Return what was seen."""
        names = [call.name for call in self._calls]
        once = [index for index, name in enumerate(names) if names.count(name) == 1]
        links = (self._links(before, after) for before, after in itertools.pairwise(once))
        return LinkedBlocks(tuple(names[index] for index in once), tuple(links))

    def _links(self, before: int, after: int) -> bool:
        if after != before + 1 or before in self._shared:
            return False
        (ours, theirs) = self._calls[before], self._calls[after]
        if not isinstance(ours.result, Tensor) or not (ours.args and theirs.args):
            return False
        return theirs.args[0] is ours.result and same_arguments(
            (ours.args[1:], ours.kwargs), (theirs.args[1:], theirs.kwargs)
        )


Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def same_arguments(ours: Arguments, theirs: Arguments) -> bool:
    """Return whether two calls are given the same: the same objects, or equal plain values."""
    if len(ours[0]) != len(theirs[0]) or set(ours[1]) != set(theirs[1]):
        return False
    pairs = [*zip(ours[0], theirs[0], strict=True), *((ours[1][name], theirs[1][name]) for name in ours[1])]
    return all(a is b or (isinstance(a, bool | int | float | str) and type(a) is type(b) and a == b) for a, b in pairs)
