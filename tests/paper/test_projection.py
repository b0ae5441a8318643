"""Eqs. 21 to 23 against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from raising import raises

from benchmarks.paper.projection import doubling_months, efficiency_after, net_speedup, speedup_of_time_saved
from trimtab.core.errors import ValueGivenError


def test_net_speedup_of_the_papers_figures():
    assert net_speedup(1.42, 0.12) == pytest.approx(1.267857, abs=1e-6)
    assert net_speedup(1.42, 0.0) == 1.42


@pytest.mark.parametrize(("speedup", "months"), [(1.26, 14.996), (1.20, 19.009), (1.355014, 11.408), (2.0, 5.0)])
def test_months_to_double(speedup, months):
    """The paper's own 14.8 months for 1.26 are 15.0."""
    assert doubling_months(speedup) == pytest.approx(months, abs=2e-3)
    assert efficiency_after(doubling_months(speedup), speedup) == pytest.approx(2.0)


def test_another_cycle_is_another_time():
    assert doubling_months(2.0, cycle_months=7.0) == 7.0
    assert efficiency_after(10.0, 1.26) == pytest.approx(1.26**2)
    assert efficiency_after(14.0, 2.0, cycle_months=7.0) == 4.0
    assert efficiency_after(0.0, 1.26) == 1.0


def test_a_share_of_time_saved_is_a_speed_up():
    assert speedup_of_time_saved(0.262) == pytest.approx(1.3550, abs=1e-4)
    assert speedup_of_time_saved(0.5) == 2.0
    assert speedup_of_time_saved(0.0) == 1.0


@pytest.mark.parametrize("speedup", [1.0, 0.9])
def test_without_a_gain_efficiency_never_doubles(speedup):
    assert doubling_months(speedup) == math.inf


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: net_speedup(0.0, 0.1), "throughput_gain"),
        (lambda: net_speedup(1.4, -0.1), "recompute_overhead"),
        (lambda: speedup_of_time_saved(1.0), "1 - share"),
        (lambda: speedup_of_time_saved(-0.1), "share"),
        (lambda: efficiency_after(-1.0, 1.2), "months"),
        (lambda: efficiency_after(1.0, math.nan), "speedup"),
        (lambda: efficiency_after(1.0, 1.2, 0.0), "cycle_months"),
        (lambda: doubling_months(0.0), "speedup"),
        (lambda: doubling_months(1.2, 0.0), "cycle_months"),
        (lambda: doubling_months("fast"), "speedup"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(call, field):
    with raises(ValueGivenError, code="value.invalid", field=field):
        call()
