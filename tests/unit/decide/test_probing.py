"""Windows of many batches, made to find noise: how often, by what their rows lose."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.batch_rule import BatchRule
from trimtab.decide.accounts import Account
from trimtab.decide.accumulation import Noise, Standing, could_save, lost
from trimtab.decide.goodput import Times, rows_needed
from trimtab.decide.probing import Probing
from trimtab.decide.window_times import WindowTimes

RULE = BatchRule("goodput", k_max=16)


def standing(noise, *, k=1, fixed_s=1.0, normalises=False):
    return Standing(k, 1, 4.0, 1, noise, Times(1.0, fixed_s), normalises)


def noise_of(scale, *, error):
    """Return noise of so many rows, whose squared norm has such a relative error."""
    return Noise(scale, 1.0, norm2_error=error, num_windows=50)


@pytest.fixture
def only_exploring(monkeypatch):
    monkeypatch.setattr("trimtab.decide.probing._CHEAP", 0.0)


def explored(known, num_windows, *, k=1):
    """Let windows pass with what is known; returns at which there were many batches, and how many."""
    account, times = Account("noise monitor"), WindowTimes()
    for _ in range(5):
        times.add(1.0, 1.0)
    probing = Probing(RULE, 1, account, times, may_split=False, shows_one=False)
    found = []
    for index in range(num_windows):
        probing.told(known)
        if probing.is_due(k, known.noise):
            batches = probing.batches(k, k, known.noise)
            if batches > max(3, k):
                found.append((index, batches))
            probing.used(batches, k)
            account.charge(1.0, 1.0)  # so that nothing else is due soon
        account.pass_window()
    return found


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("known", [None, noise_of(400.0, error=1.0), noise_of(40.0, error=0.5)])
@pytest.mark.parametrize("fixed_s", [0.1, 1.0, 10.0])
def test_what_is_lost_takes_an_eighth_of_what_could_be_saved(only_exploring, known, fixed_s, normalises):
    state = standing(known, fixed_s=fixed_s, normalises=normalises)
    found = explored(state, 20_000)
    assert [batches for _, batches in found[:3]] == [4, 8, 16]
    share = sum(min(batches * lost(state, batches), batches - 1) for _, batches in found[:-1]) / found[-1][0]
    assert 0.85 <= share / (could_save(RULE, state) / 8) <= 1 + 1e-9  # whole windows are waited for


def test_rows_that_are_not_lost_need_not_be_paid_for(only_exploring):
    """Where even the least noise there can be is large, a window of many batches is worth nearly as many windows."""
    unknown, large = (len(explored(standing(known), 5_000)) for known in (None, noise_of(4_000.0, error=0.5)))
    assert large > 2 * unknown


def test_nothing_is_explored_where_nothing_could_be_saved_or_all_is_known(only_exploring):
    assert not explored(standing(None, fixed_s=0.001), 5_000)
    assert not explored(standing(noise_of(400.0, error=0.1)), 5_000)


@given(
    scale=st.floats(1e-3, 1e6),
    error=st.floats(0.0, 10.0),
    k=st.integers(1, 8),
    more=st.integers(1, 8),
    normalises=st.booleans(),
)
def test_the_share_that_is_lost_is_one_and_grows_with_the_window(scale, error, k, more, normalises):
    state = standing(noise_of(scale, error=error), k=k, normalises=normalises)
    shares = [lost(state, k), lost(state, k + more), lost(state, k + 2 * more)]
    assert shares[0] == 0.0
    assert 0 <= shares[1] <= shares[2] <= 1
    least = state.noise.at_least().scale
    few, many = (rows_needed(each * 4.0 / least, normalises=normalises) for each in (k, k + more))
    assert shares[1] == pytest.approx(1 - few / many)


@pytest.mark.parametrize("error", [math.inf, 1.0])
def test_all_is_lost_where_nothing_is_known(error):
    assert lost(standing(None), 4) == 1.0
    assert (lost(standing(noise_of(400.0, error=error)), 4) == 1.0) is math.isinf(error)


@pytest.mark.parametrize("may_split", [False, True])
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("scale", [None, 5.0, 20.0, 80.0, 320.0, 1e9])
def test_single_micro_batches_show_noise_in_as_many_batches_as_lose_next_to_nothing(scale, normalises, may_split):
    """Whatever is known: two where half a batch shows nothing, and one, which is split, where two would lose much."""
    known = None if scale is None else noise_of(scale, error=0.1)
    account, times = Account("noise monitor"), WindowTimes()
    for _ in range(5):
        times.add(1.0, 1.0)
    probing = Probing(RULE, 1, account, times, may_split=may_split, shows_one=False)
    for _ in range(100):  # one in fifty is due, and one in four while nothing is known
        account.pass_window()
    state = standing(known, fixed_s=1e-3, normalises=normalises)
    probing.told(state)
    batches = probing.batches(1, 1, known)
    free = [n for n in (2, 4, 8, 16) if n * lost(state, n) <= 0.1]
    assert batches == max([1 if may_split else 2, *free])
    assert (batches > 2) is (scale in (320.0, 1e9) or (scale == 80.0 and normalises))
