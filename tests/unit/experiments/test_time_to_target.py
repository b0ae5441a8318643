"""Times to a target: interpolated crossings, planning that counts, and bounds where a time is not known."""

from __future__ import annotations

import math

import pytest
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.experiments.result_table import SAMPLES, SECONDS, Evaluated, ResultTable, Row
from trimtab.experiments.time_to_target import QualityMetric, crossing, time_to_target
from trimtab.planner.statistics import Interval

ACCURACY = QualityMetric("accuracy", targets=(0.5, 0.9))
CONTROL = Interval(1.0, 0.99, 1.01, 5)


def points(*values, step_s=1.0):
    return [Evaluated(8.0 * (i + 1), step_s * (i + 1), value) for i, value in enumerate(values)]


def table_of(arms, seeds=5):
    """Return a table of arms as (seconds between evaluations, values)."""
    rows = []
    for seed in range(seeds):
        for arm, (step_s, values) in arms.items():
            for number, value in enumerate(values):
                rows.append(Row(arm, seed, number, SECONDS, step_s * (1 + 0.001 * seed), "s"))
                rows.append(Row(arm, seed, number, SAMPLES, 8.0, "samples"))
                rows.append(Row(arm, seed, number, "evaluation:accuracy", value, ""))
    return ResultTable.of(rows)


@pytest.mark.parametrize(
    ("values", "seconds", "is_early"),
    [
        ((0.1, 0.4, 0.6, 0.7), 2.5, False),
        ((0.1, 0.6, 0.4, 0.6, 0.7), 3.5, False),  # A crossing that the next evaluation does not confirm.
        ((0.1, 0.2, 0.6), math.inf, False),  # The last evaluation is not confirmed.
        ((0.6, 0.7), 1.0, True),
        ((0.1, 0.2), math.inf, False),
        ((0.5, 0.5), 1.0, True),
    ],
)
def test_a_crossing_is_interpolated_and_confirmed(values, seconds, is_early):
    found = crossing(points(*values), ACCURACY, 0.5)
    assert (found.seconds, found.is_early) == (pytest.approx(seconds), is_early)


def test_a_lower_metric_crosses_downwards():
    metric = QualityMetric("loss", higher_is_better=False, targets=(3.0, 2.0))
    assert crossing(points(4.0, 3.5, 2.5, 2.0), metric, 3.0).seconds == pytest.approx(2.5)
    assert metric.unit == "relative"
    assert metric.difference(1.9, 2.0) == pytest.approx(5.0)
    assert ACCURACY.difference(0.9, 0.85) == pytest.approx(5.0)


CURVE = (0.1, 0.4, 0.6, 0.8, 0.95, 0.96)


def compared(ours, theirs, target=0.5, charged_s=0.0, seeds=5):
    table = table_of({"plan": ours, "baseline": theirs}, seeds)
    return time_to_target(table, ACCURACY, target, "plan", "baseline", charged_s=charged_s, control=CONTROL)


def test_a_faster_arm_reaches_the_target_sooner_and_planning_counts():
    found = compared((0.5, CURVE), (1.0, CURVE))
    assert found.speed.mean == pytest.approx(2.0)
    assert (found.verdict, found.reached, found.bound) == ("gain", (5, 5), "")
    charged = compared((0.5, CURVE), (1.0, CURVE), charged_s=2.5)
    assert charged.speed.mean == pytest.approx(2.5 / 3.75, rel=1e-2)
    assert charged.verdict == "harm"
    assert compared((0.5, CURVE), (1.0, CURVE), seeds=4).verdict == "no verdict"
    assert compared((1.0, CURVE), (1.0, CURVE)).verdict == "no gain"


def test_a_baseline_that_never_reaches_the_target_gives_a_lower_bound():
    found = compared((0.5, CURVE), (1.0, (0.1, 0.2, 0.3, 0.3, 0.3, 0.3)))
    assert found.speed is None
    assert found.at_least == pytest.approx(6.0 / 1.25, rel=1e-2)
    assert (found.verdict, found.reached) == ("gain", (5, 0))
    assert found.bound.startswith(">= 4.")


def test_an_arm_that_never_reaches_the_target_gives_an_upper_bound():
    found = compared((1.0, (0.1, 0.2, 0.3, 0.3, 0.3, 0.3)), (0.5, CURVE))
    assert found.speed is None
    assert found.at_least is None
    assert found.at_most == pytest.approx(1.25 / 6.0, rel=1e-2)
    assert (found.verdict, found.reached) == ("harm", (0, 5))
    neither = compared((1.0, (0.1, 0.2)), (1.0, (0.1, 0.2)))
    assert (neither.bound, neither.verdict) == ("never reached", "no verdict")


def test_a_target_met_at_the_first_evaluation_is_no_ratio():
    early = (0.7, 0.8, 0.9)
    assert compared((0.5, early), (1.0, CURVE)).at_least == pytest.approx(2.5 / 0.5, rel=1e-2)
    found = compared((1.0, CURVE), (0.5, early), charged_s=10.0)
    assert (found.speed, found.verdict) == (None, "harm")


def test_without_evaluations_there_is_no_row():
    assert time_to_target(ResultTable(), ACCURACY, 0.5, "plan", "baseline") is None


@pytest.mark.parametrize(
    "given", [{"targets": (0.9, 0.5)}, {"targets": (0.5, 0.5)}, {"unit": "meters"}, {"targets": (math.nan,)}], ids=str
)
def test_a_metric_that_cannot_be_is_refused(given):
    with raises(ValueGivenError, code="value.invalid"):
        QualityMetric("accuracy", **given)
