"""`trimtab train` after argument parsing: plan, then train now, in forecast low-carbon hours, or print the schedule."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab.carbon.job import RemainingWork, power_of, step_seconds
from trimtab.carbon.pause_schedule import CarbonSchedule, when_to_train
from trimtab.carbon.services import IntensitySource, forecast_or_reason
from trimtab.checkpoint.config import Checkpoints
from trimtab.checkpoint.signals import Signals
from trimtab.core.energy_reading import NO_METER
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget
from trimtab.core.serialization import read_json, to_jsonable
from trimtab.core.units import format_moment
from trimtab.distributed.process_group import job_position
from trimtab.experiments.progress_bar import ProgressBar
from trimtab.experiments.train import Note, TrainingOptions, TrainingPart, figures_of, train_part, train_whole
from trimtab.planner.multi_rank_plan import for_replicas
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task

# Upper bound on the reaction time to a signal, to a changed clock, or after a suspend.
SLICE_S = 1.0


@dataclass(frozen=True)
class Clock:
    """Wall clock, replaceable in tests.

    Args:
        now: returns seconds since 1970.
        sleep: sleeps for a number of seconds.
    """

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


@contextlib.contextmanager
def catch_signals() -> Iterator[Signals]:
    """Catch termination signals inside the block, where no run may handle them; act on a signal at its end.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; the exit code is 128 plus its number.
    """
    signals = Signals()
    signals.install()
    try:
        yield signals
    finally:
        signals.restore()
    if signals.came is not None:
        signals.leave()


def wait_until(moment_s: float, clock: Clock) -> float:
    """Wait until a time and return the seconds waited; unreferenced memory, including a GPU's, is freed first.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; the exit code is 128 plus its number.
    """
    begun_s = clock.now()
    if begun_s >= moment_s:
        return 0.0
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with catch_signals() as signals:
        while (left_s := moment_s - clock.now()) > 0 and signals.came is None:
            clock.sleep(min(left_s, SLICE_S))
    return clock.now() - begun_s


@dataclass(frozen=True)
class LowCarbonOptions:
    """Options of low-carbon scheduling.

    Args:
        source: source of the forecast.
        deadline_s: deadline in seconds since 1970.
        pause_s: overhead of a pause in seconds; None forbids pauses.
        takes_s: seconds of the whole run; None to use the plan's prediction.
        watts, idle_watts: given power in watts, or None.
        is_dry: True for a dry run that only computes the schedule.
    """

    source: IntensitySource
    deadline_s: float
    pause_s: float | None = None
    takes_s: float | None = None
    watts: float | None = None
    idle_watts: float | None = None
    is_dry: bool = False

    def work(self, plan: Plan | None, steps: int) -> RemainingWork:
        """Return the work of a run of `steps` steps."""
        measured, predicted, meter = (plan.measured, plan.predicted, plan.meter) if plan else (None, None, NO_METER)
        step_s, seconds_by = step_seconds(steps, self.takes_s, measured, predicted)
        power = power_of(self.watts, self.idle_watts, measured or predicted, meter)
        return RemainingWork(steps, step_s, seconds_by, power, self.pause_s)

    def schedule(self, work: RemainingWork, done: int, now_s: float) -> CarbonSchedule:
        """Return the schedule of the remaining work after `done` steps; without a forecast, start now."""
        forecast, reason = forecast_or_reason(self.source, now_s)
        return when_to_train(forecast, work.job(done), now_s, self.deadline_s, unknown=reason)


def plan_of_run(
    make: Callable[..., Plan],
    *,
    file: Path | None,
    kept: Checkpoints | None,
    budget: Budget,
    adapt: Collection[str],
    dry_runs: bool,
) -> Plan:
    """Return the plan of a run: from a file, from the saved run, or newly made.

    A run resumed on a different number of ranks gets a new plan, if "ranks" and "plan" changes are accepted.

    Args:
        make: makes a plan: `plan_task` for a task, or `LoopTraining.plan`.
        file: path of a plan, or None.
        kept: checkpoint settings, or None.
        budget, adapt, dry_runs: as in `trimtab.plan`.

    Raises:
        FormatError: the file contains no plan.
        ValueGivenError: planning options were given for a run with a saved plan, or the number of ranks differs.
    """
    if file is not None:
        return for_replicas(read_json(Plan, file), job_position().num_ranks)
    saved = None if kept is None else kept.saved_plan()
    if kept is not None and saved is not None and not _is_of_other_ranks(saved, kept):
        _refuse_planning(budget, adapt)
        return saved
    with ProgressBar() as progress:
        return make(adapt=adapt, budget=budget, dry_runs=dry_runs, progress=progress)


def _is_of_other_ranks(saved: Plan, kept: Checkpoints) -> bool:
    """Return True if a run resumes on a different number of ranks than its plan's.

    Raises:
        ValueGivenError: the change was not accepted.
    """
    here = job_position().num_ranks
    if saved.num_ranks == here:
        return False
    if not {"ranks", "plan"} <= set(kept.accepts):
        raise ValueGivenError(
            "--ranks",
            problem=f"The checkpointed run was planned for {saved.num_ranks} rank(s), but this job has {here}.",
            hint=f"Start {saved.num_ranks} rank(s), or add --accept ranks,plan to resume with a new plan.",
            code="resume.ranks_differ",
        )
    return True


def _refuse_planning(budget: Budget, adapt: Collection[str]) -> None:
    """Raise an error if planning options are given for a run with a saved plan."""
    for option, is_given in (("--adapt", bool(adapt)), ("--memory", budget != Budget())):
        if is_given:
            raise ValueGivenError(
                option,
                problem=f"{option} has no effect on a resumed run, which keeps the plan of its checkpoint.",
                hint=f"Remove {option}, or start a new run in another folder (--checkpoints).",
                code="resume.plan_fixed",
            )


def train_or_tell(
    task: Task,
    steps: int,
    make_plan: Callable[[], Plan],
    hours: LowCarbonOptions | None,
    say: Callable[[str], None],
    **options: Any,
) -> dict[str, Any]:
    """Train now or in low-carbon hours, or only compute the schedule; return the figures.

    Args:
        task: the task.
        steps: number of batches.
        make_plan: makes the plan, called if a plan is needed.
        hours: options of low-carbon scheduling; None to train now.
        say: receives every scheduling decision.
        options: further fields of `TrainingOptions`.
    """
    if hours is not None and hours.is_dry:
        plan = make_plan() if hours.takes_s is None else None
        return carbon_outlook(task, steps, plan, options.get("checkpoints"), hours)
    asked = TrainingOptions(task, make_plan(), steps, **options)
    return train_now(asked) if hours is None else train_clean(asked, hours, say)


def train_clean(asked: TrainingOptions, hours: LowCarbonOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Wait, train and pause alternately until all steps are done; return the figures with the scheduling decisions.

    Args:
        asked: options of the run.
        hours: options of low-carbon scheduling.
        say: receives every decision, before the wait.

    Raises:
        KeyboardInterrupt, SystemExit: a signal came; training before a pause is saved.
    """
    done = steps_done(asked.checkpoints, asked.task)
    if done >= asked.steps:
        return train_now(asked)
    clock, work = Clock(), hours.work(asked.plan, asked.steps)
    parts, decisions, waited_s = list[TrainingPart](), list[CarbonSchedule](), 0.0
    while not parts or parts[-1].is_paused:
        found = hours.schedule(work, done, clock.now())
        decisions.append(found)
        say(found.describe())
        here_s = wait_until(found.stretches[0].begin_s, clock)
        waited_s += here_s
        by = {"forecast": hours.source.name, "deadline_s": hours.deadline_s, "waited_s": here_s}
        note = "when_to_train", {**by, **work.describe(done), **to_jsonable(found)}
        parts.append(_stretch(asked, [note], found, clock))
        if parts[-1].is_paused:
            step_s = parts[-1].seconds / (parts[-1].done - done)
            work, done = replace(work, step_s=step_s, seconds_by="as measured before the pause"), parts[-1].done
            if asked.checkpoints is not None:
                asked = replace(asked, checkpoints=replace(asked.checkpoints, resume="always"))
    waits = {"waited_s": round(waited_s, 3), "pauses": len(parts) - 1}
    return figures_of(asked.task, asked.steps, parts) | {"when": decisions[0].describe()} | waits


