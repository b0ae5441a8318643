"""What a run takes is a plan's seconds and a meter's watts, or what was given; what is not known is said to be so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from raising import raises

from trimtab.carbon.intensity import Intensity
from trimtab.carbon.job import RemainingWork, power_of, step_seconds
from trimtab.carbon.pause_schedule import when_to_train
from trimtab.core.choice import MeasuredCost
from trimtab.core.energy_reading import MeterFacts, Provenance
from trimtab.core.errors import ValueGivenError

HOUR = 3600.0
PREDICTED, MEASURED = MeasuredCost(2.0), MeasuredCost(1.5, energy_j=300.0)
METER = MeterFacts(Provenance.MEASURED, ("rapl",), idle_w=40.0)


@pytest.mark.parametrize(
    ("takes_s", "measured", "predicted", "step_s", "source"),
    [
        (7200.0, MEASURED, PREDICTED, 72.0, "given"),
        (None, MEASURED, PREDICTED, 1.5, "measured"),
        (None, None, PREDICTED, 2.0, "predicted"),
    ],
)
def test_seconds_are_what_was_given_else_measured_else_predicted(takes_s, measured, predicted, step_s, source):
    found = step_seconds(100, takes_s, measured, predicted)
    assert found[0] == step_s
    assert source in found[1]


def test_seconds_that_nobody_knows_are_asked_for():
    with raises(ValueGivenError, code="carbon.duration_unknown", field="--when-clean"):
        step_seconds(100, None)


def test_watts_are_what_was_given_else_what_the_meter_read():
    given = power_of(90.0, 20.0, MEASURED, METER)
    assert (given.watts, given.idle_watts) == (90, 20)
    assert all(figure in given.known for figure in ("90 W (given)", "20 W while waiting (given)"))
    assert "unknown" in power_of(90.0, None, MEASURED, METER).known
    read = power_of(None, None, MEASURED, METER)
    assert (read.watts, read.idle_watts) == (200, 40)
    assert read.known == "200 W (measured during planning); 40 W while waiting"
    with raises(ValueGivenError, code="carbon.power_unknown", field="--idle-watts"):
        power_of(None, 100.0)
    beside = power_of(None, 100.0, MEASURED, METER)
    assert (beside.watts, beside.idle_watts) == (200, 100)
    assert beside.known == "200 W (measured during planning); 100 W while waiting (given)"


def test_watts_that_nobody_knows_change_the_grams_and_not_the_choice_or_the_share():
    unknown = power_of(None, None, PREDICTED)
    assert unknown.known.startswith("unknown")
    assert "1000 W" in unknown.known
    levels = (300, 100, 300, 100, 300)
    forecast = Intensity("average", tuple((HOUR * i, float(g)) for i, g in enumerate(levels)), 5 * HOUR)
    found = [
        when_to_train(forecast, RemainingWork(2, HOUR, "", power, 300.0).job(0), 0.0, 5 * HOUR)
        for power in (unknown, unknown._replace(watts=37.0))
    ]
    assert found[0].stretches == found[1].stretches
    assert len(found[0].stretches) == 2
    assert found[0].saved_share == pytest.approx(found[1].saved_share)
    assert found[0].grams == pytest.approx(found[1].grams * 1000 / 37)


def test_what_is_left_after_a_pause_has_what_a_start_loses():
    work = RemainingWork(10, 60.0, "", power_of(100.0, 30.0), 90.0)
    whole, left = work.job(0), work.job(4)
    assert (whole.seconds, whole.watts, whole.waiting_watts) == (600, 100, 30)
    assert (whole.pause.seconds, whole.pause.joules, whole.pause.idle_watts) == (90, 9000, 30)
    assert left.seconds == 6 * 60 + 90
    in_one_piece = replace(work, pause_s=None)
    assert (in_one_piece.job(4).seconds, in_one_piece.job(4).pause) == (360, None)


def test_it_says_what_is_left():
    work = RemainingWork(10, 60.0, "given", power_of(100.0, 30.0), 90.0)
    assert work.describe(4) == {
        "work": "6 min 0 s: 6 steps of 60 s (given)",
        "power": "100 W (given); 30 W while waiting (given)",
        "pause": "each pause costs 90 s (given)",
    }
    assert "pause" not in replace(work, pause_s=None).describe(0)
