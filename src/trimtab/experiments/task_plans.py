"""Plans of a task: equivalent, tuned, and for the hand-tuned recipe; each on a fresh model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from trimtab import api
from trimtab.api import FREED, Metering, default_rule, find_meter, profile
from trimtab.core.energy_reading import Energy, PowerLimit, Provenance, sum_energy
from trimtab.core.errors import InfeasibleError, ValueGivenError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.energy.energy_meter import EnergyClock, GivenWatts, Meter, MeterLost
from trimtab.experiments.baselines.loop import move
from trimtab.experiments.baselines.strong import StrongLoop
from trimtab.planner.plan_choice import choose
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile
from trimtab.profiling.candidate_traces import MIN_SAMPLES
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.profiling.training_settings_search import TRAINED, RunLength, require_rate, tune_plan
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task, TaskData
from trimtab.techniques.muon import hidden_matrices

# Energy of planning, counted alongside trials with their own power readings.

# Several readers of a meter. A meter reports a loss once, so a reader forwards the loss to all readers.


class Reader:
    """A reader of a shared meter, itself a meter; created by `readers_of`. Readers must run in the same thread."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._others: tuple[Reader, ...] = ()
        self._missed = ""  # a loss reported to another reader but not yet to this one
        self.provenance: Provenance = meter.provenance
        self.sources: tuple[str, ...] = tuple(meter.sources)
        self.period_s: float = meter.period_s
        self.uncounted: tuple[str, ...] = tuple(getattr(meter, "uncounted", ()))

    def beside(self, others: tuple[Reader, ...]) -> None:
        """Set the other readers of the meter."""
        self._others = others

    def limits(self) -> tuple[PowerLimit, ...]:
        """Return the meter's power limits."""
        return tuple(self._meter.limits()) if hasattr(self._meter, "limits") else ()

    def joules(self) -> float:
        """Return the energy in joules. Errors of the meter are raised unchanged.

        Raises:
            MeterLost: The energy is unknown, or was unknown at a reading by another reader.
        """
        try:
            found = self._meter.joules()
        except Exception as error:
            for other in self._others:
                other._missed = str(error) or "the meter could not be read"
            raise
        if self._missed:
            missed, self._missed = self._missed, ""
            raise MeterLost(missed)
        return found


def readers_of(meter: Meter, number: int) -> tuple[Reader, ...]:
    """Return `number` readers of a meter, each of which receives every loss."""
    readers = tuple(Reader(meter) for _ in range(number))
    for reader in readers:
        reader.beside(tuple(other for other in readers if other is not reader))
    return readers


T = TypeVar("T")


class PlanningMeter:
    """Counts the energy of parts of planning.

    The meter is read at progress messages; a meter that needs more frequent reads gives no figures.

    Attributes:
        metering: the metering for planning itself; a user's meter is split between both readers.
    """

    def __init__(self, device: torch.device, metering: Metering | None) -> None:
        given = metering or Metering()
        self._meter = find_meter(device, given).meter
        # Given watts can be read twice without loss.
        if given.meter is not None and not isinstance(given.meter, GivenWatts):
            self._meter, theirs = readers_of(given.meter, 2)
            given = replace(given, meter=theirs)
        self.metering = given
        self._clock = EnergyClock(self._meter)

    def heard(self, progress: Callable[[str], None]) -> Callable[[str], None]:
        """Return a progress callback that also reads the meter."""

        def said(text: str) -> None:
            self._clock.tick()
            progress(text)

        return said

    def counted(self, make: Callable[[], T]) -> tuple[T, Energy]:
        """Return the result of `make` with the energy spent on it."""
        self._clock = EnergyClock(self._meter)
        self._clock.start()
        made = make()
        return made, self._clock.read()


# Planning draws data with a seed unused by the paired runs.
PLANNING_SEED = 2**31 - 1


@dataclass(frozen=True)
class Plans:
    """Plans by kind ("equivalent", "tuned", "strong"), with profiles and the energy of planning. A JSON value.

    Args:
        plans: plan by kind.
        profiles: profile by kind; empty for a given plan.
        energy: energy of planning over the seconds in `Plan.planning_s`, by kind; empty without metering.
    """

    plans: Mapping[str, Plan]
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    energy: Mapping[str, Energy] = field(default_factory=dict)

    @property
    def device(self) -> DeviceSpec | None:
        """The device of the profile; None for a given plan."""
        return self.profiles["equivalent"].device if "equivalent" in self.profiles else None


