"""An ablation as flat benchmark rows, printed by `trimtab ablate --json`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trimtab.core.serialization import to_jsonable
from trimtab.experiments.ablation.ablation_design import PLAN_AGAIN, UNCHANGED_AGAIN, power_of_all
from trimtab.experiments.ablation.ablation_result import (
    ALONE,
    INTERACTION,
    THROUGHPUT,
    WHOLE,
    WITHIN,
    Ablation,
    ChangeEffect,
)
from trimtab.experiments.comparison.comparison_result import Ratio, RatioRow
from trimtab.experiments.comparison.comparison_rows import (
    METRICS,
    ROWS_SCHEMA,
    interval_of,
    resolution_of,
    target_object,
    verdict_object,
)


def ablation_object(ablation: Ablation) -> dict[str, Any]:
    """Return the benchmark object of an ablation; rows are flat except for `pairs`.

    Ratios are with the change over without.
    """
    run = {"command": ablation.command, "data_sha256": ablation.data_source.get("sha256")}
    run |= verdict_object(ablation.headline)
    found = {
        "schema": ROWS_SCHEMA,
        "name": "ablate",
        "environment": dict(ablation.environment) | run,
        "rows": [
            *_planning(ablation),
            *_whole(ablation),
            *_effects(ablation),
            *_times(ablation),
            *_refused(ablation),
            *_arms(ablation),
        ],
    }
    return dict(to_jsonable(found))


def _planning(ablation: Ablation) -> Iterator[dict[str, Any]]:
    changes = ", ".join(change.says for change in ablation.changes) or "nothing"
    head = {"metric": "planning_s", "task": ablation.task, "plan_kind": ablation.plan.plan_kind, "changes": changes}
    yield head | {"planning_s": ablation.plan.planning_s}


def _whole(ablation: Ablation) -> Iterator[dict[str, Any]]:
    for row in (*ablation.whole, *ablation.controls):
        yield _head(ablation, row) | {"setting": WHOLE} | interval_of(row.ratio) | {"verdict": row.verdict.kind}


def _effects(ablation: Ablation) -> Iterator[dict[str, Any]]:
    of = _controls(ablation)
    for effect in ablation.effects:
        control = of[effect.setting]
        if control is not None and not effect.change:
            control = control.to_the(power_of_all(len(ablation.changes)))
        told = resolution_of(control) if effect.metric == THROUGHPUT else {}
        head = _head(ablation, effect) | {"change": effect.change or "all", "setting": effect.setting}
        other = {"other": effect.other} if effect.other else {}
        yield head | other | interval_of(effect.ratio) | told | {"verdict": effect.verdict.kind}


def _times(ablation: Ablation) -> Iterator[dict[str, Any]]:
    of = _controls(ablation)
    for each in ablation.times:
        head = {"change": each.change} if each.change else {}
        yield target_object(ablation.task, each.row, of[each.setting]) | head | {"setting": each.setting}


def _controls(ablation: Ablation) -> dict[str, Ratio | None]:
    """Return the A/A ratio for the resolution, by setting."""
    found = {row.arm: row.ratio for row in ablation.controls}
    loop, plan = found.get(UNCHANGED_AGAIN), found.get(PLAN_AGAIN)
    return {ALONE: loop, WHOLE: loop, WITHIN: plan, INTERACTION: ablation.interaction_control}


def _head(ablation: Ablation, row: RatioRow | ChangeEffect) -> dict[str, Any]:
    head = {"metric": METRICS[row.metric], "task": ablation.task, "plan_kind": row.plan_kind}
    return head | {"arm": row.arm, "against": row.against}


def _refused(ablation: Ablation) -> Iterator[dict[str, Any]]:
    for change in ablation.changes:
        for setting, why in change.refusals.items():
            head = {
                "metric": "throughput_ratio",
                "task": ablation.task,
                "plan_kind": change.plan_kind,
                "change": change.name,
            }
            yield head | {"setting": setting, "mean": None, "n": 0, "refused": why}


def _arms(ablation: Ablation) -> Iterator[dict[str, Any]]:
    for arm in ablation.arms:
        head = {"metric": "arm", "task": ablation.task, "arm": arm.name, "changes": arm.changes}
        figures = {"sample_s": arm.sample_s, "peak_bytes": arm.peak_bytes, "final_metric": arm.final_metric}
        yield head | figures | {"final_samples": arm.final_samples} | ({"error": arm.error} if arm.error else {})
