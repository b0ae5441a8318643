"""Plans for a task: tier S, tier F, and one made for the strong peer; each on a fresh model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from trimtab import api
from trimtab.api import FREED, Metering, default_rule, profile
from trimtab.calibrate.adapting import TRAINED, RunLength, adapted, require_rate
from trimtab.calibrate.subject import Subject
from trimtab.calibrate.tracing import MIN_ROWS
from trimtab.core.energy import Energy, summed
from trimtab.core.errors import InfeasibleError, ValueGivenError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.core.plan import Plan
from trimtab.core.profile import Profile
from trimtab.decide.planner import choose
from trimtab.experiments.planning_energy import PlanningMeter
from trimtab.recipes.loop import move
from trimtab.recipes.strong import StrongLoop
from trimtab.runtime.muon import hidden_matrices
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task, TaskData

# Planning data is drawn with a seed that no race uses.
PLANNING_SEED = 2**31 - 1


@dataclass(frozen=True)
class Plans:
    """Tier ("S", "F", "strong") -> plan, the profiles behind them, and what was drawn meanwhile. A JSON value.

    Args:
        energy: of what `Plan.planning_s` is the seconds of; of none where planning was not metered.
    """

    plans: Mapping[str, Plan]
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    energy: Mapping[str, Energy] = field(default_factory=dict)

    @property
    def device(self) -> DeviceSpec | None:
        """What they were made on; None where a plan was given."""
        return self.profiles["S"].device if "S" in self.profiles else None


def given_plan(task: Task, plan: Plan, num_ranks: int = 1) -> Plans:
    """Return a plan that was made before as what a task's comparison races.

    Args:
        task: as one of so many ranks sees it.

    Raises:
        ValueGivenError: it is not for this task's batch or so many ranks, or may change more than the maths allow.
    """
    require_fits(task, plan, num_ranks)
    if plan.tier != "S":
        raise ValueGivenError(
            "plan",
            given=f"a plan of tier {plan.tier}, which changes {plan.changes_in_words}",
            expected="one that keeps the maths",
            way_out="Leave --plan out, with --adapt for tier F.",
        )
    return Plans({"S": plan})


def require_fits(task: Task, plan: Plan, num_ranks: int = 1) -> None:
    """Raise where a plan that was made before is not for this.

    Args:
        task: as one of so many ranks sees it.

    Raises:
        ValueGivenError: it is not for this task's batch or so many ranks.
    """
    if plan.num_ranks != num_ranks:
        given, way_out = f"a plan for {plan.num_ranks} ranks", f"compare --ranks {plan.num_ranks} races it."
        raise ValueGivenError("plan", given=given, expected=f"one for {num_ranks}", way_out=way_out)
    if plan.batch_rows != task.batch_rows:
        given = f"a plan for {plan.batch_rows} rows per step"
        name = task.name if num_ranks == 1 else f"{task.name} on each of {num_ranks} ranks"
        raise ValueGivenError("plan", given=given, expected=f"one for the {task.batch_rows} of {name}")


def make_plans(
    task: Task,
    data: TaskData,
    device: torch.device,
    *,
    adapt: Collection[str],
    strong: bool,
    budget: Budget | None = None,
    objective: Objective | None = None,
    traces: bool = False,
    metering: Metering | None = None,
    progress: Callable[[str], None],
) -> Plans:
    """Profile and decide, as a user of the task would; returns the plans with their profiles.

    Args:
        adapt: what tier F may change, of `ADAPTATIONS`; nothing: there is no tier F. strong: whether a plan is made
            for the strong recipe too, where the task has one. budget, objective: of every plan that is made. traces,
            metering: as in `profile`.

    Raises:
        InfeasibleError: the budget is met by no settings of the task's loop, or of the strong recipe.
    """
    require_rate(adapt)
    meter = PlanningMeter(device, metering)
    progress = meter.heard(progress)
    limits = _Limits(budget or Budget(), objective or Objective(), meter.metering, progress)
    subject, batches = _subject(task, data, device, adapt)
    how = {"frees_batch": "batch" in adapt, "traces": traces}
    (base, found), spent = meter.counted(lambda: _same_maths(task, data, subject, limits, **how))
    plans, profiles, energy = {"S": base}, {"S": found}, {"S": spent}
    if adapt:
        searched = (subject, base, adapt, batches, progress, _length(task, data), limits.budget)
        plans["F"], spent = meter.counted(lambda: _freed(*searched))
        energy["F"] = summed((energy["S"], spent), in_turn=True) if TRAINED & set(adapt) else energy["S"]
    if strong and task.strong is not None:
        made, energy["strong"] = meter.counted(lambda: _for_strong(task, device, subject.batch, limits))
        plans["strong"], profiles["strong"] = made
    return Plans(plans, profiles, energy)


@dataclass(frozen=True)
class _Limits:
    """What every plan of a comparison is made under, whichever loop it is for."""

    budget: Budget
    objective: Objective
    metering: Metering | None
    progress: Callable[[str], None]

    def profile(self, subject: Subject, reference: Reference, **how: Any) -> Profile:
        """Return the profile of a loop."""
        loop = (subject.model, subject.optimizer, subject.loss_fn, subject.batch)
        under = {"budget": self.budget, "objective": self.objective, "metering": self.metering}
        return profile(*loop, reference=reference, progress=self.progress, **under, **how)

    def chosen(self, found: Profile) -> Plan:
        """Return the plan of a profile; weights are as the profile could measure them."""
        return choose(found, found.objective, self.budget)


def _subject(task: Task, data: TaskData, device: torch.device, adapt: Collection[str]) -> tuple[Subject, Iterator[Any]]:
    """Return the task's loop as it is planned for, on a first batch, and the batches after it.

    Raises:
        UsageError: the model has nothing that Muon could step, before anything is measured.
    """
    torch.manual_seed(PLANNING_SEED)
    model = task.make_model().to(device).train()
    optimizer = task.make_optimizer(model)
    if "optimizer" in adapt:
        hidden_matrices(model, optimizer)
    batches = data.batches(PLANNING_SEED, task.batch_rows)
    return Subject(model, optimizer, task.loss_fn, move(next(batches), device)), batches


class _Epochs:
    """Batches of a task that can begin again: planning draws nothing from an iterator."""

    def __init__(self, data: TaskData, batch_rows: int) -> None:
        self._data, self._batch_rows = data, batch_rows

    def __iter__(self) -> Iterator[Any]:
        return self._data.batches(PLANNING_SEED, self._batch_rows)


def _same_maths(
    task: Task, data: TaskData, subject: Subject, limits: _Limits, *, frees_batch: bool, traces: bool
) -> tuple[Plan, Profile]:
    """Return the plan of tier S and the profile behind it."""
    how = {
        "data": _Epochs(data, task.batch_rows),
        "total_steps": task.planned_steps,
        "frees_batch": frees_batch,
        "traces": traces,
    }
    found = limits.profile(subject, task.reference, **how)
    return limits.chosen(found), found


def _freed(
    subject: Subject,
    base: Plan,
    adapt: Collection[str],
    batches: Iterator[Any],
    progress: Callable[[str], None],
    length: RunLength,
    budget: Budget,
) -> Plan:
    """Return the plan of tier F: what is found by training first, then the batch."""
    plan = adapted(subject, base, adapt, batches, progress, length, budget) if TRAINED & set(adapt) else base
    return plan.freed(default_rule(plan), FREED) if "batch" in adapt else plan


def _length(task: Task, data: TaskData) -> RunLength:
    """Return how long the run is: what is adapted may train on fewer rows than the loop that it is compared with."""
    rows = task.planned_rows or task.adapted_rows or task.budget_rows
    return RunLength(-(-rows // task.batch_rows), task.planned_steps * task.batch_rows / data.num_rows)


def _for_strong(task: Task, device: torch.device, batch: Any, limits: _Limits) -> tuple[Plan, Profile]:
    """Return the plan for the strong recipe, under the limits of the others; the recipe itself stays as it is.

    Raises:
        InfeasibleError: no settings of that recipe meet the limits.
    """
    recipe = task.strong
    assert recipe is not None
    steps = -(-(task.planned_rows or recipe.budget_rows) // task.batch_rows)
    with closing(StrongLoop(task, device)) as peer:  # its precision is the process's, not for what comes after
        subject = Subject(peer.model, peer.optimizer, peer.loss_fn, batch)
        found = limits.profile(subject, Reference(recipe.precision, recipe.clip_norm), total_steps=steps)
    try:
        return limits.chosen(found), found
    except InfeasibleError as error:
        given = f"for the strong recipe (P2) {error.given}"
        way_out = f"{error.way_out} Or leave strong out: --against names the peers that take part.".strip()
        raise InfeasibleError(error.field, given=given, expected=error.expected, way_out=way_out) from error


def profile_here(
    task: Task,
    budget: Budget,
    objective: Objective,
    progress: Callable[[str], None],
    total_steps: int | None = None,
) -> Profile:
    """Return a task's profile on this machine, under limits that no settings need to meet."""
    device = device_here()
    torch.manual_seed(PLANNING_SEED)
    model, batches = task.make_model().to(device).train(), _Epochs(task.load_data(), task.batch_rows)
    loop = (model, task.make_optimizer(model), task.loss_fn, move(next(iter(batches)), device))
    given = {"budget": budget, "objective": objective, "reference": task.reference, "total_steps": total_steps}
    return profile(*loop, data=batches, progress=progress, **given)


