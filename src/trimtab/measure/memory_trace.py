"""Memory of an optimizer step, traced on fake tensors without allocating memory.

The step runs operator by operator on fake tensors, while births and deaths of storages are recorded. The result is
exact except for workspace inside operators, which convolutions use on CPUs. Model, optimizer and batch are copied; side
effects of the user's loss or hooks on other objects are not prevented.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from trimtab.core.errors import ValueGivenError
from trimtab.core.memory_model import PeakMemoryModel, Seen, StepMemory, StepWork, aligned_peaks, operations
from trimtab.measure.blocks import hook_blocks
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.measure.storage_lifetimes import Autocast, LossFn, Marks, TracedStep, cannot_trace, make_state
from trimtab.measure.storage_tracker import StorageTracker

Prepare = Callable[[nn.Module], object]
_CUDA_GRANULE = 512  # granularity of torch's caching allocator, in bytes


def as_it_is(model: nn.Module) -> None:
    """Leave the model unchanged."""


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
    """Return the memory of a step with a given number of identical micro-batches.

    Args:
        blocks: Names of modules with separate figures.
        granule: Allocation granularity in bytes; None for the default of the model's device.
        counts_scratch: True to add operator workspace, by running each operator that needs any once on real CPU
            tensors.

    Raises:
        ModelError: The step cannot be traced, for example because it reads a tensor's value. Includes torch's reason.
        ValueGivenError: `counts_scratch` is True for a model that is not on the CPU.
    """
    device = next(model.parameters()).device.type
    if counts_scratch and device != "cpu":
        raise ValueGivenError(
            "counts_scratch",
            got=f"True for a model on {device}",
            expected="False, or a model on the CPU",
            hint="Move the model to the CPU, or pass counts_scratch=False.",
            code="counts_scratch.not_on_cpu",
        )
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
    """Return peak and work of a step as functions of the micro-batch size, fitted through two sizes, for each autocast.

    Allocator rounding is ignored, and workspace is interpolated between the two sizes, although neither is linear in
    the number of samples. The result for a single sample is an estimate, because operators treat a size of 1
    differently. Arguments not listed here are those of `trace_step`.

    Args:
        batches: Micro-batches with the sizes in `rows`.
        rows: The two micro-batch sizes in samples, smaller first and at least 2.

    Raises:
        ModelError: The step cannot be traced.
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
    """Return the operators of a step with one micro-batch, by phase: "forward", "backward" and "optimizer".

    Recomputation counts as backward. The arguments are those of `trace_step`.

    Raises:
        ModelError: The step cannot be traced.
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
        PeakMemoryModel.through([v for part, _ in chosen for v in part], [v for _, part in chosen for v in part], rows)
        for chosen in (parts, parts + more)
    )
    work = StepWork(operations(few.first_work, many.first_work, rows), operations(few.step_work, many.step_work, rows))
    return SizeTrace(whole, sliced, work, PeakMemoryModel.through(*parts[-1], rows))


class SizeTrace(NamedTuple):
    """Figures of a step as functions of the micro-batch size.

    Attributes:
        whole: Peak of a step with a single micro-batch.
        sliced: Peak of a step with several micro-batches, which holds gradients between them. Derived from the first
            micro-batch; it may be slightly too large if gradients are copied on arrival.
        work: FLOP and bytes moved.
        step: Peak of the optimizer step alone.
    """

    whole: PeakMemoryModel
    sliced: PeakMemoryModel
    work: StepWork
    step: PeakMemoryModel


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
    """Trace a step for each batch and autocast. All use the same copies, whose optimizer state is created once."""
    fakes, steps = FakeTensors(), list[TracedStep]()
    device = next(model.parameters()).device.type
    storages = StorageTracker(granule or (_CUDA_GRANULE if device == "cuda" else 1))
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
                del batches[0]  # freed here, because the next step does not hold it
    except Exception as error:  # an arbitrary model may use operators without a fake implementation
        raise cannot_trace(error) from error
    return steps, marks


def trace_state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the size of the optimizer's state in bytes.

    Raises:
        ModelError: The optimizer step cannot be traced.
    """
    fakes, storages = FakeTensors(), StorageTracker()
    try:
        _, optimizer = fakes.copy((model, optimizer))
        with fakes, storages:
            make_state(optimizer, storages)
            values = [value for state in optimizer.state.values() for value in state.values()]
            return sum(storages.sizes[number] for number in storages.numbers_of(values))
    except Exception as error:
        raise cannot_trace(error) from error


@contextlib.contextmanager
def _block_marks(model: nn.Module, blocks: Iterable[str], storages: StorageTracker) -> Iterator[Marks]:
    """Record the storages born in each block's forward."""
    marks: Marks = {}
    entered: list[int] = []

    def leave(name: str, _: Any) -> None:
        marks.setdefault(name, []).append((entered.pop(), len(storages.sizes)))

    with hook_blocks(model, blocks, lambda *_: entered.append(len(storages.sizes)), leave):
        yield marks
