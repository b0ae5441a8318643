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


def blocks(*of: tuple[int, float]) -> RunRecord:
    return record(blocks=of)


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


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([timed(0.5), timed(0.8)], [timed(1.0), timed(1.0)], [2.0, 1.25]),
        # The first block is left out.
        ([blocks((10, 100.0), (10, 1.0), (10, 1.0))], [blocks((10, 0.001), (10, 2.0), (10, 2.0))], [2.0]),
        # The other arm slows down later, where this one has stopped: 15 rows in 1.5 s, 20 rows in 2 + 4 s.
        (
            [blocks((10, 1.0), (10, 1.0), (5, 0.5))],
            [blocks((10, 1.0), (10, 2.0), (10, 4.0), (10, 900.0))],
            [10 / (20 / 6)],
        ),
        # The machine slows down for all: the fast arm, which ends early, is not compared with the slow blocks.
        ([blocks(*[(40, 1.0)] * 4)], [blocks(*[(20, 1.0)] * 4, *[(20, 2.0)] * 4)], [2.0]),
        ([blocks((10, 1.0))], [blocks((10, 3.0))], [3.0]),
        # One arm has no block but its first: of both the first is taken.
        ([blocks((10, 4.0))], [blocks((10, 8.0), (10, 1.0))], [2.0]),
        ([blocks()], [timed(1.0)], []),
    ],
    ids=["steps", "first block", "common blocks", "same time", "single block", "first blocks", "not trained"],
)
def test_throughput_is_rows_per_second_over_the_other_arm(ours, theirs, expected):
    found = races(ours, theirs)
    assert comparison_statistics.throughput_ratios(found, "ours", "theirs") == pytest.approx(expected)
    inverse = comparison_statistics.throughput_ratios(found, "theirs", "ours")
    assert inverse == pytest.approx([1 / each for each in expected])


def test_a_pair_is_a_race_of_both_arms_in_the_order_of_seeds():
    one, two = timed(1.0), timed(2.0)
    found = {
        3: {"ours": two, "theirs": one},
        1: {"ours": one, "theirs": two},
        0: {"ours": one},
        2: {"theirs": one},
    }
    assert comparison_statistics.throughput_ratios(found, "ours", "theirs") == pytest.approx([2.0, 0.5])
    assert throughput_row(found, "ours", "nobody", "equivalent", None) is None


def test_processor_time_has_a_ratio_of_its_own():
    """Twice as fast on the wall clock by keeping twice as many threads busy."""
    ours = [record(blocks=[(10, 1.0)] * 3, cpu_share=2.0)] * 5
    theirs = [record(blocks=[(10, 2.0)] * 3, cpu_share=1.0)] * 5
    row = throughput_row(races(ours, theirs), "ours", "theirs", "equivalent", CONTROL)
    assert (row.ratio.mean, row.cpu.mean, row.cpu.n) == (pytest.approx(2.0), pytest.approx(1.0), 5)
    some = [record(cpu_share=1.0), record()]
    row = throughput_row(races(some, [record(cpu_share=1.0)] * 2), "ours", "theirs", "equivalent", None)
    assert (row.cpu, row.ratio.n) == (None, 2)


def test_step_seconds_are_per_step_without_the_first_block():
    assert comparison_statistics.step_seconds(timed(0.25), STEP_ROWS) == pytest.approx(0.25)
    assert comparison_statistics.step_seconds(timed(0.25), 4 * STEP_ROWS) == pytest.approx(1.0)
    plain = timed(1.0)
    busy = replace(plain, events=(Event("retry", 0, {"why": "out of memory"}), *plain.events))
    assert comparison_statistics.step_seconds(busy, STEP_ROWS) == pytest.approx(1.0)
    assert math.isnan(comparison_statistics.step_seconds(blocks(), 10))


