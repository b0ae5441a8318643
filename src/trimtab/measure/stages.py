"""Bytes of a chain's stages, traced in one forward and backward on fake tensors: what schedules are found by.

Stages are a model's blocks and what comes behind the last one, the loss among it; what comes before the first is held
throughout.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trimtab.core.chain import Chain, ChainModel, Stage
from trimtab.core.work import Seen
from trimtab.losses import mean_of
from trimtab.measure.fakes import Fakes
from trimtab.measure.linked_blocks import LinkedBlocks
from trimtab.measure.scratch import Call, Taken, TooLarge, measured
from trimtab.measure.step_trace import Prepare, as_it_is
from trimtab.measure.storages import Storages
from trimtab.measure.traced_step import Autocast, LossFn, cannot_trace


class Stages(NamedTuple):
    """A chain's bytes, without the optimizer's state; its stages take no seconds.

    Attributes:
        first: of a first micro-batch. later: of one whose gradients are added to those of another before it.
        forwards: operators of each stage's forward, in the first. work: of all of its forward and backward.
    """

    first: Chain
    later: Chain
    forwards: list[list[Seen]]
    work: list[Seen]


def chains_through(few: Stages, many: Stages, rows: tuple[int, int]) -> list[ChainModel]:
    """Return the chains of a first micro-batch and of a later one through two of these rows, the smaller one first."""
    return [ChainModel(*pair, rows) for pair in ((few.first, many.first), (few.later, many.later))]


def trace_stages(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    blocks: LinkedBlocks,
    *,
    autocast: Autocast = contextlib.nullcontext,
    counts_scratch: bool = False,
    prepare: Prepare = as_it_is,
    drops: bool = True,
    twice: bool = True,
) -> Stages:
    """Return the bytes and operators of each block, and of what comes behind the last one.

    Args:
        model, batch: with memory, or fakes. loss_fn: a mean, or (sum, count). autocast: the forward's context.
        blocks: a stage each. counts_scratch: run each operator that takes memory for itself
            once, on real tensors on the CPU, and count it. prepare: called with the model's copy before all. drops:
            whether to trace what a forward takes that keeps nothing; else it is told as of one that does. twice:
            whether to trace a later micro-batch; else there is none, and it is told as the first.

    Raises:
        ModelError: the step cannot be traced, as where it looks at a value; with torch's own reason.
    """
    fakes, storages = Fakes(), Storages()
    try:
        model, batch = fakes.copy((model, batch))
        prepare(model)
        with fakes, storages:
            known = storages.numbers_of([*model.parameters(), *model.buffers(), batch])
            passes = []
            if drops:
                with torch.no_grad(), autocast():
                    dropping = _Pass(storages)
                    dropping.forward(model, loss_fn, batch, blocks.names)
            for _ in range(2 if twice else 1):
                storages.counts_work = not passes  # of the first alone
                passes.append(_Pass(storages))
                with autocast():
                    loss = passes[-1].forward(model, loss_fn, batch, blocks.names)
                passes[-1].backward(loss)
                del loss
        dropping = dropping if drops else passes[0]
        if counts_scratch:
            for each in (dropping, *passes):
                each.count_scratch()
    except TooLarge:
        raise
    except Exception as error:  # whatever a model does, torch may have no fake of it
        raise cannot_trace(error) from error
    held = sum(storages.sizes[number] for number in known)
    first = _chain(dropping, passes[0], blocks, held)
    held += sum(stage.gradient_bytes for stage in first.stages)
    return Stages(first, _chain(dropping, passes[-1], blocks, held), passes[0].work_of_forwards(), passes[0].work)


def require_runs(
    model: nn.Module, loss_fn: LossFn, batch: Any, *, autocast: Autocast = contextlib.nullcontext, prepare: Prepare
) -> None:
    """Raise `ModelError` where a forward and backward do not run on fakes, as `prepare` has them run."""
    fakes = Fakes()
    try:
        model, batch = fakes.copy((model, batch))
        prepare(model)
        with fakes:
            with autocast():
                result = loss_fn(model, batch)
            mean_of(result).backward()
    except Exception as error:  # whatever a model does, torch may have no fake of it
        raise cannot_trace(error) from error


def _chain(dropping: _Pass, keeping: _Pass, blocks: LinkedBlocks, held_bytes: int) -> Chain:
    dropped = list(dropping.forwards())
    links = [*blocks.links, False, False]  # the last block's result goes to what is no block
    stages = (
        Stage(
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
    return Chain(tuple(stages), held_bytes + keeping.before)


@dataclass
class _Mark:
    """How many events came before a stage's forward, before its end, and before its backward.

    And how many operators came before its forward, and its end; storages it was given, and those it returned.
    """

    begin: int
    end: int = 0
    backward: int | None = None
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    work: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _Span:
    """The most held beyond what was at its begin, and what of it is left: at its end, or of a backward in the end.

    `output_bytes`: what a forward returns; of that, what is gone before a backward. `beside`: what is held, from behind
    a forward, when the next one begins. `passing`: of what a forward leaves, gone when the whole forward is over.
    """

    most: int
    left: int
    output_bytes: int = 0
    beside: int = 0
    passing: int = 0


class _Pass:
    """One forward, and its backward."""

    def __init__(self, storages: Storages) -> None:
        self._storages, self._seen, self._marks = storages, storages.begin(), list[_Mark]()
        self._taken: dict[Call, Taken] = {}

    def forward(self, model: nn.Module, loss_fn: LossFn, batch: Any, blocks: Sequence[str]) -> Tensor:
        """Run it; returns the mean loss."""
        with self._hooked(model, blocks):
            loss = mean_of(loss_fn(model, batch))
        end, begin_work = (self._marks[-1].end, self._marks[-1].work[1]) if self._marks else (0, 0)
        self._marks.append(_Mark(end, self._now, work=(begin_work, len(self.work))))
        return loss

    def backward(self, loss: Tensor) -> None:
        """Run it."""
        seed = torch.ones_like(loss)  # else held by it until the end, as a gradient is; and its birth ends the forward
        self._marks[-1].backward = self._now
        loss.backward(seed)

    @property
    def work(self) -> list[Seen]:
        """Operators that ran."""
        return self._seen.work

    def work_of_forwards(self) -> list[list[Seen]]:
        """Return the operators of each stage's forward."""
        return [self.work[slice(*mark.work)] for mark in self._marks]

    @property
    def before(self) -> int:
        """Bytes held when the first stage begins."""
        return self._held()[self._marks[0].begin]

    @property
    def _now(self) -> int:
        return len(self._seen.events)

    @contextlib.contextmanager
    def _hooked(self, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = frozenset(self._storages.numbers_of((args, kwargs)))
            self._marks.append(_Mark(self._now, inputs=inputs, work=(len(self.work), 0)))

        def leave(_: nn.Module, args: Any, result: Any) -> None:
            mark, tensors = self._marks[-1], [each for each in tree_iter(result) if isinstance(each, Tensor)]
            mark.end, mark.outputs = self._now, frozenset(self._storages.numbers_of(tensors))
            mark.work = mark.work[0], len(self.work)
            for tensor in [each for each in tensors if each.requires_grad][:1]:
                tensor.register_hook(lambda _: setattr(mark, "backward", self._now))

        handles = []
        for name in blocks:
            block = model.get_submodule(name)
            handles += [
                block.register_forward_pre_hook(enter, with_kwargs=True),
                block.register_forward_hook(leave),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _held(self) -> list[int]:
        """Return what is held at each event.

        What a stage was given is held to the forward's end where it is let go of behind the stage's own: one that is
        run again holds it in any case.
        """
        sizes, died = self._storages.sizes, self._indices(-1)
        changes = [sign * sizes[number] for number, sign in self._seen.events]
        end = self._marks[-1].end
        late = {n: died[n] for mark in self._marks for n in mark.inputs if mark.end <= died.get(n, -1) < end}
        for number, index in late.items():
            changes[index] = 0
            changes[end : end + 1] = [change - sizes[number] for change in changes[end : end + 1]]
        return [0, *itertools.accumulate(changes)]

    def count_scratch(self) -> None:
        """Run each operator that takes memory for itself once, and count that."""
        self._taken = measured(call for call, *_ in self._seen.calls)

    def _most(self) -> list[int]:
        """Return what is held at each event, what operators take for themselves in it."""
        most = self._held()
        for call, begin, end, _ in self._seen.calls:
            if call in self._taken:
                for index in range(begin, end + 1):
                    most[index] += self._taken[call].scratch_bytes
        return most

    def forwards(self) -> list[_Span]:
        """Return each stage's forward; what the model does before it, behind the one before, is in the most of it."""
        held, most, passing, spans = self._held(), self._most(), self._passing(), []
        for index, mark in enumerate(self._marks):
            since = self._marks[index - 1].end if index else mark.begin
            following = self._marks[index + 1].begin if index + 1 < len(self._marks) else mark.end
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

    def _passing(self) -> dict[int, int]:
        """Return where each storage was born that is gone between the forward's end and the backward's begin."""
        end, backward, died = self._marks[-1].end, self._marks[-1].backward or 0, self._indices(-1)
        return {n: born for n, born in self._indices(1).items() if end <= died.get(n, -1) < backward}

    def backwards(self) -> list[_Span]:
        """Return each stage's backward, which is over where that of the one before it begins."""
        held, most, died, count = self._held(), self._most(), self._indices(-1), len(self._seen.events)
        spans, end = [], count
        for mark, left in zip(self._marks, self._left(), strict=True):
            begin = end if mark.backward is None else mark.backward
            gone = self._size(n for n in mark.outputs if died.get(n, count) < begin)
            spans.append(_Span(max(most[begin : end + 1]) - held[begin], left, gone))
            end = begin
        return spans

    def _left(self) -> list[int]:
        """Return what each backward leaves: what is still there when the next is over, less what it ends of that."""
        born, died, count = self._indices(1), self._indices(-1), len(self._seen.events)
        ends = [count]
        for mark in self._marks:
            ends.append(ends[-1] if mark.backward is None else mark.backward)
        overs = [count, *ends]  # of each stage, where the backward of the one before it is over
        left, rising = [0] * len(self._marks), ends[::-1]

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
        """Return where each storage was born (1), or died (-1)."""
        return {number: index for index, (number, sign) in enumerate(self._seen.events) if sign == wanted}

    def _size(self, numbers: Iterable[int]) -> int:
        return sum(self._storages.sizes[number] for number in numbers)
