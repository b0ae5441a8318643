"""Memory of a model's blocks, traced in a forward and backward on fake tensors; input of the recomputation solver.

The stages of a chain are the blocks, plus a last stage with everything after the last block, including the loss. Memory
allocated before the first block counts as held throughout.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trimtab.core.block_costs import BlockChain, BlockChainModel, BlockCost
from trimtab.core.memory_model import Seen
from trimtab.losses import mean_of
from trimtab.measure.blocks import BlockGraph, hook_blocks
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.measure.memory_trace import Autocast, LossFn, Prepare, as_it_is, cannot_trace
from trimtab.measure.storage_tracker import CallMemory, OperatorCall, StorageTracker, WorkspaceTooLarge, measure_calls


class BlockMemoryTrace(NamedTuple):
    """Memory of a chain's stages in bytes, without optimizer state. All times are 0.

    Attributes:
        first: Chain of a window's first micro-batch.
        later: Chain of a later micro-batch, with gradients added to existing gradients.
        forwards: Operators of every stage's forward, for the first micro-batch.
        work: Operators of the complete forward and backward of the first micro-batch.
        early: Chain of a single micro-batch with parameter updates within the backward pass; None if not traced.
    """

    first: BlockChain
    later: BlockChain
    forwards: list[list[Seen]]
    work: list[Seen]
    early: BlockChain | None = None


def chains_through(few: BlockMemoryTrace, many: BlockMemoryTrace, rows: tuple[int, int]) -> list[BlockChainModel]:
    """Return the chain models of a first and of a later micro-batch, and with early updates if traced.

    All are fitted through two sizes in samples.
    """
    found = [BlockChainModel(*pair, rows) for pair in ((few.first, many.first), (few.later, many.later))]
    if few.early is not None and many.early is not None:
        found.append(BlockChainModel(few.early, many.early, rows))
    return found


def trace_stages(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    blocks: BlockGraph,
    *,
    autocast: Autocast = contextlib.nullcontext,
    counts_scratch: bool = False,
    prepare: Prepare = as_it_is,
    drops: bool = True,
    twice: bool = True,
    updates: Mapping[str, int] | None = None,
) -> BlockMemoryTrace:
    """Return the memory and operators of every block, and of the part after the last block.

    Args:
        counts_scratch: True to add operator workspace, by running each operator that needs any once on real CPU
            tensors.
        drops: True to also trace a forward without saved activations, instead of using the normal forward.
        twice: True to also trace a later micro-batch, instead of using the figures of the first.
        updates: Temporary bytes of a parameter's update, by name, to also return the chain with updates within the
            backward pass.

    Raises:
        ModelError: The step cannot be traced, for example because it reads a tensor's value.
    """
    fakes, storages = FakeTensors(), StorageTracker()
    try:
        model, batch = fakes.copy((model, batch))
        prepare(model)
        with fakes, storages:
            known = storages.numbers_of([*model.parameters(), *model.buffers(), batch])
            passes: list[_Pass] = []
            if drops:
                with torch.no_grad(), autocast():
                    dropping = _Pass(storages)
                    dropping.forward(model, loss_fn, batch, blocks.names)
            for _ in range(2 if twice else 1):
                storages.counts_work = not passes  # only the first micro-batch
                passes.append(_Pass(storages))
                with autocast():
                    loss = passes[-1].forward(model, loss_fn, batch, blocks.names)
                passes[-1].backward(loss, model)
                del loss
        dropping = dropping if drops else passes[0]
        if counts_scratch:
            for each in (dropping, *passes):
                each.taken = measure_calls(call for call, *_ in each.seen.calls)
    except WorkspaceTooLarge:
        raise
    except Exception as error:  # an arbitrary model may use operators without a fake implementation
        raise cannot_trace(error) from error
    held = sum(storages.sizes[number] for number in known)
    first = _chain(dropping, passes[0], blocks, held)
    early = None
    if updates is not None:
        passes[0].updates = updates
        early = _chain(dropping, passes[0], blocks, held)
    held += sum(stage.gradient_bytes for stage in first.stages)
    work = passes[0].seen.work
    forwards = [work[slice(*mark.work)] for mark in passes[0].marks]
    passes[0].updates = {}
    return BlockMemoryTrace(first, _chain(dropping, passes[-1], blocks, held), forwards, work, early)


def require_runs(
    model: nn.Module, loss_fn: LossFn, batch: Any, *, autocast: Autocast = contextlib.nullcontext, prepare: Prepare
) -> None:
    """Raise `ModelError` if a forward and backward, prepared by `prepare`, do not run on fake tensors."""
    fakes = FakeTensors()
    try:
        model, batch = fakes.copy((model, batch))
        prepare(model)
        with fakes:
            with autocast():
                result = loss_fn(model, batch)
            mean_of(result).backward()
    except Exception as error:  # an arbitrary model may use operators without a fake implementation
        raise cannot_trace(error) from error


def _chain(dropping: _Pass, keeping: _Pass, blocks: BlockGraph, held_bytes: int) -> BlockChain:
    dropped = list(dropping.forwards())
    links = [*blocks.links, False, False]  # neither the last block nor the part after it is linked to a following block
    stages = (
        BlockCost(
            forward_s=0.0,
            output_bytes=span.output_bytes,
            saved_bytes=span.left - span.passing,
            passing_bytes=span.passing,
            forward_bytes=span.most,
            dropping_bytes=drop.most,
            backward_bytes=after.most,
            gradient_bytes=after.left,
            spare_bytes=after.output_bytes,
            beside_bytes=span.beside,
            cached_bytes=max(0, drop.left - drop.output_bytes),
            is_linked=is_linked,
        )
        for span, after, drop, is_linked in zip(keeping.forwards(), keeping.backwards(), dropped, links, strict=True)
    )
    return BlockChain(tuple(stages), held_bytes + keeping.before)


@dataclass
class _Mark:
    """Numbers of storage events before a stage's forward, its end and its backward; storages of arguments and results.

    `work` has the numbers of operators before the forward and before its end.
    """

    begin: int
    end: int = 0
    backward: int | None = None
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    work: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _Span:
    """Memory of a stage's forward or backward, in bytes relative to its beginning.

    Attributes:
        most: Peak.
        left: Memory left at the end; for a backward, memory that stays beyond the following backward.
        output_bytes: Size of a forward's results; for a backward, the part of them freed before it begins.
        beside: Memory added between the end of a forward and the start of the next forward.
        passing: Part of a forward's memory, freed when the complete forward ends.
    """

    most: int
    left: int
    output_bytes: int = 0
    beside: int = 0
    passing: int = 0


class _Pass:
    """A forward with its backward.

    Attributes:
        updates: Temporary bytes of a parameter's update within the backward pass, by name. A gradient of a parameter
            in `updates` is freed upon arrival; {}: gradients are held.
    """

    def __init__(self, storages: StorageTracker) -> None:
        self._storages, self.seen, self.marks = storages, storages.begin(), list[_Mark]()
        self.taken: dict[OperatorCall, CallMemory] = {}  # workspaces, if they count
        self.updates: Mapping[str, int] = {}
        # Storage of the final gradient and number of events before it, by parameter.
        self._arrived: dict[str, tuple[int, int]] = {}

    def forward(self, model: nn.Module, loss_fn: LossFn, batch: Any, blocks: Sequence[str]) -> Tensor:

        def enter(_: str, args: Any, kwargs: Any) -> None:
            inputs = frozenset(self._storages.numbers_of((args, kwargs)))
            self.marks.append(_Mark(self._now, inputs=inputs, work=(len(self.seen.work), 0)))

        def leave(_: str, result: Any) -> None:
            mark, tensors = self.marks[-1], [each for each in tree_iter(result) if isinstance(each, Tensor)]
            mark.end, mark.outputs = self._now, frozenset(self._storages.numbers_of(tensors))
            mark.work = mark.work[0], len(self.seen.work)
            for tensor in [each for each in tensors if each.requires_grad][:1]:
                tensor.register_hook(lambda _: setattr(mark, "backward", self._now))

        with hook_blocks(model, blocks, enter, leave):
            loss = mean_of(loss_fn(model, batch))
        end, begin_work = (self.marks[-1].end, self.marks[-1].work[1]) if self.marks else (0, 0)
        self.marks.append(_Mark(end, self._now, work=(begin_work, len(self.seen.work))))
        return loss

    def backward(self, loss: Tensor, model: nn.Module) -> None:
        # An implicit seed would be held by the backward to its end; allocating it here ends the forward.
        seed = torch.ones_like(loss)
        self.marks[-1].backward = self._now

        def arrives(name: str, parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._arrived[name] = self._storages.number_of(parameter.grad), self._now

        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        hooks = [p.register_post_accumulate_grad_hook(functools.partial(arrives, name)) for name, p in trained]
        loss.backward(seed)
        for hook in hooks:
            hook.remove()

    def _freed(self) -> dict[int, int]:
        """Return the number of events before an update frees the gradient, by storage; the last of several updates."""
        arrived = sorted((self._arrived[name] for name in self.updates if name in self._arrived), key=lambda a: a[1])
        return dict(arrived)

    @property
    def before(self) -> int:
        """Bytes held when the first stage begins."""
        return self._held()[self.marks[0].begin]

    @property
    def _now(self) -> int:
        return len(self.seen.events)

    def _held(self) -> list[int]:
        """Return the bytes held after every event.

        A stage's input freed between the stage's end and the end of the forward counts as held until the latter:
        recomputing the stage would keep it in any case.
        """
        sizes, died = self._storages.sizes, self._indices(-1)
        changes = [sign * sizes[number] for number, sign in self.seen.events]
        end = self.marks[-1].end
        late = {n: died[n] for mark in self.marks for n in mark.inputs if mark.end <= died.get(n, -1) < end}
        for number, index in late.items():
            changes[index] = 0
            changes[end : end + 1] = [change - sizes[number] for change in changes[end : end + 1]]
        for number, index in self._freed().items():
            changes[index : index + 1] = [change - sizes[number] for change in changes[index : index + 1]]
        return [0, *itertools.accumulate(changes)]

    def _most(self) -> list[int]:
        """Return the bytes held after every event, including operator workspace."""
        held = self._held()
        scratch = [0] * len(held)
        for call, begin, end, _ in self.seen.calls:
            if call in self.taken:
                for index in range(begin, end + 1):  # Two calls share an index if nothing was born between them.
                    scratch[index] = max(scratch[index], self.taken[call].scratch_bytes)
        for name in self.updates.keys() & self._arrived.keys():
            _, index = self._arrived[name]
            scratch[index] = max(scratch[index], self.updates[name])
        return [one + other for one, other in zip(held, scratch, strict=True)]

    def forwards(self) -> list[_Span]:
        """Return each stage's forward. Work of the model between two stages counts in the peak of the later one."""
        held, most, spans = self._held(), self._most(), []
        # Birth events of storages that are freed between the end of the forward and the backward.
        end, backward, died = self.marks[-1].end, self.marks[-1].backward or 0, self._indices(-1)
        passing = {n: born for n, born in self._indices(1).items() if end <= died.get(n, -1) < backward}
        for index, mark in enumerate(self.marks):
            since = self.marks[index - 1].end if index else mark.begin
            following = self.marks[index + 1].begin if index + 1 < len(self.marks) else mark.end
            spans.append(
                _Span(
                    max(most[since : mark.end + 1]) - held[mark.begin],
                    held[mark.end] - held[mark.begin],
                    self._size(mark.outputs),
                    max(0, held[following] - held[mark.end]),
                    self._size(n for n, born in passing.items() if mark.begin <= born < mark.end),
                )
            )
        return spans

    def backwards(self) -> list[_Span]:
        """Return the stages' backward passes; a backward ends at the start of the preceding stage's backward."""
        held, most, died, count = self._held(), self._most(), self._indices(-1), len(self.seen.events)
        spans, end = [], count
        for mark, left in zip(self.marks, self._left(), strict=True):
            begin = end if mark.backward is None else mark.backward
            gone = self._size(n for n in mark.outputs if died.get(n, count) < begin)
            spans.append(_Span(max(most[begin : end + 1]) - held[begin], left, gone))
            end = begin
        return spans

    def _left(self) -> list[int]:
        """Return the memory left by the backward passes.

        Memory counts if it is still alive after the following backward. Memory left by an earlier backward and freed in
        this one is subtracted.
        """
        born, died, count = self._indices(1), self._indices(-1), len(self.seen.events)
        ends = [count]
        for mark in self.marks:
            ends.append(ends[-1] if mark.backward is None else mark.backward)
        overs = [count, *ends]  # end of the backward of the stage before, for each stage
        left, rising = [0] * len(self.marks), ends[::-1]

        def stage_at(event: int) -> int | None:
            place = bisect.bisect_right(rising, event)
            return len(ends) - 1 - place if 0 < place < len(ends) else None

        for number, index in born.items():
            stage, death = stage_at(index), died.get(number, count)
            if stage is not None and death >= overs[stage]:
                left[stage] += self._storages.sizes[number]
                last = stage_at(death)
                if last is not None:
                    left[last] -= self._storages.sizes[number]
        return left

    def _indices(self, wanted: int) -> dict[int, int]:
        """Return the event index of every storage's birth (`wanted` = 1) or death (-1)."""
        found = {number: index for index, (number, sign) in enumerate(self.seen.events) if sign == wanted}
        return found | self._freed() if wanted < 0 else found

    def _size(self, numbers: Iterable[int]) -> int:
        return sum(self._storages.sizes[number] for number in numbers)
