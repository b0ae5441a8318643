"""Findings of comparisons, ablations, scaling tables and phase tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.paper.finding import Finding, Run
from trimtab.core.errors import FormatError
from trimtab.core.step_phases import TimedGain
from trimtab.experiments.ablation.ablation_result import INTERACTION, MEMORY, QUALITY, THROUGHPUT, Ablation
from trimtab.experiments.comparison.comparison_result import (
    NO_VERDICT,
    Arm,
    Comparison,
    Ratio,
    RatioRow,
    TargetRow,
    ThirdRow,
    Verdict,
    failure_of,
    limits_of,
)
from trimtab.experiments.comparison.comparison_statistics import ALIKE, as_ratio, time_of_crossing
from trimtab.experiments.comparison.ratio_rows import difference
from trimtab.experiments.phase_attribution import MEMORY as MEMORY_BOUND
from trimtab.experiments.phase_attribution import shares
from trimtab.experiments.phase_result import PhaseResult
from trimtab.experiments.scaling.scaling_result import PLAN_KINDS, RECIPES, Scaling
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, mean_interval

REFERENCE = "reference"
_UNPROVED = "laps of one process: no races show that the plan gains"
_NOT_FASTER = "its races do not show that it is faster"
_LAPPED = "equivalent_plan"  # The arm with phase timing.
_PARTS = {MEMORY_BOUND: "memory"}  # The name used in the paper's claims.
_Point = tuple[int, float, float]  # A point of a curve: samples, seconds, metric.


def of_comparison(name: str, found: Comparison) -> Run:
    """Return the run of a comparison."""
    return Run(
        name,
        "comparison",
        found.task,
        found.environment,
        found.headline,
        (*_ratios(found), *_targets(found), *_peers(found), *_mfu(found), *_gains(found)),
        found.metric,
        found.unit,
        found.terms,
        {arm.name: _label(arm) for arm in found.arms},
        found.command,
        found.data_source.get("sha256", ""),
        found.higher_is_better,
        _trained(found),
        meter=found.meter.describe(),
        gain=found.gain,
        precisions={arm.name: arm.precision for arm in found.arms if arm.precision},
    )


def _gains(found: Comparison) -> Iterator[Finding]:
    # An arm that failed in some paired run has no verdict, and so no gain.
    faster = {
        row.arm
        for row in found.ratios
        if (row.metric, row.against, row.verdict.kind) == ("throughput", REFERENCE, "gain")
    }
    yield from gain_findings(found.gain, found.thirds, faster)


def _label(arm: Arm) -> str:
    """Return an arm's label; for recipes with the compute precision on this machine."""
    return f"{arm.label}, computed in {arm.precision}" if arm.precision and not arm.plan_kind else arm.label


def _trained(found: Comparison) -> str:
    """Return the samples trained on by the reference, its final metric and the targets it reached."""
    reference = found.arm(REFERENCE)
    if reference is None or not reference.final_metric or not reference.curves:
        return ""
    reached = [
        sum(math.isfinite(time_of_crossing(each.points, rung, found.higher_is_better)[0]) for each in reference.curves)
        for rung in found.targets
    ]
    rungs = ", ".join(f"{rung:g}" for rung, number in zip(found.targets, reached, strict=True) if number)
    final = f"{found.metric} {statistics.median(reference.final_metric):.4g}"
    reaches = rungs or "no rung: it is far from trained"
    return f"{reference.final_samples:,} rows; the reference ends at {final} and reaches {reaches}"


def _ratios(found: Comparison) -> Iterator[Finding]:
    for row in found.ratios:
        if row.metric == "final_metric_difference":
            yield _quality(found, row)
            continue
        measure = row.metric
        values = [_value(measure, found.arm(name)) for name in (row.arm, row.against)]
        if measure == "energy":
            values = [_of_a_row(joules, found) for joules in values]
        has_verdict = _has_verdict(row)
        said = "" if has_verdict else row.verdict.sentence
        arm = found.arm(row.arm)
        each = arm.terms_per_s if arm is not None and measure == "throughput" else ()
        kind = {"has_verdict": has_verdict, "values": each, "failed": failure_of(row)}
        yield Finding(measure, row.arm, row.against, row.plan_kind, *values, row.ratio, said, **kind)
        if measure == "do_no_harm":
            yield from _peaks(found, row)


