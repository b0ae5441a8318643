"""Headline of an ablation: the plan as a whole, its most valuable change, and interactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab.experiments.ablation.ablation_design import PLAN, REFERENCE
from trimtab.experiments.ablation.ablation_result import (
    INTERACTION,
    QUALITY,
    THROUGHPUT,
    WITHIN,
    AblatedChange,
    ChangeEffect,
)
from trimtab.experiments.comparison.comparison_result import RatioRow, Verdict
from trimtab.experiments.comparison.verdicts import quality_figures, ratio_in_words
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, resolution

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
