"""Measurement of the phases of a step, without and with a plan.

Two loops run alternately, each with and without the clock of phases. Several ranks run in step; seconds are of rank 0.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter

from trimtab.core.errors import ModelError, NonFiniteError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.progress import Progress, silent
from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.experiments import loops
from trimtab.experiments.loops import DataStream, autocast
from trimtab.experiments.paired_run import Arm
from trimtab.experiments.phase_result import PART, PHASE, PHASES, ROOF, PhaseResult
from trimtab.experiments.result_table import BASELINE, PLANNED, SAMPLES, SECONDS, ResultTable, Row
from trimtab.experiments.subject import Arms, RunOptions, Subject, process_kept
from trimtab.experiments.task_loops import Setup
from trimtab.losses import parts_of
from trimtab.measure.blocks import find_parts, listen_to_recomputation
from trimtab.measure.machine import device_spec, environment
from trimtab.measure.memory_trace import Prepare, as_it_is, trace_work
from trimtab.measure.timing import seconds_between, stamp, time_call, wait_for
from trimtab.planner.cost_model import roof_of
from trimtab.planner.statistics import turns
from trimtab.plans.plan import Plan
from trimtab.settings.recompute import use_plan
from trimtab.state.process_state import ProcessState, separate_heaps
from trimtab.tasks.task import Task
from trimtab.techniques.compiled_call import is_compiled
from trimtab.training.batch import to_device

Label = tuple[str, str]  # phase, and class of module or ""
_REST: Label = ("rest", "")
_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class StepClock:
    """Seconds by phase and class of module, while `on`.

    Args:
        device: Device of the steps.
        waits: True if gradients are reduced over ranks, so that waiting after a backward counts as communication.
    """

    def __init__(self, device: torch.device, *, waits: bool = False) -> None:
        self._device, self._waits = device, waits
        self._is_on = False
        self._clear()

    def _clear(self) -> None:
        self._open = [_REST]
        self._readings: list[tuple[Any, Label]] = []  # time, and the label of the interval that ends there

    @contextlib.contextmanager
    def on(self, model: nn.Module, *, parts: bool = True) -> Iterator[None]:
        """Time the steps of a model inside the context.

        Args:
            model: Model of the steps.
            parts: True to split forward and backward by class of module, with hooks on the modules.
        """
        self._clear()
        with contextlib.ExitStack() as stack:
            for handle in self._hooks(model, parts=parts):
                stack.callback(handle.remove)
            stack.enter_context(listen_to_recomputation(lambda: self.phase("recompute")))
            self._is_on = True
            stack.callback(setattr, self, "_is_on", False)
            self._read()
            yield
            self._read()

    def seconds(self) -> dict[Label, float]:
        """Return the seconds by label since the timer was last switched on. Synchronizes the device."""
        if self._readings:
            wait_for(self._readings[-1][0])
        found: Counter[Label] = Counter()
        for (before, _), (after, label) in itertools.pairwise(self._readings):
            found[label] += seconds_between(before, after)  # type: ignore[assignment]
        return dict(found)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute time inside the context to a phase, except for time in nested phases."""
        depth = self._enter(name)
        try:
            yield
        finally:
            self._leave(depth)

    def forward(self, loss_fn: Callable[..., Any], *given: Any) -> Any:
        """Compute a loss as the forward phase, and time its backward later. Returns the loss, a mean or `Summed`."""
        if not self._is_on:
            return loss_fn(*given)
        with self.phase("forward"):
            result = loss_fn(*given)
        loss = parts_of(result).loss
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(self._backward_begins)
        return result

    def _backward_begins(self, _: Tensor) -> None:
        if self._is_on:
            depth = self._enter("backward")
            _queue_callback(lambda: self._backward_ends(depth))

    def _backward_ends(self, depth: int) -> None:
        self._leave(depth)
        if self._waits:  # DDP waits for its communication in queued callbacks, which run before this one
            depth = self._enter("communication")
            _queue_callback(lambda: self._leave(depth))

    def _hooks(self, model: nn.Module, *, parts: bool) -> Iterator[Any]:
        optimizers: list[int] = []
        yield register_optimizer_step_pre_hook(lambda *_: optimizers.append(self._enter("optimizer")))
        yield register_optimizer_step_post_hook(lambda *_: self._leave(optimizers.pop()))
        depths: list[int] = []  # of the modules in progress

        def begin(module: nn.Module, *_: Any) -> None:
            depths.append(self._enter(*self._label_of(module)))

        def end(module: nn.Module, given: Any, result: Any) -> None:
            self._leave(depths.pop())
            if self._open[-1][0] == "forward":
                self._await_gradients(type(module).__name__, given, result)

        for part in dict.fromkeys(find_parts(model)) if parts else ():
            yield part.register_forward_pre_hook(begin)
            yield part.register_forward_hook(end, always_call=True)  # a recomputation stops by raising an exception

    def _label_of(self, module: nn.Module) -> Label:
        """Return the label of a module's call.

        A call during backward is recomputation; outside the loss, the phase stays.
        """
        phase, part = self._open[-1]
        again = {"forward": "forward", "backward": "recompute", "recompute": "recompute"}
        return (again[phase], type(module).__name__) if phase in again else (phase, part)

    def _await_gradients(self, part: str, given: Any, result: Any) -> None:
        """Start a module's backward label when the gradient of its output arrives."""

        def arrives(_: Tensor) -> None:
            if self._open[-1][0] == "backward":
                self._read()
                self._open[-1] = ("backward", part)

        handed_on = {id(each) for each in tree_iter(given)}
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None and id(tensor) not in handed_on:
                tensor.register_hook(arrives)

    def _enter(self, phase: str, part: str = "") -> int:
        self._read()
        self._open.append((phase, part))
        return len(self._open) - 1

    def _leave(self, depth: int) -> None:
        self._read()
        del self._open[max(1, depth) :]

    def _read(self) -> None:
        if self._is_on:
            event = stamp(self._device)
            self._readings.append((time.perf_counter() if event is None else event, self._open[-1]))


