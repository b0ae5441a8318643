"""Times of a run's windows, and what a technique costs and brings."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.adaptive_batch.noise_probes import ALLOWANCE, EARLY, FRESH, LIMIT, PATIENCE, PAUSE, REVIEW, OverheadBudget
from trimtab.adaptive_batch.step_time_model import (
    MIN_WINDOWS,
    SKIPPED,
    StepTimes,
    WindowTimes,
    goodput_k,
    relative_time,
    rows_needed,
)
from trimtab.core.errors import UsageError


def filled(windows: int) -> WindowTimes:
    times = WindowTimes()
    for _ in range(windows):
        times.add(0.01, 0.2)
    return times


def test_times_are_medians_after_the_first_windows():
    assert filled(SKIPPED + MIN_WINDOWS - 1).times(8) is None
    found = filled(SKIPPED + MIN_WINDOWS).times(8)
    assert (found.micro_s, found.fixed_s) == (pytest.approx(0.08), 0.2)
    times = filled(20)
    times.add(9.0, 50.0)
    assert times.times(8).fixed_s == 0.2
    times = WindowTimes()
    for _ in range(10):
        times.add(0.01, -0.1)
    assert times.times(1).fixed_s == 0.0


def test_times_are_saved():
    first, second = filled(12), WindowTimes()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.times(4) == first.times(4)


@pytest.mark.parametrize(
    "damage", [{"sample_s": [1.0]}, {"sample_s": "no"}, {"seen": -1}, {"fixed_s": [math.nan] * 10}]
)
def test_a_damaged_state_of_times_is_refused(damage):
    times = filled(12)
    before = times.state_dict()
    with pytest.raises(UsageError):
        times.load_state_dict(before | damage)
    assert times.state_dict() == before


def used(price: float, windows: int, limit: float = LIMIT, account: OverheadBudget | None = None) -> OverheadBudget:
    """Return the account of a technique that takes a share of each window it is used in, used whenever it is due."""
    account = account or OverheadBudget("a technique", limit)
    charges = []
    for _ in range(windows):
        is_due = account.is_due()
        if is_due:
            account.use()
        charges.append(is_due)
        if len(charges) > 2 and charges[-3]:  # read a window late, and shared another later
            account.charge(1.0, price)
        account.pass_window()
    for _ in range(sum(charges[-2:])):
        account.charge(1.0, price)
    return account


@pytest.mark.parametrize("price", [1e-4, LIMIT, 0.03, 0.5, 3.0])
def test_what_measures_costs_what_it_may_on_average(price):
    account = used(price, 20_000)
    assert account.spent_s <= LIMIT * 20_000 + max(3 * price, ALLOWANCE)
    assert account.uses >= min(20_000 - FRESH, 0.9 * LIMIT * 20_000 / price)


@pytest.mark.parametrize("price", [0.02, 0.5])
def test_what_measures_takes_little_of_a_short_run_and_is_used_all_the_same(price):
    for windows in (50, 200, 800):
        account = used(price, windows)
        assert account.spent_s <= max(3 * price, (LIMIT + EARLY) * windows)  # three before its price is known
    assert account.uses >= 10


def test_a_runs_very_first_windows_are_not_used():
    account = OverheadBudget("a technique")
    assert not account.is_due()
    used(0.0, FRESH, account=account)
    assert account.uses == 0
    assert account.is_due()


def test_uses_are_spread_and_closest_at_first_or_sparse():
    account, used_in = OverheadBudget("a technique"), []
    for window in range(600):
        if account.is_due():
            used_in.append(window)
            used(0.05, 1, account=account)
        else:
            account.pass_window()
    gaps = [after - before for before, after in itertools.pairwise(used_in)]
    assert gaps[0] == 1
    assert gaps == sorted(gaps)
    assert gaps[-1] == account.every == 20
    account, used_in = OverheadBudget("a technique"), []
    for window in range(200):
        if account.is_due(sparse=20):
            used_in.append(window)
            account.use()
            account.charge(1.0, 0.001)
        account.pass_window()
    assert used_in == list(range(20, 200, 20))
    assert account.share == pytest.approx(0.001 * 9 / 200)


def test_what_a_pause_saved_is_there_for_a_new_beginning():
    account = used(0.05, REVIEW)
    assert not account.review(gain=0.0).pays
    before = account.uses
    used(0.05, PAUSE, account=account)
    assert account.uses == before
    used(0.05, 12, account=account)
    assert account.uses >= before + 10  # half a window's time, of a quarter of a hundredth of 200


def test_what_does_not_pay_is_paused_each_time_for_longer():
    account = used(0.02, REVIEW)
    first = account.review(gain=0.001)
    assert (first.pays, first.pause) == (False, PAUSE)
    assert first.price == pytest.approx(0.02 / account.every)
    assert first.price <= LIMIT * (1 + 1e-9)
    assert account.is_paused
    assert not account.is_due()
    for _ in range(PAUSE):
        account.pass_window()
    assert not account.is_paused
    assert account.review(gain=0.0) is None  # not by what was seen before the pause
    for _ in range(REVIEW):
        account.pass_window()
    assert account.review(gain=0.0).pause == 2 * PAUSE


def test_a_technique_that_pays_continues_and_a_likely_gain_puts_a_pause_off():
    account = used(0.02, REVIEW)
    assert account.review(gain=0.05).pays
    assert not account.is_paused
    assert account.review(gain=0.0) is None  # not before it is time again
    account = used(0.02, REVIEW)
    assert account.review(gain=0.0, prospect=lambda: 0.05) is None
    assert not account.is_paused
    assert account.review(gain=0.0, prospect=lambda: 0.0) is None  # not before it is time again
    used(0.02, REVIEW, account=account)
    assert account.review(gain=0.0, prospect=lambda: 0.0).pause == PAUSE


def test_an_unknown_gain_is_reviewed_after_enough_uses():
    assert used(0.02, REVIEW).review(gain=None) is None
    assert used(0.02, REVIEW - 1).review(gain=0.0) is None
    dear, cheap = used(0.2, 2 * REVIEW), used(0.0005, 2 * REVIEW)
    assert dear.uses < PATIENCE < cheap.uses
    assert dear.review(gain=None) is None
    assert (cheap.review(gain=None).gain, cheap.is_paused) == (0.0, True)
    told = used(0.0005, REVIEW)
    told.review(gain=0.1)
    assert told.untold == 0


def test_an_account_is_saved():
    first, second = used(0.02, 150), OverheadBudget("a technique")
    first.review(gain=0.0)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    with pytest.raises(UsageError):
        second.load_state_dict(first.state_dict() | {"uses": -1})
    assert second.state_dict() == first.state_dict()


def test_times_of_before_a_resumption_are_forgotten_as_soon_as_there_are_others():
    before, after = WindowTimes(), WindowTimes()
    for _ in range(40):
        before.add(1.0, 4.0)
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    for _ in range(SKIPPED):
        after.add(99.0, 99.0)
    for _ in range(MIN_WINDOWS - 1):
        after.add(3.0, 8.0)
        assert after.times(1.0) == StepTimes(1.0, 4.0)
        assert after.is_known
        assert not after.is_own
    after.add(3.0, 8.0)
    assert after.times(1.0) == StepTimes(3.0, 8.0)
    assert after.is_own
    after.add(9.0, 9.0)  # and the medians are of many again
    assert after.times(1.0) == StepTimes(3.0, 8.0)


# Time to reach a loss.


positive = st.floats(1e-6, 1e6)
kinds = st.booleans()


@given(positive, st.floats(1, 4096), positive, positive, kinds)
def test_the_closed_form_is_where_time_is_least(scale, rows, micro_s, fixed_s, normalises):
    times = StepTimes(micro_s, fixed_s)
    best = goodput_k(scale, rows, times, normalises=normalises)
    least = relative_time(best, scale, rows, times, normalises=normalises)
    for other in (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2, 10):
        assert relative_time(other * best, scale, rows, times, normalises=normalises) >= least * (1 - 1e-9)


@given(positive, positive, st.floats(1, 100), kinds)
def test_more_noise_or_more_of_a_fixed_part_never_asks_for_less(scale, fixed_s, factor, normalises):
    def best(scale, fixed_s):
        return goodput_k(scale, 8.0, StepTimes(1.0, fixed_s), normalises=normalises)

    assert best(scale * factor, fixed_s) >= best(scale, fixed_s) * (1 - 1e-12)
    assert best(scale, fixed_s * factor) >= best(scale, fixed_s) * (1 - 1e-12)


@given(st.floats(0, 1e3), st.floats(1, 100), kinds)
def test_a_larger_window_never_needs_fewer_rows(scales, factor, normalises):
    few, many = (rows_needed(each, normalises=normalises) for each in (scales, scales * factor))
    assert many >= few
    assert many <= 1 + scales * factor


@pytest.mark.parametrize("normalises", [False, True])
def test_far_beyond_the_noise_windows_are_what_a_loss_takes(normalises):
    assert rows_needed(2e6, normalises=normalises) == pytest.approx(2 * rows_needed(1e6, normalises=normalises))


@pytest.mark.parametrize("scales", [0.01, 0.1, 0.3, 1.0])
def test_an_optimizer_that_normalises_is_between_a_best_rate_and_one_far_below_it(scales):
    """A row's step is a times as long, and its noise a^2 times as much: progress is 2 a - a^2 of the best, or a."""
    a = 1 / math.sqrt(1 + scales)
    assert 1 / (2 * a - a**2) - 1e-3 <= rows_needed(scales, normalises=True) <= 1 / a


