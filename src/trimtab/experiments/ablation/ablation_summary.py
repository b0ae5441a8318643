"""Builds an `Ablation` from the plan, paired runs and peak memory."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.objective import Budget
from trimtab.core.plan import Effect, Plan
from trimtab.core.units import format_bytes
from trimtab.experiments.ablation.ablation_design import (
    PLAN,
    PLAN_AGAIN,
    REFERENCE,
    UNCHANGED,
    UNCHANGED_AGAIN,
    AblationDesign,
)
from trimtab.experiments.ablation.ablation_effects import AblationMeasurements
from trimtab.experiments.ablation.ablation_headline import headline
from trimtab.experiments.ablation.ablation_result import (
    ALONE,
    INTERACTION,
    WITHIN,
    AblatedArm,
    AblatedChange,
    Ablation,
    ChangeEffect,
)
from trimtab.experiments.ablation.ablation_target_times import times
from trimtab.experiments.comparison import caveats as noted
from trimtab.experiments.comparison import comparison_statistics
from trimtab.experiments.comparison.arm_metrics import ArmMetrics
from trimtab.experiments.paired_runs.results_folder import environment_of
from trimtab.experiments.task_plans import Plans
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT
from trimtab.tasks.task import Task, TaskData


@dataclass(frozen=True)
class AblationRuns:
    """Measurements of an ablation.

    Args:
        plan: the ablated plan.
        design: arms and changes.
        races: records by seed and arm.
        facts: measurements outside the paired runs, by arm.
        refusals: reason for not running, by arm.
        budget: limits of the plan.
    """

    plan: Plan
    design: AblationDesign
    races: comparison_statistics.Races
    facts: Mapping[str, ArmMetrics]
    refusals: Mapping[str, str]
    budget: Budget

    @property
    def peaks(self) -> dict[str, int]:
        """Peak bytes of a step, by measured arm."""
        return {name: fact.peak_bytes for name, fact in self.facts.items() if fact.peak_bytes}

    @property
    def failed(self) -> dict[str, str]:
        """Reason for missing figures by arm: it could not be built, or failed in all paired runs."""
        raced = {name for race in self.races.values() for name in race}
        errors = {
            name: [comparison_statistics.error_of_run(race[name]) for race in self.races.values() if name in race]
            for name in raced
        }
        return {name: found[0] for name, found in errors.items() if all(found)} | dict(self.refusals)


def summarise(task: Task, data: TaskData, raced: AblationRuns, command: str, notes: Sequence[str] = ()) -> Ablation:
    """Return the ablation with all figures of a report."""
    plan, design, metric = raced.plan, raced.design, task.metric
    says = {name: says_of(plan, name) for name in design.changes}
    labels = labels_of(design, says)
    how = (metric.name, metric.higher_is_better, metric.unit)
    evidence = AblationMeasurements(design, raced.races, raced.peaks, labels, *how)
    changes = tuple(
        AblatedChange(name, says[name], _tier(plan, name), _refusals(raced, name)) for name in design.changes
    )
    effects = tuple(_effects(evidence, changes))
    whole = tuple(evidence.whole(plan.plan_kind))
    return _ablation(
        task,
        data,
        plan,
        command,
        headline=headline(changes, effects, whole, evidence.interaction_control, metric.unit, raced.failed),
        num_seeds=len(raced.races),
        changes=changes,
        arms=tuple(_arm(name, label, task, raced) for name, label in labels.items()),
        effects=effects,
        whole=whole,
        controls=tuple(evidence.control_rows()),
        interaction_control=evidence.interaction_ratio,
        times=tuple(times(evidence, plan, changes, task.targets)),
        environment=dict(environment_of(raced.races)),
        notes=(*_notes(raced, changes, effects), *notes),
    )


def nothing_to_ablate(task: Task, data: TaskData, plan: Plan, command: str) -> Ablation:
    """Return the result for a plan without changes."""
    return _ablation(
        task, data, plan, command, headline=headline((), (), ()), num_seeds=0, environment=dict(environment_of({}))
    )


def _ablation(task: Task, data: TaskData, plan: Plan, command: str, **found: Any) -> Ablation:
    source = data.source
    return Ablation(
        task=task.name,
        description=task.description,
        metric=task.metric.name,
        higher_is_better=task.metric.higher_is_better,
        unit=task.metric.unit,
        plan=plan,
        data_source={"name": source.name, "origin": source.origin, "sha256": source.sha256},
        command=command,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **found,
    )


def _effects(evidence: AblationMeasurements, changes: Sequence[AblatedChange]) -> Iterator[ChangeEffect]:
    named = {change.name: change for change in changes}
    for change in changes:
        yield from evidence.effects(change)
    for one, other in evidence.design.pairs:
        yield from evidence.pair_effects(named[one], named[other])
    yield from evidence.all_together(changes)


def says_of(plan: Plan, name: str) -> str:
    """Return a change with its value as text, such as `precision bf16` or `fused optimizer`."""
    value, words = getattr(plan, name).value, name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"not {words}"
    return f"{words} {'none' if value is None else f'{value:g}' if isinstance(value, float) else value}"


def labels_of(design: AblationDesign, says: Mapping[str, str]) -> dict[str, str]:
    """Return the label of every arm, in table order."""
    found = {REFERENCE: "the reference", UNCHANGED: "the unchanged loop in a run"}
    for name, changes in design.arms.items():
        if name in (UNCHANGED, PLAN):
            continue
        (left_out,) = frozenset(design.changes) - changes if name.startswith("without_") else ("",)
        held = " and ".join(says[each] for each in design.changes if each in changes)
        found[name] = f"the plan without {says[left_out]}" if left_out else f"the loop with {held}"
    again = {UNCHANGED_AGAIN: "the loop again (A/A control)", PLAN_AGAIN: "the plan again (A/A control)"}
    return found | {PLAN: "the plan"} | {name: again[name] for name in design.controls}


def _tier(plan: Plan, name: str) -> str:
    return "tuned" if getattr(plan, name).effect is Effect.TRAINING else "equivalent"


def _refusals(raced: AblationRuns, change: str) -> dict[str, str]:
    """Return the reason for an impossible setting of a change, if either of its two arms failed."""
    failed, design, found = raced.failed, raced.design, {}
    arm, loop = design.alone(change)
    if loop in failed:
        found[ALONE] = f"was not measured alone, because the unchanged loop in a run failed: {failed[loop]}"
    if arm in failed:
        found[ALONE] = f"failed alone: {failed[arm]}"
    plan, without = design.within(change)
    if len(design.changes) > 1 and plan in failed:
        found[WITHIN] = f"was not measured in the plan, because the plan failed: {failed[plan]}"
    elif len(design.changes) > 1 and without in failed:
        found[WITHIN] = f"cannot be removed from the plan: {failed[without]}"
    return found


def _arm(name: str, label: str, task: Task, raced: AblationRuns) -> AblatedArm:
    records = [race[name] for _, race in sorted(raced.races.items()) if name in race]
    ran = [record for record in records if not comparison_statistics.error_of_run(record)]
    curves = [
        comparison_statistics.curve(record, task.metric.name)
        for record in ran
        if not comparison_statistics.is_brief(record)
    ]
    finals = [curve[-1] for curve in curves if curve]
    changes = raced.design.arms.get(raced.design.controls.get(name, name), frozenset())
    fact = raced.facts.get(name)
    return AblatedArm(
        name,
        label,
        tuple(each for each in raced.design.changes if each in changes),
        tuple(comparison_statistics.step_seconds(record, 1) for record in ran),
        fact.peak_bytes if fact else None,
        tuple(value for _, _, value in finals),
        max((rows for rows, _, _ in finals), default=0),
        raced.failed.get(name, ""),
    )


def _notes(raced: AblationRuns, changes: Sequence[AblatedChange], effects: Sequence[ChangeEffect]) -> list[str]:
    """Return the caveats of an ablation."""
    races = raced.races
    found = [f"{name}: {reason}" for name, reason in noted.ends(races).items()]
    found += [f"{change.says} {reason}" for change in changes for reason in change.refusals.values()]
    found += [text for change in changes for text in _limits(raced, change)]
    if len(changes) == 1:
        found.append(
            "With a single change, its effects alone and in the plan are equal, and there are no interactions."
        )
    if all(comparison_statistics.is_brief(record) for race in races.values() for record in race.values()):
        found.append("All arms were only timed for a few steps: the final metric was not measured.")
    one = changes[-1].name if len(changes) == 2 else None  # Two changes share a single interaction.
    told = [effect for effect in effects if not (effect.setting == INTERACTION and effect.change == one)]
    timed = sum(effect.ratio.n >= MIN_PAIRS_FOR_VERDICT for effect in told)
    if timed > 1:
        found.append(
            f"{timed} effects have separate 95% intervals: of the effects without a true difference, about one in "
            "twenty appears significant by chance."
        )
    return found + noted.sources(races) + noted.missing_variance(Plans({"equivalent": raced.plan}), races)


def _limits(raced: AblationRuns, change: AblatedChange) -> Iterator[str]:
    """Yield a caveat if the memory limit is met only with a change."""
    limit, peaks = raced.budget.memory_bytes, raced.peaks
    without = raced.design.within(change.name)[1]
    if limit is not None and peaks.get(PLAN, limit + 1) <= limit < peaks.get(without, 0):
        peak = f"{format_bytes(peaks[without])}, over the limit of {format_bytes(limit)}"
        yield f"{change.says} cannot be removed: without this change the plan's peak memory is {peak}."
