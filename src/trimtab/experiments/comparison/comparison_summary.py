"""Builds a `Comparison` from plans and the records of paired runs."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence

from trimtab.core.energy_reading import MeterFacts
from trimtab.core.plan import Plan
from trimtab.experiments.comparison import comparison_statistics
from trimtab.experiments.comparison.arm_metrics import ArmMetrics, utilisation
from trimtab.experiments.comparison.arms import ARMS, PLAN_ARMS, PLAN_LOOPS, ArmKind, with_baselines
from trimtab.experiments.comparison.caveats import notes
from trimtab.experiments.comparison.comparison_headline import headline
from trimtab.experiments.comparison.comparison_result import (
    Arm,
    ArmCurve,
    Comparison,
    RatioRow,
    TargetRow,
    ThirdRow,
)
from trimtab.experiments.comparison.energy_rows import (
    energy_control,
    energy_row,
    meter_of,
    of_planning,
    short_blocks,
    watts,
)
from trimtab.experiments.comparison.rank_caveats import ONE_RANK, RankConditions, rank_notes
from trimtab.experiments.comparison.ratio_rows import do_no_harm_row, memory_row, quality_row, throughput_row
from trimtab.experiments.comparison.time_to_target import PlanningCharge, target_row
from trimtab.experiments.comparison.training_thirds import third_rows
from trimtab.experiments.task_plans import Plans
from trimtab.planner.statistics import Interval, ratio_interval
from trimtab.planner.tuned_plan import tried_settings
from trimtab.tasks.task import Task, TaskData


def summarise(
    task: Task,
    data: TaskData,
    plans: Plans,
    races: comparison_statistics.Races,
    facts: Mapping[str, ArmMetrics],
    *,
    command: str,
    environment: Mapping[str, str],
    ranks: RankConditions = ONE_RANK,
) -> Comparison:
    """Return the comparison with all figures of a report."""
    present = [name for name in _kinds(task) if any(name in race for race in races.values())]
    failed = [name for name in _kinds(task) if name in facts and facts[name].error and name not in present]
    again, meter = comparison_statistics.throughput_ratios(races, "self", "reference"), meter_of(races)
    control = _control(races, again)
    ratios = _ratio_rows(task, races, facts, present, control, meter)
    targets = _target_rows(task, plans, races, present, control, meter)
    source = data.source
    return Comparison(
        task=task.name,
        description=task.description,
        headline=headline(ratios, targets, plans.plans["equivalent"], _failures(task, races, facts), ranks.headline),
        metric=task.metric.name,
        higher_is_better=task.metric.higher_is_better,
        unit=task.metric.unit,
        batch_size=task.batch_size,
        terms=task.terms,
        targets=task.targets,
        num_pairs=len(races),
        arms=tuple(_arm(name, task, plans, races, facts, ranks.num, meter) for name in (*present, *failed)),
        ratios=tuple(ratios),
        target_rows=tuple(targets),
        resolution=None if control is None else comparison_statistics.as_ratio(control, again),
        plans=plans.plans,
        trials=tuple(trial for found in plans.profiles.values() for trial in found.trials),
        planning_s=_planning_s(plans),
        data_source={"name": source.name, "origin": source.origin, "sha256": source.sha256},
        command=command,
        environment=dict(environment),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        peak_source=plans.device.source if plans.device else "unknown",
        notes=(*rank_notes(ranks, plans, facts, task.batch_size), *notes(task, plans, targets, races)),
        num_ranks=ranks.num,
        meter=meter,
        planning_energy=of_planning(plans.energy, meter),
        thirds=tuple(_thirds(task, races, present)),
    )


def _kinds(task: Task, num_ranks: int = 1) -> dict[str, ArmKind]:
    """Return the arms that a comparison of the task can have, in report order."""
    labels = {name: str(getattr(make, "label", name)) for name, make in task.baselines.items()}
    return with_baselines(labels, num_ranks)


def _planning_s(plans: Plans) -> float:
    """Return the seconds of all plans; those of a tuned plan include the equivalent plan and the search."""
    found = {key: plan.planning_s for key, plan in plans.plans.items()}
    return math.fsum([found.get("tuned", found["equivalent"]), *(found[key] for key in PLAN_LOOPS if key in found)])


def _control(races: comparison_statistics.Races, again: Sequence[float]) -> Interval | None:
    """Return the A/A interval of the reference's throughput, or None after a failure or below two pairs."""
    return ratio_interval(again) if len(again) > 1 and not comparison_statistics.failed_in(races, "self") else None


