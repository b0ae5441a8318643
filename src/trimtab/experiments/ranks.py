"""A task on several ranks: planned as one of them sees it, and shared between them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trimtab.core.codec import from_json, to_json
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.decide.ranks import replicated
from trimtab.distributed.launch import launch
from trimtab.distributed.process_group import from_first, place
from trimtab.tasks.task import Task


def task_of_rank(task: Task, num_ranks: int) -> Task:
    """Return a task as one of so many ranks sees it: its share of every batch, and of all rows.

    Raises:
        ValueGivenError: a batch has fewer rows than there are ranks.
    """
    if num_ranks > task.batch_rows:
        expected = f"{task.batch_rows} at the most, a row of each batch for every rank"
        raise ValueGivenError("--ranks", given=str(num_ranks), expected=expected)
    share = {name: -(-getattr(task, name) // num_ranks) for name in ("batch_rows", "budget_rows")}
    return replace(task, **share)


def plan_on_ranks(task: Task, make: Callable[[Task], Plan], num_ranks: int | None = None) -> Plan:
    """Return the plan of a job: rank 0 makes it for its share, the others get it; as it is where there is one process.

    Args:
        num_ranks: of a job that is still to be started; None: of this one.
    """
    ranks = place().num_ranks if num_ranks is None else num_ranks
    if ranks == 1:
        return make(task)

    def made() -> str:
        return to_json(replicated(make(task_of_rank(task, ranks)), ranks))

    return from_json(Plan, made() if num_ranks is not None else from_first(made))


def launch_with(plan: Plan, arguments: Sequence[str], num_ranks: int) -> None:
    """Run the command as so many ranks, all by one plan.

    Raises:
        RankError: as of `launch`.
    """
    with tempfile.TemporaryDirectory(prefix="trimtab-plan-") as folder:
        path = Path(folder) / "plan.json"
        path.write_text(to_json(plan), encoding="utf-8")
        launch([*arguments, "--plan", str(path)], num_ranks)
