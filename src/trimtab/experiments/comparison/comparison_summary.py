"""Builds a `Comparison` from plans and the records of paired runs."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab.core.energy_reading import MeterFacts
from trimtab.core.record import RunRecord
from trimtab.experiments.comparison import comparison_statistics
from trimtab.experiments.comparison.arm_metrics import ArmMetrics, utilisation
from trimtab.experiments.comparison.arms import ARMS, PLAN_ARMS, PLAN_LOOPS, ArmKind, with_baselines
from trimtab.experiments.comparison.caveats import ONE_RANK, RankConditions, notes, rank_notes
from trimtab.experiments.comparison.comparison_result import (
    NO_VERDICT,
    Arm,
    ArmCurve,
    Comparison,
    Ratio,
    RatioRow,
    TargetRow,
    ThirdRow,
    Verdict,
    limit_in_words,
    limits_of,
)
from trimtab.experiments.comparison.comparison_statistics import ALIKE, Races, as_ratio, blocks, curve, to_the_end
from trimtab.experiments.comparison.ratio_rows import (
    do_no_harm_row,
    energy_control,
    energy_row,
    memory_row,
    meter_of,
    of_planning,
    quality_row,
    short_blocks,
    throughput_row,
    watts,
)
from trimtab.experiments.comparison.time_to_target import PlanningCharge, target_row
from trimtab.experiments.comparison.verdicts import ratio_in_words
from trimtab.experiments.task_plans import Plans
from trimtab.planner.statistics import Interval, mean_interval, ratio_interval, share_interval
from trimtab.planner.tuned_plan import tried_settings
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task, TaskData

# Headline of a report: the equivalent plan by throughput, the tuned plan by targets and final metric.


def headline(
    ratios: Sequence[RatioRow], targets: Sequence[TargetRow], plan: Plan, failed: Mapping[str, str], ranks: str = ""
) -> Verdict:
    """Return the headline verdict.

    Args:
        ratios: ratio rows of the comparison.
        targets: target rows of the comparison.
        plan: the equivalent plan.
        failed: description of the failure, by failed arm. A failed plan brings no gain, because the remaining runs are
            selected by their outcome.
        ranks: note about several ranks, or "".
    """
    found = _find(ratios, "equivalent_plan", "throughput")
    same = _failure("The equivalent plan", failed.get("equivalent_plan"))
    same = same or (None if found else _failure("The reference", failed.get("reference"))) or _same_maths(found, plan)
    freed = _failure("The tuned plan", failed.get("tuned_plan")) or _freed(
        targets, _find(ratios, "tuned_plan", "final_metric_difference")
    )
    leads = freed if same.kind != "harm" and freed.kind == "gain" else same
    sentences = [found.sentence for found in (same, freed) if found.sentence]
    said = " ".join(sentences) or "Nothing was measured."
    return Verdict(leads.kind, f"{said} {ranks}" if ranks else said, leads.code)


def _failure(what: str, where: str | None) -> Verdict | None:
    return Verdict(NO_VERDICT, f"{what} failed {where}: no verdict.", "arm.failed") if where else None


def _find(ratios: Sequence[RatioRow], arm: str, metric: str) -> RatioRow | None:
    return next((r for r in ratios if (r.arm, r.metric, r.against) == (arm, metric, "reference")), None)


def _same_maths(row: RatioRow | None, plan: Plan) -> Verdict:
    if row is None:
        return Verdict(NO_VERDICT, "", "speed.not_measured")
    found = ratio_in_words(row.ratio)
    advice = "the plan recommends no change" if not plan.changes else "the difference is not significant"
    sentences = {
        "gain": f"The equivalent plan has {found} the throughput of the reference.",
        "harm": f"The equivalent plan is slower: {found} the throughput of the reference.",
        NO_VERDICT: f"No verdict on throughput: {row.verdict.sentence}.",
    }
    otherwise = f"No gain from the equivalent plan ({found}): {advice}."
    return Verdict(row.verdict.kind, sentences.get(row.verdict.kind, otherwise), row.verdict.code)


def _freed(targets: Sequence[TargetRow], quality: RatioRow | None) -> Verdict:
    """Return the verdict of the tuned plan, search included, at the hardest decided target.

    A missed harder target or an inferior final metric leaves no gain.
    """
    rungs = [row for row in targets if row.arm == "tuned_plan" and row.charged and row.against == "reference"]
    decided = [i for i, row in enumerate(rungs) if row.verdict.kind != NO_VERDICT and row.reached_arm == row.n]
    hardest = decided[-1] if decided else -1
    against = _missed(rungs[hardest + 1 :]) + _quality(quality, decided=bool(decided))
    if not decided:
        open_rungs = ["no target could be decided"] if rungs and not against else against
        sentence = f"For the tuned plan, {' and '.join(open_rungs)}." if open_rungs else ""
        return Verdict(NO_VERDICT, sentence, "target.undecided")
    row = rungs[hardest]
    but = f", but {' and '.join(against)}" if against else ""
    sentence = f"The tuned plan reaches target {row.target:g} {_speed(row)}{but}."
    if against:
        return Verdict(NO_VERDICT, sentence, "tuned.contradicted")
    return Verdict(row.verdict.kind, sentence, row.verdict.code)


def _speed(row: TargetRow) -> str:
    if row.ratio is None:
        return f"with a speed-up of {limit_in_words(*limits_of(row))}, search included"
    return f"with a speed-up of {row.ratio.mean:.2f}x, search included{_interval(row.ratio)}"


def _interval(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    return f" (95% {ratio.low:.2f} to {ratio.high:.2f}, n={ratio.n})"


def _missed(rungs: Sequence[TargetRow]) -> list[str]:
    """Return a phrase for every target missed by the arm in a pair in which the reference reached it."""
    return [
        f"target {row.target:g} was reached in {row.reached_arm} of {row.n} pairs (reference: {row.reached_against} "
        f"of {row.n})"
        for row in rungs
        if any(
            math.isinf(ours) and math.isfinite(theirs) for ours, theirs in zip(row.arm_s, row.against_s, strict=True)
        )
    ]


def _quality(row: RatioRow | None, *, decided: bool) -> list[str]:
    """Return objections from the final metric: harm, or a missing verdict if a target was decided."""
    if row is None:
        return ["its final quality was not measured"] if decided else []
    if row.verdict.kind not in (("harm", NO_VERDICT) if decided else ("harm",)):
        return []
    what = "its final quality is lower" if row.verdict.kind == "harm" else "there is no verdict on its final quality"
    return [f"{what}: {row.verdict.sentence}"]


# Gain in the early, middle and late third of training, by the samples of every run, from records.

THIRDS = ("early", "middle", "late")
_EDGES = (0.0, 1 / 3, 2 / 3, 1.0)
_NO_PROGRESS = "the metric did not improve in this third in every pair"
_NOT_SEEN = "the metric was first evaluated after this third"


@dataclass(frozen=True)
class _TrainingCurve:
    """A run over its fraction of samples: piecewise linear curves of seconds and of the metric (higher is better)."""

    rows: int
    seconds: tuple[tuple[float, float], ...]
    goodness: tuple[tuple[float, float], ...]

    def taken_s(self, begin: float, end: float) -> float:
        """Return the seconds between two fractions of the run."""
        return _at(self.seconds, end) - _at(self.seconds, begin)

    def of_a_sample_s(self, begin: float, end: float) -> float:
        """Return the seconds per sample between two fractions of the run."""
        return self.taken_s(begin, end) / (end - begin) / self.rows

    def progress(self, begin: float, end: float) -> float:
        """Return the improvement of the metric between two fractions of the run."""
        return _at(self.goodness, end) - _at(self.goodness, begin)


def third_rows(
    races: Races, arm: str, against: str, plan_kind: str, metric: str, higher_is_better: bool, unit: str
) -> list[ThirdRow]:
    """Return a row for every third of training, from pairs in which both arms ran to the end of their budget.

    A run's first block, with cold caches, is excluded; progress excludes the time before the first evaluation.
    Progress
    is a difference of fractions or percentages, or of logarithms for a relative metric such as perplexity.

    Args:
        races: records by seed and arm.
        arm, against: names of the arms.
        plan_kind: "equivalent", "tuned" or "".
        metric: name of the metric.
        higher_is_better: direction of the metric.
        unit: unit of the metric, as in `Metric`.
    """

    def course(record: RunRecord) -> _TrainingCurve:
        return _course(record, metric, _goodness(higher_is_better, unit))

    pairs = [pair for pair in to_the_end(races, arm, against) if all(map(_is_whole, pair))]
    courses = [(course(ours), course(theirs)) for ours, theirs in pairs]
    if not courses:
        return []
    warm = max((course.seconds[1][0] for pair in courses for course in pair if len(course.seconds) > 2), default=0.0)
    saved = _saved(courses, warm)
    found = [_row(courses, third, warm, arm, against, plan_kind) for third in THIRDS]
    return [replace(row, saved=share) for row, share in zip(found, saved, strict=True)]


def _saved(courses: Sequence[tuple[_TrainingCurve, _TrainingCurve]], warm: float) -> list[Ratio | None]:
    """Return every third's fraction of the saved seconds; a first block that was excluded is extrapolated.

    Returns None for every third if the saving is not significant or the arms train on different numbers of samples.
    Seconds are per sample, because steps of several batches can exceed the budget slightly.
    """
    begins, ends = [max(begin, warm) for begin in _EDGES[:-1]], _EDGES[1:]
    are_unlike = any(abs(ours.rows / theirs.rows - 1) > ALIKE for ours, theirs in courses)
    if are_unlike or any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return [None] * len(ends)
    each = [
        [(theirs.of_a_sample_s(begin, end) - ours.of_a_sample_s(begin, end)) / 3 for ours, theirs in courses]
        for begin, end in zip(begins, ends, strict=True)
    ]
    wholes = [math.fsum(of_run) for of_run in zip(*each, strict=True)]
    if not mean_interval(wholes).low > 0:
        return [None] * len(ends)
    mean_s = math.fsum(wholes) / len(wholes)
    return [as_ratio(share_interval(third, wholes), [seconds / mean_s for seconds in third]) for third in each]


def _row(
    courses: Sequence[tuple[_TrainingCurve, _TrainingCurve]],
    third: str,
    first_block: float,
    arm: str,
    against: str,
    plan_kind: str,
) -> ThirdRow:
    begin, end = _EDGES[THIRDS.index(third)], _EDGES[THIRDS.index(third) + 1]
    warm = max(begin, first_block)
    seen = max(begin, *(course.goodness[0][0] if course.goodness else 1.0 for pair in courses for course in pair))
    speeds = [_third_speed(ours, warm, end) / _third_speed(theirs, warm, end) for ours, theirs in courses if warm < end]
    if seen >= end:
        return ThirdRow(third, arm, against, plan_kind, _ratio(speeds), None, None, _NOT_SEEN)
    made = [(ours.progress(seen, end), theirs.progress(seen, end)) for ours, theirs in courses]
    if not all(each > 0 for pair in made for each in pair):
        return ThirdRow(third, arm, against, plan_kind, _ratio(speeds), None, None, _NO_PROGRESS)
    progress = [ours / theirs for ours, theirs in made]
    sooner = [theirs.taken_s(seen, end) / ours.taken_s(seen, end) for ours, theirs in courses]
    both = [each * sooner_by for each, sooner_by in zip(progress, sooner, strict=True)]
    return ThirdRow(third, arm, against, plan_kind, _ratio(speeds), _ratio(progress), _ratio(both))


def _third_speed(course: _TrainingCurve, begin: float, end: float) -> float:
    return course.rows * (end - begin) / course.taken_s(begin, end)


def _ratio(pairs: Sequence[float]) -> Ratio | None:
    return as_ratio(ratio_interval(pairs), pairs) if pairs else None


def _is_whole(record: RunRecord) -> bool:
    return record.end is not None and record.end.reason == "budget" and sum(b.rows for b in blocks(record)) > 0


def _course(record: RunRecord, metric: str, goodness: Callable[[float], float]) -> _TrainingCurve:
    found = blocks(record)
    rows = sum(block.rows for block in found)
    ends = itertools.accumulate(block.rows for block in found)
    times = itertools.accumulate(block.seconds for block in found)
    seconds = ((0.0, 0.0), *((end / rows, taken_s) for end, taken_s in zip(ends, times, strict=True)))
    seen = tuple((at / rows, goodness(value)) for at, _, value in curve(record, metric))
    return _TrainingCurve(rows, seconds, seen)


def _goodness(higher_is_better: bool, unit: str) -> Callable[[float], float]:
    sign = 1.0 if higher_is_better else -1.0

    def of(value: float) -> float:
        if unit != "relative":
            return sign * value
        return sign * math.log(value) if value > 0 else math.nan

    return of


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the linear interpolation at x; beyond the last point, the last value."""
    for (left, before), (right, after) in itertools.pairwise(points):
        if left <= x <= right and right > left:
            return before + (after - before) * (x - left) / (right - left)
    return points[-1][1] if points else math.nan


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
