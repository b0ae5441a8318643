"""Tasks on several ranks: number of ranks, equal tasks on all of them, and an error that ends all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from trimtab.core.errors import ValueGivenError
from trimtab.distributed.coordinator import ALONE, Coordinator, RankCoordinator
from trimtab.distributed.process_group import job_position
from trimtab.distributed.rank_consistency import digest, optimizer_facts, require_same_over_job
from trimtab.experiments.task_plans import task_of_rank
from trimtab.tasks.task import Task, TaskData


@contextlib.contextmanager
def job_ranks() -> Iterator[Coordinator]:
    """Yield the ranks of the job, or a single process; an error on any rank is raised on all ranks.

    Raises:
        RankError: another rank ended.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield ALONE
        return
    ranks = RankCoordinator()
    try:
        yield ranks
    except BaseException as error:
        _raise(ranks.ended(error), error)
    ranks.close()


def _raise(reason: BaseException, error: BaseException) -> NoReturn:
    if reason is error:
        raise error
    raise reason from error


def ranks_of_job(asked: int) -> int:
    """Return the number of ranks of a command: the launcher's world size, or the requested number.

    Raises:
        ValueGivenError: the requested number differs from the launcher's world size.
    """
    here = job_position().num_ranks
    if here > 1 and asked not in (1, here):
        raise ValueGivenError(
            "--ranks",
            problem=f"--ranks is {asked}, but the launcher started {here} processes.",
            hint=f"Remove --ranks, or start {asked} processes.",
            code="ranks.launcher_differs",
        )
    return max(asked, here)


def require_same_task(task: Task, data: TaskData) -> None:
    """Require equal data and an equal optimizer on all ranks. Collective: all ranks must call it.

    Raises:
        ValueGivenError: on every rank, with the differences and the ranks.
    """
    if job_position().num_ranks == 1:
        return
    own = {"samples": data.num_samples, "source": data.source.sha256, "values": digest(data.columns)}
    held_out = [each for batch in data.held_out for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]
    own |= {"held-out batches": len(data.held_out), "held-out values": digest(held_out)}
    hint = "Return the same data from load_data and the same optimizer from make_optimizer on every rank."
    require_same_over_job("task", own | _optimizer_facts(task), hint)


def _optimizer_facts(task: Task) -> dict[str, Any]:
    try:
        with torch.device("meta"):
            return optimizer_facts(task.make_optimizer(task.make_model()))
    except Exception:  # An optimizer that cannot be built on the meta device is compared when its run starts.
        return {}


def refuse_on_ranks(task: Task, num_ranks: int, *, adapts: bool = False, recipes: bool = False) -> None:
    """Raise an error if a comparison on several ranks includes unsupported options.

    Args:
        adapts, recipes: True if a tuned plan or recipes were requested.

    Raises:
        ValueGivenError: a batch has fewer samples than ranks, the task has a custom step, or a tuned plan or recipes
            were requested.
    """
    task_of_rank(task, num_ranks)
    if task.step is not None:
        raise ValueGivenError(
            "task.step",
            problem=f"Task {task.name} has a step function, which does not reduce gradients over {num_ranks} ranks.",
            hint="Remove --ranks; or remove task.step, and the baseline is the plain loop in DistributedDataParallel.",
            code="step.several_ranks",
        )
    asked = " and ".join(name for name, is_asked in (("--adapt", adapts), ("--against", recipes)) if is_asked)
    if asked:
        raise ValueGivenError(
            "--ranks",
            problem=f"On {num_ranks} ranks only the baseline and an equivalent plan are compared, so {asked} cannot be "
            "used.",
            hint=f"Remove {asked}, or --ranks.",
            code="option.conflict",
        )
