"""Command `train`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.options import (
    Accept,
    Adapt,
    Carbon,
    CarbonKind,
    EnergyWatts,
    Every,
    Json,
    Judged,
    KeptIn,
    Memory,
    NonFinite,
    PlanFile,
    Quiet,
    Ranks,
    Record,
    Rehearse,
    Resume,
    TaskName,
    Track,
    TrialBatchSize,
    conflict,
    intensity,
    kept_in,
    refuse_adapt,
    refuse_memory,
    require_record,
    settings_to_adapt,
)
from trimtab.cli.output import print_error, print_figures
from trimtab.experiments.progress_bar import ProgressBar

if TYPE_CHECKING:
    from trimtab.experiments.train_command import LowCarbonOptions


# Options for carbon-aware training, validated before any measurement.

WhenClean = Annotated[
    str | None,
    typer.Option(
        help="train at low carbon intensity by this forecast: a CSV file (time, g_per_kwh), great-britain, "
        "electricity-maps:ZONE or watttime:REGION"
    ),
]
By = Annotated[str | None, typer.Option(help="deadline: 2026-03-02T06:00+01:00, or 36h from now")]
Pauses = Annotated[
    str | None, typer.Option(help="allow pauses; time lost per pause, such as 90s or 10min (needs --checkpoints)")
]
Takes = Annotated[
    str | None, typer.Option(help="duration of the whole run, such as 5h; default: from the plan's step time")
]
IdleWatts = Annotated[float | None, typer.Option(min=0, help="power of held devices while waiting")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the schedule and exit")]


def low_carbon(
    source: str, kind: str | None, given: dict[str, Any], watts: float | None, *, is_kept: bool, num_ranks: int
) -> LowCarbonOptions:
    """Return the settings of `--when-clean`.

    Args:
        given: values of the related options by name; None for an option that was not passed.

    Raises:
        ValueGivenError: An option is invalid, or lacks a required option.
    """
    from trimtab.carbon.services import source_named
    from trimtab.core.units import parse_duration, parse_moment
    from trimtab.experiments.train_command import LowCarbonOptions

    if given["--by"] is None:
        hint = "Add --by with a time such as 2026-03-02T06:00+01:00, or a duration such as 36h."
        raise conflict("--by", "--when-clean needs a deadline.", hint, "option.required")
    if num_ranks > 1:
        problem = f"--when-clean supports one process, not {num_ranks} ranks."
        hint = "Get the schedule in one process with --dry-run, and start the job at that time."
        raise conflict("--when-clean", problem, hint)
    if given["--pauses"] is not None and not is_kept:
        problem = "--pauses needs checkpoints, because a paused run resumes from a checkpoint."
        raise conflict("--pauses", problem, "Add --checkpoints FOLDER.", "option.required")
    pause_s, takes_s = (
        None if given[name] is None else parse_duration(name, given[name]) for name in ("--pauses", "--takes")
    )
    deadline_s = parse_moment("--by", given["--by"], time.time())
    idle_watts, is_dry = given["--idle-watts"], bool(given["--dry-run"])
    return LowCarbonOptions(source_named(source, kind), deadline_s, pause_s, takes_s, watts, idle_watts, is_dry)


def _refuse_alone(beside: dict[str, Any]) -> None:
    for option, value in beside.items():
        if value is not None:
            problem = f"{option} has no effect without --when-clean."
            raise conflict(option, problem, f"Add --when-clean, or remove {option}.", "option.required")


def _refuse_task_options(given: dict[str, Any]) -> None:
    """Refuse options of tasks for a function `setup(seed)`."""
    for option, value in given.items():
        if value is not None:
            problem = f"{option} needs a task, but a function was given."
            raise conflict(option, problem, f"Remove {option}.", "option.needs_task")


def _report_finished(found: dict[str, Any], kept: Any, record: Path | None) -> None:
    """Report on standard error that a resumed run had no step left."""
    begun = found.get("resumed_at_rows", found.get("resumed_at_samples"))
    if begun is not None and begun >= found.get("rows", found.get("samples")):
        print_error(
            f"This run was already finished after {found['steps']} steps, so no step was trained. Its checkpoints are "
            f"in {kept.path}" + (f", and its record is {record}." if record else "; no --record was named.")
        )


def _refuse_planning_with(plan_file: Path | None, adapt: str | None, memory: str | None) -> None:
    if plan_file is not None:
        refuse_adapt(adapt, "--plan")
        refuse_memory(memory)


def train(
    task: TaskName,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 100,
    plan_file: PlanFile = None,
    seed: Annotated[int, typer.Option(help="seed of weights and data order")] = 0,
    record: Record = None,
    track: Track = None,
    memory: Memory = None,
    adapt: Adapt = None,
    batch_size: TrialBatchSize = None,
    judged: Judged = None,
    ranks: Ranks = 1,
    dry_runs: Rehearse = True,
    energy_watts: EnergyWatts = None,
    carbon: Carbon = None,
    carbon_kind: CarbonKind = None,
    checkpoints: KeptIn = None,
    every: Every = None,
    resume: Resume = None,
    accept: Accept = None,
    nonfinite: NonFinite = "error",
    when_clean: WhenClean = None,
    by: By = None,
    pauses: Pauses = None,
    takes: Takes = None,
    idle_watts: IdleWatts = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a task, or the loop of a function, with a plan and evaluate it.

    A task may also be trained at a time of low carbon intensity (`--when-clean`).
    """
    from trimtab.api import Metering
    from trimtab.core.objective import Budget
    from trimtab.core.validation import one_of
    from trimtab.distributed.launch import launch
    from trimtab.distributed.process_group import job_position, process_group
    from trimtab.experiments.loop_training import LoopTraining
    from trimtab.experiments.task_plans import plan_task, ranks_of_job, task_of_rank
    from trimtab.experiments.train import require_trackers
    from trimtab.experiments.train_command import plan_of_run, train_or_tell
    from trimtab.tasks import Task, load_task_or_setup
    from trimtab.training.nonfinite import POLICIES

    here, limits = job_position(), Budget(memory)
    one_of("--nonfinite", nonfinite, POLICIES)
    grid = intensity(carbon, carbon_kind) if carbon or not when_clean else None
    loop, tracks = load_task_or_setup(task), tuple(track or ())
    own: dict[str, Any] = {"seed": seed, "record": record, "metering": Metering(energy_watts), "grid": grid}
    own |= {"tracks": tracks, "nonfinite": nonfinite}
    beside = {
        "--by": by,
        "--pauses": pauses,
        "--takes": takes,
        "--idle-watts": idle_watts,
        "--dry-run": dry_run or None,
    }
    planning: dict[str, Any] = {"file": plan_file, "budget": limits, "dry_runs": dry_runs}
    if not isinstance(loop, Task):
        _refuse_task_options({"--batch-size": batch_size, "--judged": judged, "--when-clean": when_clean})
        _refuse_alone(beside)
        name = task.rpartition(":")[2]
        if ranks_of_job(ranks) > 1:
            problem = f"--ranks needs a task, but {name} is a function setup(seed)."
            hint = "Call trimtab.start in your own script, and start it with torchrun."
            raise conflict("--ranks", problem, hint, "option.needs_task")
        kept = kept_in(name, checkpoints, every, resume, accept)
        require_record(record, kept, name, seed)
        require_trackers(tracks, record)
        _refuse_planning_with(plan_file, adapt, memory)
        trained = LoopTraining(loop, name, steps, checkpoints=kept, **own)
        made = plan_of_run(trained.plan, kept=kept, adapt=settings_to_adapt(adapt), **planning)
        with ProgressBar() as progress:
            found = trained.train(made, progress)
        _report_finished(found, kept, record)
        print_figures(found, as_json=as_json)
        return
    loaded = loop.shortened(batch_size=batch_size, judged_batches=judged)
    kept = kept_in(loaded.name, checkpoints, every, resume, accept)
    hours, num_ranks = None, ranks_of_job(ranks)  # Raises for another number of ranks than the launcher's.
    if when_clean is None:
        _refuse_alone(beside)
    else:
        of_run: dict[str, Any] = {"is_kept": kept is not None, "num_ranks": num_ranks}
        hours = low_carbon(when_clean, carbon_kind, beside, energy_watts, **of_run)
    require_record(*(None, None) if here.rank else (record, kept), loaded.name, seed)
    require_trackers(tracks, record)
    _refuse_planning_with(plan_file, adapt, memory)
    if ranks > 1 and here.num_ranks == 1:
        task_of_rank(loaded, ranks)
        launch(sys.argv[1:], ranks)
        return
    with process_group():
        make = partial(plan_task, replace(loaded, planned_samples=steps * loaded.batch_size))
        plan = partial(plan_of_run, make, kept=kept, adapt=settings_to_adapt(adapt), **planning)
        found = train_or_tell(loaded, steps, plan, hours, print_error, checkpoints=kept, **own)
    if here.rank == 0:
        _report_finished(found, kept, record)
        print_figures(found, as_json=as_json)
