"""Memory of an optimizer step, traced on fake tensors without allocating memory.

The step runs operator by operator on fake tensors, while births and deaths of storages are recorded. The result is
exact except for workspace inside operators, which convolutions use on CPUs. Model, optimizer and batch are copied; side
effects of the user's loss or hooks on other objects are not prevented.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core.errors import ModelError, ValueGivenError
from trimtab.core.memory_model import PeakMemoryModel, Seen, StepWork, aligned_peaks, operations
from trimtab.losses import mean_of
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.measure.storage_tracker import StorageTracker, WorkspaceTooLarge, measure_calls

LossFn = Callable[[nn.Module, Any], Any]
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
Prepare = Callable[[nn.Module], object]
PrepareOptimizer = Callable[[Optimizer], object]
Phase = tuple[list[int], list[int]]  # bytes held at each moment, and births (1) or deaths (-1)


def as_it_is(model: nn.Module) -> None:
    """Leave the model unchanged."""


class SizeTrace(NamedTuple):
    """Figures of a step as functions of the micro-batch size.

    Attributes:
        whole: Peak of a step with a single micro-batch.
        sliced: Peak of a step with several micro-batches, which holds gradients between them. Derived from the first
            micro-batch; it may be slightly too large if gradients are copied on arrival.
        step: Peak of the optimizer step alone.
        early: Peak of a step with a single micro-batch that updates each parameter within the backward pass and then
            frees the gradient; None if not traced.
        early_fused: The same by fused updates, which need no temporary tensors.
    """

    whole: PeakMemoryModel
    sliced: PeakMemoryModel
    work: StepWork
    step: PeakMemoryModel
    early: PeakMemoryModel | None = None
    early_fused: PeakMemoryModel | None = None


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
    prepare_optimizer: PrepareOptimizer | None = None,
    by_parameter: bool = False,
) -> list[SizeTrace]:
    """Return peak and work of a step as functions of the micro-batch size, fitted through two sizes, for each autocast.

    Allocator rounding is ignored, and workspace is interpolated between the two sizes, although neither is linear in
    the number of samples. The result for a single sample is an estimate, because operators treat a size of 1
    differently.

    Args:
        batches: Micro-batches with the sizes in `rows`.
        rows: The two micro-batch sizes in samples, smaller first and at least 2.
        counts_scratch: True to add operator workspace, by running each operator that needs any once on real CPU
            tensors.
        prepare: Called with the fake copy of the model before the steps.
        prepare_optimizer: Called with the fake copy of the optimizer before the optimizer has state.
        by_parameter: True to also return the peak of updates within the backward pass; the optimizer must support
            steps on a single parameter.

    Raises:
        ModelError: The step cannot be traced, for example because it reads a tensor's value.
    """
    runs = [(batch, autocast) for autocast in autocasts for batch in batches]
    steps = _traced(
        model,
        optimizer,
        loss_fn,
        runs,
        prepare=prepare,
        prepare_optimizer=prepare_optimizer,
        by_parameter=by_parameter,
    )
    return [_sizes(*pair, rows, counts_scratch=counts_scratch) for pair in zip(steps[::2], steps[1::2], strict=True)]


def trace_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batch: Any,
    *,
    autocast: Autocast = contextlib.nullcontext,
    num_micro_batches: int = 1,
    counts_scratch: bool = False,
) -> int:
    """Return the peak bytes of a step with a given number of identical micro-batches. See `trace_peaks`.

    `ValueGivenError` if `counts_scratch` is True for a model that is not on the CPU.
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
    (step,) = _traced(model, optimizer, loss_fn, [(batch, autocast)], num_micro_batches=num_micro_batches)
    return max(itertools.chain.from_iterable(held for held, _ in step.by_phase(counts_scratch=counts_scratch)))


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

    Recomputation counts as backward. See `trace_peaks` for `prepare` and errors.
    """
    (step,) = _traced(model, optimizer, loss_fn, [(batch, autocast)], prepare=prepare)
    return step.phase_work


def _sizes(few: TracedStep, many: TracedStep, rows: tuple[int, int], *, counts_scratch: bool) -> SizeTrace:
    phases = few.by_phase(counts_scratch=counts_scratch), many.by_phase(counts_scratch=counts_scratch)
    again = few.again(phases[0]), many.again(phases[1])
    parts, more = _aligned(*phases), _aligned(*again)
    whole, sliced = (_model(chosen, rows) for chosen in (parts, parts + more))
    work = StepWork(operations(few.first_work, many.first_work, rows), operations(few.step_work, many.step_work, rows))
    early = [
        None
        if few.updates is None
        else _model(_aligned(few.early(phases[0], fused=fused), many.early(phases[1], fused=fused)), rows)
        for fused in (False, True)
    ]
    return SizeTrace(whole, sliced, work, PeakMemoryModel.through(*parts[-1], rows), *early)


def _aligned(few: Sequence[Phase], many: Sequence[Phase]) -> list[tuple[list[int], list[int]]]:
    """Return the aligned bytes of every phase at two sizes."""
    pairs = zip(few, many, strict=True)
    return [aligned_peaks(ours, theirs, our_kinds, their_kinds) for (ours, our_kinds), (theirs, their_kinds) in pairs]


def _model(parts: Sequence[tuple[list[int], list[int]]], rows: tuple[int, int]) -> PeakMemoryModel:
    few, many = ([value for part in parts for value in part[size]] for size in (0, 1))
    return PeakMemoryModel.through(few, many, rows)


def _traced(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    runs: Sequence[tuple[Any, Autocast]],
    *,
    num_micro_batches: int = 1,
    prepare: Prepare = as_it_is,
    prepare_optimizer: PrepareOptimizer | None = None,
    by_parameter: bool = False,
) -> list[TracedStep]:
    """Trace a step for every batch and autocast. All use the same copies, whose optimizer state is created once."""
    fakes, steps, storages = FakeTensors(), list[TracedStep](), StorageTracker()
    try:
        model, optimizer = fakes.copy((model, optimizer))
        prepare(model)
        batches = [fakes.copy(batch) for batch, _ in runs]
        with fakes, storages:
            if prepare_optimizer is not None:
                prepare_optimizer(optimizer)
            make_state(optimizer, storages)
            updates = _update_bytes(optimizer, storages) if by_parameter else None
            storages.counts_work = True
            for _, autocast in runs:
                steps.append(TracedStep(model, optimizer, storages, batches[0], first=steps[0] if steps else None))
                steps[-1].updates = updates
                steps[-1].run(loss_fn, batches[0], autocast, num_micro_batches)
                del batches[0]  # freed here, because the next step does not hold it
    except Exception as error:  # an arbitrary model may use operators without a fake implementation
        raise cannot_trace(error) from error
    return steps


def trace_state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the size of the optimizer's state in bytes; `ModelError` if the optimizer step cannot be traced."""
    fakes, storages = FakeTensors(), StorageTracker()
    try:
        _, optimizer = fakes.copy((model, optimizer))
        with fakes, storages:
            make_state(optimizer, storages)
            return sum(storages.sizes[number] for number in storages.numbers_of(_state_values(optimizer)))
    except Exception as error:
        raise cannot_trace(error) from error


