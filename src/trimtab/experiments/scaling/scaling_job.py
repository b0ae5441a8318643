"""A job of a scaling table: the plain loop and the plans, timed alternately on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import Link
from trimtab.core.progress import Progress
from trimtab.distributed.bandwidth_test import calibrate
from trimtab.distributed.cpu_affinity import oversubscribed_resource
from trimtab.distributed.process_group import job_position
from trimtab.experiments.scaling.scaling_bench import Bench, JobSettings
from trimtab.experiments.scaling.scaling_plans import JobPlan, fit_plan_to_ranks, plan_of_job, plan_within_limit
from trimtab.experiments.scaling.scaling_result import RefusedRecipe, ScalingJob, TimedArm
from trimtab.experiments.task_ranks import require_same_task, task_of_rank
from trimtab.measure.machine import environment
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task, TaskData


def run_job(task: Task, number: int, folder: Path, settings: JobSettings, progress: Progress) -> ScalingJob | None:
    """Time a task on the current ranks, and return the job on rank 0. Collective: all ranks must call it.

    Args:
        task: the task.
        number: number of the round.
        folder: folder of plans, shared by jobs with the same number of samples per rank.
        settings: options of the job.
        progress: receives progress messages.
    """
    here, data = job_position(), task.load_data()
    require_same_task(task, data)
    device = device_here()
    arms: list[TimedArm] = []
    refused: list[RefusedRecipe] = []
    for mode in settings.modes if here.num_ranks > 1 else ("weak",):
        whole = replace(task, batch_size=task.batch_size * here.num_ranks) if mode == "weak" else task
        share = task if mode == "weak" else task_of_rank(task, here.num_ranks)
        progress(f"planning for {share.batch_size} samples per rank")
        found = _planned(whole, share, data, device, folder, settings, progress)
        bench = Bench(whole, data, device, mode, number, settings, progress)
        arms += bench.arms(found.plan)
        refused += bench.refused
        refused += [] if found.plan is not None else [RefusedRecipe("plan", mode, here.num_ranks, found.refusal)]
    # Once per number of ranks, because a slow link takes seconds.
    link = _link(device) if here.num_ranks > 1 and not number else None
    shared = oversubscribed_resource()
    if here.rank:
        return None
    how = {"threads": torch.get_num_threads(), "device": device.type, "refused": tuple(refused)}
    return ScalingJob(here.num_ranks, number, tuple(arms), shared, link, **how, environment=environment())


def _planned(
    whole: Task,
    share: Task,
    data: TaskData,
    device: torch.device,
    folder: Path,
    settings: JobSettings,
    progress: Progress,
) -> JobPlan:
    if settings.plan is not None:
        return JobPlan(fit_plan_to_ranks(settings.plan, share.batch_size, job_position().num_ranks))
    if settings.budget.memory_bytes is not None:
        return plan_within_limit(settings.budget, whole, share.batch_size, folder, progress)
    return plan_of_job(share, data, device, folder)


def _link(device: torch.device) -> Link | None:
    try:
        return calibrate(device).link
    except ValueGivenError:  # Unusable link times: the table is made without a link.
        return None
