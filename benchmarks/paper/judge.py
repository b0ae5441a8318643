"""The judge: compares claims of the paper and goals of trimtab with measured rows (math: section 8).

Rows are those that `trimtab compare`, `ablate`, `scale` and `phases` print with `--json`, by run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.figure_words import bound_in_words
from benchmarks.paper.claims import ABOUT, CLAIMS, GPU, LEAST, MOST, Claim
from benchmarks.paper.goals import MONITOR, NO_HARM, PREDICTED, SMALL_BYTES, Goal
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, mean_interval

Row = Mapping[str, Any]
PASS, FAIL, NO_VERDICT = "pass", "fail", "no verdict"
NOT_COMPARABLE, NOT_MEASURED = "not comparable", "not measured"
GOAL_WORDS = {PASS: "met", FAIL: "missed", NO_VERDICT: "not shown"}
# The paper's recipe as described in its text, and trimtab's plans.
LITERAL, OURS = "paper", ("equivalent_plan", "tuned_plan")
NEAR = 0.1  # Tolerance around a claimed fraction, as a fraction of the whole gain.
# Metric of the rows of a measure, and of the arm's own value.
METRICS = {
    "throughput": ("throughput_ratio", "terms_per_s"),
    "time_to_target": ("time_to_target_ratio", "time_to_target_ratio"),
    "peak_memory": ("peak_memory_ratio", "peak_bytes"),
    "final_metric": ("final_metric_difference", "final_metric"),
    "energy": ("energy_ratio", "joules_per_sample"),
    "do_no_harm": ("do_no_harm_ratio", ""),
    "component_throughput": ("throughput_ratio", ""),
    "component_memory": ("peak_memory_ratio", ""),
    "component_quality": ("final_metric_difference", ""),
    "component_time": ("time_to_target_ratio", ""),
}
_COUNTED = ("peak_memory_ratio", "peak_bytes", "mfu")  # A count has no interval, so its value decides.


def met(sense: str, bar: float, row: Row, *, other_training: bool = False) -> str:
    """Return pass if the whole interval of a row meets a limit, fail if none of it does, otherwise no verdict.

    A bounded time passes if the bound meets the limit.

    Args:
        other_training: True if only a worse value of a metric counts against the arm, because it trains differently.
    """
    ends = ends_of(row)
    return NO_VERDICT if ends is None else within(sense, bar, *ends, other_training=other_training)


def within(sense: str, bar: float, low: float, high: float, *, other_training: bool = False) -> str:
    """Return pass if a whole interval meets a limit, fail if none of it does, otherwise no verdict."""
    if sense in (MOST, LEAST):
        beyond = (high <= bar, low > bar) if sense == MOST else (low >= bar, high < bar)
        return PASS if beyond[0] else FAIL if beyond[1] else NO_VERDICT
    if sense == ABOUT:
        low, high, bar = low - bar, high - bar, NEAR
    most = math.inf if other_training and sense != ABOUT else bar
    return PASS if -bar <= low and high <= most else FAIL if low > most or high < -bar else NO_VERDICT


def ends_of(row: Row) -> tuple[float, float] | None:
    """Return the interval that a verdict may use; None without enough pairs."""
    if row.get("mean") is not None and row["metric"] in _COUNTED:
        return row["mean"], row["mean"]
    if row.get("n", 0) < MIN_PAIRS_FOR_VERDICT:
        return None
    if row.get("low") is not None and row.get("high") is not None:
        return row["low"], row["high"]
    if row.get("at_least"):
        return 0.0, 1 / row["at_least"]
    return (1 / row["at_most"], math.inf) if row.get("at_most") else None


def judge_goal(goal: Goal, rows: Sequence[Row]) -> tuple[str, str]:
    """Return the status of a goal, and the measured figure in words.

    Args:
        rows: rows of the goal's run; for a prediction, a row of both predictions.
    """
    failed = failures_of(rows)
    if lost := [arm for arm in (goal.arm, goal.against) if arm in failed]:
        return GOAL_WORDS[NO_VERDICT], f"{lost[0]} failed: {failed[lost[0]]}"
    row = _row_of_goal(goal, rows)
    if row is None:
        return NOT_MEASURED, ""
    bar = goal.bar + (row["control_half_width"] if goal.measure == MONITOR else 0.0)
    status = met(goal.sense, bar, row, other_training=goal.arm == "tuned_plan")
    if goal.measure == PREDICTED:
        status = PASS if row["mean"] <= goal.bar and row["peak_bytes"] <= SMALL_BYTES else FAIL
        return f"predicted {GOAL_WORDS[status]}", f"{row['mean']:.3f}x the time; not measured"
    return GOAL_WORDS.get(status, status), figure_in_words(row, goal.unit)


def failures_of(rows: Sequence[Row]) -> dict[str, str]:
    """Return the errors of the arms of a run that failed in any pair, by name. Their figures show nothing."""
    return {row["arm"]: row["why"] for row in rows if row["metric"] == "failure"}


def _row_of_goal(goal: Goal, rows: Sequence[Row]) -> Row | None:
    if goal.measure in (MONITOR, NO_HARM, PREDICTED) and not (goal.measure == NO_HARM and goal.against):
        found = (r for r in rows if r["metric"] == goal.measure and goal.arm in ("", r.get("task")))
        # Interleaved steps share a process, so a plan that changes the allocator affects both loops and shows nothing.
        return next((r for r in found if goal.measure != NO_HARM or "allocator" not in r.get("changes", "")), None)
    metric, own = METRICS[goal.measure]
    found = [
        row
        for row in rows
        if row["metric"] == metric
        and (row.get("arm"), row.get("against")) == (goal.arm, goal.against)
        and (goal.measure != "time_to_target" or bool(row.get("charged")) == goal.charged)
        and "change" not in row
    ]
    row = nearest(found, goal.target)
    if row is None or not goal.of_value:
        return row
    if goal.measure == "time_to_target":
        return _of_values(row, row["arm_s"])
    value = next((r for r in rows if r["metric"] == own and r.get("arm") == goal.arm), None)
    if value is None:
        return None
    if "values" in value:
        return _of_values(value, value["values"])
    return {**value, "mean": value["value"], "n": 1}


def _of_values(row: Row, values: Sequence[float | None]) -> Row:
    """Return the row of an arm's own values: their mean with its interval."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values) or not finite:
        return {"metric": row["metric"], "n": len(values), "said": "not reached in every run"}
    of = mean_interval(finite)
    return {"metric": row["metric"], "mean": of.mean, "low": of.low, "high": of.high, "n": of.n}