def trace_update_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return the temporary bytes of an optimizer step on each parameter alone, by name.

    `ModelError` if the optimizer step cannot be traced.
    """
    fakes, storages = FakeTensors(), StorageTracker()
    try:
        model, optimizer = fakes.copy((model, optimizer))
        with fakes, storages:
            make_state(optimizer, storages)
            found = _update_bytes(optimizer, storages)
            return {name: found[p] for name, p in model.named_parameters() if p in found}
    except Exception as error:
        raise cannot_trace(error) from error


def _update_bytes(optimizer: Optimizer, storages: StorageTracker) -> dict[Tensor, int]:
    """Return the temporary bytes of a step on each parameter alone, beyond its gradient; the state must exist."""
    groups, known, found = optimizer.param_groups, dict[Any, int](), dict[Tensor, int]()
    step: Any = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)  # without the hooks of a step
    try:
        for index, group in enumerate(groups):
            for p in (each for each in group["params"] if each.requires_grad):
                key = index, p.shape, p.stride(), p.dtype
                if key not in known:
                    p.grad = torch.empty_like(p)
                    optimizer.param_groups = [{**group, "params": [p]}]
                    seen, storages.answers_ones = storages.begin(), True
                    step(optimizer)
                    storages.answers_ones, p.grad = False, None
                    sizes = (sign * storages.sizes[number] for number, sign in seen.events)
                    known[key] = max(0, *itertools.accumulate(sizes, initial=0))
                found[p] = known[key]
    finally:
        optimizer.param_groups = groups
    return found


def _state_values(optimizer: Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values()]


def make_state(optimizer: Optimizer, storages: StorageTracker) -> None:
    """Create the optimizer's state by a step with uninitialized gradients."""
    for p in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        p.grad = torch.empty_like(p) if p.requires_grad else None
    _step(optimizer, storages)


