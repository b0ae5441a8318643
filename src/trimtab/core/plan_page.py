"""A plan as a page: verdict, each choice with its reason and its losers, cost, check, advice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trimtab.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from trimtab.core.plan import Choice, Measured, Plan

_TIERS = {"S": "tier S: the same maths", "F": "tier F: other dynamics"}


def explained(plan: Plan) -> str:
    """Return the page."""
    lines = [_verdict(plan), "", f"against: {plan.reference.describe()} loop, {_rows(plan)} per step"]
    lines.append(_cost("reference, predicted" if plan.elsewhere else "reference", plan.baseline))
    lines.append(_cost("this plan, predicted", plan.predicted))
    if plan.measured is not None:
        lines.append(_cost("this plan, measured", plan.measured))
    if plan.peak_margin is not None:
        lines.append(
            f"peaks: traced, with {100 * plan.peak_margin:.2g}% on top for what no trace tells; not calibrated"
        )
    if plan.seconds_margin is not None:
        lines.append(
            f"seconds: by its data sheet, with {100 * plan.seconds_margin:.2g}% on top against a limit; not calibrated"
        )
    lines.append("")
    for name, choice in plan.choices():
        lines += _choice(name, choice)
    if plan.check is not None:
        verdict = "splitting keeps the gradient" if plan.check.splittable else "splitting is refused"
        lines += ["", f"check: {verdict}: {plan.check.reason}"]
    if plan.stands_between is not None:
        low, high = plan.stands_between
        lines.append(f"weights: the choice stands while memory weighs {low:.2g} to {high:.2g} of both together")
    lines += [f"advice: {text}" for text in plan.advice]
    if plan.planning_s:
        search = f", {format_seconds(plan.search_s)} of it search for tier F" if plan.search_s else ""
        lines.append(f"planning took {format_seconds(plan.planning_s)}{search}")
    return "\n".join(line for line in lines if line is not None)


def _verdict(plan: Plan) -> str:
    if not plan.changes and plan.elsewhere:
        return f"Change nothing: on {plan.elsewhere} nothing traced is predicted to be better. Nothing was run."
    if not plan.changes:
        return "Change nothing: no setting tried is better than this loop by more than the measurement can resolve."
    text = f"Change {plan.changes_in_words} ({_TIERS[plan.tier]})"
    if plan.baseline and plan.measured and plan.verified:
        text += f": {plan.baseline.step_s / plan.measured.step_s:.2f}x the speed in trials{_certainty(plan.verified)}"
    elif plan.baseline and plan.predicted:
        where = f" on {plan.elsewhere}" if plan.elsewhere else ""
        ran = "never run" if plan.measured is None else "not run against the loop"
        text += f": predicted at {plan.baseline.step_s / plan.predicted.step_s:.2f}x the speed{where}, and {ran}"
    if plan.splits and plan.check is None:
        text += ". That splitting keeps this model's maths is not proved"
    return text + "."


def _rows(plan: Plan) -> str:
    return f"{plan.batch_rows} rows" + (f" on each of {plan.num_ranks} ranks" if plan.num_ranks > 1 else "")


def _certainty(verified: tuple[float, float] | None) -> str:
    if verified is None or not all(map(math.isfinite, verified)):
        return ""
    low, high = verified
    doubt = "" if low > 1 or high < 1 else ", not to be told from 1"
    return f" (95% {low:.2f} to {high:.2f}{doubt})"


def _cost(label: str, cost: Measured | None) -> str:
    if cost is None:
        return f"{label}: not measured"
    between = ""
    if cost.between_s is not None:
        between = " ({} to {})".format(*map(format_seconds, cost.between_s))
    return f"{label}: {format_seconds(cost.step_s)} per step{between}, peak memory {format_bytes(cost.peak_bytes)}"


def _choice(name: str, choice: Choice) -> list[str]:
    sign = "*" if choice.changed else " "
    lines = [f"{sign} {name.replace('_', ' '):<20} {choice.value!s:<14} [{choice.mark}] {choice.reason}"]
    return lines + [f"      not {loser.value}: {loser.reason}" for loser in choice.losers]
