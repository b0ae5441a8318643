"""The command that trains: train."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import (
    Adapt,
    Carbon,
    CarbonKind,
    EnergyWatts,
    Json,
    Memory,
    PlanFile,
    Ranks,
    Rehearse,
    TaskName,
    adaptation,
    intensity,
    refuse_adapt,
    refuse_memory,
    require_new,
)
from trimtab.cli.printing import print_json
from trimtab.experiments.progress_bar import ProgressBar


def train(
    task: TaskName,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 100,
    plan_file: PlanFile = None,
    seed: Annotated[int, typer.Option(help="weights and data order")] = 0,
    record: Annotated[Path | None, typer.Option(help="write a line per step (JSON lines, a new file)")] = None,
    memory: Memory = None,
    adapt: Adapt = None,
    rows: Annotated[int | None, typer.Option(min=1, help="rows a step, in place of the task's: a trial run")] = None,
    judged: Annotated[int | None, typer.Option(min=1, help="held-out batches to judge by; all by default")] = None,
    ranks: Ranks = 1,
    rehearse: Rehearse = True,
    energy_watts: EnergyWatts = None,
    carbon: Carbon = None,
    carbon_kind: CarbonKind = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="folder that the run is kept in, and gone on from (see --resume)")
    ] = None,
    every: Annotated[int | None, typer.Option(min=1, help="steps between checkpoints; without it, ten minutes")] = None,
    resume: Annotated[
        str, typer.Option(help="auto: from the newest checkpoint that is whole; always: there must be one; never")
    ] = "auto",
    accept: Annotated[
        str | None, typer.Option(help="what may have changed since: torch,threads,device,fp32,plan,data")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a task through a plan, and evaluate it."""
    from trimtab.api import Metering
    from trimtab.checkpoint.settings import Checkpoints
    from trimtab.core.codec import read_json
    from trimtab.core.objective import Budget
    from trimtab.core.plan import Plan
    from trimtab.decide.ranks import replicated
    from trimtab.distributed.launch import launch
    from trimtab.distributed.process_group import joined, place
    from trimtab.experiments.ranks import plan_on_ranks, task_of_rank
    from trimtab.experiments.train import train_task
    from trimtab.tasks import load_task

    here, limits, grid = place(), Budget(memory), intensity(carbon, carbon_kind)
    loaded = load_task(task).shortened(batch_rows=rows, judged_batches=judged)
    kept = None
    if checkpoints is not None:
        accepts = () if accept is None else tuple(name.strip() for name in accept.split(","))
        kept = Checkpoints(checkpoints, every, None if every else 600.0, resume=resume, accepts=accepts)
    require_new(None if here.rank or kept else record)
    if plan_file is not None:
        refuse_adapt(adapt, "--plan")
        refuse_memory(memory)
    if ranks > 1 and here.num_ranks == 1:
        task_of_rank(loaded, ranks)
        launch(sys.argv[1:], ranks)
        return
    with joined():
        saved = None if kept is None or plan_file is not None else kept.saved_plan()
        if saved is not None:
            chosen = saved
        elif plan_file is None:
            with ProgressBar() as progress:
                asked = replace(loaded, planned_rows=steps * loaded.batch_rows)
                chosen = plan_on_ranks(asked, limits, adaptation(adapt), progress, rehearse=rehearse)
        else:
            chosen = replicated(read_json(Plan, plan_file), here.num_ranks)
        with ProgressBar() as progress:
            how = {"metering": Metering(energy_watts), "checkpoints": kept, "progress": progress, "grid": grid}
            found = train_task(loaded, chosen, steps=steps, seed=seed, record=record, **how)
    if here.rank == 0:
        print_json(found) if as_json else typer.echo("\n".join(f"{key}: {value}" for key, value in found.items()))
