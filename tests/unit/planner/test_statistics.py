"""Intervals and verdicts of paired ratios: against scipy, by simulation, and at the edges."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from scipy import stats as scipy_stats

from trimtab.planner.statistics import (
    Interval,
    drawn_turns,
    is_gain,
    mean_interval,
    ratio_interval,
    resolution,
    share_interval,
    t_quantile,
)


@pytest.mark.parametrize("probability", [0.5, 0.75, 0.9, 0.95, 0.975, 0.995])
def test_the_t_quantile_is_scipys(probability):
    for degrees in range(1, 201):
        expected = scipy_stats.t.ppf(probability, degrees)
        assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12), degrees


@pytest.mark.parametrize("n", [2, 3, 5, 8, 40])
def test_intervals_are_scipys(n):
    rng = random.Random(n)
    values = [rng.gauss(3, 2) for _ in range(n)]
    expected = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = mean_interval(values)
    assert (found.low, found.high, found.n) == (pytest.approx(expected.low), pytest.approx(expected.high), n)
    assert found.mean == pytest.approx(math.fsum(values) / n)
    of_ratios = ratio_interval([math.exp(value) for value in values])
    assert of_ratios.mean == pytest.approx(math.exp(found.mean))
    assert (of_ratios.low, of_ratios.high) == (pytest.approx(math.exp(found.low)), pytest.approx(math.exp(found.high)))


def test_one_value_bounds_nothing():
    assert mean_interval([2.0]) == Interval(2.0, -math.inf, math.inf, 1)
    found = ratio_interval([2.0])
    assert (found.mean, found.low, found.high) == (pytest.approx(2.0), 0.0, math.inf)


def test_ratios_too_far_apart_for_a_float_have_an_infinite_end():
    found = ratio_interval([1e-300, 1e300])
    assert (found.low, found.high) == (0.0, math.inf)


def races(rng: random.Random, n: int, ratio: float, noise: float) -> list[float]:
    """Return paired ratios of two arms whose times share a drift and differ by `ratio`."""
    found = []
    for _ in range(n):
        drift = rng.lognormvariate(0, 0.3)
        ours, theirs = (drift * rng.lognormvariate(0, noise / math.sqrt(2)) for _ in range(2))
        found.append(ratio * theirs / ours)
    return found


def test_the_interval_covers_the_truth_95_times_in_100_at_five_pairs():
    rng = random.Random(20)
    found = [ratio_interval(races(rng, 5, 1.25, 0.04)) for _ in range(10_000)]
    covered = sum(interval.low <= 1.25 <= interval.high for interval in found) / len(found)
    assert covered == pytest.approx(0.95, abs=0.0066)  # three standard deviations of 10,000 draws


def test_two_equal_arms_are_seldom_called_a_gain():
    rng = random.Random(5)
    trials = 3000
    alone, resolved = 0, 0
    for _ in range(trials):
        effect, control = (ratio_interval(races(rng, 5, 1.0, 0.05)) for _ in range(2))
        alone += effect.low > 1
        resolved += is_gain(effect, control)
    assert 0.015 < alone / trials < 0.035  # one end of a 95% interval
    assert resolved / trials < 0.005  # and the control asks for more


def test_a_true_gain_is_found():
    rng = random.Random(6)
    pairs = [(races(rng, 5, 1.2, 0.02), races(rng, 5, 1.0, 0.02)) for _ in range(300)]
    found = [is_gain(ratio_interval(effect), ratio_interval(control)) for effect, control in pairs]
    assert sum(found) > 0.98 * len(found)


@pytest.mark.parametrize(
    ("low", "mean", "control", "expected"),
    [
        (1.01, 1.05, None, False),  # no control: nothing can be resolved
        (1.0, 1.05, (0.98, 1.02), False),  # touches 1
        (0.99, 1.05, (0.98, 1.02), False),
        (1.01, 1.05, (0.98, 1.02), True),
        (1.01, 1.05, (0.98, 1.06), False),  # the control strays as far
        (1.01, 1.05, (0.94, 1.00), False),  # downwards too: 1/0.94 is 1.064
        (1.01, 1.05, (0.0, 1.0), False),  # a control of one pair resolves nothing
    ],
)
def test_a_gain_is_clear_of_one_and_above_the_resolution(low, mean, control, expected):
    interval = None if control is None else Interval(1.0, *control, 5)
    assert is_gain(Interval(mean, low, mean**2 / low, 5), interval) is expected


@pytest.mark.parametrize(("pairs", "expected"), [(3, False), (4, False), (5, True)])
def test_a_gain_takes_as_many_pairs_as_any_verdict(pairs, expected):
    assert is_gain(Interval(2.0, 1.9, 2.1, pairs), Interval(1.0, 0.99, 1.01, pairs)) is expected


def test_the_resolution_is_the_farther_end_from_one():
    assert resolution(None) == math.inf
    assert resolution(Interval(1.0, 0.9, 1.05, 5)) == pytest.approx(1 / 0.9 - 1)
    assert resolution(Interval(1.0, 0.97, 1.05, 5)) == pytest.approx(0.05)
    assert resolution(ratio_interval([1.1])) == math.inf


def test_a_share_is_of_means_and_shares_add_up():
    found = [share_interval(parts, [2.0, 4.0, 3.0]) for parts in ([1.0, 3.0, 0.0], [1.0, 1.0, 3.0])]
    assert [each.mean for each in found] == pytest.approx([4 / 9, 5 / 9])
    assert sum(each.mean for each in found) == pytest.approx(1)


def test_fiellers_interval_holds_what_is_not_told_from_nothing():
    """At its ends, and nowhere within, the part less so much of the whole is just told from nothing."""
    parts, wholes = [1.0, 1.4, 0.8, 1.1, 1.3], [3.0, 2.6, 3.3, 2.9, 3.1]
    found = share_interval(parts, wholes)

    def clear_by(share):
        apart = mean_interval([part - share * whole for part, whole in zip(parts, wholes, strict=True)])
        return abs(apart.mean) - (apart.high - apart.mean)

    assert clear_by(found.low) == pytest.approx(0, abs=1e-9)
    assert clear_by(found.high) == pytest.approx(0, abs=1e-9)
    assert clear_by(found.mean) < 0
    assert clear_by(found.low - 0.05) > 0


def test_of_a_whole_that_may_be_nothing_no_share_has_bounds():
    assert share_interval([1.0, 2.0, 3.0], [1.0, -1.0, 0.6]).high == math.inf
    assert share_interval([1.0], [2.0]) == Interval(0.5, -math.inf, math.inf, 1)


def test_it_covers_the_true_share_as_often_as_it_says_also_near_nothing():
    draws, covered = random.Random(0), 0
    for _ in range(2_000):
        wholes = [draws.gauss(1.0, 0.6) for _ in range(6)]
        parts = [0.3 * whole + draws.gauss(0, 0.2) for whole in wholes]
        found = share_interval(parts, wholes)
        covered += found.low <= 0.3 <= found.high
    assert covered / 2_000 >= 0.935


def laps(names, number):
    draw, before, orders = random.Random(0), None, []
    for lap in range(number):
        orders.append(drawn_turns(names, lap, draw, before))
        before = orders[-1][-1]
    return orders


@pytest.mark.parametrize("names", ["abc", "abcde"])
def test_nobody_follows_himself_and_nobody_is_favoured(names):
    orders = laps(names, 6000)
    assert all(sorted(order) == list(names) for order in orders)
    sequence = list(itertools.chain(*orders))
    follows = Counter(itertools.pairwise(sequence))
    assert all(follows[name, name] == 0 for name in names)
    expected = len(sequence) / (len(names) * (len(names) - 1))
    assert all(abs(follows[pair] / expected - 1) < 0.1 for pair in itertools.permutations(names, 2))
    for name in names:
        mean = sum(order.index(name) for order in orders) / len(orders)
        assert mean == pytest.approx((len(names) - 1) / 2, abs=0.05)


def test_two_go_forwards_and_backwards_in_turn():
    assert ["".join(order) for order in laps("ab", 4)] == ["ab", "ba", "ab", "ba"]


def test_one_alone_runs():
    assert laps("a", 3) == [["a"]] * 3
