"""From plans and race records to the `Comparison` every report reads."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core.plan import Plan
from trimtab.core.record import RunRecord
from trimtab.core.units import format_seconds
from trimtab.decide.statistics import Interval, ratio_interval
from trimtab.experiments import stats
from trimtab.experiments.planning import Plans
from trimtab.experiments.result import Arm, ArmCurve, Comparison, Ratio, RatioRow, TargetRow, Verdict
from trimtab.tasks.task import Task, TaskData


@dataclass(frozen=True)
class ArmFacts:
    """What was measured of one arm apart from the races; with an error it takes no part in them."""

    peak_bytes: int | None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


_LABELS = {
    "reference": ("P0 reference", "", "recipes/reference.py"),
    "self": ("reference again (A/A control)", "", "recipes/reference.py"),
    "plan_S": ("trimtab, same maths", "S", "experiments/loops.py"),
    "plan_F": ("trimtab, learning rate adapted", "F", "experiments/loops.py"),
    "paper": ("P1 paper, literal", "", "recipes/paper.py"),
    "strong": ("P2 strong, hand-tuned", "", "recipes/strong.py"),
    "strong_plan": ("trimtab's plan for P2", "S", "experiments/loops.py"),
}


def summarise(
    task: Task,
    data: TaskData,
    plans: Plans,
    races: stats.Races,
    facts: Mapping[str, ArmFacts],
    *,
    command: str,
    environment: Mapping[str, str],
) -> Comparison:
    """Return everything a report shows."""
    present = [name for name in _LABELS if any(name in race for race in races.values())]
    failed = [name for name in _LABELS if name in facts and facts[name].error]
    control = _control(races)
    ratios = _ratio_rows(task, races, facts, present, control)
    targets = _target_rows(task, plans, races, present, control)
    source = data.source
    profile = plans.profiles["S"]
    return Comparison(
        task=task.name,
        description=task.description,
        headline=_headline(ratios, targets, plans),
        metric=task.metric.name,
        higher_is_better=task.metric.higher_is_better,
        terms=task.terms,
        targets=task.targets,
        num_pairs=len(races),
        arms=tuple(_arm(name, task, plans, races, facts) for name in (*present, *failed)),
        ratios=tuple(ratios),
        target_rows=tuple(targets),
        resolution=None
        if control is None
        else stats.as_ratio(control, stats.throughput_ratios(races, "self", "reference")),
        plans=plans.plans,
        trials=tuple(trial for found in plans.profiles.values() for trial in found.trials),
        planning_s=plans.plans["S"].planning_s,
        data_source={"name": source.name, "origin": source.origin, "sha256": source.sha256},
        command=command,
        environment=dict(environment),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        peak_source=profile.device.source,
        notes=tuple(_notes(plans, targets, races)),
    )


def _control(races: stats.Races) -> Interval | None:
    ratios = _control_ratios(races)
    return ratio_interval(ratios) if len(ratios) > 1 else None


def _control_ratios(races: stats.Races) -> list[float]:
    return stats.throughput_ratios(races, "self", "reference")


def _arm(name: str, task: Task, plans: Plans, races: stats.Races, facts: Mapping[str, ArmFacts]) -> Arm:
    label, tier, source = _LABELS[name]
    all_records = {seed: race[name] for seed, race in sorted(races.items()) if name in race}
    errors = [text for record in all_records.values() if (text := stats.failed(record))]
    records = {seed: record for seed, record in all_records.items() if not stats.failed(record)}
    step_s = tuple(stats.step_seconds(record, task.batch_rows) for record in records.values())
    terms = task.batch_rows * task.terms_per_row
    whole = {seed: record for seed, record in records.items() if not stats.is_brief(record)}
    curves = tuple(ArmCurve(seed, stats.curve(record, task.metric.name)) for seed, record in whole.items())
    finals = [curve.points[-1] for curve in curves if curve.points]
    fact = facts.get(name)
    return Arm(
        name,
        label,
        tier,
        source,
        step_s,
        tuple(terms / seconds for seconds in step_s),
        peak_bytes=fact.peak_bytes if fact else None,
        phases_s=fact.phases_s if fact else {},
        mfu=_mfu(name, task, plans, step_s),
        final_metric=tuple(value for _, _, value in finals),
        final_rows=max((rows for rows, _, _ in finals), default=0),
        curves=curves,
        search_s=_charge(name, plans) or 0.0,
        error=(fact.error if fact else "") or _error_in(errors, len(all_records)),
    )


def _error_in(errors: list[str], races: int) -> str | None:
    return f"{errors[0]} (in {len(errors)} of {races} races)" if errors else None


def _mfu(name: str, task: Task, plans: Plans, step_s: tuple[float, ...]) -> float | None:
    """Return model FLOP/s over the device's peak for the precision the arm computes in."""
    profile = plans.profiles["S"]
    if profile.loop.flops_per_step is None or not step_s:
        return None
    precision = {
        "plan_S": plans.plans["S"].precision.value,
        "plan_F": plans.plans["S"].precision.value,
        "strong": task.strong.precision if task.strong else None,
    }.get(name, task.reference.precision)
    if precision is None or name in ("paper", "strong_plan"):
        return None
    return profile.device.utilisation(profile.loop.flops_per_step / statistics.median(step_s), str(precision))


def _charge(name: str, plans: Plans) -> float | None:
    tier = {"plan_S": "S", "plan_F": "F"}.get(name)
    return plans.plans[tier].planning_s if tier in plans.plans else None


