"""Times to target with and without a change (paper, table III), from records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trimtab.core.plan import Plan
from trimtab.experiments.ablation.ablation_design import PLAN, PLAN_AGAIN, REFERENCE, UNCHANGED_AGAIN
from trimtab.experiments.ablation.ablation_effects import AblationMeasurements
from trimtab.experiments.ablation.ablation_result import ALONE, WHOLE, WITHIN, AblatedChange, ChangeTime
from trimtab.experiments.comparison.time_to_target import PlanningCharge, target_row

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