def loop_of(task: Task, kind: str) -> tuple[Any, ...]:
    """Return a task's model, optimizer, loss and a batch that can be traced, on a kind of device."""
    torch.manual_seed(PLANNING_SEED)
    model = task.make_model().to(kind).train()
    return model, task.make_optimizer(model), task.loss_fn, move(example_batch(task), torch.device(kind))


def profile_there(
    task: Task, device: str, *, budget: Budget, objective: Objective, progress: Callable[[str], None]
) -> Profile:
    """Return a task's profile for a device that is not here; of a batch of few rows by one that can be traced."""
    torch.manual_seed(PLANNING_SEED)
    model = task.make_model().train()
    loop = (model, task.make_optimizer(model), task.loss_fn, example_batch(task))
    given = {"rows": task.batch_rows, "budget": budget, "objective": objective, "reference": task.reference}
    return api.profile_there(*loop, device, progress=progress, **given)


def example_batch(task: Task) -> Any:
    """Return a batch as a trace needs it, of more rows than the task's where these cannot be cut.

    Of its shapes alone where the task can make one, so that no data has to be there.
    """
    rows = max(task.batch_rows, 2 * (MIN_ROWS - 1))
    return next(task.load_data().batches(PLANNING_SEED, rows)) if task.example is None else task.example(rows)