def nearest(rows: Sequence[Row], target: float | None) -> Row | None:
    """Return the row of a target; otherwise the hardest target with a known time or bound, or the last target."""
    exact = [row for row in rows if target is not None and row.get("target") == target]
    known = [row for row in rows if row.get("mean") is not None or row.get("at_least") or row.get("at_most")]
    return (exact or known or list(rows) or [None])[-1]


def figure_in_words(row: Row, unit: str = "x") -> str:
    """Return the figure of a row with its interval, or its bound."""
    rung = f" to {row['target']:g}" if "target" in row else ""
    if row.get("mean") is None:
        return (bound_in_words(row.get("at_least"), row.get("at_most")) or row.get("said", "never reached")) + rung
    is_time = row["metric"] == "time_to_target_ratio" and unit == "x"
    mean, low, high = (row.get(key) for key in ("mean", "low", "high"))
    if is_time:  # Shown as a speed: above 1 is faster.
        mean, low, high = (None if value is None else 1 / value for value in (mean, high, low))
    shown = f"{mean:,.0f}{unit}" if abs(mean) >= 1000 else f"{mean:.3f}{unit}"
    if low is None or high is None:
        return shown + rung
    if row["n"] < MIN_PAIRS_FOR_VERDICT:  # Too few pairs for an interval.
        return f"{shown} (n = {row['n']}){rung}"
    form = ",.0f" if abs(mean) >= 1000 else ".3f"
    return f"{shown} (95% {low:{form}} to {high:{form}}, n = {row['n']}){rung}"


def judge_claims(runs: Mapping[str, tuple[str, Row, Sequence[Row]]], claims: Sequence[Claim] = CLAIMS) -> Iterator[Row]:
    """Yield a row for every claim of the paper and every run that measured its quantity.

    Args:
        runs: task, environment and rows, by name of the run.
    """
    for claim in claims:
        for name, (task, environment, rows) in runs.items():
            if task not in tasks_of(claim):
                continue
            for row in _rows_of_claim(claim, rows):
                here = met(claim.sense, claim.bar, row, other_training=row["arm"] in (LITERAL, "tuned_plan"))
                why = _elsewhere(claim, task, environment, row)
                yield {
                    "claim": claim.says,
                    "source": claim.source,
                    "sense": claim.sense,
                    "bar": claim.bar,
                    "status": NOT_COMPARABLE if why else here,
                    "here": here,
                    "why": why,
                    "run": name,
                    "task": task,
                    "arm": row["arm"],
                    "plan_kind": row.get("plan_kind", ""),
                    **{key: row.get(key) for key in ("mean", "low", "high", "n", "at_least", "at_most")},
                }