def _step(optimizer: Optimizer, storages: StorageTracker) -> None:
    storages.answers_ones = True
    optimizer.step()
    storages.answers_ones = False
    optimizer.zero_grad(set_to_none=True)


def cannot_trace(error: Exception) -> ModelError:
    """Return the error for a step that does not run on fake tensors, including torch's reason."""
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
    return ModelError(
        "model",
        got=reason,
        expected="a step that runs on fake tensors",
        problem=f"The step cannot be traced on fake tensors ({reason}).",
        hint="Avoid tensor values in Python (such as .item() or `if tensor:`) and tensors outside of the model and the "
        "batch, or run trimtab.plan on the device itself, which measures the step.",
        code="model.not_traceable",
    )


class TracedStep:
    """Birth and death of every storage in a step on fake tensors, by an optimizer whose state exists.

    The optimizer's work is identical to that of `first`, an earlier trace, and not traced again.

    Attributes:
        updates: Temporary bytes of a step on each parameter alone; None if not traced.
    """

    updates: Mapping[Tensor, int] | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        storages: StorageTracker,
        batch: Any,
        first: TracedStep | None = None,
    ) -> None:
        self._model, self._optimizer, self._storages, self._first = model, optimizer, storages, first
        self._gradients: set[int] = set()
        self._arrived: dict[int, int] = {}  # number of events before the final gradient arrives, by storage
        self._updating: dict[int, int] = {}  # temporary bytes of the parameter's update, by storage of the gradient
        self._begins: list[int] = []  # number of events before each phase
        self._work_before: list[int] = []  # number of operators before each phase
        storages.numbers_of([*model.parameters(), *model.buffers(), batch, *_state_values(optimizer)])
        self._before = storages.alive
        self._seen = storages.begin()

    def run(
        self,
        loss_fn: LossFn,
        batch: Any,
        autocast: Autocast,
        num_micro_batches: int,
        begin: Callable[..., object] = lambda *, last: None,
    ) -> None:
        """Run the step; `begin` is called before every micro-batch with `last`, True for the last one."""
        for left in reversed(range(num_micro_batches)):
            begin(last=left == 0)
            self._micro_batch(loss_fn, batch, autocast)
        self._enter_phase()
        if self._first is None:
            _step(self._optimizer, self._storages)
        self._storages.begin()  # later events do not belong to the step
        self._model.zero_grad(set_to_none=True)

    def _micro_batch(self, loss_fn: LossFn, batch: Any, autocast: Autocast) -> None:
        self._enter_phase()
        with autocast():
            result = loss_fn(self._model, batch)
        loss = mean_of(result)
        self._enter_phase()
        trained = [p for p in self._model.parameters() if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(self._arrives) for p in trained]
        loss.backward()
        for handle in handles:
            handle.remove()
        self._gradients |= self._storages.numbers_of(p.grad for p in self._model.parameters() if p.grad is not None)

    def _arrives(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        number = self._storages.number_of(parameter.grad)
        self._arrived[number] = len(self._seen.events)
        if self.updates is not None and parameter in self.updates:
            self._updating[number] = self.updates[parameter]

    def _enter_phase(self) -> None:
        self._begins.append(len(self._seen.events))
        self._work_before.append(len(self._seen.work))

    def by_phase(self, *, counts_scratch: bool) -> list[Phase]:
        """Return bytes held, and births (1) or deaths (-1), at each moment before the first phase and in each phase."""
        held = self._held(counts_scratch=counts_scratch)
        kinds = [0, *(sign for _, sign in self._seen.events)]
        edges = [0, *(begin + 1 for begin in self._begins), len(held)]
        found = [(held[begin:end], kinds[begin:end]) for begin, end in itertools.pairwise(edges)]
        if self._first is not None:
            # This trace has no optimizer step.
            *_, (backward, _), (step, kinds) = self._first.by_phase(counts_scratch=False)
            found[-1] = [size - backward[-1] + held[-1] for size in step], kinds
        return found

    def _held(self, *, counts_scratch: bool) -> list[int]:
        """Return the bytes held before the step and after every event, with operator workspace if it counts."""
        sizes, events = list(self._storages.sizes), self._seen.events
        extra = [0] * (len(events) + 1)
        if counts_scratch:
            try:
                taken = measure_calls(call for call, *_ in self._seen.calls)
            except WorkspaceTooLarge:
                raise
            except Exception as error:  # real tensors are used, so memory may run out
                raise cannot_trace(error) from error
            for call, begin, end, numbers in self._seen.calls:
                for moment in range(max(1, begin), end + 1):  # Calls share a moment if nothing was born between them.
                    extra[moment] = max(extra[moment], taken[call].scratch_bytes)
                results = taken[call].result_bytes
                for number, size in zip(numbers, results, strict=bool(results)):
                    sizes[number] = max(sizes[number], size)
        changes = (sign * sizes[number] for number, sign in events)
        held = itertools.accumulate(changes, initial=sum(sizes[number] for number in self._before))
        return [size + scratch for size, scratch in zip(held, extra, strict=True)]

    def again(self, phases: list[Phase]) -> list[Phase]:
        """Return forward and backward of a second micro-batch, derived from `by_phase` of the first.

        The first micro-batch's gradients are held in addition, and every new gradient is freed when complete.
        """
        (_, _), (forward, kinds), (backward, _), *_ = phases
        left = self.gradient_bytes
        held = [size + left for size in forward]
        arriving = sorted(self._arrived.items(), key=lambda each: each[1])
        second: Phase = [], []
        for index, size in enumerate(backward, self._begins[1] + 1):
            second[0].append(size + left)
            second[1].append(self._seen.events[index - 1][1])
            while arriving and arriving[0][1] <= index:
                number, _ = arriving.pop(0)
                left -= self._storages.sizes[number]
                second[0].append(size + left)
                second[1].append(-1)
        return [(held, kinds), second]

    def early(self, phases: list[Phase], *, fused: bool) -> list[Phase]:
        """Return the phases of a step that updates each parameter and frees its gradient within the backward pass.

        Derived from `by_phase`. Fused updates need no temporary tensors.
        """
        before, forward, (backward, kinds), *_ = phases
        arriving = sorted(self._arrived.items(), key=lambda each: each[1])
        freed, found = 0, (list[int](), list[int]())
        for index, (size, kind) in enumerate(zip(backward, kinds, strict=True), self._begins[1] + 1):
            found[0].append(size - freed)
            found[1].append(kind)
            while arriving and arriving[0][1] <= index:
                number, _ = arriving.pop(0)
                if number in self._updating:
                    found[0].append(size - freed + (0 if fused else self._updating[number]))
                    found[1].append(-1)
                    freed += self._storages.sizes[number]
        return [before, forward, found]

    @property
    def gradient_bytes(self) -> int:
        """Total bytes of the gradients."""
        return sum(self._storages.sizes[number] for number in self._gradients)

    @property
    def first_work(self) -> list[Seen]:
        """Operators of the first micro-batch."""
        return self._seen.work[: self._work_before[2]]  # after a forward and backward

    @property
    def step_work(self) -> list[Seen]:
        """Operators of the optimizer step."""
        return self._seen.work[self._work_before[-1] :] if self._first is None else self._first.step_work

    @property
    def phase_work(self) -> dict[str, list[Seen]]:
        """Operators by phase: forward and backward of the first micro-batch, then the optimizer step."""
        _, backward, end, *_ = self._work_before
        work = self._seen.work
        return {"forward": work[:backward], "backward": work[backward:end], "optimizer": self.step_work}
