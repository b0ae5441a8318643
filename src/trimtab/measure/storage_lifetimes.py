"""Trace of an optimizer step on fake tensors: type, birth and death of every storage."""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core.errors import ModelError
from trimtab.core.memory_model import PARTS, BlockMemory, MemorySample, Seen, StepMemory
from trimtab.losses import mean_of
from trimtab.measure.storage_tracker import CallMemory, OperatorCall, StorageTracker, WorkspaceTooLarge, measure_calls

LossFn = Callable[[nn.Module, Any], Any]
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
Marks = dict[str, list[tuple[int, int]]]  # storage numbers born in each block, as half-open ranges
Phase = tuple[list[int], list[int]]  # bytes held at each moment, and births (1) or deaths (-1)
_MOMENTS = 200


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
    """Trace of a step on fake tensors, by an optimizer whose state exists.

    Args:
        first: Earlier trace with the same optimizer. The optimizer's work is identical and not traced again.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        storages: StorageTracker,
        batch: Any,
        first: TracedStep | None = None,
    ) -> None:
        self._model, self._optimizer, self._storages, self._first = model, optimizer, storages, first
        self._saved: set[int] = set()  # storages saved for backward by the first micro-batch
        self._activations: set[int] = set()
        self._gradients: set[int] = set()
        self._arrived: dict[int, int] = {}  # number of events before the final gradient arrives, by storage
        self._phases: list[tuple[int, str]] = []
        self._work_before: list[int] = []  # number of operators before each phase
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

    def run(
        self,
        loss_fn: LossFn,
        batch: Any,
        autocast: Autocast,
        num_micro_batches: int,
        begin: Callable[..., object] = lambda *, last: None,
    ) -> None:
        """Run the step.

        Args:
            begin: Called before each micro-batch with `last`, True for the last one.
        """
        for left in reversed(range(num_micro_batches)):
            begin(last=left == 0)
            self._micro_batch(loss_fn, batch, autocast)
        self._enter("step")
        if self._first is None:
            _step(self._optimizer, self._storages)
        self._storages.begin()  # later events do not belong to the step
        self._model.zero_grad(set_to_none=True)

    def _micro_batch(self, loss_fn: LossFn, batch: Any, autocast: Autocast) -> None:
        self._enter("forward")
        held = self._storages.alive
        with autocast():
            result = loss_fn(self._model, batch)
        loss = mean_of(result)
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

    def scratch(self) -> dict[OperatorCall, CallMemory]:
        """Return the workspace of each operator with workspace, by running it."""
        try:
            return measure_calls(call for call, *_ in self._seen.calls)
        except WorkspaceTooLarge:
            raise
        except Exception as error:  # real tensors are used, so memory may run out
            raise cannot_trace(error) from error

    def blocks(self, marks: Marks) -> Iterator[BlockMemory]:
        """Yield the bytes saved for backward by each block, from the storages born in it."""
        for name, spans in marks.items():
            born = {number for begin, end in spans for number in range(begin, end)}
            yield BlockMemory(name, sum(self._storages.sizes[number] for number in born & self._saved))

    def by_phase(self, *, counts_scratch: bool) -> list[Phase]:
        """Return bytes held, and births (1) or deaths (-1), at each moment before the first phase and in each phase."""
        held = [sum(parts.values()) for _, parts in self._moments(self.scratch() if counts_scratch else {})]
        kinds = [0, *(sign for _, sign in self._seen.events)]
        edges = [0, *(begin + 1 for begin, _ in self._phases), len(held)]
        found = [(held[begin:end], kinds[begin:end]) for begin, end in itertools.pairwise(edges)]
        if self._first is not None:
            # This trace has no optimizer step.
            *_, (backward, _), (step, kinds) = self._first.by_phase(counts_scratch=False)
            found[-1] = [size - backward[-1] + held[-1] for size in step], kinds
        return found

    def again(self, phases: list[Phase]) -> list[Phase]:
        """Return forward and backward of a second micro-batch, derived from `by_phase` of the first.

        The first micro-batch's gradients are held in addition, and each new gradient is freed when complete.
        """
        (_, _), (forward, kinds), (backward, _), *_ = phases
        sizes, begin = self._storages.sizes, self._phases[1][0]
        left = self.gradient_bytes
        held = [size + left for size in forward]
        arriving = sorted(self._arrived.items(), key=lambda each: each[1])
        second: Phase = [], []
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

    def memory(self, blocks: tuple[BlockMemory, ...], scratch: Mapping[OperatorCall, CallMemory]) -> StepMemory:
        """Return peak and timeline of the step, by kind of memory."""
        moments = list(self._moments(scratch))
        width = max(1, -(-len(moments) // _MOMENTS))
        largest = [
            max(moments[begin : begin + width], key=lambda moment: sum(moment[1].values()))
            for begin in range(0, len(moments), width)
        ]
        timeline = tuple(MemorySample(index / len(moments), self._phase_at(index), parts) for index, parts in largest)
        most = {part: max(parts[part] for _, parts in moments) for part in PARTS}
        return StepMemory(max(timeline, key=lambda moment: moment.total_bytes), timeline, most, blocks)

    def _moments(self, scratch: Mapping[OperatorCall, CallMemory]) -> Iterator[tuple[int, dict[str, int]]]:
        sizes, part_of = list(self._storages.sizes), self._parts()
        extra = [0] * (len(self._seen.events) + 1)
        for call, begin, end, numbers in self._seen.calls:
            if call in scratch:
                taken = scratch[call]
                for moment in range(begin, end + 1):  # Two calls share a moment if nothing was born between them.
                    extra[moment] = max(extra[moment], taken.scratch_bytes)
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
        known = self._static | {"gradients": self._gradients, "activations": self._activations}
        found = {number: part for part in reversed(known) for number in known[part]}
        return lambda number: found.get(number, "transients")

    def _phase_at(self, index: int) -> str:
        begun = [begin for begin, _ in self._phases]
        return self._phases[max(0, bisect_right(begun, max(0, index - 1)) - 1)][1]
