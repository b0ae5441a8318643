"""Comparison of training loops in paired runs: a loop and a plan (`compare`), several loops (`race`), every change of a
plan alone and left out (`ablate`).

Every pair has a seed. `setup(seed)` builds all arms, and the arms train on equal batches, alternating in blocks of a
few steps. The first arm, the baseline, runs twice; the second run is the A/A control. Peak memory is measured in
separate steps.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trimtab.core import validation
from trimtab.core.errors import TrimtabError, ValueGivenError
from trimtab.core.objective import Reference
from trimtab.core.progress import Progress, silent
from trimtab.experiments import loop_setup, loops, result_table
from trimtab.experiments.ablation.ablation_design import changes_of, with_only
from trimtab.experiments.loop_result import CONTROL, LoopComparison
from trimtab.experiments.loop_setup import Setup
from trimtab.experiments.loops import DataStream, Loop, StepResult
from trimtab.experiments.paired_runs.plan_loops import settling_steps_of
from trimtab.experiments.result_table import EVALUATION, LOSS, PEAK, SAMPLES, UNITS, ResultTable, Row
from trimtab.measure.machine import environment
from trimtab.measure.timing import synchronize
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, turns
from trimtab.plans.plan import Plan
from trimtab.profiling.measurement_notes import describe
from trimtab.state.peak_memory import alive_between_steps, peak_bytes
from trimtab.state.process_state import ProcessState
from trimtab.tasks.task import Task

BASELINE, PLANNED = "baseline", "plan"
STEPS, PAIRS = 100, 5
# A block takes this many seconds, at least one step and at most a tenth of the steps. The first steps of an arm are not
# timed: they include one-time costs, such as compiled kernels.
_BLOCK_S, _BLOCKS, _MOST_BLOCKS, _LEAD_STEPS = 0.3, 10, 60, 1
_QUEUES = 4  # Length of a block as a multiple of the batches that a loader's workers prepare.

_SAME_LOSS = 0.05  # Relative difference of the first losses; dropout masks may differ.

Steps = Iterator[StepResult]
MakeSteps = Callable[[Loop, Iterator[Any]], Steps]


@dataclass(frozen=True)
class Arm:
    """A loop in a comparison.

    Args:
        name: name in the result.
        setup: builds the loop for a seed.
        steps: trains the loop on batches, and yields after every optimizer step.
        lead_steps: steps before the timed ones.
    """

    name: str
    setup: Setup
    steps: MakeSteps
    lead_steps: int = _LEAD_STEPS + 1


def compare(
    setup: Setup | Task,
    *,
    steps: int = STEPS,
    pairs: int = PAIRS,
    plan: Plan | None = None,
    name: str = "setup",
    progress: Progress = silent,
    **planning: Any,
) -> LoopComparison:
    """Compare a training loop with a plan in paired runs.

    Args:
        setup: `setup(seed)` returns a `trimtab.Loop`, a Transformers Trainer, or a Lightning (trainer, module, loader).
            Every call must build a new model, optimizer and loader.
        steps: optimizer steps of an arm per pair.
        pairs: paired runs with different seeds: five for a verdict, eight for a claim.
        plan: the plan; None to make a plan.
        name: name of the loop in the result and in errors.
        progress: called with a line of text and the completed fraction.
        planning: further arguments of `trimtab.plan`, such as `memory="8GiB"` or `total_steps`.

    Raises:
        ValueGivenError: `setup` returns no loop.
        LoopError: `setup` or the baseline raises.
    """
    steps, pairs = validation.integer("steps", steps, low=3), validation.integer("pairs", pairs)
    setup = loop_setup.setup_function(setup)
    with _process_kept():
        reference, plan, planned = _planned(setup, plan, name, progress, planning)
        arms = [_plain_arm(BASELINE, setup, reference), planned]
        return _run(f"{name}: plan against the loop", arms, steps, pairs, progress, plan=plan, reference=reference)


def race(
    setup: Setup | Task,
    *others: Setup | Task,
    steps: int = STEPS,
    pairs: int = PAIRS,
    names: Sequence[str] = (),
    progress: Progress = silent,
) -> LoopComparison:
    """Compare any loops in paired runs, without a plan; the first is the baseline.

    Args:
        setup, others: functions as in `compare`.
        steps: optimizer steps of the first loop per pair; all loops train on an equal number of samples.
        pairs: paired runs with different seeds.
        names: names of the loops in the result; by default the names of the functions.
        progress: called with a line of text and the completed fraction.

    Raises:
        ValueGivenError: fewer than two loops, or names that are missing or equal.
    """
    every = [loop_setup.setup_function(each) for each in (setup, *others)]
    steps, pairs = validation.integer("steps", steps, low=3), validation.integer("pairs", pairs)
    titles = list(names) or _names_of(every)
    if len(every) < 2 or len(titles) != len(every) or len(set(titles)) < len(titles) or CONTROL in titles:
        raise ValueGivenError(
            "race",
            got=f"{len(every)} loops with the names {', '.join(titles)}",
            expected="at least two loops, each with its own name",
            code="race.names",
        )
    with _process_kept():
        arms = [
            _plain_arm(title, each, loop_setup.observed_reference(each, 0, title))
            for title, each in zip(titles, every, strict=True)
        ]
        return _run(" against ".join(titles), arms, steps, pairs, progress)


def ablate(
    setup: Setup | Task,
    *,
    steps: int = STEPS,
    pairs: int = PAIRS,
    plan: Plan | None = None,
    name: str = "setup",
    progress: Progress = silent,
    **planning: Any,
) -> LoopComparison:
    """Compare a loop with a plan, with every change of the plan alone, and with the plan without every change.

    Arguments and errors as in `compare`.
    """
    steps, pairs = validation.integer("steps", steps, low=3), validation.integer("pairs", pairs)
    setup = loop_setup.setup_function(setup)
    with _process_kept():
        reference, plan, planned = _planned(setup, plan, name, progress, planning)
        arms = [_plain_arm(BASELINE, setup, reference), planned]
        changes = changes_of(plan, reference)
        for change in changes if len(changes) > 1 else ():
            parts = {"{} alone": {change}, "plan without {}": set(changes) - {change}}
            for title, kept in parts.items():
                reduced = with_only(plan, kept, reference)
                arms.append(_planned_arm(title.format(change.replace("_", " ")), setup, reference, reduced))
        return _run(f"{name}: changes of the plan", arms, steps, pairs, progress, plan=plan, reference=reference)


def _planned(
    setup: Setup, plan: Plan | None, name: str, progress: Progress, planning: Mapping[str, Any]
) -> tuple[Reference, Plan, Arm]:
    """Return the baseline's reference, the plan and the planned arm."""
    if planning.get("adapt") is not None:
        raise ValueGivenError(
            "adapt",
            problem="compare and ablate keep the training as it is, but adapt lets a plan change it.",
            hint="Remove adapt.",
            code="compare.adapts",
        )
    reference = loop_setup.observed_reference(setup, 0, name)
    if plan is None:
        plan = loop_setup.plan_of(loop_setup.build(setup, 0, name), reference, progress=progress, **planning)
    return reference, plan, _planned_arm(PLANNED, setup, reference, plan)


