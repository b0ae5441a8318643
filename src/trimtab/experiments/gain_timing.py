"""Short measurement of a gain: the plain loop and the plan's loop interleaved, with and without phase timing.

Both loops are in memory at once, each with a separate model. Several ranks run in step; seconds are rank 0's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.core.errors import ModelError, NonFiniteError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.progress import Progress, silent
from trimtab.core.step_phases import ArmPhases, RooflineBound, TimedGain, TimedRound
from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.distributed.sharded_loader import samples_of_rank, shard
from trimtab.experiments.baselines.loop import MakeLoop, autocast, move
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.baselines.replica import ReplicaLoop
from trimtab.experiments.paired_runs.instrumented_loop import InstrumentedLoop, by_part, by_phase
from trimtab.experiments.paired_runs.plan_loops import ON_ANOTHER_RANK, PlanLoop, nonfinite_in, settling_steps
from trimtab.measure.machine import device_spec, environment
from trimtab.measure.memory_trace import Prepare, as_it_is, trace_work
from trimtab.measure.timing import time_call
from trimtab.planner.cost_model import roof_of
from trimtab.planner.statistics import turns
from trimtab.plans.plan import Plan
from trimtab.settings.recompute import use_plan
from trimtab.state.process_state import ProcessState
from trimtab.tasks.placement import place_data, prefetch
from trimtab.tasks.task import Task, TaskData
from trimtab.techniques.compiled_call import is_compiled
from trimtab.training.batch import BY_CONTAINERS

ROUNDS = 8
_FEWEST = 2
_LAP_S, _MOST_STEPS = 0.3, 20  # For each half of a round: with and without phase timing.
_PASS_S = 120.0  # Approximate upper bound of the measurement, unless rounds are given.
_WARM_STEPS = 3
_COMPILED = "the model is compiled, so there are no times by module, and the bytes moved by fused operators are unknown"
_HIDDEN = "the task has a step function, so forward and backward are part of the phase rest"
_ALONE = "one process, so there is no communication"
_SHARED = "parameters are sharded, so forward and backward include communication, and their roofline bounds are unknown"


@dataclass(frozen=True)
class _TraceOptions:
    """Tracing options of an arm's step.

    Args:
        notes: notes about figures that are not available.
        micro_batch_samples: samples per micro-batch; None for the rank's whole shard of a batch.
        prepare: applied to the traced copy of the model, to enable activation checkpointing.
    """

    notes: tuple[str, ...]
    micro_batch_samples: int | None = None
    prepare: Prepare = as_it_is


class _TimedLoop:
    """A loop interleaved with another loop, with separate global modes and random generators.

    Args:
        make: builds the training loop.
        task: the task.
        data: data of the task.
        device: device of the loop.
        together: the ranks of the job.
        traced: tracing options.
    """

    def __init__(
        self,
        make: MakeLoop,
        task: Task,
        data: TaskData,
        device: torch.device,
        together: Coordinator,
        traced: _TraceOptions,
    ) -> None:
        own = samples_of_rank(task.batch_size, together.rank, together.num_ranks)
        self._task, self._device, self._rows = task, device, own.stop - own.start
        self._together = together
        self._traced, self._micro_batch_samples = traced, min(traced.micro_batch_samples or self._rows, self._rows)
        self._watch = InstrumentedLoop(task, device, self._rows, waits=together.num_ranks > 1)
        torch.manual_seed(0)
        with together.entering():
            self._loop = make(self._watch.watched_task(), device)
        together.draw_apart(0)
        self._batches = self._watch.drawn(
            prefetch(shard(data.batches(0, task.batch_size)), device)
        )  # As in a paired run.
        self._is_compiled = is_compiled(self._loop.model)
        self._laps: list[TimedRound] = []
        self._step(max(_WARM_STEPS, settling_steps(self._loop)))
        self.step_s = max(together.each(time_call(lambda: self._step(1), device)))
        self._state = ProcessState.capture()

    def lap(self, steps: int, *, clocked_first: bool) -> None:
        """Take `steps` steps with phase timing and the same number without."""
        self._state.restore()
        halves = [self._clocked, self._plain]
        found = [half(steps) for half in (halves if clocked_first else halves[::-1])]
        (seconds, parts), plain_s = found if clocked_first else found[::-1]
        self._laps.append(TimedRound(seconds, parts, plain_s))
        self._watch.counts.clear()
        self._state = ProcessState.capture()

    def _clocked(self, steps: int) -> Any:
        before = self._watch.num_batches
        with self._watch.clock.on(self._loop.model, parts=not self._is_compiled):
            self._step(steps)
        seconds, drawn = self._watch.clock.seconds(), self._watch.num_batches - before
        return by_phase(seconds, drawn), by_part(seconds, drawn)

    def _plain(self, steps: int) -> Any:
        before = self._watch.num_batches
        return time_call(partial(self._step, steps), self._device) / (self._watch.num_batches - before)

    def _step(self, steps: int) -> None:
        for _ in range(steps):
            self._loop.step(self._batches)

    def found(self, spec: DeviceSpec) -> ArmPhases:
        """Return the measured phases of all rounds, with roofline bounds from the operators."""
        notes = [*self._traced.notes, *([_HIDDEN] if "forward" not in self._laps[0].seconds else [])]
        roofs: dict[str, RooflineBound] = {}
        if self._is_compiled:
            notes.append(_COMPILED)
        elif _SHARED not in notes:
            roofs, why = self._roofs(spec)
            notes += [why] if why else []
        return ArmPhases(tuple(self._laps), roofs, tuple(notes))

    def _roofs(self, spec: DeviceSpec) -> tuple[dict[str, RooflineBound], str]:
        """Return the roofline bound by phase and per batch, or ({}, reason) if unknown."""
        self._state.restore()
        loop, precision = self._loop, self._loop.precision
        micro, _ = next(
            BY_CONTAINERS.slices(move(next(self._batches), self._device), self._rows, self._micro_batch_samples)
        )
        cast = partial(autocast, precision, self._device)
        try:
            how = {"autocast": cast, "prepare": self._traced.prepare}
            work = trace_work(loop.model, loop.optimizer, self._task.loss_fn, micro, **how)
        except ModelError as error:
            return {}, f"the roofline bound is unknown: {error.reason}"
        times = {"optimizer": 1.0}
        found = {phase: roof_of(seen, spec, precision) for phase, seen in work.items()}
        several = self._rows / self._micro_batch_samples
        roofs = {phase: roof.times(times.get(phase, several)) for phase, roof in found.items() if roof is not None}
        return (
            (roofs, "")
            if len(roofs) == len(found)
            else ({}, f"the roofline bound is unknown: not all peaks of {spec.name} are known")
        )

    def require_finite(self, name: str) -> None:
        """Raise an error if the loop has become non-finite on any rank. Collective: all ranks must call it.

        Times of a non-finite loop explain no gain.

        Raises:
            NonFiniteError: a loss or parameter is non-finite.
        """
        found = nonfinite_in(self._loop)
        if any(self._together.each(float(bool(found)))):
            raise NonFiniteError(
                name,
                problem=f"{name.capitalize()} became non-finite: {found or ON_ANOTHER_RANK}.",
                hint="Look for NaN or infinity in the data and in the loss, and lower the learning rate.",
                code="training.nonfinite",
            )

    def close(self) -> None:
        """Undo the changes of the loop."""
        self._state.restore()
        self._loop.close()


def measure_gain(
    task: Task,
    data: TaskData,
    device: torch.device,
    plan: Plan,
    *,
    rounds: int | None = None,
    progress: Progress = silent,
    together: Coordinator = ALONE,
) -> TimedGain:
    """Return the seconds by phase of the task's plain loop and of a plan. Collective: all ranks must call it.

    Args:
        task: the task.
        data: data of the task.
        device: device of the loops.
        plan: the plan.
        rounds: number of rounds; None for `ROUNDS`, or fewer to fit in about two minutes.
        progress: receives progress messages.
        together: the ranks of the job.
    """
    outside, data = ProcessState.capture(), place_data(data, device)[0]
    arms: list[_TimedLoop] = []
    is_over = False
    try:
        for make, traced in _makes(task, plan, together.num_ranks):
            outside.restore()
            arms.append(_TimedLoop(make, task, data, device, together, traced))
        step_s = max(arm.step_s for arm in arms)
        steps = min(_MOST_STEPS, max(1, math.ceil(_LAP_S / step_s)))
        fitting = int(_PASS_S / (2 * steps * sum(arm.step_s for arm in arms)))
        number = rounds or max(_FEWEST, min(ROUNDS, fitting))
        for index in range(number):
            progress(f"phases of {task.name}: round {index + 1} of {number}", index / number)
            for arm in turns(arms, index, 0):
                arm.lap(steps, clocked_first=index % 4 < 2)
        for arm, name in zip(arms, ("the baseline loop", "the plan's loop"), strict=True):
            arm.require_finite(name)
        spec = device_spec(device)
        found, is_over = [arm.found(spec) for arm in arms], True
    finally:
        # After an error, other ranks would wait in collectives.
        for arm in arms if is_over or together.num_ranks == 1 else ():
            arm.close()
        outside.restore()
    how: dict[str, Any] = {"num_ranks": together.num_ranks, "environment": environment()}
    return together.made(TimedGain, lambda: TimedGain(task.name, *found, plan.changes_in_words, spec, **how))


def _makes(task: Task, plan: Plan, num_ranks: int) -> list[tuple[MakeLoop, _TraceOptions]]:
    """Return the plain loop and the plan's loop, with tracing options."""
    ours: MakeLoop = partial(PlanLoop, plan=plan, total_samples=task.budget_samples)
    told = (_ALONE,) if num_ranks == 1 else ()
    shared = (_SHARED,) if plan.zero_stage.value else ()
    rows = plan.micro_batch_of(samples_of_rank(task.batch_size, 0, num_ranks).stop)
    prepare = as_it_is if plan.recompute.value is None else partial(use_plan, plan=plan)
    plain: MakeLoop = ReferenceLoop if num_ranks == 1 else ReplicaLoop
    return [(plain, _TraceOptions(told)), (ours, _TraceOptions((*told, *shared), rows, prepare))]


def gain_in(
    folder: Path,
    task: Task,
    data: TaskData,
    device: torch.device,
    plan: Plan,
    *,
    progress: Progress = silent,
    together: Coordinator = ALONE,
) -> TimedGain | None:
    """Return the gain stored in a comparison's folder, or measure it; None if the measurement fails."""
    path = folder / "gain.json"
    found = together.read(TimedGain, path)
    if found is None:
        found = together.attempt(lambda: measure_gain(task, data, device, plan, progress=progress, together=together))
        if found is not None:
            together.write(path, found, indent=1)
    return found
