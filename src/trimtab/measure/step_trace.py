"""Memory of one optimizer step, traced on fake tensors: nothing is allocated.

The step runs as it would, operator by operator, on tensors without memory, and storages are seen to come and go. That
is exact but for scratch inside operators, which convolutions take on a CPU. Model, optimizer and batch are copied; what
else a loss or a hook of the user's writes to it writes to.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core.alignment import aligned_peaks
from trimtab.core.errors import ModelError, ValueGivenError
from trimtab.core.peak_model import PeakModel
from trimtab.core.step_memory import PARTS, BlockMemory, Moment, StepMemory
from trimtab.core.work import Seen, StepWork, operations
from trimtab.measure.fakes import Fakes
from trimtab.measure.scratch import Call, Taken, TooLarge, measured
from trimtab.measure.storages import Storages

LossFn = Callable[[nn.Module, Any], Any]
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
Prepare = Callable[[nn.Module], object]
_Marks = dict[str, list[tuple[int, int]]]  # of each block, storages that were born in it: from one number to another
_Phase = tuple[list[int], list[int]]  # bytes held at each of its moments, and whether some came or went
_MOMENTS = 200
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


def _sizes(few: _Step, many: _Step, rows: tuple[int, int], *, counts_scratch: bool) -> SizeTrace:
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
) -> tuple[list[_Step], _Marks]:
    """Trace a step of each batch and autocast; all by the same copies, whose state is made once."""
    fakes, steps = Fakes(), []
    device = next(model.parameters()).device.type
    storages = Storages(granule or (_CUDA_GRANULE if device == "cuda" else 1))
    try:
        model, optimizer = fakes.copy((model, optimizer))
        prepare(model)
        batches = [fakes.copy(batch) for batch, _ in runs]
        with fakes, storages, _block_marks(model, blocks, storages) as marks:
            _make_state(optimizer, storages)
            storages.counts_work = counts_work
            for _, autocast in runs:
                steps.append(_Step(model, optimizer, storages, batches[0], first=steps[0] if steps else None))
                steps[-1].run(loss_fn, batches[0], autocast, num_micro_batches)
                del batches[0]  # the next one's step begins without it
    except Exception as error:  # whatever a model does, torch may have no fake of it
        raise cannot_trace(error) from error
    return steps, marks


def _make_state(optimizer: Optimizer, storages: Storages) -> None:
    """Step once, by gradients that nobody computed."""
    for p in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        p.grad = torch.empty_like(p) if p.requires_grad else None
    _step(optimizer, storages)


def _step(optimizer: Optimizer, storages: Storages) -> None:
    storages.answers_ones = True
    optimizer.step()
    storages.answers_ones = False
    optimizer.zero_grad(set_to_none=True)


def trace_state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of the state that an optimizer makes.

    Raises:
        ModelError: its step cannot be traced.
    """
    fakes, storages = Fakes(), Storages()
    try:
        _, optimizer = fakes.copy((model, optimizer))
        with fakes, storages:
            _make_state(optimizer, storages)
            values = [value for state in optimizer.state.values() for value in state.values()]
            return sum(storages.sizes[number] for number in storages.numbers_of(values))
    except Exception as error:
        raise cannot_trace(error) from error


def cannot_trace(error: Exception) -> ModelError:
    """Return the error of a step that does not run on fakes, with torch's own reason."""
    return ModelError(
        "model",
        given=f"a step that cannot be traced ({type(error).__name__}: {str(error).partition(chr(10))[0]:.200})",
        expected="one whose course does not depend on values, with no tensors but the model's and the batch's",
        way_out="Its memory can be measured instead, by running it.",
    )


