"""A plan as a page of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from trimtab.core.plan import Choice, Measured, Plan

_TIERS = {"S": "tier S: the same maths", "F": "tier F: other dynamics"}


def explain(plan: Plan) -> str:
    """Return the page: verdict, each choice with its reason and losers, cost, check, advice."""
    lines = [_verdict(plan), "", f"against: {plan.reference.describe()} loop, {plan.batch_rows} rows per step"]
    lines += [_cost("reference", plan.baseline), _cost("this plan", plan.predicted)]
    lines.append("")
    for name, choice in plan.choices():
        lines += _choice(name, choice)
    if plan.check is not None:
        verdict = "splitting keeps the gradient" if plan.check.splittable else "splitting is refused"
        lines += ["", f"check: {verdict}: {plan.check.reason}"]
    lines += [f"advice: {text}" for text in plan.advice]
    if plan.planning_s:
        search = f", {format_seconds(plan.search_s)} of it search for tier F" if plan.search_s else ""
        lines.append(f"planning took {format_seconds(plan.planning_s)}{search}")
    return "\n".join(line for line in lines if line is not None)


def _verdict(plan: Plan) -> str:
    if not plan.changes:
        return "Change nothing: no setting tried is better than this loop by more than the measurement can resolve."
    what = ", ".join(f"{name.replace('_', ' ')} {getattr(plan, name).value}" for name in plan.changes)
    text = f"Change {what} ({_TIERS[plan.tier]})"
    if plan.baseline and plan.predicted:
        text += f": {plan.baseline.step_s / plan.predicted.step_s:.2f}x the speed in trials"
    return text + "."


def _cost(label: str, cost: Measured | None) -> str:
    if cost is None:
        return f"{label}: not measured"
    return f"{label}: {format_seconds(cost.step_s)} per step, peak memory {format_bytes(cost.peak_bytes)}"


def _choice(name: str, choice: Choice) -> list[str]:
    sign = "*" if choice.changed else " "
    lines = [f"{sign} {name.replace('_', ' '):<20} {choice.value!s:<14} [{choice.mark}] {choice.reason}"]
    return lines + [f"      not {loser.value}: {loser.reason}" for loser in choice.losers]
