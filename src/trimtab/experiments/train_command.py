"""What `trimtab train` does once all was asked: plans, and trains now or when energy is clean, or says when that is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.checkpoint.settings import Checkpoints
from trimtab.core.codec import read_json
from trimtab.core.errors import ValueGivenError
from trimtab.core.moments import format_moment
from trimtab.core.objective import Budget
from trimtab.core.plan import Plan
from trimtab.decide.carbon_work import Work, power_of, step_seconds
from trimtab.decide.ranks import replicated
from trimtab.distributed.process_group import place
from trimtab.experiments.progress_bar import ProgressBar
from trimtab.experiments.ranks import plan_on_ranks
from trimtab.experiments.train import Note, Training, train_part, train_whole
from trimtab.experiments.train_figures import Part, figures_of
from trimtab.experiments.waiting import Clock
from trimtab.experiments.when_clean import Wish, decided, train_when_clean
from trimtab.tasks.task import Task


@dataclass(frozen=True)
class CleanHours:
    """What was asked of when to train.

    Args:
        pause_s: what a pause loses; None: it may not pause. takes_s: of the whole run; None: as the plan says.
        watts, idle_watts: as given. is_dry: whether nothing is to be trained.
    """

    wish: Wish
    pause_s: float | None = None
    takes_s: float | None = None
    watts: float | None = None
    idle_watts: float | None = None
    is_dry: bool = False

    def work(self, plan: Plan | None, steps: int) -> Work:
        """Return what a run of so many steps takes."""
        step_s, seconds_by = step_seconds(plan, steps, self.takes_s)
        return Work(steps, step_s, seconds_by, power_of(plan, self.watts, self.idle_watts), self.pause_s)


def plan_of_run(
    task: Task,
    steps: int,
    *,
    file: Path | None,
    kept: Checkpoints | None,
    budget: Budget,
    adapt: Collection[str],
    rehearse: bool,
) -> Plan:
    """Return the plan of a run of so many steps: as a file has it, as the run was saved with, or made now.

    On other ranks than it was saved with it is made now, where these and another plan are accepted.

    Args:
        file: of a plan; None: it is not given. kept: where the run is. The rest as in `plan_on_ranks`.

    Raises:
        FormatError: the file holds none. ValueGivenError: another plan is asked for than the run was saved with. The
            others as in `plan_on_ranks`.
    """
    if file is not None:
        return replicated(read_json(Plan, file), place().num_ranks)
    saved = None if kept is None else kept.saved_plan()
    if kept is not None and saved is not None and not _is_of_other_ranks(saved, kept):
        _refuse_planning(budget, adapt)
        return saved
    asked = replace(task, planned_rows=steps * task.batch_rows)
    with ProgressBar() as progress:
        return plan_on_ranks(asked, budget, adapt, progress, rehearse=rehearse)


def _is_of_other_ranks(saved: Plan, kept: Checkpoints) -> bool:
    """Return whether a run is gone on with on other ranks than its plan is of; raise where that was not accepted."""
    here = place().num_ranks
    if saved.num_ranks == here:
        return False
    if not {"ranks", "plan"} <= set(kept.accepts):
        raise ValueGivenError(
            "--ranks",
            given=f"{here}, for a run whose plan is of {saved.num_ranks}",
            expected=f"{saved.num_ranks}",
            way_out="--accept ranks,plan goes on by a plan that is made anew for these.",
        )
    return True


def _refuse_planning(budget: Budget, adapt: Collection[str]) -> None:
    """Raise where a plan is asked for that the run has already."""
    for option, is_given in (("--adapt", bool(adapt)), ("--memory", budget != Budget())):
        if is_given:
            raise ValueGivenError(
                option,
                given="what a plan is made by, for a run that is gone on with by its own",
                expected="no such option",
                way_out="Leave it out, or begin anew in another folder (--checkpoints).",
            )


def train_or_tell(
    task: Task,
    steps: int,
    make_plan: Callable[[], Plan],
    hours: CleanHours | None,
    say: Callable[[str], None],
    **options: Any,
) -> dict[str, Any]:
    """Train so many steps now, or when energy is clean, or tell when that would be; returns the figures.

    Args:
        make_plan: is called where a plan has to be there. options: the others of `Training`.
    """
    if hours is not None and hours.is_dry:
        plan = make_plan() if hours.takes_s is None else None
        return outlook(task, steps, plan, options.get("checkpoints"), hours)
    asked = Training(task, make_plan(), steps, **options)
    return train_now(asked) if hours is None else train_clean(asked, hours, say)


def train_clean(asked: Training, hours: CleanHours, say: Callable[[str], None]) -> dict[str, Any]:
    """Train when energy is clean, and evaluate; returns the figures of `train_now`, and what was decided.

    Args:
        say: is told every decision, before its wait.
    """

    def train(*, notes: Sequence[Note], is_over: Callable[[], bool], is_first: bool) -> Part:
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


def train_now(asked: Training) -> dict[str, Any]:
    """Train, and evaluate; returns the final figures."""
    with ProgressBar() as progress:
        return train_whole(asked, progress)


def outlook(task: Task, steps: int, plan: Plan | None, kept: Checkpoints | None, hours: CleanHours) -> dict[str, Any]:
    """Return when a run would train: the work that is left, its power, and the schedule.

    Raises:
        ValueGivenError: nothing is left.
    """
    done, work = steps_done(kept, task), hours.work(plan, steps)
    if done >= steps:
        raise ValueGivenError("--dry-run", given=f"a run after {done} of {steps} steps", expected="steps that are left")
    found = decided(hours.wish, work, done, Clock().now())
    stretches = [f"{format_moment(begin_s)} to {format_moment(end_s)}" for begin_s, end_s in found.stretches]
    by = {"task": task.name, "by": format_moment(hours.wish.deadline_s), "forecast": hours.wish.source.name}
    said = {**by, **work.describe(done), "when": found.describe(), "stretches": ", ".join(stretches)}
    figures = {"grams": found.grams, "start_now_g": found.start_now_g, "saved_share": found.saved_share}
    return said | {"seconds": found.work_s} | figures


def steps_done(kept: Checkpoints | None, task: Task) -> int:
    """Return the steps that a run was last saved after.

    Raises:
        FormatError: it cannot be begun, or gone on with, as it is to be; found before the wait, not after it.
    """
    if kept is None:
        return 0
    kept.require_as_asked()
    return -(-kept.saved_rows() // task.batch_rows)
