"""Headline of a report: the equivalent plan by throughput, the tuned plan by targets and final metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trimtab.core.plan import Plan
from trimtab.experiments.comparison.comparison_result import (
    NO_VERDICT,
    Ratio,
    RatioRow,
    TargetRow,
    Verdict,
    limit_in_words,
    limits_of,
)
from trimtab.experiments.comparison.verdicts import ratio_in_words


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