def _stretch(asked: TrainingOptions, notes: Sequence[Note], found: CarbonSchedule, clock: Clock) -> TrainingPart:
    """Train the first time window of a decision; the last window ends only with the last step."""
    with ProgressBar() as progress:
        if len(found.stretches) == 1:
            return train_part(asked, progress, notes=notes)
        with catch_signals() as signals:  # A signal during start-up or saving would otherwise have no handler.
            is_over = lambda: signals.came is not None or clock.now() >= found.stretches[0].end_s  # noqa: E731
            return train_part(asked, progress, notes=notes, is_over=is_over)


def train_now(asked: TrainingOptions) -> dict[str, Any]:
    """Train and evaluate; return the final figures."""
    with ProgressBar() as progress:
        return train_whole(asked, progress)


def carbon_outlook(
    task: Task, steps: int, plan: Plan | None, kept: Checkpoints | None, hours: LowCarbonOptions
) -> dict[str, Any]:
    """Return the schedule of a run: remaining work, power and time windows.

    Raises:
        ValueGivenError: no steps remain.
    """
    done, work = steps_done(kept, task), hours.work(plan, steps)
    if done >= steps:
        raise ValueGivenError(
            "--dry-run",
            problem=f"The run has completed {done} steps, and --steps is {steps}, so there is nothing to schedule.",
            hint="Raise --steps.",
            code="run.complete",
        )
    found = hours.schedule(work, done, Clock().now())
    stretches = [f"{format_moment(begin_s)} to {format_moment(end_s)}" for begin_s, end_s in found.stretches]
    by = {"task": task.name, "by": format_moment(hours.deadline_s), "forecast": hours.source.name}
    said = {**by, **work.describe(done), "when": found.describe(), "stretches": ", ".join(stretches)}
    figures = {"grams": found.grams, "start_now_g": found.start_now_g, "saved_share": found.saved_share}
    return said | {"seconds": found.work_s} | figures


def steps_done(kept: Checkpoints | None, task: Task) -> int:
    """Return the number of steps at the last checkpoint.

    Raises:
        FormatError: the run cannot be started or resumed with the given options; raised before the wait.
    """
    if kept is None:
        return 0
    kept.require_as_asked()
    return -(-kept.saved_samples() // task.batch_size)
