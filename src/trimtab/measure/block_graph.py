"""Links between a model's blocks, found in a forward on fake tensors.

Two blocks are linked if the first one's output is used only as the second one's input.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trimtab.core.errors import ValueGivenError
from trimtab.measure.blocks import find_blocks, hook_blocks
from trimtab.measure.dispatch_mode import EagerDispatchMode
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.measure.storage_lifetimes import LossFn, cannot_trace

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class BlockGraph:
    """Blocks in execution order.

    Args:
        names: Names of the blocks.
        links: For each block but the last, True if it is linked to the next block: its single output is the next
            block's first argument, has no further use, and both blocks get the same remaining arguments.
    """

    names: tuple[str, ...]
    links: tuple[bool, ...]


def find_linked_blocks(model: nn.Module, loss_fn: LossFn, batch: Any, blocks: Sequence[str]) -> BlockGraph:
    """Return the blocks that run exactly once in a forward, with their links. Nothing is computed.

    Raises:
        ModelError: The forward cannot be traced, for example because it reads a tensor's value. Includes torch's
            reason.
    """
    fakes, watch = FakeTensors(), _Watch()
    try:
        model, batch = fakes.copy((model, batch))
        with fakes, watch.hooked(model, blocks), watch:
            loss_fn(model, batch)
    except Exception as error:  # an arbitrary model may use operators without a fake implementation
        raise cannot_trace(error) from error
    return watch.found()


def blocks_of(model: nn.Module, loss_fn: LossFn, batch: Any, named: tuple[str, ...] = ()) -> BlockGraph:
    """Return a model's blocks that run exactly once in a forward, with their links.

    Raises:
        ModelError: See `find_linked_blocks`.
        ValueGivenError: A name is not a module, lies inside another named module, or runs several times or never.
    """
    found = find_linked_blocks(model, loss_fn, batch, find_blocks(model, named))
    others = [name for name in named if name not in found.names]
    if others:
        raise ValueGivenError(
            "blocks",
            got=f"{', '.join(map(repr, others))[:80]}",
            expected="modules that each run exactly once in a forward",
            problem=f"blocks lists {', '.join(map(repr, others))[:80]}, which a forward runs several times or never.",
            hint="List modules that each run exactly once in a forward.",
            code="blocks.not_run_once",
        )
    return found


@dataclass
class _Call:
    """A block's call: name, arguments and result."""

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
        """Record the blocks' calls inside the context."""

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
        """Return the recorded blocks and links."""
        names = [call.name for call in self._calls]
        once = [index for index, name in enumerate(names) if names.count(name) == 1]
        links = (self._links(before, after) for before, after in itertools.pairwise(once))
        return BlockGraph(tuple(names[index] for index in once), tuple(links))

    def _links(self, before: int, after: int) -> bool:
        if after != before + 1 or before in self._shared:
            return False
        (ours, theirs) = self._calls[before], self._calls[after]
        if not isinstance(ours.result, Tensor) or not (ours.args and theirs.args):
            return False
        return theirs.args[0] is ours.result and same_arguments(
            (ours.args[1:], ours.kwargs), (theirs.args[1:], theirs.kwargs)
        )


def same_arguments(ours: Arguments, theirs: Arguments) -> bool:
    """Return True if two calls have the same arguments: identical objects, or equal plain values."""
    if len(ours[0]) != len(theirs[0]) or set(ours[1]) != set(theirs[1]):
        return False
    pairs = [*zip(ours[0], theirs[0], strict=True), *((ours[1][name], theirs[1][name]) for name in ours[1])]
    return all(a is b or (isinstance(a, bool | int | float | str) and type(a) is type(b) and a == b) for a, b in pairs)