def _ratio_rows(
    task: Task,
    races: stats.Races,
    facts: Mapping[str, ArmFacts],
    present: list[str],
    control: Interval | None,
) -> list[RatioRow]:
    rows: list[RatioRow | None] = []
    better = task.metric.higher_is_better
    for name in present:
        if name in ("reference", "strong_plan"):
            continue
        tier = _LABELS[name][1]
        rows.append(stats.throughput_row(races, name, "reference", tier, None if name == "self" else control))
        if name != "self":
            rows.append(_memory(facts, name, "reference", tier))
        if name in ("plan_S", "plan_F"):
            rows.append(stats.quality_row(races, name, "reference", tier, task.metric.name, better))
    if "strong" in present:
        rows.append(stats.throughput_row(races, "plan_S", "strong", "S", control))
        rows.append(_memory(facts, "plan_S", "strong", "S"))
    if "strong_plan" in present:
        row = stats.throughput_row(races, "strong_plan", "strong", "S", control)
        if row is not None:
            verdict = stats.non_inferiority(row.ratio)
            rows.append(RatioRow("do_no_harm", row.arm, row.against, row.tier, row.ratio, verdict))
    return [row for row in rows if row is not None]


def _memory(facts: Mapping[str, ArmFacts], arm: str, against: str, tier: str) -> RatioRow | None:
    ours, theirs = facts.get(arm), facts.get(against)
    if ours is None or theirs is None or not ours.peak_bytes or not theirs.peak_bytes:
        return None
    return stats.memory_row(arm, against, tier, ours.peak_bytes, theirs.peak_bytes)


def _target_rows(
    task: Task, plans: Plans, races: stats.Races, present: list[str], control: Interval | None
) -> list[TargetRow]:
    rows: list[TargetRow | None] = []
    for target in task.targets:
        for name in ("plan_S", "plan_F"):
            if name not in present:
                continue
            tier = _LABELS[name][1]
            metric = (target, task.metric.name, task.metric.higher_is_better)
            for charge in (None, _charge(name, plans)):
                rows.append(stats.target_row(races, name, "reference", tier, *metric, charge, control))
            if "paper" in present:
                rows.append(stats.target_row(races, name, "paper", tier, *metric, None, control))
            if name == "plan_F" and "strong" in present:
                rows.append(stats.target_row(races, name, "strong", tier, *metric, None, control))
    return [row for row in rows if row is not None]


def _headline(ratios: list[RatioRow], targets: list[TargetRow], plans: Plans) -> Verdict:
    """Return the first sentence: tier S by throughput, then tier F by the hardest charged target both reached."""
    same = next(
        (r for r in ratios if r.arm == "plan_S" and r.metric == "throughput" and r.against == "reference"), None
    )
    parts = []
    kind = "no verdict"
    if same is not None:
        kind = same.verdict.kind
        parts.append(_same_maths(same, plans.plans["S"]))
    charged = [row for row in targets if row.arm == "plan_F" and row.charged and row.against == "reference"]
    decided = [row for row in charged if row.ratio is not None and row.verdict.kind != "no verdict"]
    if decided:
        row = decided[-1]
        ratio = row.ratio
        assert ratio is not None
        parts.append(
            f"With the learning rate freed, target {row.target:g} is reached {ratio.mean:.2f}x as fast, "
            f"search included (95% {ratio.low:.2f} to {ratio.high:.2f}, n={ratio.n})."
        )
        if kind != "harm" and row.verdict.kind == "gain":
            kind = "gain"
    return Verdict(kind, " ".join(parts) or "Nothing was measured.")


def _same_maths(row: RatioRow, plan: Plan) -> str:
    figures = _figures(row.ratio)
    if row.verdict.kind == "gain":
        return f"Same maths, {figures} the throughput of the reference."
    if row.verdict.kind == "harm":
        return f"Same maths, but slower: {figures} the throughput of the reference."
    if row.verdict.kind == "no verdict":
        return f"No verdict on throughput: {row.verdict.sentence}."
    advice = "the plan says: change nothing" if not plan.changes else "the difference is not clear of the noise"
    return f"No gain from settings that keep the maths ({figures}): {advice}."


def _figures(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.mean:.2f}x"
    return f"{ratio.mean:.2f}x (95% {ratio.low:.2f} to {ratio.high:.2f}, n={ratio.n})"


def _notes(plans: Plans, targets: list[TargetRow], races: stats.Races) -> list[str]:
    notes = [f"{name}: {reason}" for name, reason in _ends(races).items()]
    if any(row.left_censored for row in targets):
        notes.append(
            "A target crossed at the first evaluation is left-censored: its true time is at most the one shown."
        )
    if "F" in plans.plans:
        search = format_seconds(plans.plans["F"].search_s)
        notes.append(f"Tier F is charged with planning and a learning-rate range test of {search} in every pair.")
    return notes


def _ends(races: stats.Races) -> dict[str, str]:
    """Return how arms ended that did not run to their budget."""
    ends: dict[str, list[str]] = {}
    for race in races.values():
        for name, record in race.items():
            ends.setdefault(name, []).append(_end(record))
    words = {"target": "stopped after the hardest target", "cap": "stopped at the time cap", "diverged": "diverged"}
    return {
        name: ", ".join(f"{words[e]} in {found.count(e)} of {len(found)} races" for e in words if e in found)
        for name, found in ends.items()
        if any(e in words for e in found)
    }


def _end(record: RunRecord) -> str:
    return record.end.reason if record.end else "cut off"