def test_the_throughput_row_is_the_geometric_mean_with_its_t_interval():
    seconds = (1.0, 1.1, 0.9, 1.05, 1.0)
    row = throughput_row(races([timed(s) for s in seconds], [timed(1.5)] * 5), "ours", "theirs", "equivalent", CONTROL)
    logs = [math.log(1.5 / s) for s in seconds]
    expected = scipy_stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert row.ratio.mean == pytest.approx(math.exp(sum(logs) / 5))
    assert (row.ratio.low, row.ratio.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert (row.ratio.n, row.metric, row.plan_kind) == (5, "throughput", "equivalent")
    assert row.ratio.pairs == pytest.approx([1.5 / s for s in seconds])
    assert row.verdict.kind == "gain"
    alone = throughput_row(races([timed(1.0)], [timed(2.0)]), "ours", "theirs", "equivalent", None)
    assert (alone.ratio.low, alone.ratio.high, alone.ratio.n) == (None, None, 1)
    assert alone.verdict.kind == "no verdict"


@pytest.mark.parametrize(
    ("found", "control", "kind", "code"),
    [
        (ratio(1.2, 1.1, 1.3), CONTROL, "gain", "speed.gain"),
        (ratio(1.2, 1.1, 1.3, n=4), CONTROL, "no verdict", "pairs.too_few"),
        (ratio(1.2, 1.1, 1.3, n=3), None, "no verdict", "pairs.too_few"),
        (ratio(1.2, 0.99, 1.4), CONTROL, "no gain", "speed.not_significant"),
        # Clear of 1, yet below what the control resolves.
        (ratio(1.01, 1.005, 1.015), CONTROL, "no gain", "speed.not_significant"),
        (ratio(1.2, 1.1, 1.3), None, "no verdict", "control.missing"),
        (ratio(0.8, 0.7, 0.9), None, "no verdict", "control.missing"),
        (ratio(1.2, 1.1, 1.3), replace(CONTROL, n=4), "no verdict", "control.too_few"),
        (ratio(0.8, 0.7, 0.9), CONTROL, "harm", "speed.harm"),
        (ratio(0.8, 0.7, 1.01), CONTROL, "no gain", "speed.not_significant"),
        (ratio(0.99, 0.985, 0.995), CONTROL, "no gain", "speed.not_significant"),
        # Clear of 1, not of the control.
        (ratio(1.07, 1.002, 1.14), Interval(1.03, 1.003, 1.06, 8), "no gain", "speed.not_significant"),
        (ratio(1.12, 1.07, 1.17), Interval(1.03, 1.003, 1.06, 8), "gain", "speed.gain"),
        (ratio(0.93, 0.88, 0.98), Interval(0.97, 0.945, 0.995, 8), "no gain", "speed.not_significant"),
        (ratio(0.88, 0.84, 0.92), Interval(0.97, 0.945, 0.995, 8), "harm", "speed.harm"),
    ],
)
def test_the_verdict_on_speed(found, control, kind, code):
    verdict = speed_verdict(found, control, "ours", "theirs")
    assert (verdict.kind, verdict.code) == (kind, code)


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
    assert (verdict.kind, verdict.code) == (kind, code)


def test_the_row_of_the_control_needs_no_control():
    found = {seed: {"self": timed(s), "reference": timed(1.0)} for seed, s in enumerate((1.0, 1.01, 0.99, 1.0, 1.0))}
    assert throughput_row(found, "self", "reference", "", None).verdict.kind == "no gain"
    found = {seed: {"self": timed(1.0), "reference": timed(1.0)} for seed in range(6)}
    found[3]["self"] = broken(timed(1.0))
    row = throughput_row(found, "self", "reference", "", None)
    assert (row.verdict.kind, row.ratio.n) == ("no verdict", 5)
    assert "self failed in 1 of 6 runs" in row.verdict.sentence


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


def to_target(record: RunRecord, target: float, *, rising: bool = True) -> tuple[float, bool]:
    return comparison_statistics.time_to_target(record, "accuracy", target, rising)


@pytest.mark.parametrize(
    ("values", "wanted", "rising", "expected"),
    [
        ((0.2, 0.4, 0.8, 0.9), 0.5, True, (22.5, False)),
        ((0.2, 0.4, 0.8, 0.9), 0.8, True, (30, False)),
        ((80, 60, 40, 30), 45, False, (27.5, False)),
        ((0.2, 0.6, 0.4, 0.6, 0.7), 0.5, True, (35, False)),
        ((0.2, 0.3, 0.6), 0.5, True, (math.inf, False)),
        ((0.6,), 0.5, True, (math.inf, False)),
        ((0.2, 0.3, 0.4), 0.5, True, (math.inf, False)),
        ((), 0.5, True, (math.inf, False)),
        ((0.6, 0.7), 0.5, True, (10, True)),
        ((0.6, 0.4, 0.6, 0.7), 0.5, True, (25, False)),
        ((60.0, math.nan), 45, False, (math.inf, False)),
    ],
    ids=[
        "interpolated",
        "reached exactly",
        "falling",
        "one evaluation beyond it is luck",
        "the last alone",
        "the only one",
        "never",
        "no evaluation",
        "left-censored",
        "lost again",
        "diverged",
    ],
)
def test_the_time_of_the_crossing(values, wanted, rising, expected):
    climb = climbing([10 * at for at in range(1, len(values) + 1)], values) if values else record()
    assert to_target(climb, wanted, rising=rising) == pytest.approx(expected)


def reaching(seconds: float) -> RunRecord:
    """Return an arm that crosses 0.5 at this time."""
    return climbing([0.5 * seconds, 1.5 * seconds, 2 * seconds], [0.25, 0.75, 0.9])


def failing(end: float, *, cap: bool = False) -> RunRecord:
    """Return an arm that ended at this time without a crossing, or that a cap stopped then."""
    made = climbing([end / 2, end], [0.1, 0.2])
    return replace(made, end=replace(made.end, reason="cap")) if cap else made


def early(seconds: float) -> RunRecord:
    """Return an arm that is past 0.5 when first evaluated, at this time."""
    return climbing([seconds, 2 * seconds], [0.6, 0.7])


def capped(seconds: float) -> RunRecord:
    return failing(seconds, cap=True)


# An arm that was stopped right after an evaluation that may have been its crossing, and one that was stopped later.
LATE = replace(climbing([60, 120], [0.1, 0.7]), end=capped(120).end)
BETWEEN = replace(failing(60), end=replace(capped(60).end, detail={"train_s": 120.0}))
TENS = [reaching(10)] * 5
EARLIES = [early(s) for s in (5.0, 5.1, 4.9, 5.0, 5.0)]


def target(
    ours: list[RunRecord],
    theirs: list[RunRecord],
    *,
    charge: float | None = None,
    control: Interval | None = TIGHT,
):
    charged = None if charge is None else PlanningCharge(charge)
    return target_row(races(ours, theirs), "ours", "theirs", "tuned", 0.5, "accuracy", True, charged, control)


def test_the_ratio_to_target_is_theirs_over_ours():
    row = target([reaching(s) for s in (10, 11, 9, 10, 10)], [reaching(20)] * 5)
    assert row.arm_s == pytest.approx((10, 11, 9, 10, 10))
    assert row.against_s == pytest.approx((20,) * 5)
    assert row.ratio.pairs == pytest.approx([20 / s for s in (10, 11, 9, 10, 10)])
    assert (row.charged, row.bound, row.reached_arm, row.reached_against, row.n) == (False, "", 5, 5, 5)
    assert (limits_of(row), failure_of(row)) == ((None, None), "")
    assert row.verdict.kind == "gain"
    row = target(TENS, [reaching(20)] * 5, charge=30.0)
    assert row.charged
    assert row.arm_s == pytest.approx((40,) * 5)
    assert row.against_s == pytest.approx((20,) * 5)
    assert (row.ratio.mean, row.verdict.kind) == (pytest.approx(0.5), "harm")
    free = target(TENS, [reaching(20)] * 5, charge=0.0)
    assert (free.charged, free.ratio.mean) == (True, pytest.approx(2.0))
    assert target([reaching(10)] * 4, [reaching(20)] * 4).verdict.kind == "no verdict"
    close = [reaching(s) for s in (9.9, 9.91, 9.89, 9.9, 9.9)], [reaching(10)] * 5
    assert target(*close).verdict.kind == "gain"
    assert target(*close, control=CONTROL).verdict.kind == "no gain"
    assert target(*close, control=None).verdict.kind == "no verdict"
    row = target([early(5), reaching(10), reaching(10)], [reaching(10), early(5), reaching(10)])
    assert row.left_censored == 2
    assert target(EARLIES, TENS).left_censored == 5


def test_where_only_the_other_arm_was_censored_there_is_a_lower_bound():
    """It never got there in 100 s in two pairs, and in 45 s in the third; no interval."""
    row = target([reaching(10), reaching(20), reaching(10)], [failing(100), failing(100), reaching(45)])
    assert (row.ratio, row.bound, row.verdict.kind) == (None, ">= 4.50x", "no verdict")
    assert (row.at_least, row.at_most) == (4.5, None)
    assert (row.reached_arm, row.reached_against, row.n) == (3, 1, 3)
    assert limits_of(replace(row, at_least=None)) == (4.5, None)  # as it was written before it had that
    assert row.against_s == pytest.approx((math.inf, math.inf, 45))


@pytest.mark.parametrize(
    ("ours", "theirs", "charge", "bound", "kind"),
    [
        # The other arm never reached it: ours is faster if it is clear of where the other ended, in five pairs.
        ([reaching(10), reaching(20), reaching(10)], [failing(100)] * 3, 20.0, ">= 2.50x", "no verdict"),
        ([reaching(s) for s in (10, 11, 10, 12, 10)], [*[failing(100)] * 4, reaching(60)], None, ">= 6.00x", "gain"),
        ([reaching(10)] * 4, [failing(100)] * 4, None, ">= 10.00x", "no verdict"),
        (TENS, [failing(10.01)] * 5, None, ">= 1.00x", "no verdict"),
        # The least pair would speak against it: the bound is that of the interval.
        (TENS, [*[failing(100)] * 4, failing(9.8)], None, ">= 1.73x", "gain"),
        # A last evaluation beyond the target: it may have crossed right after the evaluation before.
        (TENS, [climbing([60, 80, 100], [0.1, 0.2, 0.7])] * 5, None, ">= 8.00x", "gain"),
        (TENS, [climbing([100], [0.7])] * 5, None, ">= 0.00x", "no verdict"),
        # Ours never reached it: no ratio and no bound.
        ([failing(9)] * 2, [reaching(10)] * 2, None, "never reached", "no verdict"),
        ([failing(9)] * 2, [failing(10)] * 2, None, "never reached by either arm", "no verdict"),
        ([failing(9), reaching(9)], [reaching(10)] * 2, None, "reached in some pairs only", "no verdict"),
        # A cap stopped ours, after at least 120 s: bounded from above, and slower if that is clear in five pairs.
        ([capped(120)] * 5, [reaching(s) for s in (300, 330, 300, 290, 310)], None, "<= 2.75x", "no verdict"),
        ([capped(120)] * 5, [reaching(300)] * 5, 30.0, "<= 2.00x", "no verdict"),
        ([capped(120), reaching(100)], [reaching(300)] * 2, None, "<= 3.00x", "no verdict"),
        ([capped(120)] * 2, [failing(900)] * 2, None, "never reached by either arm", "no verdict"),
        ([capped(120), failing(100)], [reaching(300)] * 2, None, "never reached", "no verdict"),
        ([capped(120), early(5)], [reaching(300)] * 2, None, "reached in some pairs only", "no verdict"),
        ([LATE] * 2, [reaching(300)] * 2, None, "<= 5.00x", "no verdict"),
        ([BETWEEN] * 2, [reaching(300)] * 2, None, "<= 5.00x", "no verdict"),
        ([capped(s) for s in (40, 41, 39, 40, 40)], TENS, None, "<= 0.26x", "harm"),
        ([capped(40), capped(41), reaching(40), early(39), reaching(40)], TENS, 30.0, "<= 0.28x", "harm"),
        ([capped(40)] * 4, [reaching(10)] * 4, None, "<= 0.25x", "no verdict"),
        ([capped(40)] * 5, [*[reaching(10)] * 4, failing(10)], None, "never reached", "no verdict"),
        # Ours is past it when first evaluated: its time is an upper bound.
        (EARLIES, TENS, None, ">= 1.96x", "gain"),
        ([early(9.99), *[reaching(10)] * 4], TENS, None, ">= 0.99x", "no verdict"),  # one such pair is enough
        ([early(12)] * 5, TENS, None, ">= 0.83x", "no verdict"),
        ([early(5)] * 4, [reaching(10)] * 4, None, ">= 2.00x", "no verdict"),
        # However early it crosses, planning had to be done first.
        (EARLIES, [reaching(s) for s in (10, 10.1, 9.9, 10, 10)], 20.0, "<= 0.51x", "harm"),
        (EARLIES, [early(10)] * 5, 20.0, "<= 0.50x", "harm"),
        (EARLIES, TENS, 9.9, ">= 0.66x", "no verdict"),  # within what can be resolved
        (EARLIES, TENS, 2.0, ">= 1.41x", "gain"),
        ([*[early(5)] * 4, failing(9)], TENS, 20.0, "reached in some pairs only", "no verdict"),
        # The other arm is past it when first evaluated: nothing to compare with.
        (TENS, [early(15), *[reaching(20)] * 4], None, OTHER_EARLY, "no verdict"),
        ([early(5)] * 5, [early(15), *[reaching(20)] * 4], None, OTHER_EARLY, "no verdict"),
    ],
)
def test_a_censored_time_has_a_bound_and_no_ratio(ours, theirs, charge, bound, kind):
    row = target(ours, theirs, charge=charge)
    assert (row.ratio, row.bound, row.verdict.kind) == (None, bound, kind)
    limit = float(bound.split()[1].rstrip("x")) if bound[:2] in (">=", "<=") else None
    assert (row.at_least, row.at_most) == (limit if bound[0] == ">" else None, limit if bound[0] == "<" else None)
    codes = {"gain": "speed.gain", "harm": "speed.harm"}
    assert codes.get(kind, row.verdict.code) == row.verdict.code
    if bound == OTHER_EARLY:
        assert row.verdict.code == "target.not_reached"


def quality(
    ours, theirs, *, plan_kind: str = "equivalent", metric: str = "accuracy", rising: bool = True, unit: str = "share"
):
    return quality_row(races(ours, theirs), "ours", "theirs", plan_kind, metric, rising, unit)


def ending(*values: float) -> RunRecord:
    """Return an arm with these values of its metric, one a second."""
    return climbing(range(1, len(values) + 1), values)


def test_a_rung_says_how_many_rows_each_arm_was_given():
    def given(found: RunRecord, rows: int) -> RunRecord:
        return replace(found, header=replace(found.header, detail={comparison_statistics.GIVEN_ROWS: rows}))

    row = target([given(reaching(10), 400)], [reaching(20)])
    assert (row.arm_samples, row.against_samples) == (400, 300)  # from a record that does not say: those it trained on


def test_quality_is_compared_at_the_last_rows_both_were_evaluated_at():
    assert quality([ending(0.1, 0.6, 0.9)], [ending(0.1, 0.5)]).ratio.pairs == pytest.approx((10.0,))
    assert quality([ending(0.1, 0.6, 0.9)], [record(evaluations=[(150, 1.0, 0.4)])]) is None


def finals(differences: list[float]) -> tuple[list[RunRecord], list[RunRecord]]:
    """Return pairs that differ by these points."""
    return [ending(0.1, 0.8 + difference / 100) for difference in differences], [ending(0.1, 0.8)] * len(differences)


@pytest.mark.parametrize(
    ("differences", "plan_kind", "kind"),
    [
        ([0.0, 0.1, -0.1, 0.1, -0.1], "equivalent", "no gain"),
        ([0.0, 0.1, -0.1, 0.1], "equivalent", "no verdict"),  # four pairs
        ([1.0, -1.0, 1.0, -1.0, 0.0], "equivalent", "no verdict"),  # too noisy to say
        ([-3.0, -3.1, -2.9, -3.0, -3.0], "equivalent", "harm"),
        ([3.0, 3.1, 2.9, 3.0, 3.0], "equivalent", "no verdict"),  # better is not the same either
        ([math.nan] * 5, "equivalent", "no verdict"),  # diverged
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
    assert quality(*finals(differences), plan_kind=plan_kind).verdict.kind == kind


@pytest.mark.parametrize("who", ["ours", "theirs"])
@pytest.mark.parametrize(
    ("reason", "kind"), [("budget", "no gain"), ("target", None), ("cap", "no gain"), ("diverged", "no verdict")]
)
def test_tier_f_is_judged_where_each_ends(reason, kind, who):
    """It may train on fewer rows: the metric that it ends with counts, against that of the whole reference.

    Pairs that are left once others stopped early were selected by their outcome; a cap is the same for all.
    """
    arms = {"ours": [ending(0.3, 0.903)] * 5, "theirs": [ending(0.1, 0.2, 0.5, 0.9)] * 5}
    first = arms[who][0]
    arms[who] = [replace(first, end=replace(first.end, reason=reason)), *arms[who][1:]]
    row = quality(*arms.values(), plan_kind="tuned")
    assert (None if row is None else row.verdict.kind) == kind
    if reason == "budget":
        assert row.ratio.pairs == pytest.approx((0.3,) * 5)
    assert quality(*arms.values(), plan_kind="equivalent") is not None


@pytest.mark.parametrize(
    ("ours", "theirs", "unit", "rising", "expected"),
    [
        (0.93, 0.90, "share", True, 3.0),
        (93.0, 90.0, "percent", True, 3.0),
        (20.0, 10.0, "relative", True, 100.0),
        (39.8, 40.0, "relative", False, 0.5),
        (-3.0, -2.0, "relative", False, 50.0),  # a log density: lower is better, and negative
        (0.05, 0.06, "share", False, 1.0),  # an error rate
        (0.1, 0.0, "relative", False, math.nan),
    ],
)
def test_a_difference_is_read_by_the_metrics_unit_and_better_is_positive(ours, theirs, unit, rising, expected):
    row = quality([ending(1.0, ours)], [ending(1.0, theirs)], rising=rising, unit=unit)
    assert row.ratio.pairs == pytest.approx((expected,), nan_ok=True)


@pytest.mark.parametrize(
    ("unit", "said"), [("share", "+0.30 points"), ("percent", "+0.00 points"), ("relative", "+0.38 percent")]
)
def test_the_verdict_on_quality_has_the_unit_of_its_metric(unit, said):
    verdict = quality(*finals([0.3] * 5), unit=unit).verdict
    assert verdict.code == "quality.within_limit"
    assert f": {said} (95% " in verdict.sentence


@pytest.mark.parametrize("plan_kind", ["equivalent", "tuned"])
def test_a_verdict_on_quality_says_after_which_rows_where_these_are_not_all(plan_kind):
    def arms(given_rows: int) -> list[RunRecord]:
        made = record(evaluations=[(768, 1.0, 0.5), (1536, 2.0, 0.8)])
        return [replace(made, header=replace(made.header, detail={comparison_statistics.GIVEN_ROWS: given_rows}))] * 5

    short, whole = (quality(arms(rows), arms(rows), plan_kind=plan_kind).verdict for rows in (7168, 1550))
    assert (short.kind, whole.kind) == ("no gain", "no gain")
    assert short.sentence.endswith(", limit 0.5, after 1,536 of 7,168 samples")
    assert whole.sentence.endswith(", limit 0.5")  # nearly all of them


def brief(found: RunRecord) -> RunRecord:
    return replace(found, header=replace(found.header, detail={BRIEF: True}))


def test_a_brief_pair_counts_for_throughput_alone():
    theirs = climbing([2, 4, 6], [0.1, 0.6, 0.9])
    found = races([ending(0.1, 0.6, 0.9), brief(theirs)], [theirs] * 2)
    assert comparison_statistics.throughput_ratios(found, "ours", "theirs") == pytest.approx([2.0, 1.0])
    of = found, "ours", "theirs", "equivalent"
    row = target_row(*of, 0.5, "accuracy", True, None)
    assert (row.n, row.reached_arm, row.arm_s) == (1, 1, pytest.approx((1.8,)))
    assert quality_row(*of, "accuracy", True, "share").ratio.n == 1
    del found[0]  # without a whole pair there is neither
    assert target_row(*of, 0.5, "accuracy", True, None) is None
    assert quality_row(*of, "accuracy", True, "share") is None


def broken(found: RunRecord) -> RunRecord:
    """Return the arm as it left its race with an error."""
    return replace(found, end=End("error", {**found.end.detail, "error": "RuntimeError: no"}))


@pytest.mark.parametrize("who", ["ours", "theirs"])
@pytest.mark.parametrize(
    ("measured", "mean"),
    [
        (lambda found: throughput_row(found, "ours", "theirs", "equivalent", TIGHT), 2.0),
        (lambda found: do_no_harm_row(found, "ours", "theirs", "equivalent"), 2.0),
        (lambda found: quality_row(found, "ours", "theirs", "equivalent", "accuracy", True, "share"), 3.0),
        (lambda found: quality_row(found, "ours", "theirs", "tuned", "accuracy", True, "share"), 3.0),
        (lambda found: memory_row(found, "ours", "theirs", "equivalent", 500, 1000), 0.5),
    ],
    ids=["throughput", "harm", "quality", "quality of a tuned plan", "memory"],
)
def test_the_races_an_arm_survived_are_no_verdict(measured, mean, who):
    """The ratio is that of the others; what it shows was selected by its outcome."""
    arms = {"ours": [climbing([1, 2], [0.1, 0.83])] * 6, "theirs": [climbing([2, 4], [0.1, 0.8])] * 6}
    whole = measured(races(*arms.values()))
    assert (whole.verdict.kind != "no verdict", whole.failed) == (whole.plan_kind == "tuned" or mean != 3.0, "")
    arms[who] = [broken(arms[who][0]), *arms[who][1:]]
    row = measured(races(*arms.values()))
    assert row.ratio.mean == pytest.approx(mean)
    assert row.ratio.n == (1 if mean == 0.5 else 5)
    assert row.verdict.kind == "no verdict"
    assert row.failed == failure_of(replace(row, failed="")) == f"{who} failed in 1 of 6 runs"


def one_broken(ours: RunRecord, theirs: RunRecord, who: str) -> dict[int, dict[str, RunRecord]]:
    """Return six races, in the first of which one arm failed."""
    arms = {"ours": [ours] * 6, "theirs": [theirs] * 6}
    arms[who] = [broken(arms[who][0]), *arms[who][1:]]
    return races(*arms.values())


def test_an_arm_that_failed_never_reached_the_target():
    # Neither where it would have gone on to it, nor where it had crossed it already.
    row = target([broken(reaching(1)), *TENS], [reaching(20)] * 6)
    assert (row.reached_arm, row.reached_against, row.n) == (5, 6, 6)
    assert row.arm_s == pytest.approx((math.inf, *[10] * 5))
    assert (row.ratio, row.bound, row.verdict.kind) == (None, "reached in some pairs only", "no verdict")
    assert row.failed == failure_of(replace(row, failed="")) == "ours failed in 1 of 6 runs"
    found = races([broken(reaching(1))] * 5, [reaching(20)] * 5)
    row = target_row(found, "ours", "theirs", "tuned", 0.5, "accuracy", True, PlanningCharge(3.0), TIGHT)
    assert (row.bound, row.reached_arm, row.n) == ("never reached", 0, 5)
    assert "ours failed in 5 of 5 runs" in row.verdict.sentence
    assert throughput_row(found, "ours", "theirs", "tuned", TIGHT) is None
    found = {0: {"theirs": timed(1.0)}, 1: {"ours": broken(timed(1.0))}, 2: {"ours": timed(1.0)}}
    assert comparison_statistics.failures(found, "ours", "theirs", "nobody") == "ours failed in 1 of 2 runs"
    assert comparison_statistics.failures(found, "theirs") == ""


def test_another_arm_that_failed_is_censored_where_it_did():
    """It trained 45 s without a target; where it had crossed at 15 s, no more than that is known against it."""
    for failed, bound in ((failing(45), ">= 2.00x"), (reaching(15), ">= 1.50x"), (early(15), OTHER_EARLY)):
        row = target([reaching(10)] * 6, [broken(failed), *[reaching(20)] * 5])
        assert (row.ratio, row.bound, row.verdict.kind) == (None, bound, "no verdict")
        assert (row.reached_arm, row.reached_against, row.against_s[0]) == (6, 5, math.inf)
        assert row.failed == "theirs failed in 1 of 6 runs"


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
