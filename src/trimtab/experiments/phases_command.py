"""`trimtab phases`: attribution of a plan's gain to phases, for measured or recorded tasks."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.progress import Progress, silent
from trimtab.core.serialization import read_json
from trimtab.distributed.coordinator import Coordinator
from trimtab.distributed.launch import launch
from trimtab.distributed.process_group import job_position, process_group
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.comparison_context import comparison_ranks
from trimtab.experiments.gain_timing import measure_gain
from trimtab.experiments.phase_result import PhaseResult, merge_results
from trimtab.experiments.progress_bar import ProgressBar
from trimtab.experiments.task_plans import given_plan, make_plans
from trimtab.experiments.task_ranks import job_plans, ranks_of_job, refuse_on_ranks, require_same_task, task_of_rank
from trimtab.planner.multi_rank_plan import for_replicas
from trimtab.plans.plan import Plan
from trimtab.tasks import load_task
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task, TaskData


@dataclass(frozen=True)
class PhasesRequest:
    """The command's options; `sources` are tasks, folders of comparisons, or files written with `--out`."""

    sources: tuple[str, ...]
    memory: str | None = None
    plan: Path | None = None
    rounds: int | None = None
    ranks: int = 1

    def given(self) -> Plan | None:
        """Return the plan read from the given file, or None.

        Raises:
            ValueGivenError: the plan is combined with a memory limit or several tasks.
        """
        if self.plan is None:
            return None
        if self.memory is not None:
            raise ValueGivenError(
                "--memory",
                problem=f"--memory {self.memory} cannot be combined with --plan, because the plan was made before.",
                hint="Pass --memory to `trimtab plan`, or remove --plan.",
                code="option.conflict",
            )
        if len(self.sources) > 1:
            raise ValueGivenError(
                "--plan",
                problem=f"--plan applies to one task, but {len(self.sources)} sources were given.",
                hint="Pass only the task that the plan was made for.",
                code="plan.several_tasks",
            )
        return read_json(Plan, self.plan)

    def require_tasks(self, tasks: Collection[str]) -> None:
        """Raise an error if measurement options are given without a task to measure.

        Raises:
            ValueGivenError: an option needs a task.
        """
        of = {"--memory": self.memory, "--plan": self.plan, "--rounds": self.rounds}
        of["--ranks"] = None if self.ranks == 1 else self.ranks
        asked = [name for name, value in of.items() if value is not None]
        if asked and not tasks:
            raise ValueGivenError(
                asked[0],
                problem=f"{asked[0]} applies to measurements, but {' and '.join(self.sources)} are recorded results.",
                hint=f"Remove {asked[0]}, or pass a task to measure.",
                code="option.conflict",
            )

    def recorded(self) -> dict[str, PhaseResult]:
        """Return recorded results, by source.

        Raises:
            FormatError: a file has the wrong format.
            ValueGivenError: a comparison has no phase timing.
        """
        paths = {source: Path(source) for source in self.sources}
        return {source: _recorded(path) for source, path in paths.items() if path.is_dir() or path.suffix == ".json"}


def _recorded(path: Path) -> PhaseResult:
    if not path.is_dir():
        return read_json(PhaseResult, path)
    found = read_json(Comparison, path / "report.json")
    if found.gain is None:
        raise ValueGivenError(
            "source",
            problem=f"The comparison in {path} has no phase times.",
            hint="Repeat it without --quick, or pass the task to measure its phases now.",
            code="phases.not_measured",
        )
    return PhaseResult((found.gain,), (found.thirds,))


def phases_of(asked: PhasesRequest) -> PhaseResult | None:
    """Return the gains of all sources by phase; None if another process returns them."""
    given, here, recorded = asked.given(), job_position(), asked.recorded()
    tasks = {source: load_task(source) for source in asked.sources if source not in recorded}
    asked.require_tasks(tasks)
    num_ranks = ranks_of_job(asked.ranks)
    if num_ranks > 1:
        for task in tasks.values():
            refuse_on_ranks(task, num_ranks)
    if num_ranks > here.num_ranks and tasks:
        launch(sys.argv[1:], num_ranks)
        return None
    with process_group(), ProgressBar() as progress, comparison_ranks() as ranks:
        told = progress if here.rank == 0 else silent
        pages = [
            recorded[source] if source in recorded else _measured(tasks[source], asked, given, told, ranks)
            for source in asked.sources
        ]
    return merge_results(pages) if here.rank == 0 else None


def _measured(
    task: Task, asked: PhasesRequest, given: Plan | None, progress: Progress, ranks: Coordinator
) -> PhaseResult:
    device, data = device_here(), ranks.in_turn(task.load_data)
    require_same_task(task, data)
    plan = _plan(task, data, device, Budget(asked.memory), given, progress, ranks)
    how: dict[str, Any] = {"rounds": asked.rounds, "progress": progress, "together": ranks}
    return PhaseResult((measure_gain(task, data, device, plan, **how),), ((),))


def _plan(
    task: Task,
    data: TaskData,
    device: torch.device,
    budget: Budget,
    given: Plan | None,
    progress: Progress,
    ranks: Coordinator,
) -> Plan:
    """Return the equivalent plan to measure, on all ranks."""
    number = ranks.num_ranks
    if given is not None:
        return given_plan(task_of_rank(task, number), for_replicas(given, number), number).plans["equivalent"]
    if number > 1:
        return job_plans(task, budget, Objective(), progress, ranks).plans["equivalent"]
    return make_plans(task, data, device, adapt=(), strong=False, budget=budget, progress=progress).plans["equivalent"]
