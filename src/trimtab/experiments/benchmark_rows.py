"""A comparison as flat rows, printed by `--json`: ratios of an arm over another, with intervals and verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from trimtab.core.serialization import to_jsonable
from trimtab.experiments import result_table
from trimtab.experiments.change_effects import ALONE, TOGETHER, ChangeEffect
from trimtab.experiments.comparison import Comparison
from trimtab.experiments.result_table import BASELINE, CONTROL, CPU_SECONDS, ENERGY, PLANNED, TUNED
from trimtab.experiments.time_to_target import TargetSpeed
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, resolution

ROWS_SCHEMA = 1
NON_INFERIOR = 0.97  # Least speed of a plan for a hand-tuned recipe relative to the recipe (math: section 8).
_NAMES = {
    BASELINE: "reference",
    CONTROL: "self",
    PLANNED: "equivalent_plan",
    TUNED: "tuned_plan",
    "plan for strong": "strong_plan",
}
_KINDS = {PLANNED: "equivalent", TUNED: "tuned"}


def benchmark_object(found: Comparison) -> dict[str, Any]:
    """Return the benchmark object of a comparison: environment, verdict, and rows."""
    where = {"command": found.command, "data_sha256": found.data.get("sha256"), "verdict": found.verdict()}
    energy = {} if found.meter.is_absent else {"energy": found.meter.describe()}
    environment = dict(found.environment) | where | energy
    rows = list(rows_of(found))
    return dict(to_jsonable({"schema": ROWS_SCHEMA, "name": _name(found), "environment": environment, "rows": rows}))


def _name(found: Comparison) -> str:
    return {"ablation": "ablate", "race": "race"}.get(found.kind, "compare")


def arm_name(arm: str) -> str:
    """Return the name of an arm in rows."""
    return _NAMES.get(arm, arm.replace(" ", "_"))


def rows_of(found: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the rows: throughput, memory, energy, final metric and time to targets of every arm; planning."""
    for arm in (CONTROL, *found.arms[1:]):
        if arm not in found.failures:
            yield from _ratios(found, arm)
    for arm, rival in found.rivals.items():
        yield from _no_harm(found, arm, rival)
    for effect in found.effects():
        yield from _effect(found, effect)
    for arm in found.arms:
        yield from _values(found, arm)
    for arm, plan in found.plans.items():
        head = _head(found, "planning_s", arm)
        yield head | {"planning_s": plan.planning_s, "search_s": plan.search_s, "changes": plan.changes_in_words}
    for arm, why in found.failures.items():
        yield _head(found, "failure", arm) | {"why": why}


def _head(found: Comparison, metric: str, arm: str, against: str = "") -> dict[str, Any]:
    of = {"against": arm_name(against)} if against else {}
    kind = _KINDS.get(arm, "equivalent" if arm in found.plans else "")
    return {"metric": metric, "task": found.task, "plan_kind": kind, "arm": arm_name(arm)} | of


def interval_of(interval: Interval | None) -> dict[str, Any]:
    """Return an interval as row fields; bounds are None if infinite."""
    if interval is None:
        return {"mean": None, "low": None, "high": None, "n": 0}
    ends = [value if math.isfinite(value) else None for value in (interval.mean, interval.low, interval.high)]
    return {"mean": ends[0], "low": ends[1], "high": ends[2], "n": interval.n}


def _counted(ratio: float) -> dict[str, Any]:
    """Return a ratio that was counted once, without an interval, as row fields."""
    return {"mean": ratio, "low": None, "high": None, "n": 1}


def _ratios(found: Comparison, arm: str) -> Iterator[dict[str, Any]]:
    base = found.arms[0]
    against = CONTROL if arm == CONTROL else base
    speed = result_table.speed(found.table, arm, base)
    cpu = result_table.speed(found.table, arm, base, metric=CPU_SECONDS)
    least = {"resolution": None if found.control is None else _finite(resolution(found.control))}
    pairs = list(result_table.speeds(found.table, arm, base).values())
    by_cpu = {f"cpu_{key}": value for key, value in interval_of(cpu).items() if key != "n"}
    verdict = {"pairs": pairs, "verdict": "control" if arm == CONTROL else found.verdict_of(speed, arm)}
    yield _head(found, "throughput_ratio", arm, against) | interval_of(speed) | by_cpu | least | verdict
    if arm == CONTROL:
        return
    if (memory := found.memory(arm)) is not None:
        yield _head(found, "peak_memory_ratio", arm, base) | _counted(memory)
    if (energy := found.energy(arm)) is not None:
        yield _head(found, "energy_ratio", arm, base) | interval_of(energy)
    if (quality := found.metric_difference(arm)) is not None:
        judged = {"verdict": found.quality_verdict(arm)}
        yield _head(found, "final_metric_difference", arm, base) | interval_of(quality) | judged
    if (loss := found.loss_difference(arm)) is not None and arm in found.plans and arm not in (TUNED, *found.rivals):
        yield _head(found, "loss_difference_percent", arm, base) | interval_of(loss)
    for other in found.arms:
        is_rival = arm in (PLANNED, TUNED) and other not in (base, arm, *found.plans, *found.failures)
        if is_rival:
            rival = found.speed(arm, other)
            judged = {"verdict": found.verdict_of(rival, arm)}
            yield _head(found, "throughput_ratio", arm, other) | interval_of(rival) | judged
    for charged in (False, True) if found.planning_s(arm) else (False,):
        for target in found.times_to_target(arm, charged=charged):
            yield _target(found, target, charged=charged)


