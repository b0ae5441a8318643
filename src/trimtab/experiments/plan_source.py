"""A plan with its profile: measured here, traced for a target device, or recorded earlier."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.core.objective import Budget, Objective
from trimtab.core.plan import Plan
from trimtab.core.profile import Profile
from trimtab.core.units import format_bytes, format_joules, format_seconds
from trimtab.experiments.profile_text import profile_text
from trimtab.experiments.recorded_plan import recorded_profile
from trimtab.planner import search_space
from trimtab.planner.plan_choice import choose, choose_there

if TYPE_CHECKING:  # Imports torch, which is not needed for a recorded profile.
    from trimtab.api import Metering


@dataclass(frozen=True)
class PlanWithProfile:
    """A plan with the profile, budget and objective behind it."""

    plan: Plan
    profile: Profile
    budget: Budget
    objective: Objective

    def explained(self) -> str:
        """Return the text of the plan, all considered combinations and the measurements."""
        return "\n\n".join((str(self.plan), self._considered(), self._measured()))

    def _considered(self) -> str:
        found = search_space.priced_candidates(self.profile, self.budget)
        reference = next((p for p in found if p.candidate == self.profile.reference_candidate), found[0])
        scores = {point: search_space.score(point, self.objective, reference) for point in found}
        ranked = sorted(found, key=lambda point: (point.refusal is not None, scores[point]))
        weights = f"weights: time {self.objective.time:.2g}, memory {self.objective.memory:.2g}"
        weights += f", energy {self.objective.energy:.2g}" if self.objective.energy else ""
        lines = [f"{len(found)} combinations considered, by objective relative to the reference ({weights}):"]
        for point in ranked:
            cost, peak = point.cost, format_bytes(point.cost.peak_bytes)
            known = "counted" if cost.counted else "traced" if cost.peak_bytes is not None else ""
            why = f"; {point.refusal}" if point.refusal else ""
            figures = f"{scores[point]:6.3f}  {format_seconds(cost.step_s):>9}  {peak:>9} {known:<7}"
            figures += "" if cost.energy_j is None else f"  {format_joules(cost.energy_j):>9}"
            lines.append(f"  {figures}  {point.candidate.describe()}{why}")
        return "\n".join(lines)

    def _measured(self) -> str:
        return profile_text(self.profile) if self.profile.trials else "No measurements: the plan is for another device."


def plan_with_profile(
    task: str,
    budget: Budget,
    objective: Objective,
    *,
    device: str | None = None,
    adapt: Collection[str] = (),
    metering: Metering | None = None,
    progress: Callable[[str], None],
) -> PlanWithProfile:
    """Return a plan with its profile.

    Args:
        task: name of a built-in task, `my_module:task`, or the path of a profile file.
        budget, objective: limits and weights of the plan.
        device: name of a target device that is not present, or None.
        adapt, metering: as in `make_plans`, only for a task measured on this machine.
        progress: receives progress messages.

    Raises:
        FormatError: the file is no profile, or has no traces for the target device.
        InfeasibleError: see `choose`.
    """
    if task.endswith(".json"):
        found = recorded_profile(task, budget, objective, device)
        plan = choose(found, objective, budget if device is None else found.budget)
        return PlanWithProfile(plan, found, budget if device is None else found.budget, objective)

    # These modules import torch, which is not needed to decide from a recorded profile.
    from trimtab.experiments.task_plans import make_plans, profile_there
    from trimtab.tasks import load_task
    from trimtab.tasks.placement import device_here

    if device is not None:
        found = profile_there(load_task(task), device, budget=budget, objective=objective, progress=progress)
        return PlanWithProfile(choose_there(found), found, found.budget, objective)
    loaded = load_task(task)
    how = {"strong": False, "budget": budget, "objective": objective, "metering": metering, "progress": progress}
    plans = make_plans(loaded, loaded.load_data(), device_here(), adapt=adapt, **how)
    found = plans.profiles["equivalent"]
    return PlanWithProfile(plans.plans.get("tuned", plans.plans["equivalent"]), found, budget, found.objective)