def _rows_of_claim(claim: Claim, rows: Sequence[Row]) -> Iterator[Row]:
    is_component = claim.measure.startswith("component_")
    failed = failures_of(rows)
    rows = [row for row in rows if row.get("arm") not in failed and row.get("against") not in failed]
    if claim.measure == "mfu":
        yield from ({**row, "mean": row["value"], "n": 1} for row in rows
                    if row["metric"] == "mfu" and row["arm"] in (LITERAL, *OURS))  # fmt: skip
    elif claim.measure == "scaling_efficiency":
        yield from ({**row, "arm": "equivalent_plan"} for row in rows if row["metric"] == claim.measure
                    and row["recipe"] == "plan" and row["ranks"] == claim.ranks)  # fmt: skip
    elif claim.measure == "gain_share":
        yield from _shares(claim, rows)
    else:
        metric, _ = METRICS[claim.measure]
        found: dict[str, list[Row]] = {}
        for row in rows:
            arms = (LITERAL, *OURS)
            is_own = row.get("setting") == "alone" and row["change"] in claim.part if is_component else (
                row.get("arm") in arms and row.get("against") == "reference" and "change" not in row
            )  # fmt: skip
            if row["metric"] == metric and is_own and not row.get("charged"):
                found.setdefault(f"{row['arm']} {row.get('change', '')}", []).append(row)
        yield from (row for each in found.values() if (row := nearest(each, claim.target)) is not None)


def _shares(claim: Claim, rows: Sequence[Row]) -> Iterator[Row]:
    names = {"memory": ("bound_saved_s", "memory-bound")}
    for part in claim.part:
        metric, phase = names.get(part, ("phase_saved_s", part))
        for row in rows:
            if (row["metric"], row.get("phase")) == (metric, phase) and row.get("share") is not None:
                ends = {"mean": row["share"], "low": row.get("share_low"), "high": row.get("share_high")}
                yield {**row, **ends, "arm": "equivalent_plan"}


def _elsewhere(claim: Claim, task: str, environment: Row, row: Row) -> str:
    """Return the reason why a figure is not comparable with the paper, or ""."""
    found = ["a smaller task"] if task in claim.workload.smaller else []
    if "gpu" not in environment:
        found.append("on a CPU")
    elif claim.measure == "mfu" and not environment["gpu"].endswith(GPU):
        found.append(f"on another GPU ({environment['gpu']}), of another peak")
    if claim.target is not None and row.get("target") != claim.target:
        found.append(f"to {row.get('target', math.nan):g}, not to {claim.target:g}")
    return "; ".join(found)


def tasks_of(claim: Claim) -> tuple[str, ...]:
    """Return the tasks of a claim, at the paper's size and smaller."""
    return (*claim.workload.tasks, *claim.workload.smaller)


def headline(claims: Sequence[Row]) -> dict[str, str]:
    """Return the headline: number of claims shown by the paper's recipe, and reached by trimtab's plans.

    A claim that fails anywhere fails.
    """
    said = {}
    for name, arms in (("literal", (LITERAL,)), ("ours", OURS)):
        statuses: dict[str, set[str]] = {}
        for row in claims:
            if row["arm"] in arms:
                statuses.setdefault(f"{row['claim']} {row['source']}", set()).add(row["status"])
        first = [next((s for s in (FAIL, NO_VERDICT, PASS) if s in found), "") for found in statuses.values()]
        said[name] = {status: first.count(status) for status in (PASS, FAIL, NO_VERDICT)}
    counts = ", ".join(f"{said['literal'][each]} {word}" for each, word in _WORDS.items())
    sentence = (
        f"Of the paper's {len(CLAIMS)} claims, by its own recipe (P1), where they can be compared: {counts}. By "
        f"trimtab's plans: {said['ours'][PASS]} reached, {said['ours'][FAIL]} missed, {said['ours'][NO_VERDICT]} "
        "without a verdict."
    )
    return {"kind": f"{said['literal'][PASS]} of {len(CLAIMS)} shown", "sentence": sentence}


_WORDS = {PASS: "shown", FAIL: "missed", NO_VERDICT: "without a verdict"}
