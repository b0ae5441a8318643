"""Phases of a step with and without a plan: savings that add up, shares, bounds, and what cannot be known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_task import BATCH_SIZE, loss_fn
from tiny_task import task as tiny

import trimtab
from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.serialization import from_json, to_json
from trimtab.experiments.phase_result import (
    COMPUTE,
    MEMORY,
    UNATTRIBUTED,
    WHOLE,
    PhaseResult,
    bound_seconds,
    rows_of,
    saved_by_bound,
    saved_by_part,
    saved_times,
)
from trimtab.experiments.result_table import SAMPLES, SECONDS, ResultTable, Row
from trimtab.plans.plan import Plan

CPU = DeviceSpec("cpu", "cpu", peak_flops={"fp32": 1e12}, bandwidth_bytes_s=1e11)
BASELINE_S = {"forward": 0.3, "backward": 0.5, "optimizer": 0.1, "rest": 0.1}
PLAN_S = {"forward": 0.2, "backward": 0.25, "optimizer": 0.1, "rest": 0.05}
JITTER = (1.0, 1.01, 0.99, 1.005, 0.995, 1.0)


def result(baseline=BASELINE_S, plan=PLAN_S, *, clock=1.0, rounds=6, roofs=True, parts=True):
    rows = []
    for arm, phases in (("baseline", baseline), ("plan", plan)):
        for number in range(rounds):
            noise = JITTER[number % 6]
            rows += [Row(arm, 0, number, f"phase:{name}", s * noise * clock / 10, "s") for name, s in phases.items()]
            rows.append(Row(arm, 0, number, SECONDS, sum(phases.values()) * noise * 2, "s"))
            rows.append(Row(arm, 0, number, SAMPLES, 20.0, "samples"))
            if parts:
                rows.append(Row(arm, 0, number, "part:forward Linear", phases.get("forward", 0) * noise / 20, "s"))
        for phase in ("forward", "backward", "optimizer") if roofs else ():
            rows.append(Row(arm, -1, -1, f"roof:compute:{phase}", 0.001, "s"))
            rows.append(Row(arm, -1, -1, f"roof:memory:{phase}", 0.003, "s"))
    return PhaseResult("task", ResultTable.of(rows), 10.0, "precision bf16", CPU)


def test_savings_of_phases_and_the_rest_sum_to_the_whole():
    found = {row.phase: row for row in saved_times(result(clock=1.1))}
    assert list(found) == ["forward", "backward", "optimizer", "rest", UNATTRIBUTED, WHOLE]
    parts = [row for name, row in found.items() if name != WHOLE]
    assert sum(row.saved.mean for row in parts) == pytest.approx(found[WHOLE].saved.mean)
    assert found[WHOLE].saved.mean == pytest.approx(0.4)
    assert found["backward"].share.mean == pytest.approx(0.25 * 1.1 / 0.4)
    assert sum(row.share.mean for row in parts) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "given", [{"plan": {**BASELINE_S, "rest": 0.2}}, {"rounds": 4}, {"clock": 2.0}], ids=["slower", "few", "distorted"]
)
def test_without_a_clear_gain_there_are_no_shares(given):
    assert all(row.share is None for row in saved_times(result(**given)))


def test_an_own_step_that_hides_phases_is_merged_into_the_rest_of_both():
    found = {row.phase: row for row in saved_times(result(baseline={"optimizer": 0.1, "rest": 0.9}))}
    assert "forward" not in found
    assert found["rest"].saved.mean == pytest.approx(0.4)


def test_bounds_split_a_phase_by_its_roofline():
    found = bound_seconds(result(), "baseline")
    assert found[COMPUTE] == pytest.approx(0.9 / 4)
    assert found[MEMORY] == pytest.approx(0.9 * 3 / 4)
    assert found["the loop itself"] == pytest.approx(0.1)
    assert set(bound_seconds(result(roofs=False), "baseline")) == {"not known", "the loop itself"}
    saved = {row.phase: row.saved.mean for row in saved_by_bound(result())}
    assert saved[MEMORY] == pytest.approx(0.35 * 3 / 4)
    assert not saved_by_bound(result(roofs=False))


def test_classes_of_modules_are_told_if_both_arms_have_them():
    (row,) = saved_by_part(result())
    assert (row.phase, row.saved.mean) == ("forward Linear", pytest.approx(0.05))
    assert not saved_by_part(result(parts=False))


def test_rows_and_text_and_schema():
    found = result()
    rows = list(rows_of(found))
    assert {row["metric"] for row in rows} == {
        "phase_saved_s",
        "part_saved_s",
        "bound_saved_s",
        "bound_share",
        "clock_ratio",
        "step_speedup",
    }
    assert "1.67x" in str(found)
    assert from_json(PhaseResult, to_json(found)) == found
    with pytest.raises(FormatError):
        replace(found, schema=1)


@pytest.mark.slow
@pytest.mark.parametrize("has_step", [False, True])
def test_phases_of_a_real_loop_are_timed(has_step):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    task = replace(tiny, step=step) if has_step else tiny
    found = trimtab.phases(task, plan=Plan.fixed(BATCH_SIZE, BATCH_SIZE // 2), rounds=3)
    assert found.phases_of("plan")[:2] == ("data", "forward")
    assert ("forward" in found.phases_of("baseline")) != has_step
    assert bool(found.notes) == has_step
    assert found.step_samples == BATCH_SIZE
    assert sum(found.clocked("plan")) > 0
    assert 0.1 < found.clock_cost("plan").mean < 10
    assert not saved_by_bound(found) or not has_step