# Optimizer, N in rows as it was measured, batches, and the samples to a loss, in the first one's (math: section 4).
MEASURED = [
    (True, 25, (4, 8, 16, 32, 64), (1, 1.02, 1.06, 1.20, 1.84)),
    (True, 54, (4, 8, 16, 32, 64, 128), (1, 1.05, 1.11, 1.23, 1.48, 1.87)),
    (False, 70, (4, 8, 16, 32, 64, 128), (1, 1.08, 1.19, 1.39, 1.70, 2.07)),
    (False, 200, (16, 32, 64, 128, 256), (1, 1.04, 0.98, 1.21, 1.24)),
]


@pytest.mark.parametrize(("normalises", "scale", "batches", "samples"), MEASURED)
def test_it_is_between_what_was_measured(normalises, scale, batches, samples):
    first = rows_needed(batches[0] / scale, normalises=normalises)
    for batch, measured in zip(batches, samples, strict=True):
        assert rows_needed(batch / scale, normalises=normalises) / first == pytest.approx(measured, rel=0.28)


@pytest.mark.parametrize("normalises", [False, True])
def test_limits(normalises):
    times = StepTimes(1.0, 3.0)
    assert goodput_k(0.0, 8.0, times, normalises=normalises) == 0.0
    assert goodput_k(100.0, 8.0, StepTimes(1.0, 0.0), normalises=normalises) == 0.0
    assert goodput_k(math.inf, 8.0, times, normalises=normalises) == math.inf
    assert relative_time(4, math.inf, 8.0, times, normalises=normalises) == 7.0 / 4
    assert relative_time(4, 0.0, 8.0, times, normalises=normalises) == 7.0
