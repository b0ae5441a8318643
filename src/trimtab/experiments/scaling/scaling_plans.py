"""Plan of a scaling job: made from a rank's shard, chosen under a limit, or given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trimtab.core.errors import InfeasibleError, RankError, ValueGivenError
from trimtab.core.files import read_text
from trimtab.core.objective import Budget
from trimtab.core.plan import Plan
from trimtab.core.progress import Progress, silent
from trimtab.core.serialization import from_json, read_json, to_json, write_whole
from trimtab.distributed.plan_on_ranks import BroadcastPlan, plan_together
from trimtab.distributed.process_group import first_ended_by, from_first, job_position
from trimtab.experiments.task_plans import make_plans
from trimtab.experiments.task_ranks import plan_on_ranks, rehearsal_of
from trimtab.planner.multi_rank_plan import for_one_process, for_replicas
from trimtab.profiling.communication_profile import step_shape
from trimtab.tasks.task import Task, TaskData


@dataclass(frozen=True)
class JobPlan:
    """A job's plan, or None with the reason if no plan meets the limit. A JSON value."""

    plan: Plan | None
    refusal: str = ""


def plan_of_job(share: Task, data: TaskData, device: torch.device, folder: Path) -> JobPlan:
    """Return the plan of the current ranks, without limits. Collective: all ranks must call it.

    Args:
        share: the task as seen from a rank.
        data: data of the task.
        device: device of the rank.
        folder: folder of plans, see `plan_maker`.
    """
    make = plan_maker(share, data, device, folder)
    if job_position().num_ranks == 1:
        return JobPlan(make().plan)
    return JobPlan(plan_together(make, device, lambda: rehearsal_of(share, device, silent)))


def plan_maker(share: Task, data: TaskData, device: torch.device, folder: Path) -> Callable[[], BroadcastPlan]:
    """Return a function that makes the plan of a rank's shard, or reads the plan of an earlier job."""
    path = folder / f"plan-{share.batch_size}.json"

    def make() -> BroadcastPlan:
        if not path.exists():
            plans = make_plans(share, data, device, adapt=(), strong=False, progress=lambda *_: None)
            with torch.device("meta"):
                model = share.make_model()
            plan = plans.plans["equivalent"]
            write_whole(
                path, to_json(BroadcastPlan(plan, step_shape(model, plans.profiles["equivalent"], plan)), indent=1)
            )
        return read_json(BroadcastPlan, path)

    return make


def plan_within_limit(budget: Budget, whole: Task, rows: int, folder: Path, progress: Progress) -> JobPlan:
    """Return the plan chosen under a limit, including the ZeRO stage. Collective: all ranks must call it.

    Jobs with the same number of ranks and samples share the plan of the first job.

    Args:
        budget: the limits.
        whole: the task over all ranks.
        rows: samples per batch and rank.
        folder: folder of plans.
        progress: receives progress messages.
    """
    here = job_position()
    path = folder / f"plan-{rows}-{here.num_ranks}.json"
    text = from_first(lambda: read_text(path, "a plan's JSON file") if path.exists() else "")
    if text:
        return from_json(JobPlan, text)
    found = _chosen(budget, whole, progress)
    if here.rank == 0:
        write_whole(path, to_json(found, indent=1))
    return found


def _chosen(budget: Budget, whole: Task, progress: Progress) -> JobPlan:
    try:
        return JobPlan(plan_on_ranks(whole, budget, (), progress))
    except InfeasibleError as error:
        return JobPlan(None, error.reason)
    except RankError as error:
        if not first_ended_by(error, InfeasibleError):
            raise
        return JobPlan(None, error.reason)


def fit_plan_to_ranks(plan: Plan, rows: int, ranks: int) -> Plan:
    """Return a given plan's settings for a number of ranks and samples per rank.

    The plan is unchanged if both numbers match; otherwise its predictions and measurements are dropped. The
    micro-batch
    size is kept if the plan splits the batch. A single rank uses the same settings without sharding.
    """
    if (plan.batch_size, plan.num_ranks) == (rows, ranks):
        return plan
    size = min(int(plan.micro_batch.value or 1), rows) if plan.splits else rows
    micro = replace(plan.micro_batch, value=size, changed=size < rows)
    found = replace(plan, batch_size=rows, micro_batch=micro, predicted=None, measured=None, stages=())
    if ranks == 1:
        return for_one_process(found) if found.num_ranks > 1 else found
    return replace(found, num_ranks=ranks) if found.num_ranks > 1 else for_replicas(found, ranks)


def refuse_other_maths(plan: Plan | None) -> None:
    """Raise an error if a given plan is tuned, because it would be timed next to equivalent plans.

    Raises:
        ValueGivenError: the plan is tuned.
    """
    if plan is not None and plan.plan_kind != "equivalent":
        raise ValueGivenError(
            "--plan",
            problem=f"The plan is not an equivalent plan: it changes {plan.changes_in_words}.",
            hint="Make a plan without --adapt.",
            code="plan.not_equivalent",
        )


def predicted_bytes(plan: Plan) -> int | None:
    """Return the predicted peak bytes of a rank; None if unknown or predicted for a single process.

    A plan chosen among ZeRO stages has no single-process baseline.
    """
    if plan.predicted is None or (plan.num_ranks > 1 and plan.baseline is not None):
        return None
    return plan.predicted.peak_bytes