class _Step:
    """One step on fakes, by an optimizer that has its state.

    Args:
        first: an earlier one by the same optimizer, whose own work is the same: it is not done again.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, storages: Storages, batch: Any, first: _Step | None
    ) -> None:
        self._model, self._optimizer, self._storages, self._first = model, optimizer, storages, first
        self._saved: set[int] = set()  # by the first micro-batch
        self._activations: set[int] = set()
        self._gradients: set[int] = set()
        self._arrived: dict[int, int] = {}  # storages whose last gradient is whole, and after how many events
        self._phases: list[tuple[int, str]] = []
        self._work_before: list[int] = []  # each phase
        self._static = self._known(batch)
        self._before = storages.alive
        self._seen = storages.begin()

    def _known(self, batch: Any) -> dict[str, set[int]]:
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        groups = {
            "parameters": self._model.parameters(),
            "buffers": self._model.buffers(),
            "batch": [batch],
            "optimizer": states,
        }
        return {part: self._storages.numbers_of(tensors) for part, tensors in groups.items()}

    def run(self, loss_fn: LossFn, batch: Any, autocast: Any, num_micro_batches: int) -> None:
        """Run it whole."""
        for _ in range(num_micro_batches):
            self._micro_batch(loss_fn, batch, autocast)
        self._enter("step")
        if self._first is None:
            _step(self._optimizer, self._storages)
        self._storages.begin()  # what comes from here on is no part of it
        self._optimizer.zero_grad(set_to_none=True)

    def _micro_batch(self, loss_fn: LossFn, batch: Any, autocast: Autocast) -> None:
        self._enter("forward")
        held = self._storages.alive
        with autocast():
            result = loss_fn(self._model, batch)
        loss: Tensor = result[0] / result[1] if isinstance(result, tuple) else result
        saved = self._storages.alive - held
        self._saved, self._activations = self._saved or saved, self._activations | saved
        self._enter("backward")
        trained = [p for p in self._model.parameters() if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(self._arrives) for p in trained]
        loss.backward()
        for handle in handles:
            handle.remove()
        self._gradients |= self._storages.numbers_of(p.grad for p in self._model.parameters() if p.grad is not None)

    def _arrives(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._arrived[self._storages.number_of(parameter.grad)] = len(self._seen.events)

    def _enter(self, phase: str) -> None:
        self._phases.append((len(self._seen.events), phase))
        self._work_before.append(len(self._seen.work))

    def scratch(self) -> dict[Call, Taken]:
        """Return what operators take for themselves, by running each that does."""
        try:
            return measured(call for call, *_ in self._seen.calls)
        except TooLarge:
            raise
        except Exception as error:  # they run on real tensors, for which there may be no memory
            raise cannot_trace(error) from error

    def blocks(self, marks: _Marks) -> Iterator[BlockMemory]:
        """Yield what each block keeps, by the storages that were born in it."""
        for name, spans in marks.items():
            born = {number for begin, end in spans for number in range(begin, end)}
            yield BlockMemory(name, sum(self._storages.sizes[number] for number in born & self._saved))

    def by_phase(self, *, counts_scratch: bool) -> list[_Phase]:
        """Return the bytes held at each moment of what was before and of each phase; and whether some came or went."""
        held = [sum(parts.values()) for _, parts in self._moments(self.scratch() if counts_scratch else {})]
        kinds = [0, *(sign for _, sign in self._seen.events)]
        edges = [0, *(begin + 1 for begin, _ in self._phases), len(held)]
        found = [(held[begin:end], kinds[begin:end]) for begin, end in itertools.pairwise(edges)]
        if self._first is not None:
            *_, (backward, _), (step, kinds) = self._first.by_phase(counts_scratch=False)  # of a step there is none
            found[-1] = [size - backward[-1] + held[-1] for size in step], kinds
        return found

    def again(self, phases: list[_Phase]) -> list[_Phase]:
        """Return the forward and backward of a second micro-batch, as `by_phase` has the first's.

        The first's gradients are held beside it, and each of its own goes as soon as it is whole.
        """
        (_, _), (forward, kinds), (backward, _), *_ = phases
        sizes, begin = self._storages.sizes, self._phases[1][0]
        left = sum(sizes[number] for number in self._gradients)
        held = [size + left for size in forward]
        arriving = sorted(self._arrived.items(), key=lambda each: each[1])
        second: _Phase = [], []
        for index, size in enumerate(backward, begin + 1):
            second[0].append(size + left)
            second[1].append(self._seen.events[index - 1][1])
            while arriving and arriving[0][1] <= index:
                number, _ = arriving.pop(0)
                left -= sizes[number]
                second[0].append(size + left)
                second[1].append(-1)
        return [(held, kinds), second]

    @property
    def first_work(self) -> list[Seen]:
        """Operators of the first micro-batch."""
        return self._seen.work[: self._work_before[2]]  # after one forward and backward

    @property
    def step_work(self) -> list[Seen]:
        """Operators of the optimizer's step."""
        return self._seen.work[self._work_before[-1] :] if self._first is None else self._first.step_work

    def memory(self, blocks: tuple[BlockMemory, ...], scratch: Mapping[Call, Taken]) -> StepMemory:
        """Return what was seen."""
        moments = list(self._moments(scratch))
        width = max(1, -(-len(moments) // _MOMENTS))
        largest = [
            max(moments[begin : begin + width], key=lambda moment: sum(moment[1].values()))
            for begin in range(0, len(moments), width)
        ]
        timeline = tuple(Moment(index / len(moments), self._phase_at(index), parts) for index, parts in largest)
        most = {part: max(parts[part] for _, parts in moments) for part in PARTS}
        return StepMemory(max(timeline, key=lambda moment: moment.total_bytes), timeline, most, blocks)

    def _moments(self, scratch: Mapping[Call, Taken]) -> Iterator[tuple[int, dict[str, int]]]:
        sizes, part_of = list(self._storages.sizes), self._parts()
        extra = [0] * (len(self._seen.events) + 1)
        for call, begin, end, numbers in self._seen.calls:
            if call in scratch:
                taken = scratch[call]
                extra[begin : end + 1] = [taken.scratch_bytes] * (end + 1 - begin)
                for number, size in zip(numbers, taken.result_bytes, strict=bool(taken.result_bytes)):
                    sizes[number] = max(sizes[number], size)
        now = dict.fromkeys(PARTS, 0)
        for number in self._before:
            now[part_of(number)] += sizes[number]
        yield 0, dict(now)
        for index, (number, sign) in enumerate(self._seen.events, 1):
            now[part_of(number)] += sign * sizes[number]
            yield index, now | {"transients": now["transients"] + extra[index]}

    def _parts(self) -> Callable[[int], str]:
        known: Mapping[str, set[int]] = self._static | {"gradients": self._gradients, "activations": self._activations}
        found = {number: part for part in reversed(known) for number in known[part]}
        return lambda number: found.get(number, "transients")

    def _phase_at(self, index: int) -> str:
        begun = [begin for begin, _ in self._phases]
        return self._phases[max(0, bisect_right(begun, max(0, index - 1)) - 1)][1]


@contextlib.contextmanager
def _block_marks(model: nn.Module, blocks: Iterable[str], storages: Storages) -> Iterator[_Marks]:
    """Note which storages are born in which block's forward."""
    marks: _Marks = {}
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