def _failures(task: Task, races: comparison_statistics.Races, facts: Mapping[str, ArmMetrics]) -> dict[str, str]:
    """Return the description of the failures by arm, with the first error."""
    raced = {name: comparison_statistics.failed_with(races, name) for name in _kinds(task)}
    early = {name: "before the first paired run" for name, fact in facts.items() if fact.error}
    return early | {name: where for name, where in raced.items() if where}


def _arm(
    name: str,
    task: Task,
    plans: Plans,
    races: comparison_statistics.Races,
    facts: Mapping[str, ArmMetrics],
    num_ranks: int,
    meter: MeterFacts,
) -> Arm:
    kind = _kinds(task, num_ranks)[name]
    is_freed = name == PLAN_ARMS["tuned"] and "tuned" in plans.plans
    all_records = {seed: race[name] for seed, race in sorted(races.items()) if name in race}
    errors = [text for record in all_records.values() if (text := comparison_statistics.error_of_run(record))]
    records = {seed: record for seed, record in all_records.items() if not comparison_statistics.error_of_run(record)}
    step_s = tuple(comparison_statistics.step_seconds(record, task.batch_size) for record in records.values())
    terms = task.batch_size * _terms_per_sample(task, facts)
    whole = {seed: record for seed, record in records.items() if not comparison_statistics.is_brief(record)}
    curves = tuple(
        ArmCurve(seed, comparison_statistics.curve(record, task.metric.name)) for seed, record in whole.items()
    )
    finals = [curve.points[-1] for curve in curves if curve.points]
    fact = facts.get(name)
    samples_per_s = tuple(task.batch_size / seconds for seconds in step_s)
    metered = [] if meter.is_absent else list(records.values())
    short = [short_blocks(record) for record in metered]
    mfu, hfu = utilisation(plans.device, fact, facts.get("reference"), samples_per_s)
    return Arm(
        name,
        _freed_label(plans.plans["tuned"]) if is_freed else kind.label,
        kind.plan_kind,
        kind.source,
        step_s,
        tuple(terms / seconds for seconds in step_s),
        peak_bytes=fact.peak_bytes if fact else None,
        phases_s=fact.phases_s if fact else {},
        mfu=mfu,
        hfu=hfu,
        final_metric=tuple(value for _, _, value in finals),
        final_samples=max((rows for rows, _, _ in finals), default=0),
        curves=curves,
        search_s=_charged_s(name, plans) or 0.0,
        error=(fact.error if fact else "") or _error_in(errors, len(all_records)),
        joules=_known(comparison_statistics.step_joules(record, task.batch_size) for record in metered),
        watts=_known(watts(record) for record in metered),
        short_blocks=sum(number for number, _ in short),
        blocks=sum(number for _, number in short),
        precision=fact.precision if fact else "",
    )


def _freed_label(plan: Plan) -> str:
    """Return the label of a tuned plan, naming the settings tried."""
    words = (name.replace("_", " ") for name in tried_settings(plan))
    return f"trimtab, tuned plan ({' and '.join(words) or 'nothing tuned'})"


