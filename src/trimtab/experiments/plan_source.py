"""A plan with its profile: measured here, traced for a target device, or recorded earlier."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trimtab.core import validation
from trimtab.core.errors import FormatError
from trimtab.core.hardware import absent_device
from trimtab.core.objective import Budget, Objective
from trimtab.core.serialization import read_json
from trimtab.core.units import format_bytes, format_count, format_joules, format_seconds
from trimtab.planner import search_space
from trimtab.planner.plan_choice import choose, choose_there
from trimtab.planner.target_device_candidates import recorded_blocks, recorded_traces, traced_for, with_blocks
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile

if TYPE_CHECKING:
    from trimtab.api import Metering


def profile_text(profile: Profile) -> str:
    """Return the facts, phases, utilisation and trials of a profile as text."""
    loop, device = profile.loop, profile.device
    lines = [
        f"{device.name}, {device.num_threads or 'no'} threads; {profile.reference.describe()}",
        f"{format_count(loop.num_parameters)} parameters, {loop.optimizer}, {loop.batch_size} samples and "
        f"{format_count(loop.terms_per_step)} {loop.terms} per step",
        *_utilisation(profile),
        "",
        "phases of a reference step:",
        *(f"  {name:<12} {format_seconds(seconds)}" for name, seconds in profile.phases_s.items()),
        "",
        "trials:",
    ]
    for trial in profile.trials:
        label = f"  {trial.stage:<12} {trial.candidate.describe()}{' (A/A control)' if trial.control else ''}"
        alone = "" if trial.is_whole else f" ({trial.stage} only)"
        energy = "" if trial.energy_j is None else f", {format_joules(trial.energy_j)} at {trial.power_w:.3g} W"
        peak = format_bytes(trial.peak_bytes)
        result = trial.error or f"{format_seconds(trial.step_s)}{alone}, peak {peak}{energy}"
        lines.append(f"{label:<70} {result}")
    splitting = "keeps the gradient" if profile.check.splittable else "is not possible"
    lines += ["", f"splitting the batch {splitting}: {profile.check.reason}"]
    lines.append(f"energy: {profile.meter.describe()}")
    lines.append(f"profiling took {format_seconds(profile.profiling_s)}")
    return "\n".join(lines)


def _utilisation(profile: Profile) -> list[str]:
    first = profile.trials[0]
    flops = profile.loop.flops_per_step
    if flops is None or first.step_s is None:
        return ["FLOP: not counted"]
    rate = flops / first.step_s
    mfu = profile.device.utilisation(rate, profile.reference.precision)
    share = "MFU unknown (unknown peak FLOP/s)" if mfu is None else f"MFU {100 * mfu:.0f}% of {profile.device.source}"
    return [f"{format_count(flops)}FLOP per step, {format_count(rate)}FLOP/s, {share}"]


def recorded_profile(path: str, budget: Budget, objective: Objective, device: str | None) -> Profile:
    """Return the profile in a file, for the recorded device or for a target device that is not present.

    Raises:
        FormatError: the file is no profile, or has no traces of target devices.
    """
    recorded = read_json(Profile, path)
    for trial in recorded.trials:  # Times are compared as ratios, so they must be positive and finite.
        validation.positive_and_finite(f"{path}: trials.block_s", trial.block_s)
    if device is None:
        return recorded
    spec = absent_device(device)
    if not recorded.target_device_traces:
        raise FormatError(
            path,
            problem=f"The profile {path} has no traces for other devices, which a plan for {device} needs.",
            hint="Record the profile on a CPU with `trimtab profile TASK -o FILE.json`. If the new profile "
            "has no traces either, the task's steps cannot be traced.",
            code="profile.no_traces",
        )
    there = replace(recorded.for_device(spec), objective=objective, budget=budget.within(spec.memory_bytes))
    return with_blocks(traced_for(there, recorded_traces(recorded)), recorded_blocks(recorded))


@dataclass(frozen=True)
class PlanWithProfile:
    """A plan with the profile (None for a tuned plan), budget and objective behind it."""

    plan: Plan
    profile: Profile | None
    budget: Budget
    objective: Objective

    def explained(self) -> str:
        """Return the text of the plan, all considered combinations and the measurements."""
        if self.profile is None:
            return self.plan.explain()
        return "\n\n".join((self.plan.explain(), self._considered(self.profile), self._measured(self.profile)))

    def _considered(self, profile: Profile) -> str:
        found = search_space.priced_candidates(profile, self.budget)
        reference = next((p for p in found if p.candidate == profile.reference_candidate), found[0])
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

    def _measured(self, profile: Profile) -> str:
        return profile_text(profile) if profile.trials else "No measurements: the plan is for another device."


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
        adapt, metering: as in `trimtab.plan`, only for a task measured on this machine.
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
    from trimtab.experiments.task_plans import plan_task, profile_task, profile_there
    from trimtab.tasks import load_task

    loaded = load_task(task)
    if device is not None:
        found = profile_there(loaded, device, budget=budget, objective=objective, progress=progress)
        return PlanWithProfile(choose_there(found), found, found.budget, objective)
    how: dict[str, Any] = {"budget": budget, "objective": objective, "metering": metering, "progress": progress}
    if adapt:
        return PlanWithProfile(plan_task(loaded, adapt=adapt, **how), None, budget, objective)
    found = profile_task(loaded, total_steps=loaded.planned_steps, **how)
    return PlanWithProfile(choose(found, found.objective, budget), found, budget, found.objective)