def by_phase(seconds: Mapping[Label, float]) -> dict[str, float]:
    """Return the seconds of every phase present, in order."""
    present = {phase for phase, _ in seconds}
    return {
        phase: math.fsum(s for (name, _), s in seconds.items() if name == phase) for phase in PHASES if phase in present
    }


def by_part(seconds: Mapping[Label, float]) -> dict[str, float]:
    """Return the seconds of forward and backward by module class, as "forward Linear"."""
    found = {label: s for label, s in seconds.items() if label[0] in ("forward", "backward")}
    return {" ".join(label).strip(): s for label, s in sorted(found.items())}


ROUNDS = 8
_FEWEST = 2
_LAP_S, _MOST_STEPS = 0.3, 20  # For each half of a round: with and without the clock.
_PASS_S = 120.0  # Approximate upper bound of the measurement, unless rounds are given.
_WARM_STEPS = 3
_OWN_STEP = "the loop has its own step, so forward and backward are part of the rest"


def phases(
    setup: Setup | Task,
    *,
    plan: Plan | None = None,
    rounds: int | None = None,
    name: str = "setup",
    progress: Progress = silent,
    options: RunOptions | None = None,
    **planning: Any,
) -> PhaseResult:
    """Measure the phases of a step, without and with a plan. Arguments and errors as in `trimtab.compare`.

    Args:
        rounds: number of rounds; None for `ROUNDS`, or fewer to fit in about two minutes.
    """
    subject, made = Subject.of(setup, name, options or RunOptions(progress=progress)), Arms()
    with process_kept():
        reference = subject.reference()
        found = subject.plan(reference, plan, planning)
        made.plain(BASELINE, subject.setup, reference)
        made.planned(PLANNED, subject.setup, reference, found, samples=None, horizon=subject.horizon(found))
        how: dict[str, Any] = {"progress": subject.options.progress, "together": subject.options.together}
        return measure_phases(made.arms, found, made.precisions, task=subject.name, rounds=rounds, **how)