def _of_a_row(joules: float | None, found: Comparison) -> float | None:
    """Return joules per sample from joules per batch; None if the batch size is unknown.

    Joules cover all ranks. Older reports contain only a plan, with the batch size of the fullest rank.
    """
    batches = {found.batch_size or plan.batch_size * found.num_ranks for plan in found.plans.values()}
    return joules / batches.pop() if joules is not None and len(batches) == 1 else None


def _has_verdict(row: RatioRow) -> bool:
    """Return True if an interval may be compared with a claim.

    For "do no harm", an interval that includes its own limit may still decide against another limit.
    """
    if row.metric == "do_no_harm" and not failure_of(row):
        return row.ratio.n >= MIN_PAIRS_FOR_VERDICT
    return row.verdict.kind != NO_VERDICT


def _quality(found: Comparison, row: RatioRow) -> Finding:
    """Return a plan's final metric against the reference: at equal samples, or at both ends for a tuned plan.

    Both values are taken at the point of comparison. A comparison before the end of the reference's budget gives no
    verdict,
    because it does not describe the trained model. A tuned plan may end early itself.
    """
    ours, theirs = found.arm(row.arm), found.arm(row.against)
    ends = [] if ours is None or theirs is None else _ends(ours, theirs, after_equal_samples=row.plan_kind != "tuned")
    after, (is_ours_whole, is_theirs_whole) = _after(ends, _budget_samples(found))
    values = [statistics.median(metric) for metric in zip(*((o[2], t[2]) for o, t in ends), strict=True)]
    has_verdict = _has_verdict(row)
    open_as = "" if has_verdict else row.verdict.sentence
    said = "; ".join(filter(None, (open_as.partition(", after ")[0] if after else open_as, after)))
    is_comparable = is_theirs_whole and (is_ours_whole or row.plan_kind == "tuned")
    kind = {"has_verdict": has_verdict and is_comparable, "failed": failure_of(row)}
    return Finding(
        "final_metric", row.arm, row.against, row.plan_kind, *(values or (None, None)), row.ratio, said, **kind
    )


def _budget_samples(found: Comparison) -> int:
    """Return the reference's sample budget; for older reports, the number of samples trained on."""
    given = [row.against_samples for row in found.target_rows if row.against == REFERENCE]
    reference = found.arm(REFERENCE)
    return max(given, default=0) or (0 if reference is None else reference.final_samples)


def _peaks(found: Comparison, row: RatioRow) -> Iterator[Finding]:
    """Yield the peak-memory ratio of a plan over its hand-tuned loop, missing from a comparison's rows."""
    ours, theirs = (_value("peak_memory", found.arm(name)) for name in (row.arm, row.against))
    if ours and theirs:
        figure = Ratio(ours / theirs, None, None, 1, (ours / theirs,), counted=True)
        failed = failure_of(row)
        kind = {"said": row.verdict.sentence if failed else "", "has_verdict": not failed, "failed": failed}
        yield Finding("peak_memory", row.arm, row.against, row.plan_kind, ours, theirs, figure, **kind)


def _value(measure: str, arm: Arm | None) -> float | None:
    """Return an arm's own figure, the median over seeds."""
    if arm is None:
        return None
    of = {"throughput": arm.terms_per_s, "do_no_harm": arm.terms_per_s, "final_metric": arm.final_metric}
    of |= {"energy": arm.joules, "peak_memory": () if arm.peak_bytes is None else (float(arm.peak_bytes),)}
    values = of.get(measure, ())
    return statistics.median(values) if values else None