def _known(figures: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(figure for figure in figures if figure is not None and math.isfinite(figure))


def _terms_per_sample(task: Task, facts: Mapping[str, ArmMetrics]) -> float:
    """Return loss terms per sample as counted in the reference's loss, used for all arms to keep rates comparable."""
    counted = facts["reference"].terms_per_sample if "reference" in facts else None
    return task.terms_per_sample if counted is None else counted


def _error_in(errors: list[str], races: int) -> str | None:
    return f"{errors[0]} (in {len(errors)} of {races} runs)" if errors else None


def _charged_s(name: str, plans: Plans) -> float | None:
    kind = ARMS.get(name)  # None for a baseline of the task, which needs no planning
    return plans.plans[kind.plan].planning_s if kind and kind.is_charged and kind.plan in plans.plans else None


def _charge(name: str, plans: Plans, meter: MeterFacts) -> PlanningCharge | None:
    """Return the planning cost charged to an arm, with joules if counted by the meter of the paired runs.

    Returns None if no planning time is known, as for a hand-written plan with 0 s.
    """
    if not (seconds := _charged_s(name, plans)):
        return None
    spent = of_planning(plans.energy, meter).get(ARMS[name].plan)
    return PlanningCharge(seconds, None if spent is None else spent.joules)


def _ratio_rows(
    task: Task,
    races: comparison_statistics.Races,
    facts: Mapping[str, ArmMetrics],
    present: list[str],
    control: Interval | None,
    meter: MeterFacts,
) -> list[RatioRow]:
    rows: list[RatioRow | None] = []
    better, counted, kinds = task.metric.higher_is_better, (meter, energy_control(races)), _kinds(task)
    for name in present:
        if name in ("reference", "strong_plan"):
            continue
        plan_kind = kinds[name].plan_kind
        rows.append(throughput_row(races, name, "reference", plan_kind, control))
        rows.append(energy_row(races, name, "reference", plan_kind, *counted))
        if name != "self":
            rows.append(_memory(races, facts, name, "reference", plan_kind))
        if kinds[name].has_quality:
            rows.append(quality_row(races, name, "reference", plan_kind, task.metric.name, better, task.metric.unit))
    for arm, peer in [(name, peer) for name in present for peer in kinds[name].rivals if peer in present]:
        plan_kind = kinds[arm].plan_kind
        rows.append(throughput_row(races, arm, peer, plan_kind, control))
        rows.append(energy_row(races, arm, peer, plan_kind, *counted))
        rows.append(_memory(races, facts, arm, peer, plan_kind))
    if "strong_plan" in present:
        rows.append(do_no_harm_row(races, "strong_plan", "strong", "equivalent"))
    return [row for row in rows if row is not None]


def _memory(
    races: comparison_statistics.Races, facts: Mapping[str, ArmMetrics], arm: str, against: str, plan_kind: str
) -> RatioRow | None:
    ours, theirs = facts.get(arm), facts.get(against)
    if ours is None or theirs is None or not ours.peak_bytes or not theirs.peak_bytes:
        return None
    return memory_row(races, arm, against, plan_kind, ours.peak_bytes, theirs.peak_bytes)


def _thirds(task: Task, races: comparison_statistics.Races, present: list[str]) -> list[ThirdRow]:
    metric = (task.metric.name, task.metric.higher_is_better, task.metric.unit)
    kinds = _kinds(task)
    arms = [(name, kinds[name].plan_kind) for name in present if kinds[name].has_thirds]
    return [row for name, plan_kind in arms for row in third_rows(races, name, "reference", plan_kind, *metric)]


def _target_rows(
    task: Task,
    plans: Plans,
    races: comparison_statistics.Races,
    present: list[str],
    control: Interval | None,
    meter: MeterFacts,
) -> list[TargetRow]:
    rows: list[TargetRow | None] = []
    kinds = _kinds(task)
    for target in task.targets:
        metric = (target, task.metric.name, task.metric.higher_is_better)
        for name in present:
            kind = kinds[name]
            if kind.times is None:
                continue
            charge = _charge(name, plans, meter)
            charges = (None,) if charge is None else (None, charge)
            for against in ("reference", *(peer for peer in kind.times if peer in present)):
                of = (races, name, against, kind.plan_kind, *metric)
                rows += [target_row(*of, charge, control, meter=meter) for charge in charges]
    return [row for row in rows if row is not None]