class _ClockedLoop:
    """A loop with a clock of phases, with separate global modes and random generators."""

    def __init__(self, arm: Arm, together: Coordinator) -> None:
        self.arm, self._together = arm, together
        self.plain_loop = arm.setup(0)
        together.draw_apart(0)
        device = self.plain_loop.device
        self._clock = StepClock(device, waits=together.num_ranks > 1)
        self._stream = DataStream(self.plain_loop.loader, 0)
        loss_fn = self.plain_loop.loss_fn
        self.loop = replace(self.plain_loop, loss_fn=partial(self._clock.forward, loss_fn))
        self._steps = arm.steps(self.loop, self._drawn())
        self.is_compiled = False
        self._take(max(_WARM_STEPS, arm.lead_steps))
        self.is_compiled = is_compiled(self.loop.model)
        self.step_s = max(together.each(time_call(lambda: self._take(1), device)))
        self.state = ProcessState.capture()

    def _drawn(self) -> Iterator[Any]:
        while True:
            with self._clock.phase("data"):
                batch = next(self._stream)
            yield batch

    def _take(self, steps: int) -> int:
        return sum(next(self._steps).samples for _ in range(steps))

    def lap(self, steps: int, number: int, *, clocked_first: bool) -> list[Row]:
        """Take `steps` steps with the clock and the same number without; return the measured values."""
        self.state.restore()
        halves = [self._clocked, self._plain]
        found = {name: value for half in (halves if clocked_first else halves[::-1]) for name, value in half(steps)}
        self.state = ProcessState.capture()
        return [Row(self.arm.name, 0, number, name, value, "s") for name, value in found.items()]

    def _clocked(self, steps: int) -> Iterator[tuple[str, float]]:
        with self._clock.on(self.loop.model, parts=not self.is_compiled):
            samples = self._take(steps)
        seconds = self._clock.seconds()
        yield from ((f"{PHASE}{name}", value / samples) for name, value in by_phase(seconds).items())
        yield from ((f"{PART}{name}", value / samples) for name, value in by_part(seconds).items())

    def _plain(self, steps: int) -> Iterator[tuple[str, float]]:
        taken: list[int] = []
        yield SECONDS, time_call(lambda: taken.append(self._take(steps)), self.loop.device)
        yield SAMPLES, float(taken[0])

    def roofs(self, spec: DeviceSpec, precision: str, plan: Plan | None) -> tuple[list[Row], str]:
        """Return the roofline by phase in seconds per sample, or ([], reason) if unknown."""
        if self.is_compiled:
            return [], "the model is compiled: times by module and bytes moved by fused operators are unknown"
        if plan is not None and plan.zero_stage.value:
            return [], "parameters are sharded, so forward and backward include communication"
        self.state.restore()
        loop = self.plain_loop
        batch = to_device(next(self._stream), loop.device)
        samples = loop.batching.read(batch).samples
        if not samples:
            return [], "the roofline bound is unknown: the samples of a batch cannot be counted"
        size = samples if plan is None else min(samples, plan.micro_batch_of(samples))
        micro, _ = next(loop.batching.slices(batch, samples, size))
        prepare: Prepare = as_it_is
        if plan is not None and plan.recompute.value is not None:
            prepare = partial(use_plan, plan=plan)
        try:
            cast = partial(autocast, precision, loop.device)
            work = trace_work(loop.model, loop.optimizer, loop.loss_fn, micro, autocast=cast, prepare=prepare)
        except ModelError as error:
            return [], f"the roofline bound is unknown: {error.reason}"
        rows = []
        for phase, seen in work.items():
            roof = roof_of(seen, spec, precision)
            if roof is None:
                return [], f"the roofline bound is unknown: not all peaks of {spec.name} are known"
            share = 1 / samples if phase == "optimizer" else 1 / size
            for kind, seconds in (("compute", roof.compute_s), ("memory", roof.memory_s)):
                rows.append(Row(self.arm.name, -1, -1, f"{ROOF}{kind}:{phase}", seconds * share, "s"))
        return rows, ""

    def require_finite(self) -> None:
        """Raise an error if the loop is not finite on any rank: its times would explain no gain."""
        said = loops.nonfinite_in(self.loop, None)
        if any(self._together.each(float(bool(said)))):
            raise NonFiniteError(
                self.arm.name,
                problem=f"{self.arm.name} became non-finite: {said or 'on another rank'}.",
                hint="Look for NaN or infinity in the data and in the loss, and lower the learning rate.",
                code="training.nonfinite",
            )

    def close(self) -> None:
        """Undo the plan, and end the loader's workers."""
        self.state.restore()
        self._steps.close()  # type: ignore[attr-defined]  # A generator.
        self._stream.close()


@separate_heaps()
def measure_phases(
    arms: Sequence[Arm],
    plan: Plan,
    precisions: Mapping[str, str],
    *,
    task: str,
    rounds: int | None = None,
    progress: Progress = silent,
    together: Coordinator = ALONE,
) -> PhaseResult:
    """Return the seconds by phase of a baseline and of a loop with a plan. Collective: all ranks must call it.

    Args:
        arms: the baseline, and the loop with the plan.
        plan: the plan.
        precisions: precision of matrix products, by arm.
        task: name of the loop.
        rounds: number of rounds; None for `ROUNDS`, or fewer to fit in about two minutes.

    Raises:
        NonFiniteError: a loop became non-finite.
    """
    outside, running = ProcessState.capture(), list[_ClockedLoop]()
    rows, notes, is_over = list[Row](), dict[str, tuple[str, ...]](), False
    try:
        for arm in arms:
            outside.restore()
            running.append(_ClockedLoop(arm, together))
        step_s = max(each.step_s for each in running)
        steps = min(_MOST_STEPS, max(1, math.ceil(_LAP_S / step_s)))
        fitting = int(_PASS_S / (2 * steps * sum(each.step_s for each in running)))
        number = rounds or max(_FEWEST, min(ROUNDS, fitting))
        for index in range(number):
            progress(f"phases of {task}: round {index + 1} of {number}", index / number)
            for each in turns(running, index, 0):
                rows += each.lap(steps, index, clocked_first=index % 4 < 2)
        for each in running:
            each.require_finite()
        spec = device_spec(running[0].loop.device)
        for each in running:
            own = plan if each.arm.name == PLANNED else None
            found, why = each.roofs(spec, precisions[each.arm.name], own)
            rows += found
            is_hidden = each.loop.step is not None and each.arm.name == BASELINE
            notes[each.arm.name] = tuple(filter(None, [_OWN_STEP if is_hidden else "", why]))
        is_over = True
    finally:
        # After an error, other ranks would wait in collectives.
        for each in running if is_over or together.num_ranks == 1 else ():
            each.close()
        outside.restore()
    samples = next(row.value for row in rows if (row.arm, row.metric) == (arms[0].name, SAMPLES)) / steps
    ranks = together.num_ranks
    notes = {name: said for name, said in notes.items() if said}
    return PhaseResult(
        task, ResultTable.of(rows), samples, plan.changes_in_words or "nothing", spec, ranks, environment(), notes
    )