def _targets(found: Comparison) -> Iterator[Finding]:
    for row in found.target_rows:
        time, failed = _time(row, "time_to_target", row.arm, row.against), _failure(found.arm(row.arm))
        yield _without_figure(time, failed) if failed else time


def _without_figure(time: Finding, failed: str) -> Finding:
    """Return the time of a failed arm without bounds, because a bound would count as a figure."""
    return replace(time, said=failed, figure=None, has_verdict=False, at_least=None, at_most=None, failed=failed)


def _failure(arm: Arm | None) -> str:
    return f"it failed: {arm.error}" if arm is not None and arm.error else ""


def _time(row: TargetRow, measure: str, arm: str, against: str, part: str = "") -> Finding:
    ours, theirs = (_median(seconds) for seconds in (row.arm_s, row.against_s))
    figure, is_open = None if row.ratio is None else row.ratio.inverse, row.verdict.kind == NO_VERDICT
    said = row.bound or _unreached(row) or (row.verdict.sentence if is_open and figure is not None else "")
    at_least, at_most = limits_of(row)
    if failed := failure_of(row):
        said, at_least, at_most = row.verdict.sentence, None, None
    where = {"target": row.target, "charged": row.charged, "has_verdict": not is_open, "failed": failed}
    where |= {"values": row.arm_s, "part": part, "reached": (row.reached_arm, row.reached_against)}
    where |= {"at_least": at_least, "at_most": at_most}
    return Finding(measure, arm, against, row.plan_kind, ours, theirs, figure, said, **where)


def _unreached(row: TargetRow) -> str:
    return "never reached" if row.n and not row.reached_arm else ""


