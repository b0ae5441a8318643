"""Command `train`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from trimtab.cli.carbon_options import By, DryRun, IdleWatts, Pauses, Takes, WhenClean, clean_hours
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
    Ranks,
    Record,
    Rehearse,
    Resume,
    TaskName,
    Track,
    TrialBatchSize,
    intensity,
    kept_in,
    refuse_adapt,
    refuse_memory,
    require_record,
    settings_to_adapt,
)
from trimtab.cli.output import print_error, print_figures


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
    as_json: Json = False,
) -> None:
    """Train a task with a plan and evaluate it, immediately or at a time of low carbon intensity (`--when-clean`)."""
    from trimtab.api import Metering
    from trimtab.core.objective import Budget
    from trimtab.core.validation import one_of
    from trimtab.distributed.launch import launch
    from trimtab.distributed.process_group import job_position, process_group
    from trimtab.experiments.task_ranks import ranks_of_job, task_of_rank
    from trimtab.experiments.train_command import plan_of_run, train_or_tell
    from trimtab.experiments.train_record import require_trackers
    from trimtab.tasks import load_task
    from trimtab.training.nonfinite import POLICIES

    here, limits = job_position(), Budget(memory)
    one_of("--nonfinite", nonfinite, POLICIES)
    grid = intensity(carbon, carbon_kind) if carbon or not when_clean else None
    loaded = load_task(task).shortened(batch_size=batch_size, judged_batches=judged)
    kept, tracks = kept_in(loaded.name, checkpoints, every, resume, accept), tuple(track or ())
    hours = clean_hours(
        when_clean,
        carbon_kind,
        by,
        pauses=pauses,
        takes=takes,
        watts=energy_watts,
        idle_watts=idle_watts,
        is_dry=dry_run,
        is_kept=kept is not None,
        num_ranks=ranks_of_job(ranks),
    )
    require_record(*(None, None) if here.rank else (record, kept), loaded.name, seed)
    require_trackers(tracks, record)
    if plan_file is not None:
        refuse_adapt(adapt, "--plan")
        refuse_memory(memory)
    if ranks > 1 and here.num_ranks == 1:
        task_of_rank(loaded, ranks)
        launch(sys.argv[1:], ranks)
        return
    with process_group():
        made = partial(
            plan_of_run,
            loaded,
            steps,
            file=plan_file,
            kept=kept,
            budget=limits,
            adapt=settings_to_adapt(adapt),
            dry_runs=dry_runs,
        )
        found = train_or_tell(
            loaded,
            steps,
            made,
            hours,
            print_error,
            checkpoints=kept,
            seed=seed,
            record=record,
            metering=Metering(energy_watts),
            grid=grid,
            tracks=tracks,
            nonfinite=nonfinite,
        )
    if here.rank == 0:
        print_figures(found, as_json=as_json)