def given_plan(task: Task, plan: Plan, num_ranks: int = 1) -> Plans:
    """Return an existing plan as the equivalent plan of a comparison.

    Args:
        task: the task as seen from a rank.
        plan: the existing plan.
        num_ranks: number of ranks.

    Raises:
        ValueGivenError: the plan has another batch size or number of ranks, or is not an equivalent plan.
    """
    require_fits(task, plan, num_ranks)
    if plan.plan_kind != "equivalent":
        raise ValueGivenError(
            "plan",
            problem=f"The plan is not an equivalent plan: it changes {plan.changes_in_words}.",
            hint="Remove --plan and use --adapt to compare a tuned plan.",
            code="plan.not_equivalent",
        )
    return Plans({"equivalent": plan})


def require_fits(task: Task, plan: Plan, num_ranks: int = 1) -> None:
    """Raise an error if an existing plan does not match the task.

    Args:
        task: the task as seen from a rank.
        plan: the existing plan.
        num_ranks: number of ranks.

    Raises:
        ValueGivenError: the plan has another batch size or number of ranks.
    """
    if plan.num_ranks != num_ranks:
        raise ValueGivenError(
            "plan",
            problem=f"The plan is for {plan.num_ranks} rank(s), but the command runs on {num_ranks}.",
            hint=f"Add --ranks {plan.num_ranks}, or use a plan for {num_ranks} rank(s).",
            code="plan.ranks_differ",
        )
    if plan.batch_size != task.batch_size:
        name = task.name if num_ranks == 1 else f"{task.name} on each of {num_ranks} ranks"
        raise ValueGivenError(
            "plan",
            problem=f"The plan is for {plan.batch_size} samples per step, but {name} has {task.batch_size}.",
            hint=f"Make a plan with `trimtab plan` for {task.name}.",
            code="plan.batch_differs",
        )


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
    """Profile the task's loop and choose plans; return the plans with their profiles.

    Args:
        task: the task.
        data: data of the task.
        device: device to plan on.
        adapt: training settings a tuned plan may change, from `ADAPTATIONS`; empty for no tuned plan.
        strong: True to make a plan for the hand-tuned recipe too, if the task has a recipe.
        budget, objective: limits and weights of all plans.
        traces, metering: as in `profile`.
        progress: receives progress messages.

    Raises:
        InfeasibleError: no settings of the task's loop, or of the hand-tuned recipe, meet the budget.
    """
    require_rate(adapt)
    meter = PlanningMeter(device, metering)
    progress = meter.heard(progress)
    limits = _PlanningLimits(budget or Budget(), objective or Objective(), meter.metering, progress)
    subject, batches = _subject(task, data, device, adapt)
    how = {"adapts_batch_size": "batch" in adapt, "traces": traces}
    (base, found), spent = meter.counted(lambda: _same_maths(task, data, subject, limits, **how))
    plans, profiles, energy = {"equivalent": base}, {"equivalent": found}, {"equivalent": spent}
    if adapt:
        searched = (subject, base, adapt, batches, progress, _length(task, data), limits.budget)
        plans["tuned"], spent = meter.counted(lambda: _freed(*searched))
        energy["tuned"] = (
            sum_energy((energy["equivalent"], spent), in_turn=True) if TRAINED & set(adapt) else energy["equivalent"]
        )
    if strong and task.strong is not None:
        made, energy["strong"] = meter.counted(lambda: _for_strong(task, device, subject.batch, limits))
        plans["strong"], profiles["strong"] = made
    return Plans(plans, profiles, energy)


@dataclass(frozen=True)
class _PlanningLimits:
    """Budget, objective, metering and progress shared by all plans of a comparison."""

    budget: Budget
    objective: Objective
    metering: Metering | None
    progress: Callable[[str], None]

    def profile(self, subject: TrainingLoop, reference: Reference, **how: Any) -> Profile:
        """Return the profile of a loop."""
        loop = (subject.model, subject.optimizer, subject.loss_fn, subject.batch)
        under = {"budget": self.budget, "objective": self.objective, "metering": self.metering}
        return profile(*loop, reference=reference, progress=self.progress, **under, **how)

    def chosen(self, found: Profile) -> Plan:
        """Return the plan chosen from a profile, with the profile's objective."""
        return choose(found, found.objective, self.budget)


def _subject(
    task: Task, data: TaskData, device: torch.device, adapt: Collection[str]
) -> tuple[TrainingLoop, Iterator[Any]]:
    """Return the task's loop with a first batch for planning, and the iterator of further batches.

    Raises:
        UsageError: the optimizer may be adapted, but the model has no parameters for Muon. Raised before measuring.
    """
    torch.manual_seed(PLANNING_SEED)
    model = task.make_model().to(device).train()
    optimizer = task.make_optimizer(model)
    if "optimizer" in adapt:
        hidden_matrices(model, optimizer)
    batches = data.batches(PLANNING_SEED, task.batch_size)
    return TrainingLoop(model, optimizer, task.loss_fn, move(next(batches), device)), batches