def _names_of(setups: Sequence[Setup]) -> list[str]:
    names = [getattr(each, "__name__", f"loop {index + 1}") for index, each in enumerate(setups)]
    return [
        f"{name} {names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def _plain_arm(name: str, setup: Setup, reference: Reference) -> Arm:
    return Arm(name, _referring(setup, reference, name), loops.plain_steps)


def _planned_arm(name: str, setup: Setup, reference: Reference, plan: Plan) -> Arm:
    return Arm(
        name,
        _referring(setup, reference, name),
        lambda loop, batches: loops.planned_steps(loop, batches, plan),
        lead_steps=_LEAD_STEPS + settling_steps_of(plan),
    )


def _referring(setup: Setup, reference: Reference, name: str) -> Setup:
    return lambda seed: loop_setup.with_reference(loop_setup.build(setup, seed, name), reference)


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Restore random generators and global modes after the block."""
    outside = ProcessState.capture()
    try:
        yield
    finally:
        outside.restore()


def _run(
    title: str,
    arms: Sequence[Arm],
    steps: int,
    pairs: int,
    progress: Progress,
    *,
    plan: Plan | None = None,
    reference: Reference | None = None,
) -> LoopComparison:
    rows, failures = list[Row](), dict[str, str]()
    for arm in arms:
        progress(f"peak memory of {arm.name}", 0.0)
        _measure_peak(arm, rows, failures, is_baseline=arm is arms[0])
    running = [arm for arm in arms if arm.name not in failures]
    control = Arm(CONTROL, arms[0].setup, arms[0].steps)
    for seed in range(pairs):
        _run_pair([running[0], control, *running[1:]], seed, steps, rows, failures, progress, (seed, pairs))
    return LoopComparison(
        title,
        tuple(arm.name for arm in arms),
        steps,
        ResultTable.of(rows),
        plan,
        reference,
        environment(),
        failures,
        _notes(rows, pairs),
    )


def _notes(rows: Sequence[Row], pairs: int) -> tuple[str, ...]:
    found = []
    if pairs < MIN_PAIRS_FOR_VERDICT:
        found.append(f"{pairs} pairs: a verdict needs {MIN_PAIRS_FOR_VERDICT}.")
    if not any(row.metric == LOSS for row in rows):
        found.append("The loop's step returns no loss, so losses were not compared.")
    first = {row.arm: row.value for row in reversed(rows) if row.metric == LOSS and row.seed == 0 and row.round == 1}
    own = first.get(BASELINE)
    if own is not None and PLANNED in first and abs(first[PLANNED] - own) > _SAME_LOSS * abs(own):
        found.append(
            f"The first losses differ, {own:.4g} and {first[PLANNED]:.4g}: step and loss_fn may compute different ones."
        )
    return tuple(found)


def _measure_peak(arm: Arm, rows: list[Row], failures: dict[str, str], *, is_baseline: bool) -> None:
    """Measure the peak memory of an arm's step, after the steps that create optimizer state."""
    outside = ProcessState.capture()
    stream = steps = None
    try:
        loop = arm.setup(0)
        stream = DataStream(loop.loader, 0)
        steps = arm.steps(loop, stream)
        for _ in range(arm.lead_steps):
            next(steps)
        loop.optimizer.zero_grad(set_to_none=True)
        found = peak_bytes(lambda: next(steps), loop.device, lambda: alive_between_steps(loop.model, loop.optimizer))
        rows.append(Row(arm.name, -1, -1, PEAK, float(found), UNITS[PEAK]))
    except Exception as error:
        if is_baseline:
            raise loop_setup.step_failed(arm.name, error) from error
        failures[arm.name] = describe(error)
    finally:
        _close(steps, stream)
        steps = stream = None
        outside.restore()
        gc.collect()


def _close(steps: Steps | None, stream: DataStream | None) -> None:
    if steps is not None:
        steps.close()  # type: ignore[attr-defined]  # A generator; closing it leaves the run's `with` block.
    if stream is not None:
        stream.close()


class _RunningArm:
    """An arm in a paired run, with separate random generators and global modes."""

    def __init__(self, arm: Arm, seed: int) -> None:
        self.arm, self.seed = arm, seed
        self.loop = arm.setup(seed)
        self.stream = DataStream(self.loop.loader, seed)
        self.steps = arm.steps(self.loop, self.stream)
        self.samples = self.num_steps = 0
        self.state = ProcessState.capture()

    def take(self, limit: float) -> tuple[list[StepResult], float, float]:
        """Train until a number of samples is reached; return the steps, their seconds and processor seconds."""
        self.state.restore()
        taken: list[StepResult] = []
        synchronize(self.loop.device)
        start, start_cpu = time.perf_counter(), time.process_time()
        while self.samples < limit:
            step = next(self.steps)
            taken.append(step)
            self.samples += step.samples
        synchronize(self.loop.device)
        aside_s = self.stream.take_aside_s()  # Takes processor time too.
        seconds, cpu_s = time.perf_counter() - start - aside_s, time.process_time() - start_cpu - aside_s
        self.state = ProcessState.capture()
        return taken, seconds, cpu_s

    def close(self) -> None:
        """Undo the plan, and end the loader's workers."""
        _close(self.steps, self.stream)


def _run_pair(
    arms: Sequence[Arm],
    seed: int,
    steps: int,
    rows: list[Row],
    failures: dict[str, str],
    progress: Progress,
    position: tuple[int, int],
) -> None:
    """Run all arms for a seed, interleaved in blocks. A failed arm drops out; an error of the baseline raises."""
    outside, running = ProcessState.capture(), list[_RunningArm]()
    try:
        for arm in arms:
            outside.restore()
            if (made := _guarded(arm, arms[0], failures, _RunningArm, arm, seed)) is not None:
                _require_apart(made, running)
                running.append(made)
        per_step = _lead(running, arms[0], rows, failures)
        limit, most = running[0].samples, running[0].samples + steps * per_step[0]
        block = per_step[0] * _steps_of_block(steps, per_step[1], running)
        last = None
        for number in itertools.count():
            if limit >= most:
                break
            limit = min(most, limit + block)
            for each in turns(running, number, seed, last):
                if each.arm.name not in failures:
                    _guarded(each.arm, arms[0], failures, _take_block, each, limit, number, rows)
                last = each
            progress(f"paired run {position[0] + 1} of {position[1]}", (position[0] + limit / most) / position[1])
        for each in running:
            if each.arm.name not in failures:
                _guarded(each.arm, arms[0], failures, _finish, each, rows)
    finally:
        with contextlib.ExitStack() as closing:
            closing.callback(gc.collect)  # A run refers to itself, and would hold its model until a collection.
            closing.callback(outside.restore)
            closing.callback(running.clear)
            for each in running:
                closing.callback(each.close)


def _steps_of_block(steps: int, step_s: float, running: Sequence[_RunningArm]) -> int:
    """Return the steps of a block: about `_BLOCK_S`, at least `_BLOCKS` and at most `_MOST_BLOCKS` blocks per run.

    While an arm waits, the workers of the loader fill the queues. A block therefore takes several times the number of
    queued batches, or the time to load a batch would not be measured.
    """
    wanted = max(round(_BLOCK_S / max(step_s, 1e-9)), math.ceil(steps / _MOST_BLOCKS))
    queued = max(_queued_batches(each.loop) for each in running)
    return max(1, min(steps // _BLOCKS, wanted), min(steps // 3, math.ceil(_QUEUES * queued)))


def _queued_batches(loop: Loop) -> float:
    """Return the number of optimizer steps with batches that loader workers may have prepared."""
    workers = getattr(loop.loader, "num_workers", 0)
    factor = getattr(loop.loader, "prefetch_factor", None)
    return workers * (factor or 2) / loop.accumulate if isinstance(workers, int) else 0.0


def _require_apart(made: _RunningArm, running: Sequence[_RunningArm]) -> None:
    """Raise if two arms have the same model, optimizer or stateful loader, because `setup` must build new objects."""
    draws_itself = any(getattr(made.loop.loader, name, None) for name in ("generator", "persistent_workers"))
    for name in ("model", "optimizer", *(("loader",) if draws_itself else ())):
        if any(getattr(made.loop, name) is getattr(other.loop, name) for other in running):
            made.close()
            raise ValueGivenError(
                "setup",
                got=f"the same {name} from two calls",
                expected=f"a new {name} from each call of setup(seed)",
                hint=f"Build the {name} within the function.",
                code="setup.shares_objects",
            )


def _guarded(arm: Arm, baseline: Arm, failures: dict[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function. On an error, raise for the baseline; else record the failure and return None."""
    try:
        return function(*arguments)
    except Exception as error:
        if arm.name in (baseline.name, CONTROL):
            raise loop_setup.step_failed(baseline.name, error) from error
        failures[arm.name] = describe(error) if not isinstance(error, TrimtabError) else error.reason
        return None


def _lead(
    running: Sequence[_RunningArm], baseline: Arm, rows: list[Row], failures: dict[str, str]
) -> tuple[float, float]:
    """Run the steps before the clock starts, and return samples and seconds per step of the baseline."""
    most = max(each.arm.lead_steps for each in running)
    first = running[0]
    seconds, samples = math.inf, 1.0
    for _ in range(most):
        taken, took_s, _ = _guarded(first.arm, baseline, failures, first.take, first.samples + 1)
        _guarded(first.arm, baseline, failures, _note_steps, first, taken, rows)
        samples, seconds = max(samples, float(taken[0].samples)), min(seconds, took_s)
    for each in running[1:]:
        _guarded(each.arm, baseline, failures, _take_lead, each, first.samples, rows)
    return samples, seconds


def _take_lead(each: _RunningArm, limit: float, rows: list[Row]) -> None:
    _note_steps(each, each.take(limit)[0], rows)


def _take_block(each: _RunningArm, limit: float, number: int, rows: list[Row]) -> None:
    taken, seconds, cpu_s = each.take(limit)
    if not taken:
        return
    values = {result_table.SECONDS: seconds, result_table.CPU_SECONDS: cpu_s, SAMPLES: sum(t.samples for t in taken)}
    for metric, value in values.items():
        rows.append(Row(each.arm.name, each.seed, number, metric, float(value), UNITS[metric]))
    _note_steps(each, taken, rows)


def _note_steps(each: _RunningArm, taken: Sequence[StepResult], rows: list[Row]) -> None:
    """Add the losses of steps, read after the clock has stopped.

    Raises:
        FloatingPointError: the last loss or a parameter is not finite.
    """
    value: float | None = None
    for step in taken:
        each.num_steps += 1
        if step.loss is not None:
            value = float(step.loss)
            rows.append(Row(each.arm.name, each.seed, each.num_steps, "step_samples", float(step.samples), "samples"))
            rows.append(Row(each.arm.name, each.seed, each.num_steps, LOSS, value, UNITS[LOSS]))
    if found := loops.nonfinite_in(each.loop, value):
        raise FloatingPointError(f"after {each.num_steps} steps, {found}")


def _finish(each: _RunningArm, rows: list[Row]) -> None:
    """Evaluate an arm."""
    if each.loop.evaluate is None:
        return
    each.state.restore()
    found = each.loop.evaluate(each.loop.model)
    named = found if isinstance(found, Mapping) else {"evaluation": found}
    for name, value in named.items():
        number = value.item() if isinstance(value, Tensor) else value
        rows.append(Row(each.arm.name, each.seed, -1, f"{EVALUATION}{name}", float(number), ""))