def _target(found: Comparison, row: TargetSpeed, *, charged: bool) -> dict[str, Any]:
    """Return the row of a target; the ratio is in seconds (below 1 is faster), bounds are speeds."""
    reached, reached_against = row.reached
    speed = row.speed
    seconds = None if speed is None else speed.inverse
    return _head(found, "time_to_target_ratio", row.arm, row.against) | {
        "target": row.target,
        "charged": charged,
        "censored": speed is None,
        "reached": reached,
        "reached_against": reached_against,
        "median_s": _finite(statistics.median(row.arm_s)),
        "median_against_s": _finite(statistics.median(row.against_s)),
        "arm_s": [_finite(each) for each in row.arm_s],
        "against_s": [_finite(each) for each in row.against_s],
        **interval_of(seconds),
        "n": row.n,
        "bound": row.bound,
        "at_least": row.at_least,
        "at_most": row.at_most,
        "verdict": row.verdict,
    }


def _no_harm(found: Comparison, arm: str, rival: str) -> Iterator[dict[str, Any]]:
    speed = found.speed(arm, rival)
    if speed is None:
        return
    verdict = "no verdict"
    if speed.n >= MIN_PAIRS_FOR_VERDICT and arm not in found.failures and rival not in found.failures:
        verdict = "no harm" if speed.low >= NON_INFERIOR else "harm" if speed.high < NON_INFERIOR else "no verdict"
    pairs = list(result_table.speeds(found.table, arm, rival).values())
    judged = {"pairs": pairs, "verdict": verdict, "changes": found.plans[arm].changes_in_words}
    yield _head(found, "do_no_harm_ratio", arm, rival) | interval_of(speed) | judged
    if (memory := found.memory(arm, rival)) is not None:
        yield _head(found, "peak_memory_ratio", arm, rival) | _counted(memory)


def _effect(found: Comparison, effect: ChangeEffect) -> Iterator[dict[str, Any]]:
    """Yield the rows of a change of an ablation, which have the keys `change` and `setting`."""
    of = {"change": effect.change, "setting": effect.setting}
    verdict = {} if effect.setting == TOGETHER else {"verdict": found.verdict_of(effect.speed, effect.arm)}
    yield _head(found, "throughput_ratio", effect.arm, effect.against) | of | interval_of(effect.speed) | verdict
    if effect.memory is not None:
        yield _head(found, "peak_memory_ratio", effect.arm, effect.against) | of | _counted(effect.memory)
    if effect.setting == ALONE:
        if (quality := found.metric_difference(effect.arm)) is not None:
            said = {"verdict": found.quality_verdict(effect.arm)}
            yield _head(found, "final_metric_difference", effect.arm, effect.against) | of | interval_of(quality) | said
        for target in found.times_to_target(effect.arm, charged=False):
            yield _target(found, target, charged=False) | of


def _values(found: Comparison, arm: str) -> Iterator[dict[str, Any]]:
    """Yield the own figures of an arm: terms per second, peak bytes, joules per sample, utilisation, last metric."""
    rates = found.terms_per_s(arm)
    if rates:
        rate = {"terms": found.terms, "value": statistics.median(rates), "values": rates}
        yield _head(found, "terms_per_s", arm) | rate
    if (peak := found.table.value(result_table.PEAK, arm)) is not None:
        yield _head(found, "peak_bytes", arm) | {"value": peak}
    if joules := result_table.per_sample(found.table, arm, ENERGY):
        yield _head(found, "joules_per_sample", arm) | {"value": statistics.median(joules), "values": joules}
    for name, of_model in (("mfu", True), ("hfu", False)):
        if (share := found.utilisation(arm, of_model=of_model)) is not None:
            yield _head(found, name, arm) | {"value": share}
    for name, values in result_table.final_values(found.table, arm).items():
        finals = list(values.values())
        yield _head(found, "final_metric", arm) | {"of": name, "value": statistics.median(finals), "values": finals}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
