"""Memory of one optimizer step, traced on fake tensors: nothing is allocated.

The step runs as it would, operator by operator, on tensors without memory, and storages are seen to come and go. That
is exact but for scratch inside operators, which convolutions take on a CPU. Model, optimizer and batch are copied; what
else a loss or a hook of the user's writes to it writes to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from trimtab.core.alignment import aligned_peaks
from trimtab.core.errors import ValueGivenError
from trimtab.core.peak_model import PeakModel
from trimtab.core.step_memory import StepMemory
from trimtab.core.work import Seen, StepWork, operations
from trimtab.measure.fakes import Fakes
from trimtab.measure.storages import Storages
from trimtab.measure.traced_step import Autocast, LossFn, Marks, TracedStep, cannot_trace, make_state

Prepare = Callable[[nn.Module], object]
_CUDA_GRANULE = 512  # of torch's caching allocator


def as_it_is(model: nn.Module) -> None:
    """Leave a model as it is."""


def trace_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batch: Any,
    *,
    autocast: Autocast = contextlib.nullcontext,
    num_micro_batches: int = 1,
    blocks: Sequence[str] = (),
    granule: int | None = None,
    counts_scratch: bool = False,
    prepare: Prepare = as_it_is,
) -> StepMemory:
    """Return the memory of a step of so many micro-batches, each of which is `batch`.

    Args:
        model, optimizer: with memory, or made on fakes. loss_fn: a mean, or (sum, count). autocast: the forward's
            context. blocks: names of modules to tell apart. granule: bytes that allocations are multiples of; by
            default those of the model's device. counts_scratch: run each operator that takes memory for itself once,
            on real tensors on the CPU, and count it. prepare: called with the model's copy before the step.

    Raises:
        ModelError: the step cannot be traced, as where it looks at a value; with torch's own reason. ValueGivenError:
            scratch is to be counted of a model that is not on the CPU.
    """
    device = next(model.parameters()).device.type
    if counts_scratch and device != "cpu":
        raise ValueGivenError("counts_scratch", given=f"a model on {device}", expected="one on the CPU")
    runs = [(batch, autocast)]
    how: dict[str, Any] = {"num_micro_batches": num_micro_batches, "prepare": prepare}
    (step,), marks = _traced(model, optimizer, loss_fn, runs, blocks, granule, **how)
    return step.memory(tuple(step.blocks(marks)), step.scratch() if counts_scratch else {})


def trace_peaks(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: tuple[Any, Any],
    rows: tuple[int, int],
    *,
    autocasts: Sequence[Autocast] = (contextlib.nullcontext,),
    counts_scratch: bool = False,
    prepare: Prepare = as_it_is,
) -> list[SizeTrace]:
    """Return the peak of a step for any number of rows, and its work, from two of them; arguments as of `trace_step`.

    Each autocast's in turn.

    What an allocator rounds up is not in it, and scratch is there as it is found at the two: neither is a line in the
    rows. Of one row it is an estimate: operators treat a size of one in their own way.

    Args:
        batches: of `rows`, the smaller one first and of two at the least.

    Raises:
        ModelError: the step cannot be traced.
    """
    runs = [(batch, autocast) for autocast in autocasts for batch in batches]
    steps, _ = _traced(model, optimizer, loss_fn, runs, (), granule=1, counts_work=True, prepare=prepare)
    return [
        _sizes(few, many, rows, counts_scratch=counts_scratch)
        for few, many in zip(steps[::2], steps[1::2], strict=True)
    ]


def trace_work(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batch: Any,
    *,
    autocast: Autocast = contextlib.nullcontext,
    prepare: Prepare = as_it_is,
) -> dict[str, list[Seen]]:
    """Return the operators of a step of one micro-batch by phase: "forward", "backward" and "optimizer".

    What blocks compute again is in the backward; arguments as of `trace_step`.

    Raises:
        ModelError: the step cannot be traced.
    """
    (step,), _ = _traced(model, optimizer, loss_fn, [(batch, autocast)], (), None, counts_work=True, prepare=prepare)
    return step.phase_work


def _sizes(few: TracedStep, many: TracedStep, rows: tuple[int, int], *, counts_scratch: bool) -> SizeTrace:
    phases = few.by_phase(counts_scratch=counts_scratch), many.by_phase(counts_scratch=counts_scratch)
    again = few.again(phases[0]), many.again(phases[1])
    parts, more = (
        [aligned_peaks(ours, theirs, our_kinds, their_kinds) for (ours, our_kinds), (theirs, their_kinds) in pairs]
        for pairs in (zip(*phases, strict=True), zip(*again, strict=True))
    )
    whole, sliced = (
        PeakModel.through([v for part, _ in chosen for v in part], [v for _, part in chosen for v in part], rows)
        for chosen in (parts, parts + more)
    )
    work = StepWork(operations(few.first_work, many.first_work, rows), operations(few.step_work, many.step_work, rows))
    return SizeTrace(whole, sliced, work, PeakModel.through(*parts[-1], rows))


class SizeTrace(NamedTuple):
    """A step for any number of rows of a micro-batch.

    Attributes:
        whole: its peak where it is of one micro-batch. sliced: of several, whose gradients are held in between; the
            second is told from the first, and may be a little less than this where a gradient is copied as it arrives.
        step: of the optimizer's step alone.
    """

    whole: PeakModel
    sliced: PeakModel
    work: StepWork
    step: PeakModel


def _traced(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    runs: Sequence[tuple[Any, Autocast]],
    blocks: Sequence[str],
    granule: int | None,
    *,
    num_micro_batches: int = 1,
    counts_work: bool = False,
    prepare: Prepare,
) -> tuple[list[TracedStep], Marks]:
    """Trace a step of each batch and autocast; all by the same copies, whose state is made once."""
    fakes, steps = Fakes(), []
    device = next(model.parameters()).device.type
    storages = Storages(granule or (_CUDA_GRANULE if device == "cuda" else 1))
    try:
        model, optimizer = fakes.copy((model, optimizer))
        prepare(model)
        batches = [fakes.copy(batch) for batch, _ in runs]
        with fakes, storages, _block_marks(model, blocks, storages) as marks:
            make_state(optimizer, storages)
            storages.counts_work = counts_work
            for _, autocast in runs:
                steps.append(TracedStep(model, optimizer, storages, batches[0], first=steps[0] if steps else None))
                steps[-1].run(loss_fn, batches[0], autocast, num_micro_batches)
                del batches[0]  # the next one's step begins without it
    except Exception as error:  # whatever a model does, torch may have no fake of it
        raise cannot_trace(error) from error
    return steps, marks


def trace_state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of the state that an optimizer makes.

    Raises:
        ModelError: its step cannot be traced.
    """
    fakes, storages = Fakes(), Storages()
    try:
        _, optimizer = fakes.copy((model, optimizer))
        with fakes, storages:
            make_state(optimizer, storages)
            values = [value for state in optimizer.state.values() for value in state.values()]
            return sum(storages.sizes[number] for number in storages.numbers_of(values))
    except Exception as error:
        raise cannot_trace(error) from error


@contextlib.contextmanager
def _block_marks(model: nn.Module, blocks: Iterable[str], storages: Storages) -> Iterator[Marks]:
    """Note which storages are born in which block's forward."""
    marks: Marks = {}
    entered: list[int] = []
    handles = []

    def leave(name: str) -> None:
        marks.setdefault(name, []).append((entered.pop(), len(storages.sizes)))

    for name in blocks:
        block = model.get_submodule(name)
        handles.append(block.register_forward_pre_hook(lambda *_: entered.append(len(storages.sizes))))
        handles.append(block.register_forward_hook(lambda *_, name=name: leave(name)))
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()
