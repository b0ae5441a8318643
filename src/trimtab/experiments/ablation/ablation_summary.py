"""Builds an `Ablation` from the plan, paired runs and peak memory."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.choice import Effect
from trimtab.core.objective import Budget
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
from trimtab.experiments.ablation.ablation_result import (
    ALONE,
    INTERACTION,
    QUALITY,
    THROUGHPUT,
    WHOLE,
    WITHIN,
    AblatedArm,
    AblatedChange,
    Ablation,
    ChangeEffect,
    ChangeTime,
)
from trimtab.experiments.comparison import caveats as noted
from trimtab.experiments.comparison import comparison_statistics
from trimtab.experiments.comparison.arm_metrics import ArmMetrics
from trimtab.experiments.comparison.comparison_result import RatioRow, Verdict
from trimtab.experiments.comparison.time_to_target import PlanningCharge, target_row
from trimtab.experiments.comparison.verdicts import quality_figures, ratio_in_words
from trimtab.experiments.paired_runs.results_folder import environment_of
from trimtab.experiments.task_plans import Plans
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, resolution
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task, TaskData

# Headline of an ablation: the plan as a whole, its most valuable change, and interactions.

NOTHING = Verdict("no gain", "The plan changes nothing, so there is nothing to ablate.", "plan.no_changes")


def headline(
    changes: Sequence[AblatedChange],
    effects: Sequence[ChangeEffect],
    whole: Sequence[RatioRow],
    control: Interval | None = None,
    unit: str = "share",
    failed: Mapping[str, str] | None = None,
) -> Verdict:
    """Return the headline verdict.

    Args:
        changes: changes of the plan.
        effects: effects of the changes.
        whole: ratios of the whole plan.
        control: A/A interval of interactions.
        unit: unit of the metric.
        failed: reason for missing figures, by arm.
    """
    if not changes:
        return NOTHING
    rows = {row.metric: row for row in whole if (row.arm, row.against) == (PLAN, REFERENCE)}
    row, quality = rows.get(THROUGHPUT), rows.get(QUALITY)
    if row is None:
        errors = failed or {}
        why = "; ".join(f"{arm} failed: {errors[arm]:.200}" for arm in (REFERENCE, PLAN) if arm in errors)
        why = why.rstrip(".") or "see the table of all arms"
        return Verdict("no verdict", f"The plan as a whole was not timed: {why}.", "speed.not_measured")
    many = (
        f"The plan's {len(changes)} changes together"
        if len(changes) > 1
        else f"The plan's only change ({changes[0].says})"
    )
    sentences = [
        _whole(row, many),
        _ends(quality, unit),
        _dearest(changes, effects, row),
        _together(changes, effects, control),
        _for_quality(changes, effects, unit),
    ]
    kind = _kind(row, quality)
    decisive = [each.verdict.code for each in (row, quality) if each is not None and each.verdict.kind == kind]
    code = decisive[0] if decisive else "speed.contradicts_quality"
    return Verdict(kind, " ".join(each for each in sentences if each), code)


def _kind(speed: RatioRow, quality: RatioRow | None) -> str:
    """Return a combined verdict on speed and final metric; "no verdict" if they contradict."""
    found = speed.verdict.kind
    if quality is None or found == "no verdict":
        return found
    kinds = {found, quality.verdict.kind}
    may_end_worse = quality.plan_kind == "tuned" and quality.verdict.kind == "no verdict" and found == "gain"
    if {"gain", "harm"} <= kinds or may_end_worse:
        return "no verdict"
    return next((kind for kind in ("harm", "gain") if kind in kinds), found)


def _ends(quality: RatioRow | None, unit: str) -> str:
    """Return a sentence on the final metric; for an equivalent plan, only if it differs."""
    if quality is None or (quality.plan_kind != "tuned" and quality.verdict.kind == "no gain"):
        return ""
    found = quality_figures(quality.ratio, unit)
    return {
        "gain": f"The final metric is better: {found}.",
        "harm": f"The final metric is worse: {found}.",
        "no gain": f"The final metric is equal within the limit: {found}.",
    }.get(quality.verdict.kind, f"No verdict on the final metric: {quality.verdict.sentence}.")


def _whole(row: RatioRow, many: str) -> str:
    found = ratio_in_words(row.ratio)
    return {
        "gain": f"{many}: {found} the throughput of the reference.",
        "harm": f"{many}: slower, {found} the throughput of the reference.",
        "no verdict": f"No verdict on the plan as a whole: {row.verdict.sentence}.",
    }.get(row.verdict.kind, f"{many}: no significant gain ({found}).")


def _dearest(changes: Sequence[AblatedChange], effects: Sequence[ChangeEffect], whole: RatioRow) -> str:
    """Return a sentence on the most valuable change, and on changes that slow the plan down.

    "Most of the gain" means more than half of the gain on a logarithmic scale.
    """
    within = [e for e in effects if (e.setting, e.metric) == (WITHIN, THROUGHPUT)]
    says = {change.name: change.says for change in changes}
    gains = sorted((e for e in within if e.verdict.kind == "gain"), key=lambda e: -e.ratio.mean)
    said = ""
    if gains:
        first = gains[0].ratio
        is_most = whole.verdict.kind == "gain" and first.mean**2 > whole.ratio.mean
        which = "Most of the gain is from" if is_most else "The largest gain in the plan is from"
        said = f"{which} {says[gains[0].change]}: {ratio_in_words(first)} the speed of the plan without this change."
    harms = [says[e.change] for e in within if e.verdict.kind == "harm"]
    return f"{said} The plan is faster without {' and without '.join(harms)}.".strip() if harms else said


def _together(changes: Sequence[AblatedChange], effects: Sequence[ChangeEffect], control: Interval | None) -> str:
    """Return a sentence on changes that interact with the rest of the plan, or on the absence of interactions."""
    says = {change.name: change.says for change in changes}
    found = _interactions(effects, THROUGHPUT)
    seen = []
    for kind in ("more", "less"):
        named = [
            f"{says[e.change]} by {ratio_in_words(e.ratio)}" for e in found if e.verdict.kind == f"{kind} together"
        ]
        seen += [f"Changes with {kind} throughput gain in the plan than alone: {', '.join(named)}."] if named else []
    if not seen and found and all(e.verdict.kind == "none found" for e in found):
        none = "No change has a significantly different throughput gain in the plan than alone"
        return f"{none}; the A/A control resolves {100 * resolution(control):.2g}%."
    return " ".join(seen)


def _for_quality(changes: Sequence[AblatedChange], effects: Sequence[ChangeEffect], unit: str) -> str:
    """Return a sentence on interactions in quality; two changes share a single interaction."""
    says = {change.name: change.says for change in changes}
    found = _interactions(effects, QUALITY)[: 1 if len(changes) == 2 else None]
    seen = []
    for kind in ("more", "less"):
        for each in (e for e in found if e.verdict.kind == f"{kind} together"):
            what = " and ".join(says.values()) if len(changes) == 2 else f"{says[each.change]} and the rest of the plan"
            figure = quality_figures(each.ratio, unit)
            seen.append(f"{kind.capitalize()} improvement of the final metric by {what} together: {figure}.")
    if not seen and any(e.verdict.kind == "no verdict" and e.ratio.n >= MIN_PAIRS_FOR_VERDICT for e in found):
        return "Interactions of changes in the final metric are undecided."
    return " ".join(seen)


def _interactions(effects: Sequence[ChangeEffect], metric: str) -> list[ChangeEffect]:
    """Return the interactions of single changes with the rest of the plan."""
    return [e for e in effects if (e.setting, e.metric) == (INTERACTION, metric) and e.change and not e.other]


# Times to target with and without a change (paper, table III), from records.

# Arms with and without the change, and the loop with the A/A control.
_Arms = tuple[str, str, str]


def times(
    evidence: AblationMeasurements, plan: Plan, changes: Sequence[AblatedChange], targets: Sequence[float]
) -> Iterator[ChangeTime]:
    """Yield times to all targets of the whole plan and of every change with full runs, also with charged planning.

    The plan is charged with planning and search. A training change is charged with the whole search, because the search
    time
    per change is unknown.
    """
    for target in targets:
        yield from _rung(
            evidence, "", WHOLE, plan.plan_kind, (PLAN, REFERENCE, UNCHANGED_AGAIN), target, plan.planning_s
        )
        for change in changes:
            charge_s = plan.search_s if change.plan_kind == "tuned" else 0.0
            for setting, arms in _settings(evidence, change).items():
                yield from _rung(evidence, change.name, setting, change.plan_kind, arms, target, charge_s)


def _settings(evidence: AblationMeasurements, change: AblatedChange) -> dict[str, _Arms]:
    """Return the arms of every possible setting of a change."""
    design = evidence.design
    found = {ALONE: (*design.alone(change.name), UNCHANGED_AGAIN)}
    if evidence.has_interactions:
        found[WITHIN] = (*design.within(change.name), PLAN_AGAIN)
    return {setting: arms for setting, arms in found.items() if setting not in change.refusals}


def _rung(
    evidence: AblationMeasurements,
    change: str,
    setting: str,
    plan_kind: str,
    arms: _Arms,
    target: float,
    charge_s: float,
) -> Iterator[ChangeTime]:
    arm, against, again = arms
    metric = (target, evidence.metric, evidence.higher_is_better)
    for charge in (None, *([PlanningCharge(charge_s)] if charge_s else [])):
        row = target_row(evidence.races, arm, against, plan_kind, *metric, charge, evidence.control(again))
        if row is not None:
            yield ChangeTime(change, setting, row)


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
