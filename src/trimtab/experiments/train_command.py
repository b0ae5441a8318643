"""`trimtab train` after argument parsing: plan, then train now, train in low-carbon hours or print the schedule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trimtab.carbon.job import RemainingWork, power_of, step_seconds
from trimtab.checkpoint.config import Checkpoints
from trimtab.core.energy_reading import NO_METER
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget
from trimtab.core.progress import Progress
from trimtab.core.serialization import read_json
from trimtab.core.units import format_moment
from trimtab.distributed.process_group import job_position
from trimtab.experiments.carbon_aware_training import CarbonRequest, Clock, schedule_of_rest, train_when_clean
from trimtab.experiments.progress_bar import ProgressBar
from trimtab.experiments.train import Note, TrainingOptions, train_part, train_whole
from trimtab.experiments.train_summary import TrainingPart, figures_of
from trimtab.planner.multi_rank_plan import for_replicas
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task


@dataclass(frozen=True)
class LowCarbonOptions:
    """Options of low-carbon scheduling.

    Args:
        wish: forecast source and deadline.
        pause_s: overhead of a pause in seconds; None forbids pauses.
        takes_s: seconds of the whole run; None to use the plan's prediction.
        watts, idle_watts: given power in watts, or None.
        is_dry: True for a dry run that only computes the schedule.
    """

    wish: CarbonRequest
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


class MakesPlan(Protocol):
    """Makes the plan of a run: `plan_task` for a task, or `LoopTraining.plan`."""

    def __call__(self, *, budget: Budget, adapt: Collection[str], dry_runs: bool, progress: Progress) -> Plan: ...


def plan_of_run(
    make: MakesPlan,
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
        make: makes a plan.
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
    """Train in low-carbon hours and evaluate; return the figures of `train_now` with the scheduling decisions.

    Args:
        asked: options of the run.
        hours: options of low-carbon scheduling.
        say: receives every decision, before the wait.
    """

    def train(*, notes: Sequence[Note], is_over: Callable[[], bool], is_first: bool) -> TrainingPart:
        kept = asked.checkpoints
        next_one = asked if is_first or kept is None else replace(asked, checkpoints=replace(kept, resume="always"))
        with ProgressBar() as progress:
            return train_part(next_one, progress, notes=notes, is_over=is_over)

    done = steps_done(asked.checkpoints, asked.task)
    if done >= asked.steps:
        return train_now(asked)
    work = hours.work(asked.plan, asked.steps)
    waited = train_when_clean(hours.wish, work, done, train, say, Clock())
    return figures_of(asked.task, asked.steps, waited.parts) | waited.figures()


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
    found = schedule_of_rest(hours.wish, work, done, Clock().now())
    stretches = [f"{format_moment(begin_s)} to {format_moment(end_s)}" for begin_s, end_s in found.stretches]
    by = {"task": task.name, "by": format_moment(hours.wish.deadline_s), "forecast": hours.wish.source.name}
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
