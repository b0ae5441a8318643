"""Verdict on low-bit optimizer state: the same loss, and a cost that the objective accepts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.choice import MeasuredCost
from trimtab.core.objective import Objective
from trimtab.planner.smaller_state import ends_comparison, judge_smaller, peak_reduction, with_lower_peak
from trimtab.planner.tuned_plan import ShortPair, ShortRun
from trimtab.plans.plan import Plan

STEPS, PEAK = 60, 1000
TIME, BOTH = Objective(), Objective(time=1, memory=1)
PLAN = replace(Plan.fixed(4), measured=MeasuredCost(1.0, PEAK), baseline=MeasuredCost(1.0, PEAK))


def falling(rate: float, step_s: float = 1.0) -> ShortRun:
    """Return a training whose loss falls in a straight line."""
    return ShortRun(tuple(10 - rate * i / STEPS for i in range(STEPS)), step_s)


def pair(speed: float = 1.0, cost: float = 1.0) -> ShortPair:
    """Return a pair whose rival's loss falls `speed` times as fast, at `cost` times the seconds per step."""
    return ShortPair(falling(5), falling(5 * speed, cost), falling(5))


def judged(pairs: list[ShortPair], objective: Objective = TIME, saved: float = 0.3, plan: Plan = PLAN):
    return judge_smaller(pairs, plan, objective, "8bit", saved)


@given(speed=st.floats(0.5, 2))
def test_samples_at_the_higher_of_both_final_losses_are_about_the_ratio_of_speeds(speed):
    found = pair(speed).samples_at_equal_loss
    assert 0.9 * speed <= found <= 1.1 * speed
    assert ShortPair(falling(5), falling(5)).samples_at_equal_loss == 1


def test_equal_loss_as_fast_in_less_memory_is_accepted():
    found = judged([pair()] * 5)
    assert (found.is_gain, found.code, found.step_ratio) == (True, "paired_run.less_memory", 1.0)


def test_the_memory_weight_decides_how_much_slower_a_step_may_be():
    slower = [pair(cost=1.1)] * 5
    assert judged(slower, TIME).code == "paired_run.not_worth"
    assert judged(slower, BOTH).is_gain  # 10% slower, 30% smaller
    assert judged(slower, BOTH, saved=0.08).code == "paired_run.not_worth"
    # Time and memory count relative to the loop before planning: a plan at a quarter of its peak saves less.
    lighter = replace(PLAN, measured=MeasuredCost(1.0, PEAK // 4))
    assert judged(slower, BOTH, plan=lighter).code == "paired_run.not_worth"


@pytest.mark.parametrize(
    ("pairs", "code"),
    [
        ([pair(speed=0.8)], "paired_run.worse_loss"),
        ([pair(), pair(), pair(speed=0.8)], "paired_run.worse_loss"),
        ([pair(speed=0.93)] * 5, "paired_run.loss_uncertain"),
        ([pair(speed=each) for each in (0.93, 1.1, 0.93, 1.1, 1.0)], "paired_run.loss_uncertain"),
        ([ShortPair(falling(5), ShortRun((9.0, float("nan")) * 30, 1.0))], "paired_run.worse_loss"),
        ([ShortPair(falling(0), falling(0))], "paired_run.no_target"),
    ],
)
def test_a_loss_that_is_or_may_be_worse_is_refused(pairs, code):
    found = judged(pairs, BOTH)
    assert (found.is_gain, found.code) == (False, code)
    assert ends_comparison(pairs[-1]) is (code != "paired_run.loss_uncertain")


def test_traced_peaks_count_and_without_a_trace_the_bytes_of_the_state():
    traced = {"user": 2000, "8bit": 1500}
    assert peak_reduction(PLAN, traced, "8bit", 1) == (500, 0.25)
    for untraced in ({}, {"8bit": 500}):
        assert peak_reduction(PLAN, untraced, "8bit", 300) == (300, 0.3)
    assert peak_reduction(Plan.fixed(4), {}, "8bit", 300) is None
    lower = with_lower_peak(replace(PLAN, predicted=MeasuredCost(1.0)), 300)
    assert (lower.measured.peak_bytes, lower.predicted.peak_bytes) == (PEAK - 300, None)
