"""From records to ratios, times to target and verdicts: on records made by hand, whose answers are known."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from race_records import STEP_ROWS, climbing, record, timed
from scipy import stats as scipy_stats

from trimtab.core.record import BRIEF, End, Event, RunRecord
from trimtab.experiments.comparison import comparison_statistics
from trimtab.experiments.comparison.comparison_result import Ratio, failure_of, limits_of
from trimtab.experiments.comparison.ratio_rows import do_no_harm_row, memory_row, quality_row, throughput_row
from trimtab.experiments.comparison.time_to_target import OTHER_EARLY, PlanningCharge, target_row
from trimtab.experiments.comparison.verdicts import control_verdict, non_inferiority, pairs_for_power, speed_verdict
from trimtab.planner.statistics import Interval, ratio_interval

CONTROL = Interval(1.0, 0.98, 1.02, 5)
TIGHT = Interval(1.0, 0.999, 1.001, 5)


def races(ours: list[RunRecord], theirs: list[RunRecord]) -> dict[int, dict[str, RunRecord]]:
    return {seed: {"ours": a, "theirs": b} for seed, (a, b) in enumerate(zip(ours, theirs, strict=True))}


def ratio(mean: float, low: float, high: float, n: int = 5) -> Ratio:
    return Ratio(mean, low, high, n, (mean,) * n)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ratio(1.2, 1.1, 1.3), (1.1, 1.3)),
        (ratio(1.2, 1.1, 1.3, n=4), None),
        (Ratio(1.2, None, None, 5, (1.2,) * 5), None),
    ],
)
def test_a_verdict_rests_on_five_pairs_and_an_interval(found, expected):
    assert comparison_statistics.bounds(found) == expected


# Throughput.


def test_throughput_is_rows_per_second_over_the_other_arm():
    found = races([timed(0.5), timed(0.8)], [timed(1.0), timed(1.0)])
    assert comparison_statistics.throughput_ratios(found, "ours", "theirs") == pytest.approx([2.0, 1.25])
    assert comparison_statistics.throughput_ratios(found, "theirs", "ours") == pytest.approx([0.5, 0.8])


def test_the_first_block_is_left_out():
    ours = record(blocks=[(10, 100.0), (10, 1.0), (10, 1.0)])
    theirs = record(blocks=[(10, 0.001), (10, 2.0), (10, 2.0)])
    assert comparison_statistics.throughput_ratios(races([ours], [theirs]), "ours", "theirs") == pytest.approx([2.0])


def test_a_single_block_is_all_there_is():
    found = races([record(blocks=[(10, 1.0)])], [record(blocks=[(10, 3.0)])])
    assert comparison_statistics.throughput_ratios(found, "ours", "theirs") == pytest.approx([3.0])


def test_only_the_laps_both_ran_count():
    """The other arm slows down later, where this one has stopped: it has no partner there."""
    ours = record(blocks=[(10, 1.0), (10, 1.0), (5, 0.5)])  # 15 rows in 1.5 s after the first block
    theirs = record(blocks=[(10, 1.0), (10, 2.0), (10, 4.0), (10, 900.0)])  # 20 rows in 2 + 4 s
    assert comparison_statistics.throughput_ratios(races([ours], [theirs]), "ours", "theirs") == pytest.approx(
        [10 / (20 / 6)]
    )


def test_each_block_has_a_partner_of_its_time():
    """A machine that slows down for all: the fast arm, which ends early, is not held against the slow lap."""
    fast = record(blocks=[(40, 1.0)] * 4)
    slow = record(blocks=[(20, 1.0)] * 4 + [(20, 2.0)] * 4)
    assert comparison_statistics.throughput_ratios(races([fast], [slow]), "ours", "theirs") == pytest.approx([2.0])


def test_a_first_block_is_held_against_a_first_block_alone():
    """Where one arm has no other, both are taken with their first."""
    found = races([record(blocks=[(10, 4.0)])], [record(blocks=[(10, 8.0), (10, 1.0)])])
    assert comparison_statistics.throughput_ratios(found, "ours", "theirs") == pytest.approx([2.0])


# Processor time.


def test_processor_time_has_a_ratio_of_its_own():
    """Twice as fast on the wall clock by keeping twice as many threads busy."""
    ours = [record(blocks=[(10, 1.0)] * 3, cpu_share=2.0)] * 5
    theirs = [record(blocks=[(10, 2.0)] * 3, cpu_share=1.0)] * 5
    row = throughput_row(races(ours, theirs), "ours", "theirs", "equivalent", CONTROL)
    assert row.ratio.mean == pytest.approx(2.0)
    assert row.cpu is not None
    assert (row.cpu.mean, row.cpu.n) == (pytest.approx(1.0), 5)


def test_records_without_processor_time_have_none():
    some = [record(cpu_share=1.0), record()]
    row = throughput_row(races(some, [record(cpu_share=1.0)] * 2), "ours", "theirs", "equivalent", None)
    assert row.cpu is None
    assert row.ratio.n == 2


def test_a_race_without_the_other_arm_is_no_pair():
    found = {0: {"ours": timed(1.0)}, 1: {"ours": timed(1.0), "theirs": timed(2.0)}, 2: {"theirs": timed(1.0)}}
    assert comparison_statistics.throughput_ratios(found, "ours", "theirs") == pytest.approx([2.0])
    assert throughput_row(found, "ours", "nobody", "equivalent", None) is None


def test_pairs_come_in_the_order_of_their_seeds():
    found = {2: {"ours": timed(2.0), "theirs": timed(1.0)}, 0: {"ours": timed(1.0), "theirs": timed(1.0)}}
    assert comparison_statistics.throughput_ratios(found, "ours", "theirs") == pytest.approx([1.0, 0.5])


def test_an_arm_that_did_not_train_is_no_pair():
    found = races([record(blocks=[])], [timed(1.0)])
    assert comparison_statistics.throughput_ratios(found, "ours", "theirs") == []
    assert math.isnan(comparison_statistics.step_seconds(record(blocks=[]), 10))


def test_other_events_are_no_blocks():
    plain = timed(1.0)
    busy = replace(plain, events=(Event("retry", 0, {"why": "out of memory"}), *plain.events))
    assert comparison_statistics.step_seconds(busy, STEP_ROWS) == pytest.approx(1.0)


def test_step_seconds_are_per_step_without_the_first_block():
    assert comparison_statistics.step_seconds(timed(0.25), STEP_ROWS) == pytest.approx(0.25)
    assert comparison_statistics.step_seconds(timed(0.25), 4 * STEP_ROWS) == pytest.approx(1.0)


def test_the_throughput_row_is_the_geometric_mean_with_its_t_interval():
    ours, theirs = [timed(s) for s in (1.0, 1.1, 0.9, 1.05, 1.0)], [timed(1.5)] * 5
    row = throughput_row(races(ours, theirs), "ours", "theirs", "equivalent", CONTROL)
    assert row is not None
    logs = [math.log(1.5 / s) for s in (1.0, 1.1, 0.9, 1.05, 1.0)]
    expected = scipy_stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert row.ratio.mean == pytest.approx(math.exp(sum(logs) / 5))
    assert (row.ratio.low, row.ratio.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert (row.ratio.n, row.metric, row.plan_kind) == (5, "throughput", "equivalent")
    assert row.ratio.pairs == pytest.approx([1.5 / s for s in (1.0, 1.1, 0.9, 1.05, 1.0)])
    assert row.verdict.kind == "gain"


def test_one_pair_has_no_interval():
    row = throughput_row(races([timed(1.0)], [timed(2.0)]), "ours", "theirs", "equivalent", None)
    assert row is not None
    assert (row.ratio.low, row.ratio.high, row.ratio.n) == (None, None, 1)
    assert row.verdict.kind == "no verdict"


# Verdicts.


@pytest.mark.parametrize(
    ("found", "control", "kind"),
    [
        (ratio(1.2, 1.1, 1.3), CONTROL, "gain"),
        (ratio(1.2, 1.1, 1.3, n=4), CONTROL, "no verdict"),
        (ratio(1.2, 1.1, 1.3, n=3), None, "no verdict"),
        (ratio(1.2, 0.99, 1.4), CONTROL, "no gain"),
        (ratio(1.01, 1.005, 1.015), CONTROL, "no gain"),  # clear of 1, yet below what the control resolves
        (ratio(1.2, 1.1, 1.3), None, "no verdict"),  # nothing says what noise does here
        (ratio(0.8, 0.7, 0.9), None, "no verdict"),
        (ratio(1.2, 1.1, 1.3), Interval(1.0, 0.98, 1.02, 4), "no verdict"),
        (ratio(0.8, 0.7, 0.9), CONTROL, "harm"),
        (ratio(0.8, 0.7, 1.01), CONTROL, "no gain"),
        (ratio(0.99, 0.985, 0.995), CONTROL, "no gain"),
        (ratio(1.07, 1.002, 1.14), Interval(1.03, 1.003, 1.06, 8), "no gain"),  # clear of 1, not of the control
        (ratio(1.12, 1.07, 1.17), Interval(1.03, 1.003, 1.06, 8), "gain"),
        (ratio(0.93, 0.88, 0.98), Interval(0.97, 0.945, 0.995, 8), "no gain"),
        (ratio(0.88, 0.84, 0.92), Interval(0.97, 0.945, 0.995, 8), "harm"),
    ],
)
def test_the_verdict_on_speed(found, control, kind):
    assert speed_verdict(found, control, "ours", "theirs").kind == kind


@pytest.mark.parametrize(("control", "why"), [(None, "control.missing"), (replace(CONTROL, n=4), "control.too_few")])
def test_without_a_control_there_is_no_verdict_on_speed(control, why):
    assert speed_verdict(ratio(1.2, 1.1, 1.3), control, "ours", "theirs").code == why


@pytest.mark.parametrize(
    ("found", "kind", "code"),
    [
        (ratio(1.0, 0.98, 1.02), "no gain", "control.unbiased"),
        (ratio(1.03, 1.01, 1.05), "no verdict", "control.biased"),
        (ratio(0.97, 0.95, 0.99), "no verdict", "control.biased"),
        (ratio(1.03, 1.01, 1.05, n=4), "no verdict", "pairs.too_few"),
    ],
)
def test_the_control_is_judged_by_itself(found, kind, code):
    verdict = control_verdict(found)
    assert verdict.kind == kind
    assert verdict.code == code
    assert "resolves" not in verdict.sentence


def test_the_row_of_the_control_needs_no_control():
    found = {seed: {"self": timed(s), "reference": timed(1.0)} for seed, s in enumerate((1.0, 1.01, 0.99, 1.0, 1.0))}
    assert throughput_row(found, "self", "reference", "", None).verdict.kind == "no gain"


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (ratio(1.0, 0.97, 1.03), "no harm"),
        (ratio(1.0, 0.969, 1.03), "no verdict"),  # not shown, which is no harm
        (ratio(0.97, 0.95, 0.99), "no verdict"),
        (ratio(0.95, 0.93, 0.9699), "harm"),
        (ratio(1.3, 1.2, 1.4), "no harm"),  # it only asks for no harm
        (ratio(1.0, 0.99, 1.01, n=4), "no verdict"),
    ],
)
def test_do_no_harm_asks_for_the_lower_end(found, kind):
    assert non_inferiority(found).kind == kind


def test_do_no_harm_says_how_many_pairs_would_show_it():
    """z = 1.960 + 1.282; at 2% noise and no difference 5 pairs, at 4% noise 18."""
    noisy = [math.exp(deviation) for deviation in (-0.04, 0.04) * 3]
    deviation = 0.04 * math.sqrt(6 / 5)
    expected = math.ceil(((1.95996 + 1.28155) * deviation / -math.log(0.97)) ** 2)
    assert pairs_for_power(noisy) == expected == 22
    assert pairs_for_power([1.0, 1.001, 0.999]) == 5
    assert pairs_for_power([0.96, 0.97, 0.95]) is None
    wide = Ratio(1.0, 0.95, 1.05, 6, tuple(noisy))
    assert non_inferiority(wide).code == "non_inferiority.undecided"
    assert "22 pairs give 90% power" in non_inferiority(wide).sentence
    assert "no number of pairs" in non_inferiority(ratio(0.95, 0.93, 0.96)).sentence


@pytest.mark.parametrize(
    ("ours", "kind"), [(97, "gain"), (100, "no gain"), (98.5, "no gain"), (101.5, "no gain"), (103, "harm")]
)
def test_the_verdict_on_memory(ours, kind):
    row = memory_row({}, "ours", "theirs", "equivalent", int(10 * ours), 1000)
    assert (row.metric, row.verdict.kind) == ("peak_memory", kind)
    assert row.ratio == Ratio(ours / 100, None, None, 1, (ours / 100,), counted=True)


def test_equal_arms_measured_with_noise_are_seldom_told_apart():
    rng = random.Random(3)
    kinds = []
    for _ in range(400):
        arms = [[timed(rng.lognormvariate(0, 0.04)) for _ in range(5)] for _ in range(4)]
        control = ratio_interval(comparison_statistics.throughput_ratios(races(arms[0], arms[1]), "ours", "theirs"))
        row = throughput_row(races(arms[2], arms[3]), "ours", "theirs", "equivalent", control)
        kinds.append(row.verdict.kind)
    assert set(kinds) <= {"no gain", "gain", "harm"}
    assert kinds.count("no gain") > 0.98 * len(kinds)


# Time to target.


def to_target(record: RunRecord, target: float, *, rising: bool = True) -> tuple[float, bool]:
    return comparison_statistics.time_to_target(record, "accuracy", target, rising)


def test_the_crossing_is_interpolated_in_time():
    climb = climbing([10, 20, 30, 40], [0.2, 0.4, 0.8, 0.9])
    assert to_target(climb, 0.5) == (pytest.approx(22.5), False)
    assert to_target(climb, 0.8) == (30, False)  # reached exactly
    fall = climbing([10, 20, 30, 40], [80, 60, 40, 30])
    assert to_target(fall, 45, rising=False) == (pytest.approx(27.5), False)


def test_one_evaluation_beyond_the_target_is_luck():
    lucky = climbing([10, 20, 30, 40, 50], [0.2, 0.6, 0.4, 0.6, 0.7])
    assert to_target(lucky, 0.5) == (pytest.approx(35), False)


def test_the_last_evaluation_alone_does_not_count():
    assert to_target(climbing([10, 20, 30], [0.2, 0.3, 0.6]), 0.5) == (math.inf, False)
    assert to_target(climbing([10], [0.6]), 0.5) == (math.inf, False)


def test_never_is_infinite():
    assert to_target(climbing([10, 20, 30], [0.2, 0.3, 0.4]), 0.5) == (math.inf, False)
    assert to_target(record(), 0.5) == (math.inf, False)


def test_a_crossing_at_the_first_evaluation_is_left_censored():
    assert to_target(climbing([10, 20], [0.6, 0.7]), 0.5) == (10, True)
    assert to_target(climbing([10, 20, 30, 40], [0.6, 0.4, 0.6, 0.7]), 0.5) == (pytest.approx(25), False)


def test_a_diverged_arm_never_reaches_it():
    assert to_target(climbing([10, 20], [60.0, math.nan]), 45, rising=False) == (math.inf, False)


def target(
    ours: list[RunRecord],
    theirs: list[RunRecord],
    *,
    charge: float | None = None,
    control: Interval | None = TIGHT,
):
    charged = None if charge is None else PlanningCharge(charge)
    return target_row(races(ours, theirs), "ours", "theirs", "tuned", 0.5, "accuracy", True, charged, control)


def reaching(seconds: float) -> RunRecord:
    """Return an arm that crosses 0.5 at this time."""
    return climbing([0.5 * seconds, 1.5 * seconds, 2 * seconds], [0.25, 0.75, 0.9])


def failing(cap: float) -> RunRecord:
    return climbing([cap / 2, cap], [0.1, 0.2])


def test_the_ratio_to_target_is_theirs_over_ours():
    row = target([reaching(s) for s in (10, 11, 9, 10, 10)], [reaching(20)] * 5)
    assert row.arm_s == pytest.approx((10, 11, 9, 10, 10))
    assert row.against_s == pytest.approx((20,) * 5)
    assert row.ratio is not None
    assert row.ratio.pairs == pytest.approx([20 / s for s in (10, 11, 9, 10, 10)])
    assert (row.charged, row.bound, row.reached_arm, row.reached_against, row.n) == (False, "", 5, 5, 5)
    assert (limits_of(row), failure_of(row)) == ((None, None), "")
    assert row.verdict.kind == "gain"


def test_planning_and_search_are_charged_to_the_arm_alone():
    row = target([reaching(10)] * 5, [reaching(20)] * 5, charge=30.0)
    assert row.charged
    assert row.arm_s == pytest.approx((40,) * 5)
    assert row.against_s == pytest.approx((20,) * 5)
    assert row.ratio is not None
    assert row.ratio.mean == pytest.approx(0.5)
    assert row.verdict.kind == "harm"
    free = target([reaching(10)] * 5, [reaching(20)] * 5, charge=0.0)
    assert free.charged
    assert free.ratio is not None
    assert free.ratio.mean == pytest.approx(2.0)


def test_a_verdict_on_targets_needs_five_pairs_and_more_than_the_control_resolves():
    assert target([reaching(10)] * 4, [reaching(20)] * 4).verdict.kind == "no verdict"
    close = [reaching(s) for s in (9.9, 9.91, 9.89, 9.9, 9.9)], [reaching(10)] * 5
    assert target(*close).verdict.kind == "gain"
    assert target(*close, control=CONTROL).verdict.kind == "no gain"
    assert target(*close, control=None).verdict.kind == "no verdict"


def test_where_only_the_other_arm_was_censored_there_is_a_lower_bound():
    """It never got there in 100 s in two pairs, and in 45 s in the third; no interval."""
    row = target([reaching(10), reaching(20), reaching(10)], [failing(100), failing(100), reaching(45)])
    assert (row.ratio, row.bound) == (None, ">= 4.50x")
    assert (row.at_least, row.at_most) == (4.5, None)
    assert (row.reached_arm, row.reached_against, row.n) == (3, 1, 3)
    assert limits_of(replace(row, at_least=None)) == (4.5, None)  # as it was written before it had that
    assert row.against_s == pytest.approx((math.inf, math.inf, 45))
    assert row.verdict.kind == "no verdict"
    charged = target([reaching(10), reaching(20), reaching(10)], [failing(100)] * 3, charge=20.0)
    assert charged.bound == ">= 2.50x"


def test_an_arm_that_is_clear_of_where_the_other_ended_is_faster():
    """By how much nobody knows; that takes five pairs, and a control."""
    row = target([reaching(s) for s in (10, 11, 10, 12, 10)], [*[failing(100)] * 4, reaching(60)])
    assert (row.ratio, row.bound, row.verdict.kind) == (None, ">= 6.00x", "gain")
    assert row.verdict.code == "speed.gain"
    assert "ours is faster than theirs, >= 6.00x: " in row.verdict.sentence
    assert target([reaching(10)] * 4, [failing(100)] * 4).verdict.kind == "no verdict"
    assert target([reaching(10)] * 5, [failing(10.01)] * 5).verdict.kind == "no verdict"


def test_a_gain_is_told_by_what_it_rests_on_where_the_least_pair_would_speak_against_it():
    row = target([reaching(10)] * 5, [*[failing(100)] * 4, failing(9.8)])
    assert (row.bound, row.verdict.kind) == (">= 1.73x", "gain")


def test_a_last_evaluation_beyond_the_target_bounds_nothing_since_the_one_before():
    """It may have crossed right after that one: so long is known, no longer."""
    late = climbing([60, 80, 100], [0.1, 0.2, 0.7])
    assert target([reaching(10)] * 5, [late] * 5).bound == ">= 8.00x"
    at_once = climbing([100], [0.7])
    nothing = target([reaching(10)] * 5, [at_once] * 5)
    assert (nothing.bound, limits_of(nothing)) == (">= 0.00x", (0.0, None))


@pytest.mark.parametrize(
    ("ours", "theirs", "bound"),
    [
        ([failing(9), failing(9)], [reaching(10), reaching(10)], "never reached"),
        ([failing(9), failing(9)], [failing(10), failing(10)], "never reached by either arm"),
        ([failing(9), reaching(9)], [reaching(10), reaching(10)], "reached in some pairs only"),
    ],
)
def test_an_arm_that_was_censored_has_no_ratio(ours, theirs, bound):
    row = target(ours, theirs)
    assert (row.ratio, row.bound) == (None, bound)
    assert limits_of(row) == (None, None)
    assert row.verdict.kind == "no verdict"


def capped(seconds: float) -> RunRecord:
    """Return an arm that was stopped by a cap before it crossed."""
    made = failing(seconds)
    return replace(made, end=replace(made.end, reason="cap"))


def test_an_arm_that_a_cap_stopped_is_bounded_from_above():
    """It took 120 s at the least, whatever it would have taken in the end: that is no "never"."""
    row = target([capped(120)] * 5, [reaching(300), reaching(330), reaching(300), reaching(290), reaching(310)])
    assert (row.ratio, row.bound, row.reached_arm) == (None, "<= 2.75x", 0)
    assert (row.at_least, row.at_most) == (None, 2.75)
    assert row.verdict.kind == "no verdict"
    charged = target([capped(120)] * 5, [reaching(300)] * 5, charge=30.0)
    assert charged.bound == "<= 2.00x"
    assert target([capped(120), reaching(100)], [reaching(300)] * 2).bound == "<= 3.00x"
    assert target([capped(120)] * 2, [failing(900)] * 2).bound == "never reached by either arm"
    assert target([capped(120), failing(100)], [reaching(300)] * 2).bound == "never reached"
    assert target([capped(120), early(5)], [reaching(300)] * 2).bound == "reached in some pairs only"
    late = climbing([60, 120], [0.1, 0.7])  # stopped right after an evaluation that may have been its crossing
    stopped = replace(late, end=replace(late.end, reason="cap"))
    assert target([stopped] * 2, [reaching(300)] * 2).bound == "<= 5.00x"
    between = replace(failing(60), end=replace(failing(60).end, reason="cap", detail={"train_s": 120.0}))
    assert target([between] * 2, [reaching(300)] * 2).bound == "<= 5.00x"  # it may have crossed right after 60 s


def test_an_arm_that_a_cap_stopped_later_than_the_other_was_there_is_slower():
    """Its times are at the least what they were when it was stopped, and that shows a loss in five pairs."""
    row = target([capped(s) for s in (40, 41, 39, 40, 40)], [reaching(10)] * 5)
    assert (row.ratio, row.bound, row.verdict.kind) == (None, "<= 0.26x", "harm")
    assert (row.at_least, row.at_most) == (None, 0.26)
    assert row.verdict.code == "speed.harm"
    assert "in 5 of 5 pairs" in row.verdict.sentence
    mixed = target([capped(40), capped(41), reaching(40), early(39), reaching(40)], [reaching(10)] * 5, charge=30.0)
    assert mixed.verdict.kind == "harm"
    assert target([capped(40)] * 4, [reaching(10)] * 4).verdict.kind == "no verdict"
    assert target([capped(40)] * 5, [*[reaching(10)] * 4, failing(10)]).verdict.kind == "no verdict"


def early(seconds: float) -> RunRecord:
    """Return an arm that is past 0.5 when first looked at, at this time."""
    return climbing([seconds, 2 * seconds], [0.6, 0.7])


def test_left_censored_pairs_are_counted():
    row = target([early(5), reaching(10), reaching(10)], [reaching(10), early(5), reaching(10)])
    assert row.left_censored == 2


def test_an_arm_past_the_target_when_first_looked_at_is_at_least_so_fast():
    """Its time is an upper bound: clear of 1 all the same, it is a gain of unknown size."""
    row = target([early(s) for s in (5.0, 5.1, 4.9, 5.0, 5.0)], [reaching(10)] * 5)
    assert (row.ratio, row.bound, row.left_censored) == (None, ">= 1.96x", 5)  # the interval's lower end
    assert row.verdict.kind == "gain"
    assert "ours is faster than theirs, >= 1.96x" in row.verdict.sentence


def test_a_charge_that_takes_longer_than_the_other_did_is_a_loss():
    """However early an arm crosses, planning had to be done first."""
    ours = [early(s) for s in (5.0, 5.1, 4.9, 5.0, 5.0)]
    row = target(ours, [reaching(s) for s in (10, 10.1, 9.9, 10, 10)], charge=20.0)
    assert (row.ratio, row.bound, row.verdict.kind) == (None, "<= 0.51x", "harm")
    both_early = target(ours, [early(10)] * 5, charge=20.0)
    assert (both_early.bound, both_early.verdict.kind) == ("<= 0.50x", "harm")
    assert target(ours, [reaching(10)] * 5, charge=9.9).verdict.kind == "no verdict"  # within what can be resolved
    assert target(ours, [reaching(10)] * 5, charge=2.0).verdict.kind == "gain"
    assert target([*[early(5)] * 4, failing(9)], [reaching(10)] * 5, charge=20.0).bound == "reached in some pairs only"


@pytest.mark.parametrize(
    ("ours", "bound"),
    [
        ([early(9.99), *[reaching(10)] * 4], ">= 0.99x"),  # one such pair is enough
        ([early(12)] * 5, ">= 0.83x"),  # slower, as far as the bound goes: which shows nothing
        ([early(5)] * 4, ">= 2.00x"),  # four pairs
    ],
)
def test_a_lower_bound_that_is_not_clear_is_no_verdict(ours, bound):
    row = target(ours, [reaching(10)] * len(ours))
    assert (row.ratio, row.bound, row.verdict.kind) == (None, bound, "no verdict")


@pytest.mark.parametrize("ours", [reaching(10), early(5)])
def test_the_other_arm_past_the_target_when_first_looked_at_leaves_nothing_to_hold_against(ours):
    row = target([ours] * 5, [early(15), *[reaching(20)] * 4])
    assert (row.ratio, row.bound, row.verdict.kind) == (None, OTHER_EARLY, "no verdict")
    assert row.verdict.code == "target.not_reached"


def test_a_rung_says_how_many_rows_each_arm_was_given():
    def given(found: RunRecord, rows: int) -> RunRecord:
        return replace(found, header=replace(found.header, detail={comparison_statistics.GIVEN_ROWS: rows}))

    row = target([given(reaching(10), 400)], [reaching(20)])
    assert (row.arm_samples, row.against_samples) == (400, 300)  # from a record that does not say: those it trained on


# Quality.


def quality(
    ours, theirs, *, plan_kind: str = "equivalent", metric: str = "accuracy", rising: bool = True, unit: str = ""
):
    unit = unit or ("share" if rising else "relative")
    return quality_row(races(ours, theirs), "ours", "theirs", plan_kind, metric, rising, unit)


def test_the_difference_of_accuracy_is_in_points():
    row = quality([climbing([1, 2], [0.5, 0.823])], [climbing([1, 2], [0.5, 0.82])])
    assert row is not None
    assert row.ratio.pairs == pytest.approx((0.3,))


def test_the_difference_of_perplexity_is_in_percent_and_better_is_positive():
    ours, theirs = climbing([1, 2], [90, 39.8], "perplexity"), climbing([1, 2], [90, 40], "perplexity")
    row = quality([ours], [theirs], metric="perplexity", rising=False)
    assert row is not None
    assert row.ratio.pairs == pytest.approx((0.5,))


def test_quality_is_compared_at_the_last_rows_both_were_evaluated_at():
    longer, shorter = climbing([1, 2, 3], [0.1, 0.6, 0.9]), climbing([1, 2], [0.1, 0.5])
    row = quality([longer], [shorter])
    assert row is not None
    assert row.ratio.pairs == pytest.approx((10.0,))
    apart = record(evaluations=[(150, 1.0, 0.4)])
    assert quality([longer], [apart]) is None


def finals(differences: list[float]) -> tuple[list[RunRecord], list[RunRecord]]:
    """Return pairs that differ by these points."""
    ours = [climbing([1, 2], [0.1, 0.8 + difference / 100]) for difference in differences]
    return ours, [climbing([1, 2], [0.1, 0.8])] * len(ours)


@pytest.mark.parametrize(
    ("differences", "plan_kind", "kind"),
    [
        ([0.0, 0.1, -0.1, 0.1, -0.1], "equivalent", "no gain"),
        ([0.0, 0.1, -0.1, 0.1], "equivalent", "no verdict"),  # four pairs
        ([1.0, -1.0, 1.0, -1.0, 0.0], "equivalent", "no verdict"),  # too noisy to say
        ([-3.0, -3.1, -2.9, -3.0, -3.0], "equivalent", "harm"),
        ([3.0, 3.1, 2.9, 3.0, 3.0], "equivalent", "no verdict"),  # better is not the same either
        ([-3.0, -3.1, -2.9, -3.0, -3.0], "tuned", "harm"),
        ([3.0, 3.1, 2.9, 3.0, 3.0], "tuned", "gain"),
        ([-0.1, 0.1, 0.0, 0.1, -0.1], "tuned", "no gain"),  # not worse, which is no gain
        ([-3.5, -0.5, -2.0, -1.5, -2.2], "tuned", "harm"),  # clear of 0, though not of the limit
        ([3.5, 0.5, 2.0, 1.5, 2.2], "tuned", "gain"),
        ([0.2, 0.3, 0.2, 0.3, 0.25], "tuned", "no gain"),  # clear of 0, and within the limit
        ([-3.5, 1.5, -2.0, -1.5, -2.2], "tuned", "no verdict"),
        ([-0.2, 1.0, 0.4, 0.9, 0.1], "tuned", "no gain"),  # not worse than the limit
        ([-0.2, 1.0, 0.4, 0.9, 0.1], "equivalent", "no verdict"),  # nor shown to be the same
    ],
)
def test_the_verdict_on_quality(differences, plan_kind, kind):
    row = quality(*finals(differences), plan_kind=plan_kind)
    assert row is not None
    assert row.verdict.kind == kind


def test_tier_f_is_judged_where_each_ends():
    """It may train on fewer rows: what counts is the metric it ends with, against that of the whole reference."""
    ours, theirs = climbing([1, 2], [0.3, 0.903]), climbing([1, 2, 3, 4], [0.1, 0.2, 0.5, 0.9])
    row = quality([ours], [theirs], plan_kind="tuned")
    assert row is not None
    assert row.ratio.pairs == pytest.approx((0.3,))


@pytest.mark.parametrize("who", ["ours", "theirs"])
@pytest.mark.parametrize(("reason", "kind"), [("target", None), ("cap", "no gain"), ("diverged", "no verdict")])
def test_tier_f_is_not_judged_on_the_pairs_that_happened_to_end(reason, kind, who):
    """Those that are left once the others stopped early were selected by their outcome; a cap is the same for all."""
    ours, theirs = climbing([1, 2], [0.3, 0.903]), climbing([1, 2, 3, 4], [0.1, 0.2, 0.5, 0.9])
    arms = {"ours": [ours] * 5, "theirs": [theirs] * 5}
    assert quality(*arms.values(), plan_kind="tuned") is not None
    first = arms[who][0]
    arms[who] = [replace(first, end=replace(first.end, reason=reason)), *arms[who][1:]]
    row = quality(*arms.values(), plan_kind="tuned")
    assert (None if row is None else row.verdict.kind) == kind
    assert quality(*arms.values(), plan_kind="equivalent") is not None


@pytest.mark.parametrize(
    ("ours", "theirs", "unit", "rising", "expected"),
    [
        (0.93, 0.90, "share", True, 3.0),
        (93.0, 90.0, "percent", True, 3.0),
        (20.0, 10.0, "relative", True, 100.0),
        (8.0, 10.0, "relative", False, 20.0),
        (-3.0, -2.0, "relative", False, 50.0),  # a log density: lower is better, and negative
        (0.05, 0.06, "share", False, 1.0),  # an error rate
        (0.1, 0.0, "relative", False, math.nan),
    ],
)
def test_a_difference_is_read_by_the_metrics_unit(ours, theirs, unit, rising, expected):
    pairs = [climbing([1, 2], [1.0, value]) for value in (ours, theirs)]
    row = quality([pairs[0]], [pairs[1]], rising=rising, unit=unit)
    assert row.ratio.pairs == pytest.approx((expected,), nan_ok=True)


@pytest.mark.parametrize(
    ("unit", "said"), [("share", "+0.30 points"), ("percent", "+0.00 points"), ("relative", "+0.38 percent")]
)
def test_the_verdict_on_quality_has_the_unit_of_its_metric(unit, said):
    row = quality(*finals([0.3] * 5), unit=unit)
    assert row is not None
    assert row.verdict.code == "quality.within_limit"
    assert f": {said} (95% " in row.verdict.sentence


@pytest.mark.parametrize("plan_kind", ["equivalent", "tuned"])
def test_a_verdict_on_quality_says_after_which_rows_where_these_are_not_all(plan_kind):
    def arms(given_rows: int) -> list[RunRecord]:
        made = record(evaluations=[(768, 1.0, 0.5), (1536, 2.0, 0.8)])
        return [replace(made, header=replace(made.header, detail={comparison_statistics.GIVEN_ROWS: given_rows}))] * 5

    short, whole = (quality(arms(rows), arms(rows), plan_kind=plan_kind).verdict for rows in (7168, 1550))
    assert (short.kind, whole.kind) == ("no gain", "no gain")
    assert short.sentence.endswith(", limit 0.5, after 1,536 of 7,168 samples")
    assert whole.sentence.endswith(", limit 0.5")  # nearly all of them


def test_a_diverged_arm_is_not_of_equal_quality():
    ours, theirs = [climbing([1, 2], [0.8, math.nan])] * 5, [climbing([1, 2], [0.8, 0.8])] * 5
    assert quality(ours, theirs).verdict.kind == "no verdict"


# Pairs that were only timed.


def brief(found: RunRecord) -> RunRecord:
    return replace(found, header=replace(found.header, detail={BRIEF: True}))


def test_a_brief_pair_counts_for_throughput_alone():
    whole, short = climbing([1, 2, 3], [0.1, 0.6, 0.9]), brief(climbing([2, 4, 6], [0.1, 0.6, 0.9]))
    found = races([whole, short], [climbing([2, 4, 6], [0.1, 0.6, 0.9])] * 2)
    assert comparison_statistics.throughput_ratios(found, "ours", "theirs") == pytest.approx([2.0, 1.0])
    row = target_row(found, "ours", "theirs", "equivalent", 0.5, "accuracy", True, None)
    assert row is not None
    assert (row.n, row.reached_arm, row.arm_s) == (1, 1, pytest.approx((1.8,)))
    difference = quality_row(found, "ours", "theirs", "equivalent", "accuracy", True, "share")
    assert difference is not None
    assert difference.ratio.n == 1


def test_without_a_whole_pair_there_is_no_rung():
    found = races([brief(climbing([1, 2, 3], [0.1, 0.6, 0.9]))], [climbing([2, 4, 6], [0.1, 0.6, 0.9])])
    assert target_row(found, "ours", "theirs", "equivalent", 0.5, "accuracy", True, None) is None
    assert quality_row(found, "ours", "theirs", "equivalent", "accuracy", True, "share") is None


# Arms that failed.


def broken(found: RunRecord) -> RunRecord:
    """Return the arm as it left its race with an error."""
    assert found.end is not None
    return replace(found, end=End("error", {**found.end.detail, "error": "RuntimeError: no"}))


FAILS = pytest.mark.parametrize("who", ["ours", "theirs"])


def one_broken(ours: RunRecord, theirs: RunRecord, who: str) -> dict[int, dict[str, RunRecord]]:
    """Return six races, in the first of which one arm failed."""
    arms = {"ours": [ours] * 6, "theirs": [theirs] * 6}
    arms[who] = [broken(arms[who][0]), *arms[who][1:]]
    return races(*arms.values())


@FAILS
def test_the_races_an_arm_survived_are_no_verdict_on_its_throughput(who):
    """The ratio is that of the others; what it shows was selected by its outcome."""
    row = throughput_row(one_broken(timed(1.0), timed(2.0), who), "ours", "theirs", "equivalent", TIGHT)
    assert row.ratio.pairs == pytest.approx((2.0,) * 5)
    assert row.verdict.kind == "no verdict"
    assert row.verdict.sentence.startswith(f"{who} failed in 1 of 6 runs")
    assert row.failed == failure_of(replace(row, failed="")) == f"{who} failed in 1 of 6 runs"


@FAILS
def test_nor_on_the_harm_it_does(who):
    row = do_no_harm_row(one_broken(timed(1.0), timed(2.0), who), "ours", "theirs", "equivalent")
    assert row.ratio.n == 5
    assert row.verdict.kind == "no verdict"
    assert f"{who} failed in 1 of 6 runs" in row.verdict.sentence
    assert row.failed == f"{who} failed in 1 of 6 runs"
    assert (
        do_no_harm_row(races([timed(1.0)] * 5, [timed(1.0)] * 5), "ours", "theirs", "equivalent").verdict.kind
        == "no harm"
    )


@FAILS
@pytest.mark.parametrize("plan_kind", ["equivalent", "tuned"])
def test_nor_on_its_quality(who, plan_kind):
    ours, theirs = (arms[0] for arms in finals([3.0]))
    row = quality_row(one_broken(ours, theirs, who), "ours", "theirs", plan_kind, "accuracy", True, "share")
    assert row.ratio.n == 5
    assert row.verdict.kind == "no verdict"
    assert f"{who} failed in 1 of 6 runs" in row.verdict.sentence
    assert row.failed == f"{who} failed in 1 of 6 runs"


@FAILS
def test_nor_on_the_memory_it_holds(who):
    row = memory_row(one_broken(timed(1.0), timed(2.0), who), "ours", "theirs", "equivalent", 500, 1000)
    assert (row.ratio.mean, row.verdict.kind) == (0.5, "no verdict")
    assert row.failed == f"{who} failed in 1 of 6 runs"


def test_a_control_that_failed_is_no_verdict_either():
    found = {seed: {"self": timed(1.0), "reference": timed(1.0)} for seed in range(6)}
    found[3]["self"] = broken(timed(1.0))
    row = throughput_row(found, "self", "reference", "", None)
    assert (row.verdict.kind, row.ratio.n) == ("no verdict", 5)
    assert "self failed in 1 of 6 runs" in row.verdict.sentence


def test_an_arm_that_failed_never_reached_the_target():
    """Neither where it would have gone on to it, nor where it had crossed it already."""
    row = target([broken(reaching(1)), *[reaching(10)] * 5], [reaching(20)] * 6)
    assert (row.reached_arm, row.reached_against, row.n) == (5, 6, 6)
    assert row.arm_s == pytest.approx((math.inf, *[10] * 5))
    assert (row.ratio, row.bound) == (None, "reached in some pairs only")
    assert row.verdict.kind == "no verdict"
    assert "ours failed in 1 of 6 runs" in row.verdict.sentence
    assert row.failed == failure_of(replace(row, failed="")) == "ours failed in 1 of 6 runs"


def test_another_arm_that_failed_is_censored_where_it_did():
    """It trained 45 s without a target; where it had crossed at 15 s, no more than that is known against it."""
    row = target([reaching(10)] * 6, [broken(failing(45)), *[reaching(20)] * 5])
    assert (row.ratio, row.bound, row.verdict.kind) == (None, ">= 2.00x", "no verdict")
    assert (row.reached_arm, row.reached_against) == (6, 5)
    assert row.against_s[0] == math.inf
    assert "theirs failed in 1 of 6 runs" in row.verdict.sentence
    assert target([reaching(10)] * 6, [broken(reaching(15)), *[reaching(20)] * 5]).bound == ">= 1.50x"
    assert target([reaching(10)] * 6, [broken(early(15)), *[reaching(20)] * 5]).bound == OTHER_EARLY


def test_an_arm_that_failed_in_every_race_has_a_rung_and_no_ratio():
    found = races([broken(reaching(1))] * 5, [reaching(20)] * 5)
    row = target_row(found, "ours", "theirs", "tuned", 0.5, "accuracy", True, PlanningCharge(3.0), TIGHT)
    assert (row.bound, row.reached_arm, row.n) == ("never reached", 0, 5)
    assert "ours failed in 5 of 5 runs" in row.verdict.sentence
    assert throughput_row(found, "ours", "theirs", "tuned", TIGHT) is None


def test_a_race_without_the_arm_is_none_that_it_failed():
    found = {0: {"theirs": timed(1.0)}, 1: {"ours": broken(timed(1.0))}, 2: {"ours": timed(1.0)}}
    assert comparison_statistics.failures(found, "ours", "theirs", "nobody") == "ours failed in 1 of 2 runs"
    assert comparison_statistics.failures(found, "theirs") == ""


# What holds for any records.

step_times = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1, max_size=8)
climbs = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(step_times)
def test_swapping_the_arms_inverts_every_ratio(pairs):
    found = races([timed(a) for a, _ in pairs], [timed(b) for _, b in pairs])
    ours, theirs = (
        comparison_statistics.throughput_ratios(found, *names) for names in (("ours", "theirs"), ("theirs", "ours"))
    )
    assert ours == pytest.approx([b / a for a, b in pairs])
    assert theirs == pytest.approx([1 / value for value in ours])


@given(climbs, st.floats(0, 1), st.floats(0, 1))
def test_a_harder_target_is_never_reached_sooner(values, one, other):
    climb = climbing([10.0 * i for i in range(1, len(values) + 1)], values)
    easy, hard = sorted((one, other))
    assert to_target(climb, easy)[0] <= to_target(climb, hard)[0] + 1e-9
    mirrored = climbing([10.0 * i for i in range(1, len(values) + 1)], [-value for value in values])
    assert to_target(mirrored, -easy, rising=False) == to_target(climb, easy)