class _Epochs:
    """Re-iterable batches of a task: planning needs an iterable that can restart."""

    def __init__(self, data: TaskData, batch_size: int) -> None:
        self._data, self._batch_size = data, batch_size

    def __iter__(self) -> Iterator[Any]:
        return self._data.batches(PLANNING_SEED, self._batch_size)


def _same_maths(
    task: Task, data: TaskData, subject: TrainingLoop, limits: _PlanningLimits, *, adapts_batch_size: bool, traces: bool
) -> tuple[Plan, Profile]:
    """Return the equivalent plan with its profile."""
    how = {
        "data": _Epochs(data, task.batch_size),
        "total_steps": task.planned_steps,
        "adapts_batch_size": adapts_batch_size,
        "traces": traces,
    }
    found = limits.profile(subject, task.reference, **how)
    return limits.chosen(found), found


def _freed(
    subject: TrainingLoop,
    base: Plan,
    adapt: Collection[str],
    batches: Iterator[Any],
    progress: Callable[[str], None],
    length: RunLength,
    budget: Budget,
) -> Plan:
    """Return the tuned plan: settings found by training first, then the batch size."""
    plan = tune_plan(subject, base, adapt, batches, progress, length, budget) if TRAINED & set(adapt) else base
    return plan.freed(default_rule(plan), FREED) if "batch" in adapt else plan


def _length(task: Task, data: TaskData) -> RunLength:
    """Return the length of the tuned run, possibly on fewer samples than the reference."""
    rows = task.planned_samples or task.adapted_samples or task.budget_samples
    return RunLength(-(-rows // task.batch_size), task.planned_steps * task.batch_size / data.num_samples)


def _for_strong(task: Task, device: torch.device, batch: Any, limits: _PlanningLimits) -> tuple[Plan, Profile]:
    """Return the plan for the hand-tuned recipe, under the same limits; the recipe itself is unchanged.

    Raises:
        InfeasibleError: no settings of the recipe meet the limits.
    """
    recipe = task.strong
    assert recipe is not None
    steps = -(-(task.planned_samples or recipe.budget_samples) // task.batch_size)
    with closing(StrongLoop(task, device)) as peer:  # The loop sets the process-wide precision; closing restores it.
        subject = TrainingLoop(peer.model, peer.optimizer, peer.loss_fn, batch)
        found = limits.profile(subject, Reference(recipe.precision, recipe.clip_norm), total_steps=steps)
    try:
        return limits.chosen(found), found
    except InfeasibleError as error:
        raise InfeasibleError(
            error.field,
            problem=f"No plan for the hand-tuned recipe (P2): {error}",
            hint="To compare without this recipe, name other recipes with --against.",
            code=error.code,
        ) from error


def profile_here(
    task: Task,
    budget: Budget,
    objective: Objective,
    progress: Callable[[str], None],
    total_steps: int | None = None,
) -> Profile:
    """Return a task's profile on this machine; the limits are recorded, not enforced."""
    device = device_here()
    torch.manual_seed(PLANNING_SEED)
    model, batches = task.make_model().to(device).train(), _Epochs(task.load_data(), task.batch_size)
    loop = (model, task.make_optimizer(model), task.loss_fn, move(next(iter(batches)), device))
    given = {"budget": budget, "objective": objective, "reference": task.reference, "total_steps": total_steps}
    return profile(*loop, data=batches, progress=progress, **given)


def loop_of(task: Task, kind: str) -> tuple[Any, ...]:
    """Return a task's model, optimizer, loss and a traceable batch on a kind of device."""
    torch.manual_seed(PLANNING_SEED)
    model = task.make_model().to(kind).train()
    return model, task.make_optimizer(model), task.loss_fn, move(example_batch(task), torch.device(kind))


def profile_there(
    task: Task, device: str, *, budget: Budget, objective: Objective, progress: Callable[[str], None]
) -> Profile:
    """Return a task's profile for a target device that is not present, from a trace."""
    torch.manual_seed(PLANNING_SEED)
    model = task.make_model().train()
    loop = (model, task.make_optimizer(model), task.loss_fn, example_batch(task))
    given = {"rows": task.batch_size, "budget": budget, "objective": objective, "reference": task.reference}
    return api.profile_there(*loop, device, progress=progress, **given)


def example_batch(task: Task) -> Any:
    """Return a batch for tracing, larger than the task's batch if that has too few samples to split.

    Uses `task.example`, which needs no data, if available.
    """
    rows = max(task.batch_size, 2 * (MIN_SAMPLES - 1))
    return next(task.load_data().batches(PLANNING_SEED, rows)) if task.example is None else task.example(rows)
