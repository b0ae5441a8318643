"""A comparison as flat benchmark rows, printed by `trimtab compare --json`."""

from __future__ import annotations

import math
import statistics
from typing import Any

from trimtab.core.energy_reading import NO_METER
from trimtab.core.serialization import to_jsonable
from trimtab.experiments.comparison.arms import PLAN_ARMS
from trimtab.experiments.comparison.comparison_result import Comparison, Ratio, RatioRow, TargetRow, Verdict, limits_of
from trimtab.experiments.comparison.comparison_statistics import bounds
from trimtab.experiments.comparison.gain_rows import gain_rows, third_rows_flat
from trimtab.plans.plan import Plan

ROWS_SCHEMA = 1
METRICS = {
    "throughput": "throughput_ratio",
    "peak_memory": "peak_memory_ratio",
    "energy": "energy_ratio",
    "final_metric_difference": "final_metric_difference",
    "do_no_harm": "do_no_harm_ratio",
}
# Metrics to which the resolution of the A/A control (a ratio of speeds) applies.
_TIMED = ("throughput", "do_no_harm")


def benchmark_object(comparison: Comparison) -> dict[str, Any]:
    """Return the benchmark object of a comparison.

    Rows are flat except for `pairs`; ratios are arm over other arm.
    """
    rows = [_ratio_row(comparison, row) for row in comparison.ratios]
    rows += [target_object(comparison.task, row, comparison.resolution) for row in comparison.target_rows]
    rows += [_planning_row(comparison, key, comparison.plans[key]) for key in PLAN_ARMS if key in comparison.plans]
    rows += [] if comparison.gain is None else gain_rows(comparison.gain)
    rows += third_rows_flat(comparison.task, comparison.thirds)
    found = {
        "schema": ROWS_SCHEMA,
        "name": "compare",
        "environment": dict(comparison.environment) | _run(comparison),
        "rows": rows,
    }
    return dict(to_jsonable(found))


def _run(comparison: Comparison) -> dict[str, Any]:
    """Return the command, the data hash, the verdict and the energy meter."""
    sha256 = comparison.data_source.get("sha256")
    energy = {} if comparison.meter == NO_METER else {"energy": comparison.meter.describe()}
    return {"command": comparison.command, "data_sha256": sha256} | verdict_object(comparison.headline) | energy


def verdict_object(headline: Verdict) -> dict[str, str]:
    """Return the headline verdict with its sentence."""
    return {"verdict": headline.kind, "verdict_why": headline.sentence}


def _planning_row(comparison: Comparison, key: str, plan: Plan) -> dict[str, Any]:
    """Return the planning cost charged to a plan's arm, including search."""
    head = {"metric": "planning_s", "task": comparison.task, "plan_kind": plan.plan_kind, "arm": PLAN_ARMS[key]}
    spent: dict[str, Any] = {"planning_s": plan.planning_s, "search_s": plan.search_s}
    if key in comparison.planning_energy:
        spent |= {"planning_j": comparison.planning_energy[key].joules}
    return head | spent | {"changes": plan.changes_in_words or "nothing"}


def _ratio_row(comparison: Comparison, row: RatioRow) -> dict[str, Any]:
    against = {"self": "self"}.get(row.arm, row.against)
    head = {
        "metric": METRICS[row.metric],
        "task": comparison.task,
        "plan_kind": row.plan_kind,
        "arm": row.arm,
        "against": against,
    }
    resolved = resolution_of(comparison.resolution) if row.metric in _TIMED else {}
    cpu = _cpu(row.cpu) if row.metric == "throughput" else {}
    whole = {} if row.whole is None else {"n_whole": row.whole}
    return head | interval_of(row.ratio) | whole | cpu | resolved | {"verdict": row.shown.kind}


def target_object(task: str, row: TargetRow, control: Ratio | None) -> dict[str, Any]:
    """Return the row of a target; the ratio is in seconds (below 1 is faster), bounds are speed-ups.

    Args:
        task: name of the task.
        row: time to target of an arm and another arm.
        control: the A/A ratio, for the resolution.
    """
    head = {
        "metric": "time_to_target_ratio",
        "task": task,
        "plan_kind": row.plan_kind,
        "arm": row.arm,
        "against": row.against,
        "target": row.target,
        "charged": row.charged,
        "censored": row.ratio is None,
        "reached": row.reached_arm,
        "reached_against": row.reached_against,
        "n": row.n,
        "left_censored": row.left_censored,
        "arm_samples": row.arm_samples,
        "against_samples": row.against_samples,
        "median_s": _median(row.arm_s),
        "median_against_s": _median(row.against_s),
        "arm_s": row.arm_s,
        "against_s": row.against_s,
    }
    if row.energy is not None:
        of_energy = {f"energy_{key}": value for key, value in interval_of(row.energy).items() if key != "pairs"}
        head |= {"arm_j": row.arm_j, "against_j": row.against_j} | of_energy
    if row.ratio is None:
        at_least, at_most = limits_of(row)
        limits = {"bound": row.bound, "at_least": at_least, "at_most": at_most}
        return head | limits | {"verdict": row.verdict.kind}
    # The row already has the n of all pairs.
    interval = {key: value for key, value in interval_of(row.ratio.inverse).items() if key != "n"}
    return head | interval | resolution_of(control) | {"verdict": row.verdict.kind}


def _median(seconds: tuple[float, ...]) -> float | None:
    """Return the median over pairs, or None if infinite."""
    middle = statistics.median(seconds)
    return middle if math.isfinite(middle) else None


def interval_of(ratio: Ratio) -> dict[str, Any]:
    """Return a ratio's mean, interval, number of pairs and raw ratios as row fields."""
    return {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "n": ratio.n, "pairs": ratio.pairs}


def _cpu(ratio: Ratio | None) -> dict[str, Any]:
    """Return the row fields for throughput per CPU second."""
    if ratio is None:
        return {"cpu_mean": None, "cpu_low": None, "cpu_high": None}
    return {"cpu_mean": ratio.mean, "cpu_low": ratio.low, "cpu_high": ratio.high}


def resolution_of(control: Ratio | None) -> dict[str, Any]:
    """Return the smallest significant effect given the A/A control; None below the pairs needed for a verdict."""
    ends = None if control is None else bounds(control)
    return {"resolution": None if ends is None else max(ends[1], 1 / ends[0]) - 1}