def _median(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def _peers(found: Comparison) -> Iterator[Finding]:
    """Yield the final metric of other recipes against the reference, missing from a comparison's rows."""
    reference = found.arm(REFERENCE)
    if reference is None or reference.error:
        return
    for arm in found.arms:
        if arm.plan_kind or arm.name in (REFERENCE, "self") or not arm.curves:
            continue
        if failed := _failure(arm):
            yield Finding("final_metric", arm.name, REFERENCE, said=failed, has_verdict=False, failed=failed)
        elif (end := _at_the_end(arm, reference, found)) is not None:
            values = (_value("final_metric", each) for each in (arm, reference))
            figure, said, is_alike = end
            yield Finding("final_metric", arm.name, REFERENCE, "", *values, figure, said, has_verdict=is_alike)


def _ends(arm: Arm, reference: Arm, *, after_equal_samples: bool) -> list[tuple[_Point, _Point]]:
    """Return the points of comparison of every pair: the last common evaluation, or the end of both runs.

    Returns [] if a pair lacks such points.
    """
    theirs, ends = {curve.seed: curve for curve in reference.curves}, []
    for curve in arm.curves:
        if (beside := theirs.get(curve.seed)) is None:
            continue
        mine, yours = curve.points, beside.points
        if after_equal_samples:
            common = {rows for rows, *_ in mine} & {rows for rows, *_ in yours}
            mine, yours = (tuple(point for point in points if point[0] in common) for points in (mine, yours))
        if not mine or not yours:
            return []
        ends.append((mine[-1], yours[-1]))
    return ends


def _after(ends: Sequence[tuple[_Point, _Point]], rows: int) -> tuple[str, tuple[bool, bool]]:
    """Return the position of the comparison in the reference's training, and whether both runs are nearly complete.

    Args:
        ends: points of comparison, by pair.
        rows: samples of the reference's training.

    Returns:
        A text, or "" at the end of training; and (arm complete, reference complete).
    """
    if not ends:
        return "some pair has no evaluation of both", (False, False)
    ours, theirs = ([pair[side][0] / rows for pair in ends if rows] for side in (0, 1))
    between = [_between(shares) for shares in (ours, theirs)]
    said = "" if between[0] == "100" else f"after {between[0]}% of the reference's rows"
    if between[1] not in (between[0], "100"):
        said = f"after {between[0]}% of the reference's rows, which itself came to {between[1]}%"
    is_whole = [all(abs(share - 1) <= ALIKE for share in shares) for shares in (ours, theirs)]
    return said, (is_whole[0], is_whole[1])


def _between(shares: Sequence[float]) -> str:
    least, most = (f"{100 * end(shares, default=1.0):.0f}" for end in (min, max))
    return least if least == most else f"{least} to {most}"


def _at_the_end(arm: Arm, reference: Arm, found: Comparison) -> tuple[Ratio, str, bool] | None:
    """Return the difference of the final metric (positive is better), its position, and whether both runs are complete.

    A recipe ends with its own budget: steps of several batches go slightly beyond it, and a short schedule ends early.
    """
    ends = _ends(arm, reference, after_equal_samples=False)
    if not ends:
        return None
    pairs = [difference(ours, theirs, found.higher_is_better, found.unit) for (*_, ours), (*_, theirs) in ends]
    said, is_whole = _after(ends, _budget_samples(found))
    return as_ratio(mean_interval(pairs), pairs), said, all(is_whole)


def _mfu(found: Comparison) -> Iterator[Finding]:
    """Yield the model FLOP/s utilisation of all arms; over seeds it varies with throughput."""
    reference = found.arm(REFERENCE)
    for arm in found.arms:
        if arm.mfu is None or not arm.terms_per_s or arm.name == REFERENCE:
            continue
        middle = statistics.median(arm.terms_per_s)
        each = [arm.mfu * rate / middle for rate in arm.terms_per_s]
        theirs = None if reference is None else reference.mfu
        figure = as_ratio(mean_interval(each), each)
        failed = _failure(arm)
        kind = {"said": failed, "has_verdict": not failed, "failed": failed}
        yield Finding("mfu", arm.name, REFERENCE, arm.plan_kind, arm.mfu, theirs, figure, **kind)


def of_scaling(name: str, found: Scaling) -> Run:
    """Return the run of a scaling table."""
    return Run(
        name,
        "scaling",
        found.task,
        dict(found.environment or {}) | _threads(found),
        Verdict(NO_VERDICT, "Scaling efficiency: throughput(n) / (n throughput(1)), paired within rounds."),
        tuple(_efficiencies(found)),
        labels=RECIPES,
    )


def _threads(found: Scaling) -> dict[str, str]:
    """Return the threads per rank, unlike those of the launching process."""
    return {"threads": f"{' / '.join(map(str, found.threads))} a rank"} if found.threads else {}


def _efficiencies(found: Scaling) -> Iterator[Finding]:
    alone = {row.recipe: row.samples_per_s.mean for row in found.rows if row.ranks == 1}
    for row in found.rows:
        if row.recipe == "self" or row.mode != "weak":
            continue
        figure = None if row.efficiency is None or row.crowded else _efficiency(row.efficiency, row.pairs)
        said = f"ranks share {row.crowded}: it says that they run, and nothing of scaling" if row.crowded else ""
        rates = (row.samples_per_s.mean, alone.get(row.recipe))
        yield Finding(
            "scaling_efficiency", row.recipe, "", PLAN_KINDS[row.recipe], *rates, figure, said, ranks=row.ranks
        )


def _efficiency(found: Interval, pairs: Sequence[float]) -> Ratio:
    bounds = (found.low, found.high) if len(pairs) >= MIN_PAIRS_FOR_VERDICT else (None, None)
    return Ratio(found.mean, *bounds, len(pairs), tuple(pairs))


def of_ablation(name: str, found: Ablation) -> Run:
    """Return the run of an ablation: every change alone, over the unchanged loop in trimtab's run."""
    return Run(
        name,
        "ablation",
        found.task,
        found.environment,
        found.headline,
        tuple(_components(found)),
        found.metric,
        found.unit,
        labels={"plan": "a change of trimtab's plan"} | {change.name: change.says for change in found.changes},
        command=found.command,
        data_sha256=found.data_source.get("sha256", ""),
        higher_is_better=found.higher_is_better,
    )


def _components(found: Ablation) -> Iterator[Finding]:
    names = {THROUGHPUT: "component_throughput", MEMORY: "component_memory", QUALITY: "component_quality"}
    for effect in found.effects:
        if not effect.change or effect.other:
            continue
        is_open = effect.verdict.kind == NO_VERDICT
        yield Finding(
            names[effect.metric],
            "plan",
            effect.setting,
            effect.plan_kind,
            figure=effect.ratio,
            said=effect.verdict.sentence if is_open else "",
            has_verdict=not is_open,
            part=effect.change,
        )
    for each in found.times:
        if each.change:
            yield _time(each.row, "component_time", "plan", each.setting, each.change)
    yield from _whole(found, names)


def _whole(found: Ablation, names: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the effect of all changes together, and the A/A controls."""
    labels = {arm.name: arm.label for arm in found.arms} | {"reference": "the reference"}
    for row in (*found.whole, *found.controls):
        if row.ratio is not None and row.metric in names:
            part, against = (labels.get(name, name) for name in (row.arm, row.against))
            yield Finding(names[row.metric], "plan", against, row.plan_kind, figure=row.ratio, part=part)
    if found.interaction_control is not None:
        of = "nothing (control of interactions)"
        yield Finding("component_throughput", "plan", INTERACTION, figure=found.interaction_control, part=of)


def gain_findings(gain: TimedGain | None, thirds: Sequence[ThirdRow], faster: Collection[str]) -> Iterator[Finding]:
    """Yield fractions of the saved time by phase, bound and third of training.

    Args:
        gain: the gain by phase, or None.
        thirds: comparison by thirds of training.
        faster: arms with a significant gain in paired runs and no failure. Phase timing covers a single seed with arms
            built once, and thirds cover only successful runs, so neither allows a verdict alone.
    """
    if gain is not None:
        yield from _shares(gain, _LAPPED in faster)
    for row in thirds:
        if row.against == REFERENCE and row.saved is not None:
            is_proved = row.arm in faster
            how = {"said": "" if is_proved else _NOT_FASTER, "part": row.third, "has_verdict": is_proved}
            yield Finding("gain_share", row.arm, REFERENCE, row.plan_kind, figure=row.saved, **how)


def _shares(gain: TimedGain, is_proved: bool) -> Iterator[Finding]:
    said = "; ".join(filter(None, (gain.on_ranks, "" if is_proved else _UNPROVED)))
    for each in shares(gain):
        figure = as_ratio(each.share, each.each)
        part = _PARTS.get(each.of, each.of)
        how = {"said": said, "part": part, "has_verdict": is_proved}
        yield Finding("gain_share", _LAPPED, REFERENCE, "equivalent", figure=figure, **how)


def of_phases(name: str, found: PhaseResult) -> Run:
    """Return the run of a phase table.

    Raises:
        FormatError: the table has no plan or several plans, or steps with zero or infinite time.
    """
    if len(found.gains) != 1:
        given, hint = f"{len(found.gains)} of them", "trimtab phases ONE --out FILE"
        raise FormatError("gains", got=given, expected="one plan's", hint=hint)
    (gain,) = found.gains
    laps = (*gain.reference.laps, *gain.plan.laps)
    if not all(0 < seconds < math.inf for lap in laps for seconds in (lap.plain_s, lap.clocked_s)):
        raise FormatError("gains: laps", got="a step that took no time, or for ever", expected="seconds above 0")
    clocked = " ".join(filter(None, (f"A step of {gain.task}", gain.on_ranks, "under a clock of its phases")))
    said = f"{clocked}: {gain.changes or 'the plan changes nothing'}."
    return Run(
        name,
        "phases",
        gain.task,
        gain.environment,
        Verdict(NO_VERDICT, said),
        tuple(gain_findings(gain, found.thirds[0] if found.thirds else (), faster=())),
        labels={"equivalent_plan": gain.changes or "the plan"},
        gain=gain,
    )
